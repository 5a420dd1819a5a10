"""The same exactness on the Llama family with random weights and its real kernels."""

import random

import pytest
import torch

from specserve.core.sampling import SamplingParams
from specserve.models.checkpoint import family_shapes
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaFamily
from tests.fakes.drive import Drive

VOCAB = 128


def model(seed=0, dtype=torch.float32, noise=0.0, layers=2):
    inv_freq = tuple((1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)).tolist())
    config = ModelConfig(
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=64,
        intermediate_size=96,
        vocab_size=VOCAB,
        max_position=512,
        rms_norm_eps=1e-5,
        inv_freq=inv_freq,
        rope_scale=1.0,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0,) * layers,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in family_shapes(config).items():
        scale = 1.0 if "norm" in name else 0.3
        value = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * scale
        weights[name] = (value + noise * torch.randn(shape, generator=generator)).to(dtype)
    return LlamaFamily(config, weights)


def jobs(temperature, max_tokens=32):
    rng = random.Random(2)
    result = {}
    for i in range(4):
        word = rng.choices(range(1, VOCAB), k=rng.randint(3, 9))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, logprobs=2)
        result[f"r{i}"] = (word * rng.randint(1, 4) + word[:2], params)
    return result


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trap_a1_drafts_never_change_the_tokens(temperature, dtype):
    target = model(dtype=dtype)
    plain = Drive(target, vocab=VOCAB).run(jobs(temperature))
    pairs = {
        ("suffix",): None,
        ("draft_model",): model(dtype=dtype),
        ("suffix", "draft_model"): model(seed=9, dtype=dtype),
    }
    for methods, draft in pairs.items():
        for k, chunk in ((1, 64), (5, 19), (8, 64)):
            answers = Drive(target, draft=draft, methods=methods, k=k, vocab=VOCAB, chunk=chunk).run(jobs(temperature))
            for name, answer in answers.items():
                assert answer.token_ids == plain[name].token_ids
                assert answer.logprobs == plain[name].logprobs
                if methods == ("draft_model",):
                    assert answer.accepted == answer.drafted > 0
