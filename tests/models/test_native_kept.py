"""Steps of decodes, whose batch and structure are kept from one to the next."""

import pytest
import torch

from specserve.core.plan import ScheduledRequest
from specserve.models.native import Partial
from specserve.worker.inputs import BatchBuilder, build_batch
from tests.fakes.paging import make_cache
from tests.models.native_models import model, same_bits

pytestmark = pytest.mark.usefixtures("native_library")

BLOCKS = 6


def test_a_kept_batch_gives_what_a_new_one_gives() -> None:
    """Its step is made once; what the model did meanwhile, and another cache, make no difference."""
    llama = model("odd", "q8")
    cache, other, fresh = (make_cache(llama.info, BLOCKS, 16) for _ in range(3))
    builder = BatchBuilder(16)
    blocks = [list(range(BLOCKS // 2)), list(range(BLOCKS // 2, BLOCKS))]
    for position in range(20):
        items = [
            ScheduledRequest(
                str(i), 0, ((7 * position + i) % llama.info.vocab_size,), position, table[: position // 16 + 1], 1
            )
            for i, table in enumerate(blocks)
        ]
        batch = builder.build(items, [1, 1])
        expected = llama.forward(build_batch(items, [1, 1], 16), fresh)
        if position % 3 == 1:
            assert same_bits(llama.forward(batch, cache), expected)
        assert llama.forward_best(batch, cache) == expected.argmax(-1).tolist()
        assert llama.forward_best(batch, other) == expected.argmax(-1).tolist()
        llama.forward_partial(batch, cache, Partial(last_layer=1))
    assert torch.equal(cache.storage, fresh.storage)
    assert torch.equal(other.storage, fresh.storage)
