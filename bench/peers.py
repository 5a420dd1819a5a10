"""llama.cpp and OpenVINO GenAI in turn with specserve: the same prompts, the same weights in the same precision class.

The peers live in an environment of their own in the cache folder, with pinned versions; the first run makes it, which
compiles llama.cpp for this processor, and converts the demo model. Speculation is off, every engine has the same number
of threads and a process of its own, which is stopped while another has its turn. Greedy; end tokens are ignored. Each
round has new prompts. Ratios are to the better of the two peers, of medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import RESULTS, ROOT, Row, finish, machine
from bench.engines.environment import CMAKE, REQUIREMENTS, Environment, NotInstalled
from bench.engines.measured import Measured, Store
from bench.engines.table import OURS, agreement, rows
from bench.engines.turns import Child, ChildFailed, closing, turns
from bench.engines.weights import gguf_variant
from bench.engines.work import PRECISIONS, WORKS, Texts, Work

PEERS = ("llama.cpp", "openvino")
WEIGHTS = {
    "specserve bf16": "dequantised to bfloat16",
    "specserve q8": "the file's Q4_1 requantised to q8, its Q8_0 embedding as it is",
    "specserve q4": "the file's Q4_1 and Q8_0 blocks as they are",
    "llama.cpp bf16": "BF16",
    "llama.cpp q8": "Q8_0",
    "llama.cpp q4": "Q4_0, embedding Q8_0",
    "openvino bf16": "float16, run in the precision that it chooses for this processor",
    "openvino q8": "int8 asymmetric by channel",
    "openvino q4": "int4 symmetric in groups of 64, embedding int8 asymmetric by channel",
}
OPENVINO_MODELS = {"bf16": "f16", "q8": "int8", "q4": "int4"}
CONVERTER = Path(__file__).resolve().parent / "engines" / "convert_openvino.py"


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
    precision: str,
    works: list[Work],
    engines: list[str],
    environment: Environment,
    settings: argparse.Namespace,
    store: Store,
) -> None:
    """All engines in one precision; what the store has already is not measured again."""
    works = [work for work in works if store.get(key(precision, work)) is None]
    if not works:
        return
    missing: dict[str, str] = {}
    children: dict[str, Child] = {}
    with closing(children), Progress() as progress:
        task = progress.add_task("", total=len(engines) * (1 + len(works) * (settings.repeats + 1)))

        def tick(what: str, engine: str) -> None:
            progress.update(task, advance=1, description=f"{precision}, {what}: {engine}")

        for engine in engines:
            tick("loading", engine)
            try:
                children[engine] = start(engine, precision, environment, settings.threads)
            except ChildFailed as error:
                missing[engine] = str(error)
        texts = Texts.of_demo()
        configs = {engine: child.config for engine, child in children.items()}
        for work in works:
            found = turns(children, work, texts, settings.repeats, partial(tick, work.name))
            missing |= found.missing
            found.missing, found.engines = dict(missing), configs
            store.put(key(precision, work), found)


def key(precision: str, work: Work) -> str:
    return f"{precision}, {work.name}"


def write(works: list[Work], store: Store, missing: dict[str, str], settings: argparse.Namespace) -> int:
    """Table and result file; the exit status."""
    made: list[Row] = []
    extra: dict[str, dict[str, Any]] = {"not_measured": dict(missing), "engines": {}, "same_first_tokens": {}}
    for precision in settings.only:
        for work in works:
            found = store.get(key(precision, work)) or Measured()
            made += rows(work, precision, found.rates, found.missing)
            extra["same_first_tokens"][key(precision, work)] = agreement(found.tokens)
            extra["engines"] |= {f"{precision} {name}": config for name, config in found.engines.items()}
            extra["not_measured"] |= {f"{precision} {name}": why for name, why in found.missing.items()}
    made += [Row(f"{peer} not measured: {why}", 0.0, "") for peer, why in missing.items()]
    status = finish("peers", made, check=settings.check)
    path = RESULTS / "peers.json"
    body = json.loads(path.read_text()) | {"repeats": settings.repeats, "threads": settings.threads}
    body |= {"requirements": REQUIREMENTS, "cmake": CMAKE, "weights": WEIGHTS} | extra
    path.write_text(json.dumps(body, indent=1) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), metavar="PRECISION")
    parser.add_argument("--work", type=int, choices=[w.number for w in WORKS], nargs="+", metavar="N", help="1..5")
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on where a run of the same commit was cut short")
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
    depends = {"commit": commit(), "processor": processor, "repeats": settings.repeats, "threads": settings.threads}
    store = Store(environment.folder / "measured.json", depends | {"engines": engines}, resume=settings.resume)
    for precision in settings.only:
        measure(precision, works, engines, environment, settings, store)
    return write(works, store, missing, settings)


def commit() -> str:
    """Of the tree that is measured."""
    ran = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
