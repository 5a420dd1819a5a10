from specserve.core.protocols import DraftContext
from specserve.core.request import Request
from specserve.core.sampling import SamplingParams
from specserve.core.tree import EMPTY_TREE, TokenTree
from specserve.spec.combine import CombinedDrafter


class Fixed:
    def __init__(self, name, answers):
        self.name = name
        self.answers = answers
        self.asked = []
        self.forgotten = []

    def propose(self, contexts):
        self.asked += [c.request.request_id for c in contexts]
        return [TokenTree.chain(self.answers.get(c.request.request_id, ()), self.name) for c in contexts]

    def forget(self, request_id):
        self.forgotten.append(request_id)


def context(name, budget=4, **params):
    return DraftContext(Request(name, [1, 2], SamplingParams(**params)), budget)


def test_the_first_drafter_with_an_answer():
    first, second = Fixed("suffix", {"a": (1, 2)}), Fixed("draft_model", {"a": (9,), "b": (3,)})
    trees = CombinedDrafter([first, second]).propose([context("a"), context("b"), context("c")])
    assert [t.tokens for t in trees] == [(1, 2), (3,), ()]
    assert [t.sources for t in trees] == [("suffix",) * 2, ("draft_model",), ()]
    assert second.asked == ["b", "c"]


def test_trap_f10_no_drafter_runs_where_the_request_says_no():
    drafter = Fixed("suffix", {"a": (1,), "b": (1,), "c": (1, 2, 3)})
    off = [context("a", speculation=False), context("b", speculation={"num_speculative_tokens": 0})]
    trees = CombinedDrafter([drafter]).propose([*off, context("c", speculation={"num_speculative_tokens": 2})])
    assert [len(t) for t in trees] == [0, 0, 2]
    assert drafter.asked == ["c"]


def test_a_draft_that_was_not_run_yet_stands():
    drafter = Fixed("suffix", {"a": (7,)})
    pending = context("a", 2)
    pending.request.draft = TokenTree.chain((4, 5, 6), "draft_model")
    assert CombinedDrafter([drafter]).propose([pending])[0].tokens == (4, 5)
    assert drafter.asked == []


def test_forget_reaches_every_drafter():
    drafters = [Fixed("a", {}), Fixed("b", {})]
    CombinedDrafter(drafters).forget("r")
    assert [d.forgotten for d in drafters] == [["r"], ["r"]]
    assert CombinedDrafter([]).propose([context("a")]) == [EMPTY_TREE]
