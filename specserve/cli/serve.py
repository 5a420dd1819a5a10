"""`specserve serve`: the engine in a process of its own, the server in this one, one line when it is ready."""

from __future__ import annotations

import logging
import sys
import threading

from specserve.core.config import EngineConfig, ServerConfig
from specserve.engine.client import AsyncEngineClient
from specserve.engine.process import EngineProcess
from specserve.models.loader import load_tokenizer, model_context
from specserve.models.progress import ConsoleProgress
from specserve.server.serve import Server


def run(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal; returns the exit status.

    Raises:
        SpecserveError: what kept it from starting.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    with ConsoleProgress() as progress:
        tokenizer = load_tokenizer(engine.model, progress)
        # Beside the engine, which takes longer. No daemon: the interpreter must not end in the middle of an import.
        threading.Thread(target=tokenizer.prepare_chat, name="chat-templates", daemon=False).start()
        context = min(model_context(engine.model), engine.max_model_len or sys.maxsize)
        client = AsyncEngineClient(EngineProcess(engine, progress=progress))

        def ready(host: str, port: int) -> None:
            progress.close()
            print(ready_line(engine, host, port, client.info["weights"]), flush=True)

        Server(client, tokenizer, server, engine.model, context, on_ready=ready).run()
    return 0


def ready_line(engine: EngineConfig, host: str, port: int, weights: str) -> str:
    """The one line that says where and what."""
    shown = f"[{host}]" if ":" in host else host
    drafts = "+".join(engine.speculation.methods) if engine.speculation else "off"
    precision = f"weights {weights}, activations and KV {engine.dtype}"
    what = f"{engine.model}, {precision}, numerics {engine.numerics}, speculation {drafts}"
    return f"specserve ready on ws://{shown}:{port}/v1/responses ({what})"
