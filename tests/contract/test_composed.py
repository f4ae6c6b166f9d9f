"""ComposedMethod: the order of hooks on clients and server, and that each member sees only its own state."""

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import MEMORY, Batch, Phase, Strategy
from cfl.contract.combining import capped
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedAvgM, FedProx, LocalRegularizer
from cfl.models import Model
from tests import toy
from tests.toy import context

BATCH = Batch(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.arange(2))
SHARED = {"params": {"w": torch.tensor(1.0)}}


@dataclass(frozen=True)
class Rule(LocalRegularizer):
    """Records its calls; `adjust` and `around` are affine maps whose results show the order."""

    name: str
    factor: float = 1.0
    offset: float = 0.0
    log: list = field(default_factory=list)

    def note(self, hook, ctx):
        self.log.append((self.name, hook, {key: leaf.item() for key, leaf in ctx.state.items()}))

    def init_client(self, params, model):
        return {"count": torch.tensor(self.factor), "deep/er": torch.tensor(-1.0)}

    def augment(self, batch, ctx):
        self.note("augment", ctx)
        assert ctx.batch is batch
        return batch._replace(x=batch.x * self.factor + self.offset)

    def penalty(self, params, logits, ctx):
        self.note("penalty", ctx)
        return params["w"] * self.factor

    def around(self, grad_fn):
        def outer(params, ctx):
            self.note("around", ctx)
            return {name: leaf * self.factor + self.offset for name, leaf in grad_fn(params, ctx).items()}

        return outer

    def adjust(self, grads, params, ctx):
        self.note("adjust", ctx)
        return {name: leaf * self.factor + self.offset for name, leaf in grads.items()}

    def finish(self, params, ctx, steps):
        self.note("finish", ctx)
        return {"sent": params["w"] * self.factor}, {"count": ctx.state["count"] + steps}


@dataclass(frozen=True)
class Hard(Rule):
    hard_constraint: ClassVar[bool] = True


def make(*rules):
    log = []
    members = {rule.name: type(rule)(rule.name, rule.factor, rule.offset, log) for rule in rules}
    composed = ComposedMethod(members)
    state = composed.client_state(None, SHARED["params"], None)
    return composed, context(SHARED, state, BATCH), log


A, B = Rule("strategy", 2.0, 1.0), Rule("b", 10.0, 3.0)


def order(log):
    return [name for name, _, _ in log]


def test_each_members_initial_state_is_named_by_its_owner():
    _, ctx, _ = make(A, B)
    assert set(ctx.state) == {"strategy/count", "strategy/deep/er", "b/count", "b/deep/er"}
    assert {name: leaf.item() for name, leaf in tree.part(ctx.state, "b").items()} == {"count": 10, "deep/er": -1}


def test_owners_with_a_common_prefix_are_kept_apart():
    state = {"prox/a": torch.tensor(1), "prox2/a": torch.tensor(2)}
    assert tree.part(state, "prox") == {"a": torch.tensor(1)}


def test_every_hook_sees_only_its_own_state():
    composed, ctx, log = make(A, B)
    composed.augment(BATCH, ctx)
    composed.penalty(SHARED["params"], torch.zeros(2, 2), ctx)
    composed.around(lambda params, ctx: params)(SHARED["params"], ctx)
    composed.adjust(SHARED["params"], SHARED["params"], ctx)
    composed.finish(SHARED["params"], ctx, 1)
    assert len(log) == 10
    for name, hook, state in log:
        assert state == {"count": 2.0 if name == "strategy" else 10.0, "deep/er": -1.0}, hook


def test_the_innermost_gradient_sees_all_states():
    composed, ctx, _ = make(A, B)
    seen = []

    def innermost(params, ctx):
        seen.append(set(ctx.state))
        return params

    composed.around(innermost)(SHARED["params"], ctx)
    assert seen == [set(ctx.state)]


def test_augment_and_adjust_run_in_the_order_of_the_list():
    composed, ctx, log = make(A, B)
    assert composed.augment(BATCH, ctx).x[0].item() == (1 * 2 + 1) * 10 + 3
    assert composed.adjust({"w": torch.tensor(1.0)}, SHARED["params"], ctx)["w"].item() == (1 * 2 + 1) * 10 + 3
    assert order(log) == ["strategy", "b"] * 2


