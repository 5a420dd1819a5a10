"""A fake AsyncEngineClient: scripted events or a deterministic echo; abort, death and restart; everything is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    EngineStats,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    Usage,
)
from specserve.core.sampling import choice_seed

Script = Callable[[GenerateCommand], Iterable[Event]]


class FakeTokenizer:
    """One token a UTF-8 byte, and a chat template of angle brackets. Ids 256.. are special."""

    vocab_size = 300

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


class FakeClient:
    """Echoes the prompt, one token a delta, until `max_tokens` (`echo_choices` for several); or plays `script`.

    A request is held before its first delta while `gate` is clear, so that tests decide when things happen.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.commands: list[GenerateCommand] = []
        self.aborted: list[str] = []
        self.closed_streams: list[str] = []
        self.counters: dict[str, float] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.alive = asyncio.Event()
        self.live: dict[str, asyncio.Queue[Event]] = {}
        self.started = False

    @property
    def ready(self) -> bool:
        return self.alive.is_set()

    async def start(self) -> None:
        self.started = True
        self.alive.set()

    async def close(self) -> None:
        self.alive.clear()

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), kv_blocks=10, kv_blocks_used=1, counters=dict(self.counters))

    def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.aborted.append(request_id)
            prompt = next(c for c in self.commands if c.request_id == request_id).prompt_token_ids
            self.live[request_id].put_nowait(FinishedEvent(request_id, "cancelled", Usage(len(prompt), 1), 7))

    def die(self) -> None:
        """The engine process ends: each live request fails once; submits wait until `start`."""
        self.alive.clear()
        for request_id, queue in self.live.items():
            queue.put_nowait(FailedEvent(request_id, "engine_died", "the engine process ended", status=503))

    async def submit(self, command: GenerateCommand) -> AsyncIterator[Event]:
        self.commands.append(command)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self.live[command.request_id] = queue
        player: asyncio.Task[None] | None = None
        try:
            await self.alive.wait()
            player = asyncio.ensure_future(self._play(command, queue))
            while True:
                event = await queue.get()
                yield event
                if isinstance(event, (FinishedEvent, FailedEvent)):
                    return
        finally:
            if player is not None:
                player.cancel()
            del self.live[command.request_id]
            self.closed_streams.append(command.request_id)

    async def _play(self, command: GenerateCommand, queue: asyncio.Queue[Event]) -> None:
        several = command.params.num_sequences > 1
        for event in (self.script or (echo_choices if several else echo))(command):
            if isinstance(event, DeltaEvent):
                await self.gate.wait()
            queue.put_nowait(event)
            await asyncio.sleep(0)


def echo(command: GenerateCommand) -> Iterable[Event]:
    """The prompt again, byte by byte; what does not fit `max_tokens` is cut."""
    name, prompt = command.request_id, command.prompt_token_ids
    most = command.params.max_tokens or 1 << 30
    out = prompt[:most]
    seed = command.params.seed if command.params.seed is not None else 42
    yield QueuedEvent(name)
    yield StartedEvent(name, seed, len(prompt), 0)
    yield ProgressEvent(name, len(prompt), len(prompt))
    for token in out:
        yield DeltaEvent(name, (token,), chr(token) if token < 128 else "?")
    reason = "length" if len(prompt) > most else "stop"
    yield FinishedEvent(name, reason, Usage(len(prompt), len(out), 0, 4, 3, 1, {"suffix": (4, 3)}), seed)


def echo_choices(command: GenerateCommand) -> Iterable[Event]:
    """Choice i is the prompt's last 3 + i tokens, one a delta; the last choice is cut by "length".

    Those of n come side by side, the last one first; those of best_of and beams whole, best first, with scores.
    """
    name, prompt, params = command.request_id, command.prompt_token_ids, command.params
    seed = params.seed if params.seed is not None else 42
    ranked = params.beams > 0 or (params.best_of or 0) > params.n
    outs = [prompt[-3 - i :] for i in range(params.n)]
    yield QueuedEvent(name)
    yield StartedEvent(name, seed, len(prompt), 0)

    def delta(i: int, at: int) -> DeltaEvent:
        return DeltaEvent(name, (outs[i][at],), chr(outs[i][at]), index=i)

    def end(i: int) -> ChoiceFinishedEvent:
        reason = "length" if i == params.n - 1 else "stop"
        own = seed if params.beams else choice_seed(seed, i)
        return ChoiceFinishedEvent(name, i, reason, own, -0.5 * (i + 1) if ranked else None)

    if ranked:
        for i, out in enumerate(outs):
            yield from (delta(i, at) for at in range(len(out)))
            yield end(i)
    else:
        for at in range(len(outs[-1]) + 1):
            for i in reversed(range(params.n)):
                if at < len(outs[i]):
                    yield delta(i, at)
                elif at == len(outs[i]):
                    yield end(i)
    usage = Usage(len(prompt), sum(map(len, outs)), 0, 4, 3, 1, {"suffix": (4, 3)})
    yield FinishedEvent(name, "length", usage, seed)
