"""llama.cpp and OpenVINO GenAI in turn with specserve: the same prompts, the same weights in the same precision class.

The peers live in an environment of their own in the cache folder, with pinned versions; the first run makes it, which
compiles llama.cpp for this processor, and converts the demo model. Speculation is off, every engine has the same number
of threads and a process of its own, which is stopped while another has its turn. Greedy; end tokens are ignored. Each
round has new prompts. Ratios are to the better of the two peers, of medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import RESULTS, Row, finish, machine
from bench.engines.environment import Environment, NotInstalled
from bench.engines.table import OURS, agreement, rows
from bench.engines.turns import Child, ChildFailed, closing, turns
from bench.engines.weights import gguf_variant
from bench.engines.work import PRECISIONS, WORKS, Texts, Work

PEERS = ("llama.cpp", "openvino")
OPENVINO_MODELS = {"bf16": "f16", "q8": "int8", "q4": "int4"}
CONVERTER = Path(__file__).resolve().parent / "engines" / "convert_openvino.py"


@dataclass
class Record:
    """What goes into the result file beside the rows."""

    rows: list[Row] = field(default_factory=list)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # "bf16 openvino" -> how it was set
    agree: dict[str, dict[str, int]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # peer -> why


def quantization(precision: str) -> dict[str, str]:
    """The option of EngineConfig, where this specserve has it. Raises ChildFailed where it cannot run so."""
    from specserve.core import config

    values = getattr(config, "QUANTIZATION", ())
    wanted = "none" if precision == "bf16" else precision
    if wanted in values:
        return {"quantization": wanted}
    if precision == "bf16" and "quantization" in {f.name for f in fields(config.EngineConfig)}:
        return {}
    raise ChildFailed(f"this specserve has no quantization {precision}")


def prepare(peer: str, environment: Environment, say: Callable[[str], None]) -> None:
    """Install a peer and make its models. Raises NotInstalled."""
    from specserve.models.source import resolve

    environment.install(peer)
    environment.models.mkdir(parents=True, exist_ok=True)
    source = resolve("demo").path
    if peer == "llama.cpp":
        for precision in PRECISIONS:
            gguf_variant(source, environment.models, precision, say)
        return
    target = environment.models / "openvino"
    if not target.exists():
        half = gguf_variant(source, environment.models, "f16", say)
        say("converting the model to OpenVINO's format, float16, int8 and int4")
        part = environment.models / "part-openvino"
        environment.run("convert-openvino", CONVERTER, str(half), str(part))
        part.replace(target)


def start(engine: str, precision: str, environment: Environment, threads: int) -> Child:
    """Raises ChildFailed."""
    python, log = environment.python, environment.folder / f"{engine}.log"
    options: dict[str, Any] = {"threads": threads}
    if engine == OURS:
        python = Path(sys.executable)
        options |= {"model": "demo", "dtype": "bfloat16", **quantization(precision)}
    elif engine == "llama.cpp":
        options["model"] = str(environment.models / f"demo-{precision}.gguf")
    else:
        options["model"] = str(environment.models / "openvino" / OPENVINO_MODELS[precision])
    return Child(engine, python, options, log)


def measure(
    precision: str, works: list[Work], engines: list[str], environment: Environment, settings: argparse.Namespace
) -> Record:
    """All engines in one precision."""
    record = Record()
    missing: dict[str, str] = {}
    children: dict[str, Child] = {}
    with closing(children), Progress() as progress:
        task = progress.add_task("", total=len(engines) + len(works) * (settings.repeats + 1) * len(engines))

        def tick(what: str, engine: str) -> None:
            progress.update(task, advance=1, description=f"{precision}, {what}: {engine}")

        for engine in engines:
            tick("loading", engine)
            try:
                children[engine] = start(engine, precision, environment, settings.threads)
                record.engines[f"{precision} {engine}"] = children[engine].config
            except ChildFailed as error:
                missing[engine] = str(error)
        texts = Texts.of_demo()
        for work in works:
            found = turns(children, work, texts, settings.repeats, partial(tick, work.name))
            rates, failed, tokens = found
            missing |= failed
            record.rows += rows(work, precision, rates, missing)
            record.agree[f"{precision}, {work.name}"] = agreement(tokens)
    record.missing = {f"{precision} {engine}": why for engine, why in missing.items()}
    return record


def write(records: list[Record], missing: dict[str, str], settings: argparse.Namespace) -> int:
    """Table and result file; the exit status."""
    made = [row for record in records for row in record.rows]
    made += [Row(f"{peer} not measured: {why}", 0.0, "") for peer, why in missing.items()]
    status = finish("peers", made, check=settings.check)
    path = RESULTS / "peers.json"
    body = json.loads(path.read_text())
    body["repeats"], body["threads"] = settings.repeats, settings.threads
    body["not_measured"] = {**missing, **{k: v for r in records for k, v in r.missing.items()}}
    body["engines"] = {k: v for r in records for k, v in r.engines.items()}
    body["same_first_tokens"] = {k: v for r in records for k, v in r.agree.items()}
    path.write_text(json.dumps(body, indent=1) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--work", type=int, choices=[w.number for w in WORKS], nargs="+", metavar="N", help="1..5")
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    settings = parser.parse_args()
    from specserve.models.home import home

    about = machine()
    processor = f"{about.get('cpu', about['arch'])} {' '.join(about.get('isa', ()))}"
    environment = Environment(home() / "peers", processor, say)
    engines, missing = [OURS], dict[str, str]()
    for peer in settings.peers:
        try:
            prepare(peer, environment, say)
            engines.append(peer)
        except NotInstalled as error:
            missing[peer] = str(error)
            say(f"{peer} is left out: {error}")
    works = [work for work in WORKS if not settings.work or work.number in settings.work]
    records = [measure(precision, works, engines, environment, settings) for precision in settings.only]
    return write(records, missing, settings)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
