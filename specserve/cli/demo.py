"""The main job in one command: chat and JSON on one WebSocket, with and without drafts; the same tokens either way."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from specserve.cli.wire import Socket
from specserve.core.errors import SpecserveError

READY = re.compile(r"ready on (ws://\S+)")
STOP_SECONDS = 20.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "population_millions": {"type": "number"},
        "landmarks": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "country", "population_millions", "landmarks"],
    "additionalProperties": False,
}
RECIPE = (
    "Pancakes: mix two cups of flour, two cups of milk, two eggs and a pinch of salt. Rest the batter for half an "
    "hour. Heat butter in a pan, pour in a thin layer of batter and turn the pancake when the edges are brown."
)
JOBS: dict[str, dict[str, Any]] = {
    "chat": {
        "input": f"Repeat this recipe word for word, then name one topping.\n\n{RECIPE}",
        "max_output_tokens": 96,
    },
    "json": {
        "input": f"Describe Paris as JSON that follows this schema: {json.dumps(SCHEMA)}",
        "max_output_tokens": 160,
        "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
    },
}


@dataclass(slots=True)
class Answer:
    """One streamed response and what it cost."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens a second from the first token to the end."""
        return (len(self.token_ids) - 1) / max(self.last - self.first, 1e-9)


def run(console: Console | None = None) -> int:
    """Start a server on a free port, stream, compare, stop it. Returns the exit status."""
    console = console or Console(highlight=False)
    # Like Ctrl-C: the server is stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server, url = start_server(console)
    try:
        answers = asyncio.run(stream_all(url, console))
    finally:
        stop_server(server)
    return report(answers, console)


def start_server(console: Console) -> tuple[subprocess.Popen[str], str]:
    """A server as a user starts it, on a free port; its own progress is shown until it is ready."""
    command = [sys.executable, "-m", "specserve.cli", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            console.print(f"[dim]server: {line.rstrip()}[/dim]", soft_wrap=True)
            found = READY.search(line)
            if found:
                return server, found[1]
    except KeyboardInterrupt:
        stop_server(server)
        raise
    raise SpecserveError(f"the server ended with status {server.wait()} before it was ready")


def stop_server(server: subprocess.Popen[str]) -> None:
    """Ask it to stop, insist after a while; nothing is left running."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()


async def stream_all(url: str, console: Console) -> dict[tuple[str, bool], Answer]:
    """Both jobs at once over one socket, first without drafts, then with them."""
    answers: dict[tuple[str, bool], Answer] = {}
    async with Socket(url) as socket:
        for drafts in (False, True):
            console.print(f"\n[bold]chat and JSON at once, drafts {'on' if drafts else 'off'}[/bold]")
            done = await asyncio.gather(*(stream_one(socket, job, drafts) for job in JOBS.values()))
            for name, answer in zip(JOBS, done, strict=True):
                answers[name, drafts] = answer
                console.print(Panel(answer.text.strip(), title=name, title_align="left"))
    return answers


async def stream_one(socket: Socket, job: dict[str, Any], drafts: bool) -> Answer:
    """Stream one response and time it."""
    answer = Answer()
    async for event in socket.stream({**job, "temperature": 0, "speculation": drafts}):
        if event["type"] == "response.output_text.delta":
            answer.first = answer.first or time.perf_counter()
            answer.text += event["delta"]
            answer.token_ids += event["token_ids"]
        elif event["type"] in ("response.completed", "response.incomplete"):
            answer.last = time.perf_counter()
            answer.usage = event["response"]["usage"]
    return answer


def report(answers: dict[tuple[str, bool], Answer], console: Console) -> int:
    """The table and the checks: valid JSON, and the same token ids with and without drafts."""
    table = Table("answer", "drafts", "tokens/s", "tokens", "drafted", "accepted", "rejected", "by source")
    for (name, drafts), answer in answers.items():
        use = answer.usage["speculation"]
        sources = ", ".join(f"{s}: {v['accepted']}/{v['drafted']}" for s, v in use["by_source"].items())
        table.add_row(
            name,
            "on" if drafts else "off",
            f"{answer.rate:.1f}",
            str(answer.usage["output_tokens"]),
            *(str(use[key]) for key in ("drafted", "accepted", "rejected")),
            sources or "-",
        )
    console.print(table)
    ok = True
    for name in JOBS:
        same = answers[name, False].token_ids == answers[name, True].token_ids
        ok &= same
        console.print(f"{name}: token ids with and without drafts {'agree' if same else '[red]DIFFER[/red]'}")
    for drafts in (False, True):
        ok &= valid(answers["json", drafts].text, console)
    return 0 if ok else 1


def valid(text: str, console: Console) -> bool:
    """Whether the JSON answer parses and follows the schema, judged by jsonschema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        console.print(f"[red]json: not valid: {error.args[0]}[/red]")
        return False
    console.print("json: valid against its schema")
    return True
