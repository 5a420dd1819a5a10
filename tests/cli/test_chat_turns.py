"""The chat against a fake server: Ctrl-C, a lost connection, commands, input that cannot be sent. Never a traceback."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from specserve.cli import chat
from specserve.cli.chat import ChatOptions
from specserve.cli.main import app
from specserve.core.errors import SpecserveError


class FakeServer:
    """Answers each question with "hello"; holds the answer open after "hel" when the question is "long".

    `on_text` runs when the chat's part of the answer is on its way. With `deaf` a cancel gets no answer.
    """

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.cancels: list[dict] = []
        self.deaf = False
        self.cancelled = threading.Event()
        self._server = serve(self._handle, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}/v1/responses"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _handle(self, socket: ServerConnection) -> None:
        try:
            for frame in socket:
                self._answer(socket, orjson.loads(frame))
        except ConnectionClosed:
            pass

    def _answer(self, socket: ServerConnection, request: dict) -> None:
        if request["type"] == "response.cancel":
            self.cancels.append(request)
            self.cancelled.set()
            if not self.deaf:
                self._send(socket, "response.cancelled", self._lane, response={"usage": {"output_tokens": 1}})
            return
        self.requests.append(request)
        question = request["input"][-1]["content"]
        self._lane = request["stream_id"]
        if question == "bye":
            socket.close(1001, "the server is stopping")
            return
        if question == "bad":
            self._send(socket, "error", self._lane, error={"message": "too [long]", "code": "invalid"})
            return
        self._send(socket, "response.created", self._lane, response={"id": f"resp_{len(self.requests)}"})
        if question != "silent":
            self._send(socket, "response.output_text.delta", self._lane, delta="hel")
        if question not in ("long", "silent"):
            self._send(socket, "response.output_text.delta", self._lane, delta="lo")
            self._send(socket, "response.completed", self._lane, response={"usage": {"output_tokens": 2}})

    @staticmethod
    def _send(socket: ServerConnection, kind: str, lane: str, **fields: object) -> None:
        socket.send(orjson.dumps({"type": kind, "stream_id": lane, **fields}).decode())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def play(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException | Callable[[], str]) -> None:
    """What the user types, line by line; then the end of the input."""
    left = iter(lines)

    def typed(prompt: str = "") -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line() if callable(line) else line

    monkeypatch.setattr("builtins.input", typed)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, kind: str, then: Callable[[], None] | None = None) -> None:
    """Ctrl-C as soon as the chat has seen an event of this type; `then` runs right after, in a thread."""
    show = chat.Turn._show
    once = []

    def watched(turn: chat.Turn, event: dict) -> None:
        show(turn, event)
        if event["type"] == kind and not once:
            once.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            if then is not None:
                threading.Thread(target=then).start()

    monkeypatch.setattr(chat.Turn, "_show", watched)


def talk(server: FakeServer, **options: object) -> str:
    out = io.StringIO()
    assert chat.run(ChatOptions(server.url, **options), Console(file=out, width=200)) == 0
    return out.getvalue()


def said(request: dict) -> list[str]:
    return [message["content"] for message in request["input"]]


def test_answers_and_history(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one", "", "two", "/new", "three", "/quit", "never")
    assert talk(server).count("hello") == 3
    assert [said(r) for r in server.requests] == [["one"], ["one", "hello", "two"], ["three"]]


def test_interrupt_stops_the_answer_and_keeps_what_was_said(server: FakeServer, monkeypatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    play(monkeypatch, "long", "again")
    interrupt_after(monkeypatch, "response.output_text.delta")
    shown = talk(server)
    assert "hel\nstopped" in shown
    assert server.cancels == [{"type": "response.cancel", "response_id": "resp_1"}]
    assert said(server.requests[1]) == ["long", "hel", "again"]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_before_any_text_takes_the_question_back(server: FakeServer, monkeypatch) -> None:
    play(monkeypatch, "silent", "again")
    interrupt_after(monkeypatch, "response.created")
    talk(server)
    assert said(server.requests[1]) == ["again"]


def test_second_interrupt_ends_the_chat(server: FakeServer, monkeypatch) -> None:
    server.deaf = True

    def again() -> None:
        server.cancelled.wait()
        os.kill(os.getpid(), signal.SIGINT)

    play(monkeypatch, "long", AssertionError("asked again"))
    interrupt_after(monkeypatch, "response.output_text.delta", again)
    talk(server)
    assert len(server.cancels) == 1


def test_interrupt_at_the_prompt_ends_the_chat(server: FakeServer, monkeypatch) -> None:
    play(monkeypatch, KeyboardInterrupt(), AssertionError("asked again"))
    talk(server)


def test_errors_take_the_question_back(server: FakeServer, monkeypatch) -> None:
    play(monkeypatch, "bad", "good")
    assert "too [long]" in talk(server)
    assert said(server.requests[1]) == ["good"]


def test_unknown_commands_and_broken_text_are_not_sent(server: FakeServer, monkeypatch) -> None:
    play(monkeypatch, "/help", "caf\udce9", " /etc", "good")
    shown = talk(server)
    assert "/new starts over, /quit ends. A space" in shown
    assert "not UTF-8" in shown
    assert [said(r)[-1] for r in server.requests] == ["/etc", "good"]


def test_connection_that_ends_during_an_answer(server: FakeServer, monkeypatch) -> None:
    play(monkeypatch, "bye")
    with pytest.raises(SpecserveError, match="the connection ended: the server is stopping"):
        talk(server)


def test_connection_that_ends_between_answers(server: FakeServer, monkeypatch) -> None:
    def late() -> str:
        server.close()
        return "two"

    play(monkeypatch, "one", late)
    result = CliRunner().invoke(app, ["chat", "--url", server.url])
    assert result.exit_code == 1
    assert result.stderr.startswith("specserve: the connection ended")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1/"], "ws://host:port/v1/responses"),
        (["--url", "foo"], "ws://host:port/v1/responses"),
        (["--url", ""], "ws://host:port/v1/responses"),
        (["--url", "ws://127.0.0.1:1/"], "specserve serve"),
        (["--api-key", "caf\u00e9"], "--api-key"),
        (["--api-key", "a\nb"], "--api-key"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "inf"], "--temperature"),
        (["--temperature", "-1"], "--temperature"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--system", "\udce9"], "--system"),
    ],
)
def test_wrong_flags_are_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["chat", *arguments])
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
