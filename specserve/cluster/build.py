"""build_engine: from a configuration to an engine that runs in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from specserve.cluster.local import LocalExecutor
from specserve.cluster.memory import KVSplit, split_kv
from specserve.core.config import EngineConfig, SpeculationConfig
from specserve.core.errors import ConfigError, ModelLoadError
from specserve.core.protocols import Drafter
from specserve.engine.checks import EngineLimits
from specserve.engine.engine import Engine
from specserve.guided.compiler import CompiledGrammar, GrammarCompiler
from specserve.kernels.cpu.native import ISAError, library
from specserve.kernels.lazy import cores, load, set_num_threads
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.kv.swap import HostPool
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.models.loader import LoadedModel, load_model
from specserve.models.source import resolve
from specserve.models.tokenizer import Tokenizer
from specserve.sched.budget import TokenBudget
from specserve.sched.preempt import Preemption
from specserve.sched.scheduler import Scheduler, SchedulerLimits
from specserve.spec.combine import CombinedDrafter
from specserve.spec.controller import Controller
from specserve.spec.draft_model import DraftModelDrafter
from specserve.spec.suffix import SuffixDrafter
from specserve.worker.runner import Model, ModelRunner

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
logger = logging.getLogger(__name__)
GRAMMAR_DELAY = 1.0  # seconds from start-up until the library for grammars is imported without being asked for


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the models and put the engine together. Call it in the thread that will run the engine.

    Args:
        progress: called with (bytes done, bytes in all, what) while models are fetched and loaded, and once with how
            the KV memory is split.

    Raises:
        ConfigError: names the option at fault.
        ModelLoadError: a model cannot be found, read or verified.
    """
    try:
        library()
    except ISAError as error:
        raise ConfigError(str(error), param="SPECSERVE_ISA") from None
    set_num_threads(config.threads or cores())  # a property of the calling thread in OpenMP, hence here
    speculation = config.speculation
    draft_name = speculation.model if speculation is not None else None
    if draft_name is not None:  # a name that is wrong is told before the target is loaded
        _draft_errors(lambda: resolve(draft_name, weights=False, progress=progress))
    target = _load(config, config.model, progress)
    draft = None
    if draft_name is not None:
        draft = _draft_errors(lambda: _load(config, draft_name, progress))
        check_pair(target.tokenizer, draft.tokenizer, draft.info)
    return assemble(config, target, draft, progress)


def build_served_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """The same for a process that serves, with torch imported before: no request waits for it later."""
    load()
    return build_engine(config, progress)


def _load(config: EngineConfig, name: str, progress: Progress | None) -> LoadedModel:
    return load_model(
        name, dtype=config.dtype, numerics=config.numerics, quantization=config.quantization, progress=progress
    )


def assemble(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None = None, progress: Progress | None = None
) -> Engine:
    """The engine over loaded models."""
    tokenizer = target.tokenizer
    max_model_len = context_length(config.max_model_len, target.info)
    split = _split(config, target.info, draft.info if draft is not None else None)
    logger.info(split.describe())
    if progress is not None:
        progress(0, 0, split.describe())
    kv = _manager(config, split)
    executor = LocalExecutor(
        _runner(target.model, split, "target"),
        _runner(draft.model, split, "draft") if draft is not None else None,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
    )
    scheduler = _scheduler(config, split, kv, executor, max_model_len)
    drafter, controller = None, None
    if config.speculation is not None:
        drafter = _drafter(config, config.speculation, executor, kv, tokenizer, draft)
        controller = Controller(
            config.speculation.num_speculative_tokens,
            max_model_len=max_model_len,
            adaptive=config.speculation.adaptive,
            sources=config.speculation.methods,
        )
    return Engine(
        scheduler,
        kv,
        executor,
        vocabulary=tokenizer,
        limits=EngineLimits(
            max_model_len=max_model_len,
            num_speculative_tokens=config.speculation.num_speculative_tokens if config.speculation is not None else 0,
            numerics=config.numerics,
            weights=target.info.weights,
        ),
        drafter=drafter,
        controller=controller,
        compiler=_compiler(tokenizer),
    )


def _split(config: EngineConfig, target: ModelInfo, draft: ModelInfo | None) -> KVSplit:
    swap_memory = config.swap_memory if config.preemption != "recompute" else 0  # which never swaps
    return split_kv(config.kv_memory, config.block_size, target, draft, swap_memory=swap_memory)


def _manager(config: EngineConfig, split: KVSplit) -> KVManager:
    def pool() -> BlockPool:
        return BlockPool(split.num_blocks, split.block_size)

    return KVManager(
        pool(),
        pool() if split.draft_bytes else None,
        prefix_cache=config.prefix_cache,
        host=HostPool(split.host_blocks),
        draft_host=HostPool(split.host_blocks) if split.draft_bytes else None,
    )