def test_around_of_the_last_member_is_outermost():
    composed, ctx, log = make(A, B)
    result = composed.around(lambda params, ctx: {"w": torch.tensor(1.0)})(SHARED["params"], ctx)
    assert result["w"].item() == (1 * 2 + 1) * 10 + 3  # b maps what the strategy made
    assert order(log) == ["b", "strategy"]  # and is called first


def test_around_may_evaluate_twice_and_elsewhere():
    @dataclass(frozen=True)
    class Shifted(LocalRegularizer):
        def around(self, grad_fn):
            def outer(params, ctx):
                first = grad_fn(params, ctx)
                return grad_fn({"w": params["w"] + first["w"]}, ctx)

            return outer

    composed = ComposedMethod({"strategy": LocalRegularizer(), "shifted": Shifted()})
    gradient = composed.around(lambda params, ctx: {"w": 3 * params["w"]})
    ctx = context(SHARED, {}, BATCH)
    assert gradient({"w": torch.tensor(1.0)}, ctx)["w"].item() == 12  # 3 * (1 + 3)


def test_penalties_add_up():
    composed, ctx, _ = make(A, B)
    assert composed.penalty({"w": torch.tensor(4.0)}, torch.zeros(2, 2), ctx).item() == 4 * 2 + 4 * 10
    assert ComposedMethod({"strategy": LocalRegularizer()}).penalty({}, torch.zeros(2, 2), ctx) == 0


def test_hard_constraints_adjust_last_wherever_they_are_listed():
    composed, ctx, log = make(Hard("strategy", 2.0, 1.0), B, Rule("c", 0.5, 0.0))
    result = composed.adjust({"w": torch.tensor(1.0)}, SHARED["params"], ctx)["w"].item()
    assert result == ((1 * 10 + 3) * 0.5) * 2 + 1
    assert order(log) == ["b", "c", "strategy"]


def test_finish_keeps_uploads_and_states_apart():
    composed, ctx, _ = make(A, B)
    uploads, states = composed.finish({"w": torch.tensor(4.0)}, ctx, 5)
    assert {owner: own["sent"].item() for owner, own in uploads.items()} == {"strategy": 8, "b": 40}
    assert {name: leaf.item() for name, leaf in states.items()} == {"strategy/count": 7, "b/count": 15}


def test_a_member_that_sends_nothing_is_not_in_the_uploads():
    composed = ComposedMethod({"strategy": LocalRegularizer()})
    ctx = context(SHARED, {"strategy/kept": torch.tensor(3.0)}, BATCH)
    assert composed.finish({"w": torch.tensor(4.0)}, ctx, 1) == ({}, ctx.state)


def test_the_empty_regularizer_changes_nothing():
    composed = ComposedMethod({"strategy": LocalRegularizer()})
    ctx, grads = context(SHARED, {}, BATCH), {"w": torch.tensor(3.0)}
    assert composed.augment(BATCH, ctx) is BATCH
    assert composed.adjust(grads, SHARED["params"], ctx) is grads
    assert composed.around(lambda params, ctx: grads)(SHARED["params"], ctx) is grads
    assert composed.client_state(None, SHARED["params"], None) == {}


# --- uploads, and the server half ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(LocalRegularizer):
    """A regularizer with a server half; `send` and `server_step` are affine maps whose results show the order."""

    name: str
    factor: float = 1.0
    offset: float = 0.0
    log: list = field(default_factory=list)

    def init_client(self, params, model):
        return {"mine": torch.tensor(self.factor)}

    def finish(self, params, ctx, steps):
        return {"sent": torch.tensor(self.factor)}, {"mine": ctx.state["mine"] + 1}

    def send(self, update, ctx, steps):
        self.log.append((self.name, "send", ctx.state["mine"].item(), ctx.sent.get("down"), steps))
        return {name: leaf * self.factor + self.offset for name, leaf in update.items()}

    def init_shared(self, params, model):
        return {"rounds": torch.tensor(0.0)}

    def provide(self, own, info):
        return {"down": own["rounds"]}

    def server_step(self, step, own, gathered, params, info):
        self.log.append((self.name, "server", step["w"].item(), gathered["sent"].item(), params["w"].item()))
        new = {name: leaf * self.factor + self.offset for name, leaf in step.items()}
        return new, {"rounds": own["rounds"] + self.factor}


