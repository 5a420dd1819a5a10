"""A LocalExecutor over a tiny model, and plans for it."""

from specserve.cluster.local import LocalExecutor
from specserve.core.plan import NewRequest, ScheduledRequest
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree
from specserve.worker.runner import ModelRunner
from tests.fakes.drive import EOS
from tests.fakes.tiny_model import TinyModel

VOCAB = 48


def executor(**options):
    model = TinyModel()
    runner = ModelRunner(model, model.cache(8, 4), num_host_blocks=2)
    return LocalExecutor(runner, vocab_size=VOCAB, eos_ids=[EOS], **options), runner


def new(name, tokens, num_prompt=None, **params):
    return NewRequest(name, tuple(tokens), num_prompt or len(tokens), SamplingParams(**params), 3)


def run(ex, plan, masks=None):
    ex.forward(plan)
    return ex.sample(plan, masks or {})


def ask(name, tokens, start=0, blocks=(0, 1), logits=1, draft=()):
    rows = (*tokens, *draft)
    return ScheduledRequest(name, 0, rows, start, list(blocks), logits + len(draft), TokenTree.chain(draft, "suffix"))