def _scheduler(
    config: EngineConfig, split: KVSplit, kv: KVManager, executor: LocalExecutor, max_model_len: int
) -> Scheduler:
    # Measured while nothing is in use: the first preemption already chooses by costs. One of each pool, hence halved.
    swap_seconds = executor.measure_swap() / (2 if split.draft_bytes else 1) if split.host_blocks else None
    target = config.target_itl_ms
    return Scheduler(
        SchedulerLimits(config.max_batched_tokens, config.max_running, config.max_waiting, max_model_len),
        kv,
        preemption=Preemption(config.preemption, swap_seconds),
        budget=TokenBudget(config.max_batched_tokens, None if target is None else target / 1000),
    )


def _draft_errors(action: Callable[[], T]) -> T:
    """Run `action`; what is wrong with the draft model is said of its own option."""
    try:
        return action()
    except ModelLoadError as error:
        message = error.message.removeprefix("model: ")
        raise ModelLoadError(f"speculation.model: {message}", param="speculation.model", code=error.code) from None


def check_pair(target: Tokenizer, draft: Tokenizer, draft_info: ModelInfo) -> None:
    """A draft model must have the target's vocabulary; the padded widths of the logits may differ.

    Raises:
        ConfigError: names the first difference.
    """
    difference = target.fingerprint_difference(draft)
    if difference is None and draft_info.vocab_size < target.vocab_size:
        difference = f"the draft has {draft_info.vocab_size} ids, the target {target.vocab_size}"
    if difference is not None:
        raise ConfigError(
            f"speculation.model: a draft model needs the target's vocabulary: {difference}", param="speculation.model"
        )


def context_length(asked: int | None, info: ModelInfo) -> int:
    """The configured context within the model's own.

    Raises:
        ConfigError: more is asked than the model has positions.
    """
    if asked is not None and asked > info.max_position:
        raise ConfigError(f"max_model_len: {asked} is more than the model's {info.max_position}", param="max_model_len")
    return asked or info.max_position


def _runner(model: Model, split: KVSplit, pool: str) -> ModelRunner:
    info = model.info
    cache = PagedKVCache(
        info.num_layers, split.num_blocks, split.block_size, info.num_kv_heads, info.head_dim, info.dtype
    )
    return ModelRunner(model, cache, pool=pool, num_host_blocks=split.host_blocks)


def _drafter(
    config: EngineConfig,
    speculation: SpeculationConfig,
    executor: LocalExecutor,
    kv: KVManager,
    tokenizer: Tokenizer,
    draft: LoadedModel | None,
) -> CombinedDrafter:
    drafters: list[Drafter] = []
    for method in speculation.methods:
        if method == "suffix":
            shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
            drafters.append(SuffixDrafter(shortest, longest, eos_ids=tokenizer.eos_ids))
        else:
            assert draft is not None, "loaded with the target"
            model_drafter = DraftModelDrafter(
                executor,
                kv,
                vocab_size=tokenizer.vocab_size,
                max_model_len=draft.info.max_position,
                eos_ids=tokenizer.eos_ids,
                max_catch_up_rows=config.max_batched_tokens,
            )
            drafters.append(model_drafter)
    return CombinedDrafter(drafters)


class PreparedCompiler:
    """A GrammarCompiler that a thread makes while the engine runs: its library takes longer to import than a model
    to load, holds the interpreter lock meanwhile, and most first requests have no grammar.

    Args:
        make: makes it, on the first `compile` or after `delay`. What it raises, that `compile` raises, and the next one
            tries again.
        delay: seconds.
    """

    def __init__(self, make: Callable[[], GrammarCompiler], delay: float = GRAMMAR_DELAY) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Future[GrammarCompiler] | None = None
        self._told = False
        timer = threading.Timer(delay, self._start)
        timer.daemon = True  # the interpreter does not wait for what nobody asked for
        timer.start()

    def _start(self) -> Future[GrammarCompiler]:
        with self._lock:
            if self._made is None or (self._made.done() and self._made.exception() is not None):
                self._made = Future()
                # No daemon, as its maker is: the interpreter must not end in the middle of an import.
                threading.Thread(target=self._run, args=(self._made,), name="grammar-library", daemon=False).start()
            return self._made

    def _run(self, made: Future[GrammarCompiler]) -> None:
        try:
            made.set_result(self._make())
        except BaseException as error:
            if not self._told:
                logger.exception("grammars cannot be compiled")
            self._told = True
            made.set_exception(error)

    def compile(self, guided: Mapping[str, Any]) -> CompiledGrammar:
        """As GrammarCompiler.compile; waits until it is there."""
        return self._start().result().compile(guided)


def _compiler(tokenizer: Tokenizer) -> PreparedCompiler:
    def make() -> GrammarCompiler:
        token_bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        return GrammarCompiler(token_bytes, tokenizer.vocab_size, tokenizer.eos_ids)

    return PreparedCompiler(make)