@dataclass(frozen=True)
class Plain(Strategy):
    """Broadcasts all parameters, whatever the names of the round."""

    def broadcast(self, server, info):
        return {"params": server["params"]}

    def absorb(self, server, mean, info, lr):
        new = {name: server["params"][name] - step for name, step in mean.get("strategy", {}).items()}
        return {"params": {**server["params"], **new}}


MODEL = Model(toy.net(nn.Linear(1, 2)), (1,), [2, 2], multi_head=False)
TRAIN = replace(toy.consolidation(MODEL), phase=Phase("train"))


def halves(*more):
    log = []
    members = {"b": Half("b", 2.0, 1.0, log), "c": Half("c", 10.0, 3.0, log)}
    return ComposedMethod({"strategy": Plain(), **members, **dict(more)}), log


def test_send_runs_in_the_order_of_the_list_on_the_strategys_upload():
    composed, log = halves()
    state = composed.client_state(None, SHARED["params"], None)
    ctx = context({**SHARED, "local/b": {"down": 5}}, state, BATCH)
    uploads, state = composed.finish({"w": torch.tensor(4.0)}, ctx, 7)
    assert uploads["strategy"]["w"].item() == ((1 - 4) * 2 + 1) * 10 + 3
    assert uploads["b"]["sent"].item() == 2 and uploads["c"]["sent"].item() == 10
    # each hook has its own state from before `finish`, and its own part of the broadcast
    assert log == [("b", "send", 2.0, 5, 7), ("c", "send", 10.0, None, 7)]
    assert {name: leaf.item() for name, leaf in state.items()} == {"b/mine": 3, "c/mine": 11}


def test_send_is_not_called_if_the_strategy_uploads_nothing():
    class Silent(Strategy):
        def finish(self, params, ctx, steps):
            return {}, ctx.state

    log = []
    composed = ComposedMethod({"strategy": Silent(), "b": Half("b", 2.0, 1.0, log)})
    state = composed.client_state(None, SHARED["params"], None)
    uploads, _ = composed.finish({"w": torch.tensor(4.0)}, context(SHARED, state, BATCH), 1)
    assert set(uploads) == {"b"} and log == []


def test_server_steps_run_in_order_and_the_strategy_absorbs_last():
    composed, log = halves()
    server = {"params": {"w": torch.tensor(100.0)}}
    for number in range(2):
        parts = composed.broadcast(server, TRAIN)
        assert {name: leaves["down"] for name, leaves in parts.items() if name != "params"} == {
            "local/b": 2.0 * number,
            "local/c": 10.0 * number,
        }
        mean = {
            "strategy": {"w": torch.tensor(1.0)},
            "b": {"sent": torch.tensor(7.0)},
            "c": {"sent": torch.tensor(8.0)},
        }
        before = server["params"]["w"].item()
        server = composed.absorb(server, parts, mean, TRAIN, 1.0)
        assert server["params"]["w"].item() == before - ((1 * 2 + 1) * 10 + 3)
        assert log[-2:] == [("b", "server", 1.0, 7.0, before), ("c", "server", 3.0, 8.0, before)]
        # Plain returns only its own trees; ComposedMethod keeps those of the regularizers
        assert {name: leaves["rounds"].item() for name, leaves in server.items() if name != "params"} == {
            "local/b": 2.0 * (number + 1),
            "local/c": 10.0 * (number + 1),
        }
    assert mean["strategy"]["w"].item() == 1.0


@pytest.mark.parametrize("names", [*itertools.permutations(["doubles", "distils", "momentum"])], ids=",".join)
def test_server_steps_run_by_turn_in_any_order_of_the_user(names):
    class Doubles(LocalRegularizer):
        def server_step(self, step, own, gathered, params, info):
            return {name: 2 * leaf for name, leaf in step.items()}, own

    class Distils(LocalRegularizer):
        turn: ClassVar[int] = 1

        def server_step(self, step, own, gathered, params, info):
            return {name: leaf + 10 for name, leaf in step.items()}, own

    members = {"doubles": Doubles(), "distils": Distils(), "momentum": FedAvgM(momentum=0.5)}
    composed = ComposedMethod({"strategy": Plain(), **{name: members[name] for name in names}})
    server = {"params": {"0.bias": torch.tensor([100.0, 100.0])}}
    for _ in range(2):
        mean = {"strategy": {"0.bias": torch.tensor([1.0, 2.0])}}
        server = composed.absorb(server, composed.broadcast(server, TRAIN), mean, TRAIN, 1.0)
    # steps 2 + 10 and 4 + 10, then the same plus half of the first
    assert server["params"]["0.bias"].tolist() == [100 - 12 - 18, 100 - 14 - 21]


