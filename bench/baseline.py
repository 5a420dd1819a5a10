"""transformers' generate as a process of its own: a line of JSON {"prompts", "tokens"} in, {"seconds"} out.

Its own process, so that nothing of ours touches it: specserve sets how OpenMP's threads wait, which slows it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


class Baseline:
    """The process, from the parent's side."""

    def __init__(self, gguf: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(gguf)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of one static batch of left-padded prompts, greedy."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the baseline ended with status {self._process.wait()}")
        return float(json.loads(line)["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(sys.argv[1])
    # Whole weights: by default transformers keeps them quantised and unpacks them in every product, which is slower.
    whole = GgufConfig(gguf_file=path.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=whole
    )
    for line in sys.stdin:
        job = json.loads(line)
        prompts, tokens = job["prompts"], job["tokens"]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        seconds = time.perf_counter() - start
        assert out.shape[1] == width + tokens
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
