"""Configuration: small frozen dataclasses, each handed to the part that needs it; from flags, TOML or Python."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specserve.core.errors import ConfigError

DTYPES = ("float32", "bfloat16")
QUANTIZATION = ("auto", "none", "q8", "q4")
NUMERICS = ("invariant", "fast")
METHODS = ("suffix", "draft_model")
PREEMPTION = ("auto", "swap", "recompute")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: str | int, name: str = "kv_memory", least: int = 1) -> int:
    """Bytes of "2GiB", "512 MB" or a number."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].lower() not in _UNITS or float(found[1]) < least:
        raise ConfigError(f'{name}: {value!r} is not a size; write it as "2GiB" or as a number of bytes', param=name)
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: {value!r} must be a whole number from {low} to {high}", param=name)


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} must be true or false", param=name)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} must be one of {', '.join(allowed)}", param=name)


def _texts(name: str, value: object) -> tuple[str, ...]:
    # A single text is refused: as a sequence it would be its letters.
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{name}: must be a list of texts", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How drafts are made. Names are vLLM's where the meaning is the same.

    Attributes:
        methods: drafters in order of preference, each asked for what the ones before left open.
        num_speculative_tokens: most drafted tokens a step and request (K).
        model: the draft model of "draft_model" (demo, folder, GGUF file or hub name).
        prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that "suffix" matches.
        adaptive: let the controller lower K by measured acceptance and cost; off drafts K always.
    """

    methods: tuple[str, ...] = ("suffix",)
    num_speculative_tokens: int = 5
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    adaptive: bool = True

    def __post_init__(self) -> None:
        methods = self.methods
        if isinstance(methods, str) or not isinstance(methods, (list, tuple)) or not methods:
            raise ConfigError(
                f"speculation.methods: must be a list of {', '.join(METHODS)}", param="speculation.methods"
            )
        for i, method in enumerate(methods):
            _one_of(f"speculation.methods[{i}]", method, METHODS)
        object.__setattr__(self, "methods", tuple(methods))
        _switch("speculation.adaptive", self.adaptive)
        _whole("speculation.num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        _whole("speculation.prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        _whole("speculation.prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 64)
        if "draft_model" in methods and not self.model:
            raise ConfigError(
                'speculation.model: "draft_model" needs the draft model: a folder, a GGUF file or a hub name',
                param="speculation.model",
            )
        if self.model and "draft_model" not in methods:
            raise ConfigError(
                'speculation.methods: a draft model is named but "draft_model" is not among the methods',
                param="speculation.methods",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | str | None) -> SpeculationConfig | None:
        """None, "off" and {} are off; a key that is not known is an error that names it."""
        if values is None or (isinstance(values, str) and values.strip().lower() == "off"):
            return None
        if not isinstance(values, Mapping):
            raise ConfigError(
                'speculation: must be an object such as {"methods": ["suffix"]}; None or "off" switches drafts off',
                param="speculation",
            )
        values = dict(values)
        if "method" in values:
            if "methods" in values:
                raise ConfigError("speculation.method: give method or methods, not both", param="speculation.method")
            values["methods"] = [values.pop("method")]
        return cls(**_known(cls, values, "speculation.")) if values else None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine is built from.

    Attributes:
        model: "demo", a Hugging Face folder, a GGUF file or a hub name.
        dtype: of weights, activations and KV.
        quantization: of weights, also the draft model's. "auto" keeps the blocks of a quantised GGUF file and runs
            everything else in dtype, "none" dequantises to dtype, "q8" and "q4" quantise what is not that already (q4
            leaves embedding and head in q8). dtype "float32" takes "auto" for "none".
        numerics: "invariant" (rows never depend on the batch) or "fast".
        kv_memory: bytes for target and draft KV together.
        block_size: tokens a KV block.
        max_batched_tokens: rows a step at most (chunked prefill's budget).
        max_running: requests that run at once at most.
        max_waiting: requests that wait at most; more are refused as overloaded.
        max_model_len: context limit; None for the model's own.
        threads: CPU threads; None for all cores.
        prefix_cache: reuse KV of equal prefixes within a namespace.
        preemption: what happens to the KV of a request that gives way: "swap" to host memory, "recompute" later, or
            "auto", whichever the measured costs say is faster.
        swap_memory: bytes of host memory for swapped KV, of target and draft together; 0 never swaps.
        target_itl_ms: inter-token latency that prompt chunks must leave to those that decode, in milliseconds; None
            keeps a step with chunks within twice what a step without them takes, by all that decode or wait; 0 fills
            max_batched_tokens always.
    """

    model: str = "demo"
    dtype: str = "bfloat16"
    quantization: str = "auto"
    numerics: str = "invariant"
    speculation: SpeculationConfig | None = field(default_factory=SpeculationConfig)
    kv_memory: int = 2 * 2**30
    block_size: int = 16
    max_batched_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 4096
    max_model_len: int | None = None
    threads: int | None = None
    prefix_cache: bool = True
    preemption: str = "auto"
    swap_memory: int = 512 * 2**20
    target_itl_ms: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError('model: must be "demo", a folder, a GGUF file or a hub name', param="model")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("numerics", self.numerics, NUMERICS)
        _one_of("quantization", self.quantization, QUANTIZATION)
        if self.dtype == "float32" and self.quantization in ("q8", "q4"):
            raise ConfigError(
                f'quantization: {self.quantization!r} runs in bfloat16; leave out dtype "float32", or quantization',
                param="quantization",
            )
        object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory))
        _whole("block_size", self.block_size, 1, 256)
        _whole("max_batched_tokens", self.max_batched_tokens, 1, 65536)
        _whole("max_running", self.max_running, 1, 65536)
        _whole("max_waiting", self.max_waiting, 1, 10**6)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2, 2**31 - 1)
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024)
        self._check_policies()

    def _check_policies(self) -> None:
        _one_of("preemption", self.preemption, PREEMPTION)
        _switch("prefix_cache", self.prefix_cache)
        object.__setattr__(self, "swap_memory", parse_bytes(self.swap_memory, "swap_memory", least=0))
        if self.preemption == "swap" and self.swap_memory == 0:
            raise ConfigError('swap_memory: preemption "swap" needs host memory; give some', param="swap_memory")
        target = self.target_itl_ms
        if target is not None and (
            isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 <= target <= 60_000
        ):
            raise ConfigError(
                f"target_itl_ms: {target!r} must be a number of milliseconds from 0 to 60000", param="target_itl_ms"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """From untrusted names and values (keyword arguments, TOML); an unknown key is an error that names it."""
        values = dict(_known(cls, values, ""))
        if "speculation" in values and not isinstance(values["speculation"], SpeculationConfig):
            values["speculation"] = SpeculationConfig.from_dict(values["speculation"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens, and its published limits.

    Attributes:
        api_keys: keys that are accepted; empty for no authentication.
        allowed_origins: browser origins beside the server's own ("*" for all).
        max_message_bytes: largest WebSocket frame or HTTP body.
        max_responses: active responses on one connection.
        output_buffer_bytes: unsent output a connection may hold before its client counts as too slow.
        heartbeat_seconds: longest silence of a live response.
        slow_client_seconds: how long a client may leave the output buffer full before it is disconnected.
        drain_seconds: how long a stopping server lets live responses run on.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_message_bytes: int = 4 * 2**20
    max_responses: int = 64
    output_buffer_bytes: int = 4 * 2**20
    heartbeat_seconds: float = 10.0
    slow_client_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("heartbeat_seconds", "slow_client_seconds", "drain_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 86400:
                raise ConfigError(f"{name}: {value!r} must be a number of seconds from 0 to 86400", param=name)
        _whole("port", self.port, 0, 65535)
        _whole("max_message_bytes", self.max_message_bytes, 1024, 2**30)
        _whole("max_responses", self.max_responses, 1, 65536)
        _whole("output_buffer_bytes", self.output_buffer_bytes, 1024, 2**30)
        object.__setattr__(self, "api_keys", _texts("server.api_keys", self.api_keys))
        for i, key in enumerate(self.api_keys):
            # An empty key would let everyone in; a header cannot carry the others, so they would let nobody in.
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError(
                    f"server.api_keys: key {i + 1} must be printable ASCII text, not empty, without spaces around it",
                    param="server.api_keys",
                )
        object.__setattr__(self, "allowed_origins", _texts("server.allowed_origins", self.allowed_origins))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerConfig:
        return cls(**_known(cls, values, "server."))


def load_toml(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine values and server values of a specserve.toml: top-level keys and the table [server]."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}", param="config") from None
    server = values.pop("server", {})
    if not isinstance(server, dict):
        raise ConfigError("config: server must be a table, written as [server]", param="server")
    if values.get("speculation") in ("off", False):
        values["speculation"] = None
    return values, server


def _known(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    for name in values:
        if name not in names:
            raise ConfigError(
                f"{prefix}{name}: unknown option; known are {', '.join(sorted(names))}", param=f"{prefix}{name}"
            )
    return dict(values)