def test_rounds_without_training_do_not_run_the_server_half():
    composed, log = halves()
    server = {"params": {"w": torch.tensor(100.0)}, "local/b": {"rounds": torch.tensor(4.0)}}
    work = toy.consolidation(MODEL)
    assert set(composed.broadcast(server, work)) == {"params"}
    after = composed.absorb(server, composed.broadcast(server, work), {"work": {"n": torch.tensor(1.0)}}, work, 1.0)
    assert log == [] and after["local/b"]["rounds"].item() == 4.0 and "local/c" not in after


def test_a_server_tree_that_is_cleared_stays_cleared():
    class Clears(LocalRegularizer):
        def init_shared(self, params, model):
            return {"fresh": torch.ones(())}

        def server_step(self, step, own, gathered, params, info):
            seen.append(set(own))
            return step, {}

    seen = []
    composed = ComposedMethod({"strategy": Plain(), "clears": Clears()})
    server = {"params": {"w": torch.tensor(0.0)}}
    for _ in range(3):
        server = composed.absorb(
            server, composed.broadcast(server, TRAIN), {"strategy": {"w": torch.ones(())}}, TRAIN, 1.0
        )
    assert seen == [{"fresh"}, set(), set()]


def test_the_end_of_a_task_keeps_only_the_strategys_trees():
    one = torch.ones(())
    server = {"params": {"w": one}, "basis": {"0": one}, "local/b": {"rounds": one}}
    clients = {3: {"strategy/a": one, "b/mine": one}, 5: {"b/mine": one}}
    composed, _ = halves()
    server, clients = composed.end_task(server, clients)
    assert set(server) == {"params", "basis"}
    assert {id: set(state) for id, state in clients.items()} == {3: {"strategy/a"}, 5: set()}


def test_a_client_starts_a_task_with_the_strategys_stored_state_and_initial_ones_of_the_regularizers():
    composed, _, _ = make(A, B)
    stored = {"strategy/count": torch.tensor(7.0), "b/count": torch.tensor(7.0)}
    state = composed.client_state(stored, SHARED["params"], None)
    assert {name: leaf.item() for name, leaf in state.items()} == {"strategy/count": 7, "b/count": 10, "b/deep/er": -1}
    cleared = composed.client_state({}, SHARED["params"], None)  # the strategy has cleared its state: it stays empty
    assert set(cleared) == {"b/count", "b/deep/er"}


def test_steps_see_neither_the_memory_nor_a_state_that_its_member_hides():
    class Hides(LocalRegularizer):
        steps_see_state = False

    composed = ComposedMethod({"strategy": Strategy(), "a": Hides(), "b": FedProx()})
    names = ("strategy/w", f"strategy/{MEMORY}", "a/w", f"b/{MEMORY}", "b/w")
    seen = composed.step_state(dict.fromkeys(names, torch.tensor(1.0)))
    assert list(seen) == ["strategy/w", f"b/{MEMORY}", "b/w"]


# --- borrowed terms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lender(Half):
    """Changes `penalty`, `around` and `adjust`, the hooks that borrowing removes from the update, and `augment`."""

    def augment(self, batch, ctx):
        return batch._replace(x=batch.x + self.factor)

    def penalty(self, params, logits, ctx):
        self.log.append((self.name, "penalty"))
        return self.factor * params["w"] ** 2

    def around(self, grad_fn):
        return lambda params, ctx: {"w": grad_fn(params, ctx)["w"] + 1000}

    def adjust(self, grads, params, ctx):
        self.log.append((self.name, "adjust"))
        return {"w": grads["w"] + ctx.state["mine"] + ctx.sent["down"]}


@dataclass(frozen=True)
class Borrower(LocalRegularizer):
    lender: str = ""
    seen: list = field(default_factory=list)

    @property
    def borrows(self):
        return self.lender or None

    def around(self, grad_fn):
        def outer(params, ctx):
            self.seen.append(None if ctx.correction is None else ctx.correction(params)["w"].item())
            return grad_fn(params, ctx)

        return outer


