import pytest

from specserve.core.plan import SampledTokens, ScheduledRequest, StepPlan, StepResult
from specserve.core.request import Request, Status
from specserve.core.sampling import SamplingParams
from specserve.core.tree import EMPTY_TREE, TokenTree
from specserve.spec.acceptance import Acceptance
from specserve.spec.controller import WARM_UP, Controller
from specserve.spec.cost import UNTIMED, CostModel

SUFFIX = ("suffix",)
MODEL = ("draft_model",)


class World:
    """A synthetic engine: seconds of a step by its rows and depth, acceptance by request."""

    def __init__(self, controller, cost, acceptance, source="suffix"):
        self.controller = controller
        self.cost = cost
        self.acceptance = acceptance
        self.source = source
        self.requests = [_request(name) for name in acceptance]
        self.emitted = 0
        self.seconds = 0.0
        self.credit = dict.fromkeys(acceptance, 0.5)

    def step(self):
        budgets = self.controller.budgets(self.requests)
        rows, outputs, depth = [], [], 0
        for request, budget in zip(self.requests, budgets, strict=True):
            name = request.request_id
            tree = TokenTree.chain((1,) * budget, self.source) if budget else EMPTY_TREE
            accepted = 0
            while accepted < budget:
                # Deterministic draws: hits come as evenly as the rate says.
                self.credit[name] += self.acceptance[name]
                if self.credit[name] < 1:
                    break
                self.credit[name] -= 1
                accepted += 1
            rows.append(ScheduledRequest(name, 0, (1,) * (budget + 1), 5, [0], budget + 1, tree))
            outputs.append(SampledTokens(name, 0, (1,) * (accepted + 1), budget, accepted))
            depth = max(depth, budget if self.source == "draft_model" else 0)
        plan = StepPlan(1, tuple(rows))
        seconds = self.cost(plan.num_rows, depth)
        self.controller.observe(plan, StepResult(1, tuple(outputs)), seconds)
        self.emitted += sum(len(o.token_ids) for o in outputs)
        self.seconds += seconds
        return budgets

    def run(self, steps):
        return [self.step() for _ in range(steps)]

    def speed(self, steps=600):
        self.run(200)
        self.emitted, self.seconds = 0, 0.0
        self.run(steps)
        return self.emitted / self.seconds


def _request(name="r", prompt=(1, 2, 3), output=0, **params):
    request = Request(name, list(prompt), SamplingParams(**{"max_tokens": None, **params}))
    request.append((1,) * output)
    request.status = Status.RUNNING
    return request


def controller(k=5, **options):
    return Controller(k, max_model_len=10_000, **options)


def flat(rows, depth):
    return 0.050 + 0.0001 * rows


def linear(rows, depth):
    return 0.001 + 0.010 * rows


def fixed_speed(k, cost, rates, source="suffix"):
    world = World(controller(k, adaptive=False) if k else _Off(), cost, rates, source)
    return world.speed()


class _Off:
    def budgets(self, requests):
        return [0] * len(requests)

    def observe(self, *args):
        pass


class TestLimits:
    def test_what_bounds_a_draft(self):
        c = Controller(5, max_model_len=20, adaptive=False)
        assert c.budgets([_request()]) == [5]
        assert c.budgets([_request(speculation=False)]) == [0]
        assert c.budgets([_request(speculation={"num_speculative_tokens": 2})]) == [2]
        assert c.budgets([_request(max_tokens=4)]) == [3]
        assert c.budgets([_request(max_tokens=4, output=3)]) == [0]

    def test_trap_a18_the_context_bounds_a_draft(self):
        c = Controller(5, max_model_len=20, adaptive=False)
        assert [c.limit(_request(prompt=[1] * n)) for n in (13, 14, 15, 17, 18, 19, 20)] == [5, 5, 4, 2, 1, 0, 0]

    def test_adaptive_keeps_the_limits(self):
        c = controller()
        for _ in range(300):
            assert c.budgets([_request("a", max_tokens=3), _request("b", speculation=False)])[0] <= 2


