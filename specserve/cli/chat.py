"""A terminal chat over the WebSocket. With --show-drafts the tokens that a draft gave are coloured."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from specserve.cli.background import BackgroundLoop
from specserve.cli.wire import Socket
from specserve.core.errors import ConfigError, InvalidRequestError, SpecserveError
from specserve.core.sampling import SamplingParams

try:  # Line editing and history; some builds of Python lack it.
    import readline
except ImportError:
    readline = None  # type: ignore[assignment]

ACCEPTED_STYLE = "bold green"
COMMANDS = "/new starts over, /quit ends"
# Line editing must know which characters take no room: those between \001 and \002.
COLOUR_PROMPT = "\001\x1b[1;36m\002> \001\x1b[0m\002"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the flags of `specserve chat` say."""

    url: str
    show_drafts: bool = False
    temperature: float = 0.0
    max_tokens: int = 512
    system: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)
        except InvalidRequestError as error:
            flag = f"--{error.param}".replace("_", "-")
            raise ConfigError(error.message.replace(f"{error.param}", flag, 1), param=error.param) from None
        if self.system is not None and not encodable(self.system):
            raise ConfigError("--system: is not UTF-8 text", param="system")


class DraftColours:
    """Splits streamed text into what drafts gave and what the model added, from the events of one response.

    A `response.speculation.delta` comes before the text of its step; text that is withheld (a possible stop text, half
    a character) arrives later, so accepted text waits here until it is seen.
    """

    def __init__(self) -> None:
        self._expected = ""

    def speculation(self, event: Mapping[str, Any]) -> None:
        accepted = event["tokens"][: event["accepted"]]
        self._expected = "".join(token["text"] for token in accepted)

    def split(self, text: str) -> tuple[str, str]:
        """(drafted part, the rest) of the next piece of text."""
        common = 0
        while common < min(len(text), len(self._expected)) and text[common] == self._expected[common]:
            common += 1
        self._expected = self._expected[common:] if common == len(text) else ""
        return text[:common], text[common:]


def run(options: ChatOptions, console: Console | None = None) -> int:
    """Chat until end of input, /quit or Ctrl-C at the prompt. Returns the exit status.

    Raises:
        SpecserveError: the server cannot be reached, refuses the connection, or went away.
    """
    console = console or Console(highlight=False)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is not UTF-8 must reach us as a line, to be refused alone.
        sys.stdin.reconfigure(errors="surrogateescape")
    socket = Socket(options.url, options.api_key)
    with BackgroundLoop() as loop:
        loop.run(socket.__aenter__())
        try:
            _chat(loop, socket, options, console)
        finally:
            loop.run(socket.__aexit__(None, None, None))
    return 0


def _chat(loop: BackgroundLoop, socket: Socket, options: ChatOptions, console: Console) -> None:
    messages: list[dict[str, str]] = []
    console.print(f"[dim]{COMMANDS}; Ctrl-C stops an answer[/dim]")
    while True:
        try:
            line = input(COLOUR_PROMPT if readline and console.is_terminal and sys.stdin.isatty() else "> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        command = line.rstrip()
        if command == "/quit":
            return
        if command == "/new":
            messages.clear()
        elif line.startswith("/"):
            console.print(f"[dim]no such command; {COMMANDS}. A space before the / sends the line[/dim]")
        elif not encodable(line):
            console.print("[red]that line is not UTF-8 text; it was not sent[/red]")
        elif command:
            messages.append({"role": "user", "content": line.strip()})
            turn = Turn(socket, options, messages, console)
            loop.run(turn.run(), turn.interrupt)
            if turn.left:
                return


def encodable(text: str) -> bool:
    """Whether the text can be sent: input that is not UTF-8 arrives as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Turn:
    """One question's answer, shown as it streams. A first interrupt stops it at the server, a second leaves it."""

    def __init__(self, socket: Socket, options: ChatOptions, messages: list[dict[str, str]], console: Console) -> None:
        self._socket = socket
        self._options = options
        self._messages = messages
        self._console = console
        self._colours = DraftColours()
        self._text = ""
        self._response_id: str | None = None
        self._interrupts = 0
        self._task: asyncio.Task[Any] | None = None
        self._cancelling: asyncio.Task[None] | None = None

    @property
    def left(self) -> bool:
        """Whether it was interrupted again while it was being stopped."""
        return self._interrupts > 1

    def interrupt(self) -> None:
        """Called inside the loop, at Ctrl-C."""
        self._interrupts += 1
        if self.left and self._task is not None:
            self._task.cancel()
        else:
            self._stop()

    async def run(self) -> None:
        """Stream the answer into `messages`. After an error, or when stopped before any text, the question is taken
        back, so that the chat can go on; what a stopped answer said until then is kept.

        Raises:
            SpecserveError: the connection ended; other errors are shown.
        """
        self._task = asyncio.current_task()
        try:
            async with contextlib.aclosing(self._socket.stream(self._request())) as events:
                async for event in events:
                    self._show(event)
        except asyncio.CancelledError:
            if not self.left:
                raise
            self._console.print()
            return
        except SpecserveError as error:
            if error.code == "closed":
                raise
            self._messages.pop()
            self._console.print(Text(error.message, style="red"))
            return
        if self._interrupts and not self._text:
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": self._text})

    def _stop(self) -> None:
        if self._response_id is not None and self._cancelling is None:
            self._cancelling = asyncio.ensure_future(self._cancel(self._response_id))

    async def _cancel(self, response_id: str) -> None:
        # A connection that ended is told by the stream.
        with contextlib.suppress(SpecserveError):
            await self._socket.cancel(response_id)

    def _request(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "input": self._messages,
            "temperature": self._options.temperature,
            "max_output_tokens": self._options.max_tokens,
            "report_speculation": self._options.show_drafts,
        }
        if self._options.system:
            request["instructions"] = self._options.system
        return request

    def _show(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "response.created":
            self._response_id = event["response"]["id"]
            if self._interrupts:
                self._stop()
        elif kind == "response.speculation.delta":
            self._colours.speculation(event)
        elif kind == "response.output_text.delta":
            self._text += event["delta"]
            drafted, rest = self._colours.split(event["delta"])
            self._console.print(Text(drafted, style=ACCEPTED_STYLE), Text(rest), sep="", end="")
        elif kind in ("response.completed", "response.incomplete", "response.cancelled"):
            self._console.print()
            if kind == "response.cancelled":
                self._console.print("[dim]stopped[/dim]")
            if self._options.show_drafts:
                self._console.print(f"[dim]{summary(event['response'])}[/dim]")


def summary(response: Mapping[str, Any]) -> str:
    """One line on what drafts did for a finished response."""
    usage = response["usage"]
    drafts = usage.get("speculation", {})
    return (
        f"{usage['output_tokens']} tokens; drafted {drafts.get('drafted', 0)}, "
        f"accepted {drafts.get('accepted', 0)}, rejected {drafts.get('rejected', 0)}"
    )