def test_borrowed_terms_stay_out_of_penalty_around_and_adjust():
    # the outputs do not matter: the lender's penalty depends on w alone
    log, seen, inner = [], [], []
    lender = Lender("b", 2.0, 1.0, log)
    rest = {"inner": Borrower("", inner), "takes": Borrower("b", seen)}
    composed = ComposedMethod({"strategy": Strategy(), "b": lender, **rest})
    state = composed.client_state(None, SHARED["params"], MODEL)
    ctx = context({**SHARED, "local/b": {"down": torch.tensor(0.5)}}, state, Batch(*BATCH[:4]), MODEL)
    ctx = ctx._replace(forward=lambda params, batch, **more: torch.zeros(2, 2))
    at = {"w": torch.tensor(3.0)}
    assert composed.penalty(at, torch.zeros(2, 2), ctx) == 0
    assert composed.adjust({"w": torch.tensor(1.0)}, at, ctx)["w"].item() == 1 and log == []
    seen.clear()
    assert composed.around(lambda params, ctx: {"w": torch.tensor(1.0)})(at, ctx)["w"].item() == 1
    assert seen == [2 * 2 * 3 + 2 + 0.5]  # gradient of 2 w^2; `adjust` adds the state and the broadcast
    assert inner == [None]  # the correction is the borrower's alone
    assert composed.augment(BATCH, ctx).x.tolist() == [[3.0], [3.0]]  # a batch is the same for all members
    assert log == [("b", "penalty"), ("b", "adjust")]
    uploads, state = composed.finish(at, ctx, 1)  # the lender's other hooks still run
    assert uploads["strategy"]["w"].item() == (1 - 3) * 2 + 1 and state["b/mine"].item() == 3
    plain = ComposedMethod({"strategy": Strategy(), "b": lender, "takes": Borrower("", seen)})
    assert plain.borrowed == frozenset() and composed.borrowed == {"b"}
    seen.clear()
    assert plain.around(lambda params, ctx: {"w": torch.tensor(1.0)})(at, ctx)["w"].item() == 1001
    assert seen == [None] and plain.penalty(at, torch.zeros(2, 2), ctx).item() == 18


def test_the_correction_is_the_gradient_of_the_lenders_penalty_at_all_parameters():
    class Twice(Borrower):
        def around(self, grad_fn):
            def outer(params, ctx):
                return {name: leaf + ctx.correction(params)[name] for name, leaf in grad_fn(params, ctx).items()}

            return outer

    x = toy.random(5, 1)
    batch = Batch(x, torch.tensor([0, 1, 0, 1, 1]), torch.ones(5).double(), torch.arange(5))
    ends = []
    for members in ({"fedprox": FedProx(mu=0.7)}, {"fedprox": FedProx(mu=0.7), "twice": Twice("fedprox")}):
        step = LocalStep(MODEL, 0, frozenset(), ComposedMethod({"strategy": Strategy(), **members}), optim.sgd(0.9))
        local = step.start(MODEL.params)
        for index in range(4):
            local, _ = step(local, StepInputs({"params": MODEL.params}, batch, lr=0.1, step=index))
        ends.append(local.params)
    # a term that is removed from the loss and added to its gradient gives the same training
    assert all(torch.allclose(ends[0][name], leaf, atol=1e-12, rtol=0) for name, leaf in ends[1].items())


def test_a_cap_leaves_the_mean_of_uploads_a_mean():
    class Averaged(Strategy):
        gathers = "mean"

    info = SimpleNamespace(phase=SimpleNamespace(protected=True))
    trees = {"work": {"x": torch.tensor([[1.0], [1.0], [4.0]])}, "weights": {"": torch.tensor([1.0, 1.0, 2.0])}}
    rule = SimpleNamespace(cap=lambda uploads, sizes, info: uploads)
    assert capped(trees, rule, Averaged(), info)["x"].item() == (1 + 1 + 2 * 4) / 4
    assert capped(trees, rule, Strategy(), info)["x"].item() == 6  # the sum


def test_an_upload_that_is_no_parameter_is_named():
    class Counts(Strategy):
        """Uploads a leaf beside its update, and leaves it to the default `absorb`."""

        def finish(self, params, ctx, steps):
            update, state = super().finish(params, ctx, steps)
            return {**update, "extra": torch.ones(1)}, state

    with pytest.raises(cfl.errors.ConfigError, match="`finish` uploads 'extra', which is no parameter of the model"):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), strategy=Counts())