class TestChoice:
    def test_cheap_rows_and_good_drafts_use_all_of_k(self):
        budgets = World(controller(), flat, {"a": 0.9}).run(120)
        assert budgets[-20:] == [[5]] * 20

    def test_trap_g1_rows_that_cost_as_much_as_steps_are_not_spent(self):
        budgets = World(controller(), linear, {"a": 0.2}).run(200)
        drafted = sum(b[0] for b in budgets[-100:])
        assert drafted <= 8, "only probes"

    @pytest.mark.parametrize("cost", [flat, linear])
    @pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
    @pytest.mark.parametrize("count", [1, 8])
    def test_trap_f8_near_the_best_fixed_k_whatever_the_load(self, cost, rate, count):
        rates = {f"r{i}": rate for i in range(count)}
        best = max(fixed_speed(k, cost, rates) for k in (0, 1, 3, 5))
        assert World(controller(), cost, rates).speed() > 0.93 * best

    def test_a_draft_models_depth_costs(self):
        def slow_draft(rows, depth):
            return 0.050 + 0.0001 * rows + 0.060 * depth

        rates = {"a": 0.7}
        budgets = World(controller(sources=MODEL), slow_draft, rates, "draft_model").run(200)
        assert sum(b[0] for b in budgets[-60:]) <= 10
        quick = World(controller(sources=MODEL), lambda r, d: flat(r, d) + 0.002 * d, rates, "draft_model").run(200)
        assert min(b[0] for b in quick[-20:]) >= 3

    def test_each_request_by_its_own_acceptance(self):
        def cost(rows, depth):
            return 0.030 + 0.008 * rows

        world = World(controller(), cost, {"good": 0.95, "bad": 0.02})
        budgets = world.run(150)[-40:]
        assert sum(b[0] for b in budgets) > 4 * sum(b[1] for b in budgets)

    def test_a_budget_of_zero_is_probed_and_recovers(self):
        world = World(controller(), flat, {"a": 0.0})
        world.run(150)
        assert sum(b[0] > 0 for b in world.run(100)) >= 1, "probed"
        world.acceptance["a"] = 1.0
        world.run(600)
        assert [b for b in world.run(10) if b[0] < 4] == []

    def test_the_same_input_gives_the_same_budgets(self):
        runs = [World(controller(), flat, {"a": 0.6, "b": 0.3}).run(150) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_forget(self):
        c = controller()
        world = World(c, linear, {"a": 0.1})
        world.run(60)
        c.forget("a")
        c.forget("unknown")
        assert not c._probes


class TestFigures:
    def test_trap_g6_drafted_accepted_emitted_by_source_position_and_request(self):
        c = controller(adaptive=False)
        tree = TokenTree.chain((1, 2, 3), "suffix")
        plan = StepPlan(
            1,
            (
                ScheduledRequest("a", 0, (9, 1, 2, 3), 5, [0], 4, tree),
                ScheduledRequest("b", 0, (9,), 5, [0], 1),
                ScheduledRequest("c", 0, (9, 4), 5, [0], 2, TokenTree.chain((4,), "draft_model")),
            ),
        )
        outputs = (
            SampledTokens("a", 0, (1, 2, 7), 3, 2),
            SampledTokens("b", 0, (5,), 0, 0),
            SampledTokens("c", 0, (6,), 1, 0),
        )
        c.observe(plan, StepResult(1, outputs), 0.01)
        totals = c.acceptance.totals
        assert totals.emitted == 5
        assert totals.drafts == 2
        assert dict(totals.drafted) == {"suffix": 3, "draft_model": 1}
        assert totals.accepted.get("suffix") == 2
        assert totals.accepted.get("draft_model", 0) == 0
        assert dict(totals.accepted_at) == {("suffix", 0): 1, ("suffix", 1): 1}

    def test_what_was_drafted_behind_the_answers_end_counts_for_nothing(self):
        c = controller(adaptive=False)
        scheduled = ScheduledRequest("a", 0, (9, 1, 2, 3), 5, [0], 4, TokenTree.chain((1, 2, 3), "suffix"))
        c.observe(StepPlan(1, (scheduled,)), StepResult(1, (SampledTokens("a", 0, (1,), 1, 1),)), 0.01)
        assert dict(c.acceptance.totals.drafted) == {"suffix": 1}

    def test_rates_are_conditional_by_position(self):
        a = Acceptance()
        for _ in range(200):
            a.observe("r", ("suffix",) * 3, 2, 3)
        assert a.rate("suffix", 0) > 0.9
        assert a.rate("suffix", 1) > 0.9
        assert a.rate("suffix", 2) < 0.1
        first, second, third = a.gains("r", "suffix", 3)
        assert first > second > third
        assert third < 0.1


def warm():
    cost = CostModel()
    for _ in range(UNTIMED):
        cost.observe(1, 0, 100.0)
    return cost


class TestCost:
    def test_an_affine_cost_is_found(self):
        cost = warm()
        for rows in (1, 2, 6, 6, 12, 48):
            for depth in (0, 3):
                cost.observe(rows, depth, 0.02 + 0.003 * rows + 0.005 * depth)
        fit = cost.fit(6)
        assert fit.seconds(8, 2) == pytest.approx(0.02 + 0.024 + 0.010, rel=0.02)

    def test_unknown_until_two_sizes_were_seen(self):
        cost = warm()
        assert cost.fit(1) is None
        cost.observe(4, 0, 0.1)
        cost.observe(4, 0, 0.1)
        assert cost.fit(4) is None
        cost.observe(0, 0, 0.1)
        cost.observe(5, 0, 0.0)
        assert cost.fit(4) is None

    def test_coefficients_are_never_negative(self):
        cost = warm()
        cost.observe(1, 0, 0.2)
        cost.observe(8, 0, 0.1)
        fit = cost.fit(4)
        assert fit.per_row == 0.0
        assert fit.base > 0

    def test_one_stall_does_not_move_the_average_far(self):
        cost = warm()
        for _ in range(16):
            cost.observe(1, 0, 0.01)
            cost.observe(8, 0, 0.02)
        cost.observe(1, 0, 5.0)
        assert cost.fit(1).seconds(1) < 0.015

    def test_warm_up_teaches_two_sizes(self):
        assert {0.0, 1.0} <= set(WARM_UP)
