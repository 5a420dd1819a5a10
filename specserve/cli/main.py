"""The command `specserve`: serve, chat, demo. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from specserve.cli import flags
from specserve.core.errors import SpecserveError

app = typer.Typer(
    help="Speculative and guided decoding on every request, streamed over a WebSocket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    model: flags.Model = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    speculation: flags.Speculation = None,
    host: flags.Host = None,
    port: flags.Port = None,
    threads: flags.Threads = None,
    kv_memory: flags.KVMemory = None,
    numerics: flags.Numerics = None,
    target_itl_ms: flags.TargetITL = None,
    preemption: flags.Preemption = None,
    swap_memory: flags.SwapMemory = None,
    api_key: flags.APIKeys = None,
    config: flags.Config = None,
) -> None:
    """Serve a model on a WebSocket and HTTP; without arguments the demo model on 127.0.0.1:8000."""
    from specserve.cli.options import read_options

    engine_flags = {
        "model": model,
        "dtype": dtype,
        "quantization": quantization,
        "threads": threads,
        "kv_memory": kv_memory,
        "numerics": numerics,
        "target_itl_ms": target_itl_ms,
        "preemption": preemption,
        "swap_memory": swap_memory,
    }
    # An empty variable is a mistake to be told, not a server without keys.
    keys = tuple(api_key) if api_key else ("",) if flags.API_KEY in os.environ else None
    server_flags = {"host": host, "port": port, "api_keys": keys}

    def start() -> int:
        engine, server = read_options(config, engine_flags, server_flags, speculation)
        from specserve.cli.serve import run

        return run(engine, server)

    _exit(start)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The server's address.")] = "ws://127.0.0.1:8000/v1/responses",
    show_drafts: Annotated[bool, typer.Option(help="Colour the tokens that a draft gave.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar=flags.API_KEY)] = None,
) -> None:
    """Chat in the terminal with a running server."""
    from specserve.cli.chat import ChatOptions, run

    _exit(lambda: run(ChatOptions(url, show_drafts, temperature, max_tokens, system, api_key)))


@app.command()
def demo() -> None:
    """Start a server with the demo model and show chat and JSON answers, with and without drafts, on one socket."""
    from specserve.cli.demo import run

    _exit(run)


def _exit(action: Callable[[], int]) -> None:
    """Run `action`; a typed error becomes one line on stderr and exit status 1, Ctrl-C becomes 130."""
    try:
        code = action()
    except SpecserveError as error:
        typer.secho(f"specserve: {error.message}", fg=typer.colors.RED, err=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command."""
    sys.exit(app())
