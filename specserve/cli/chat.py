"""A terminal chat over the WebSocket. With --show-drafts the tokens that a draft gave are coloured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from specserve.cli.wire import Socket
from specserve.core.errors import SpecserveError

ACCEPTED_STYLE = "bold green"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the flags of `specserve chat` say."""

    url: str
    show_drafts: bool = False
    temperature: float = 0.0
    max_tokens: int = 512
    system: str | None = None
    api_key: str | None = None


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
    """Chat until end of input or /quit. Returns the exit status."""
    return asyncio.run(_chat(options, console or Console(highlight=False)))


async def _chat(options: ChatOptions, console: Console) -> int:
    messages: list[dict[str, str]] = []
    async with Socket(options.url, options.api_key) as socket:
        console.print("[dim]/new starts over, /quit ends; Ctrl-C stops an answer[/dim]")
        while True:
            try:
                line = (await asyncio.to_thread(console.input, "[bold cyan]> [/]")).strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            if line == "/quit":
                return 0
            if line == "/new":
                messages.clear()
            elif line:
                messages.append({"role": "user", "content": line})
                await _turn(socket, options, messages, console)


async def _turn(socket: Socket, options: ChatOptions, messages: list[dict[str, str]], console: Console) -> None:
    """One answer. An error is shown and the question taken back, so that the chat can go on."""
    try:
        answer = await _answer(socket, options, messages, console)
    except SpecserveError as error:
        if error.code == "closed":
            raise
        messages.pop()
        console.print(f"[red]{error.message}[/red]")
        return
    messages.append({"role": "assistant", "content": answer})


async def _answer(socket: Socket, options: ChatOptions, messages: list[dict[str, str]], console: Console) -> str:
    request: dict[str, Any] = {
        "input": messages,
        "temperature": options.temperature,
        "max_output_tokens": options.max_tokens,
        "report_speculation": options.show_drafts,
    }
    if options.system:
        request["instructions"] = options.system
    colours, text = DraftColours(), ""
    async for event in socket.stream(request):
        if event["type"] == "response.speculation.delta":
            colours.speculation(event)
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
            drafted, rest = colours.split(event["delta"])
            console.print(Text(drafted, style=ACCEPTED_STYLE), Text(rest), sep="", end="")
        elif event["type"].startswith(("response.completed", "response.incomplete", "response.cancelled")):
            console.print()
            if options.show_drafts:
                console.print(f"[dim]{summary(event['response'])}[/dim]")
    return text


def summary(response: Mapping[str, Any]) -> str:
    """One line on what drafts did for a finished response."""
    usage = response["usage"]
    drafts = usage.get("speculation", {})
    return (
        f"{usage['output_tokens']} tokens; drafted {drafts.get('drafted', 0)}, "
        f"accepted {drafts.get('accepted', 0)}, rejected {drafts.get('rejected', 0)}"
    )
