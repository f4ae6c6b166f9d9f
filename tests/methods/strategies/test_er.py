"""Experience replay: the loss by hand, FedAvg as a limit, and replay through the heads of the samples' tasks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.core import optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies import ER
from cfl.models import Model
from tests import toy

COMBINE = ("half", "sum", "concat")
LR = 0.1


# --- helpers ---------------------------------------------------------------------------------------------------------


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=rng.generator(seed))


def batch(x, y, task=None, mask=None):
    mask = torch.ones(len(y)).to(x.dtype) if mask is None else torch.tensor(mask).to(x.dtype)
    return Batch(x, torch.tensor(y), mask, torch.arange(len(y)), None if task is None else torch.tensor(task))


def joined(y, task, mask=None):
    """A batch as `augment` returns it; the loss does not depend on its inputs."""
    return batch(torch.zeros(len(y), 1, dtype=torch.float64), y, task, mask)


def loss_of(strategy, logits, whole, task=1):
    return strategy.loss(logits, toy.context({}, {}, whole, task=task))


def local_step(strategy, model, task=1, heads=(0, 1)):
    frozen = strategy.frozen(task, model)
    return LocalStep(model, task, frozen, ComposedMethod({"strategy": strategy}), optim.sgd(), heads=heads)


def two_heads():
    """A network with a head of three classes for task 0 and one of two for task 1, in float64."""
    with rng.fork(1):
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        return Model(net, (4,), [3, 2], multi_head=True)


def brute_force(model, new, old, weigh, train_old_heads):
    """Leaves after one step of SGD, with each sample passed through its head alone and weigh(new, old) as the loss."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in model.params.items()}

    def loss(x, y, task):
        hidden = torch.tanh(F.linear(x, params["0.weight"], params["0.bias"]))
        logits = F.linear(hidden, params[f"2.weight@{task}"], params[f"2.bias@{task}"])
        return torch.logsumexp(logits, 0) - logits[y]

    losses = [
        torch.stack([loss(x, y, task) for x, y, task in zip(part.x, part.y, tasks, strict=True)])
        for part, tasks in ((new, [1] * len(new.y)), (old, old.task.tolist()))
    ]
    weigh(*losses).backward()
    still = () if train_old_heads else model.head(0)
    return {name: leaf.detach() - (0 if name in still else LR * leaf.grad) for name, leaf in params.items()}


def watched(strategy, **options):
    """A strategy that records the server's model before each task, and the record: task to model."""
    seen = {}

    class Watched(type(strategy)):
        def broadcast(self, server, info):
            seen.setdefault(info.task, tree.clone(server["params"]))
            return super().broadcast(server, info)

    return Watched(**options), seen


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        # Two new samples with losses log 4 and log 4/3 (mean a), a replayed one with log 2.
        ("half", ((math.log(4) + math.log(4 / 3)) / 2 + math.log(2)) / 2),
        ("sum", (math.log(4) + math.log(4 / 3)) / 2 + math.log(2)),
        ("concat", (math.log(4) + math.log(4 / 3) + math.log(2)) / 3),
    ],
)
def test_loss_by_hand(combine, expected):
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [5.0, 5.0]]).double()  # p: 1/4 3/4, twice; 1/2 1/2
    assert loss_of(ER(combine=combine), logits, joined([0, 1, 0], [1, 1, 0])).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("combine", "slope"),
    [
        # W = (0, 0), so p = 1/2 for both classes. The gradient of a sample's loss by W is (p - one-hot) x:
        # (-1/2, 1/2) for each of the two new samples (x = 1, y = 0), (1, -1) for the replayed one (x = 2, y = 1).
        ("half", 0.5 * -0.5 + 0.5 * 1),
        ("sum", -0.5 + 1),
        ("concat", (-0.5 - 0.5 + 1) / 3),
    ],
)
def test_one_step_of_two_parameters_by_hand(combine, slope):
    model = Model(nn.Linear(1, 2, bias=False).double(), (1,), [2, 2], multi_head=False)
    model.params["weight"] = torch.zeros(2, 1, dtype=torch.float64)
    new = batch(torch.ones(2, 1, dtype=torch.float64), [0, 0])
    old = batch(torch.full((1, 1), 2.0, dtype=torch.float64), [1], task=[0])
    step = local_step(ER(combine=combine), model)
    after, _ = step(step.start(model.params), StepInputs({"params": model.params}, new, old, lr=LR))
    assert after.params["weight"].flatten().tolist() == pytest.approx([-LR * slope, LR * slope], abs=1e-15)


# --- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("multi_head", toy.quick(True, of=[False, True]))
def test_without_memory_it_is_fedavg_to_the_byte(multi_head, combine):
    options = ("local.momentum=0.9", "local.weight_decay=0.01", "model.dropout=[0.2,0.2]")
    stream = toy.stream(multi_head=multi_head)
    fedavg = cfl.run(toy.config(*options, method="fedavg"), stream=stream)
    replay = ("strategy.memory=0", f"strategy.combine={combine}")
    er = cfl.run(toy.config(*options, *replay, method="er"), stream=stream)
    assert all(torch.equal(er.params[name], leaf) for name, leaf in fedavg.params.items())
    assert er.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]
    stored = cfl.run(toy.config(*options, "strategy.memory=2", *replay[1:], method="er"), stream=stream)
    assert any(not torch.equal(stored.params[name], leaf) for name, leaf in fedavg.params.items())


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_first_task_is_fedavg_to_the_byte(multi_head):
    models = []
    for strategy, seen in (watched(Strategy()), watched(ER(), memory=4)):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(multi_head=multi_head), strategy=strategy)
        models.append(seen)
    fedavg, er = models
    assert all(torch.equal(er[1][name], leaf) for name, leaf in fedavg[1].items())
    assert any(not torch.equal(er[2][name], leaf) for name, leaf in fedavg[2].items())  # the second replays


@pytest.mark.parametrize("combine", COMBINE)
def test_a_memory_of_padding_alone_is_fedavg(combine):
    logits, whole = random(5, 3), joined([0, 2, 1, 0, 2], [1, 1, 1, 0, 0], mask=[1.0, 1.0, 1.0, 0.0, 0.0])
    plain = Strategy().loss(logits[:3], toy.context({}, {}, joined([0, 2, 1], [1, 1, 1]), task=1))
    assert loss_of(ER(combine=combine), logits, whole).item() == pytest.approx(plain.item(), abs=1e-12)


def test_halves_of_equal_size_are_the_mean_over_all():
    logits, whole = random(6, 3), joined([0, 2, 1, 0, 2, 1], [1, 1, 1, 0, 0, 0])
    half, sum_, concat = (loss_of(ER(combine=combine), logits, whole).item() for combine in COMBINE)
    assert half == pytest.approx(concat, abs=1e-12) and sum_ == pytest.approx(2 * half, abs=1e-12)


# --- property --------------------------------------------------------------------------------------------------------


WEIGH = {
    "half": lambda new, old: (new.mean() + old.mean()) / 2,
    "sum": lambda new, old: new.mean() + old.mean(),
    "concat": lambda new, old: torch.cat([new, old]).mean(),
}


@pytest.mark.parametrize("train_old_heads", [False, True])
@pytest.mark.parametrize("combine", COMBINE)
def test_replayed_samples_go_through_the_heads_of_their_tasks(combine, train_old_heads):
    model, strategy = two_heads(), ER(combine=combine, train_old_heads=train_old_heads)
    new, old = batch(random(4, 4, seed=1), [0, 1, 1, 0]), batch(random(3, 4, seed=2), [2, 0, 1], task=[0, 0, 0])
    step = local_step(strategy, model)
    after, loss = step(step.start(model.params), StepInputs({"params": model.params}, new, old, lr=LR))
    expected = brute_force(model, new, old, WEIGH[combine], train_old_heads)
    assert set(after.params) == {*model.trainable(1), *(model.head(0) if train_old_heads else ())}
    for name, leaf in after.params.items():
        assert torch.allclose(leaf, expected[name], atol=1e-12), name
        assert not torch.equal(leaf, model.params[name]), name
    # Through the head of the round's task, the step differs.
    wrong = brute_force(model, new, old._replace(y=old.y % 2, task=old.task + 1), WEIGH[combine], False)
    assert not torch.allclose(wrong["0.weight"], expected["0.weight"], atol=1e-4)


def test_a_memory_of_several_tasks_by_brute_force():
    with rng.fork(1):
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        model = Model(net, (4,), [3, 2, 2], multi_head=True)
    new, old = batch(random(4, 4, seed=1), [0, 1, 1, 0]), batch(random(3, 4, seed=2), [1, 2, 1], task=[2, 0, 2])
    step = local_step(ER(), model, heads=(0, 1, 2))
    after, _ = step(step.start(model.params), StepInputs({"params": model.params}, new, old, lr=LR))
    expected = brute_force(model, new, old, WEIGH["half"], False)
    assert all(torch.allclose(leaf, expected[name], atol=1e-12) for name, leaf in after.params.items())


@pytest.mark.parametrize("train_old_heads", [False, True])
def test_heads_of_earlier_tasks_stay_to_the_bit_unless_they_are_to_train(train_old_heads):
    strategy, seen = watched(ER(), memory=2, train_old_heads=train_old_heads)
    result = cfl.run(
        toy.config("local.momentum=0.9", "local.weight_decay=0.01", method="er"),
        stream=toy.stream(multi_head=True),
        strategy=strategy,
    )
    for task in (0, 1):  # from the start of the next task to the end
        for name in result.model.head(task):
            assert torch.equal(result.params[name], seen[task + 1][name]) is not train_old_heads, name
    for name in result.model.head(2):
        assert torch.equal(seen[2][name], seen[0][name])  # heads of later tasks keep their initial values
        assert not torch.equal(result.params[name], seen[2][name])


@pytest.mark.slow
def test_replay_keeps_the_first_task():
    """One head, and the second task swaps the labels of the first: without replay the first task is forgotten.

    With seeds 3 to 6 of the inputs FGT is .38, .61, .88, .50 for FedAvg, and at most .22 for ER and .16 for GLFC;
    ACC is .77, .54, .52, .72 for FedAvg, and at least .80 for ER and .78 for GLFC.
    """
    x = torch.randn(160, 8, generator=rng.generator(4))
    y, marked = (x[:, 0] > 0).long(), x.clone()
    marked[:, 1] += 4  # tasks are distinguishable, so one network can learn both
    stream = cfl.from_tensors([(x[:96], y[:96], x[96:], y[96:]), (marked[:96], 1 - y[:96], marked[96:], 1 - y[96:])])
    options = ("tasks=2", "rounds=10", "model.hidden=[16]", "local.lr=0.3", "partition.clients=2", "cohort=2")
    fedavg = cfl.run(toy.config(*options, method="fedavg"), stream=stream).metrics
    for method in ("er", "glfc"):
        replay = cfl.run(toy.config(*options, "strategy.memory=12", method=method), stream=stream).metrics
        assert replay["fgt"] < fedavg["fgt"] / 2 and replay["acc"] > fedavg["acc"] + 0.1, method


# --- conformance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", COMBINE)
def test_padding_changes_nothing(combine):
    """Samples with mask 0, new or replayed, have no influence, whatever their outputs and labels."""
    strategy, mask = ER(combine=combine), [1.0, 0.0, 1.0, 1.0, 0.0]
    logits = random(5, 3)
    logits[[1, 4]] *= 1e3
    whole, kept = joined([0, 2, 1, 0, 2], [1, 1, 1, 0, 0], mask), [0, 2, 3]
    slope, value = torch.func.grad_and_value(lambda at: loss_of(strategy, at, whole))(logits)
    few = joined([0, 1, 0], [1, 1, 0])
    slope_of_few, value_of_few = torch.func.grad_and_value(lambda at: loss_of(strategy, at, few))(logits[kept])
    assert value.item() == pytest.approx(value_of_few.item(), abs=1e-12)
    assert torch.allclose(slope[kept], slope_of_few, atol=1e-12)
    assert slope[[1, 4]].abs().max() == 0


@pytest.mark.parametrize("combine", COMBINE)
def test_stacked_clients_under_vmap_are_the_clients_one_by_one(combine):
    """The second client's memory is all padding; the loss must not branch on it."""
    strategy, logits = ER(combine=combine), random(2, 5, 3)
    y, task = torch.tensor([[0, 2, 1, 0, 2]] * 2), torch.tensor([[1, 1, 1, 0, 0]] * 2)
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1.0, 1, 1, 0, 0]]).double()

    def loss(logits, y, mask, task):
        return loss_of(strategy, logits, Batch(torch.zeros(5, 1), y, mask, torch.arange(5), task))

    toy.assert_stacked_is_each_alone(loss, logits, y, mask, task)


def test_hooks_write_to_nothing_that_they_are_given():
    model, strategy = two_heads(), ER()
    new, old = batch(random(4, 4, seed=1), [0, 1, 1, 0]), batch(random(3, 4, seed=2), [2, 0, 1], task=[0, 0, 0])
    given = [*new[:4], *old, *model.params.values()]
    before = [leaf.clone() for leaf in given]
    step = local_step(strategy, model)
    step(step.start(model.params), StepInputs({"params": model.params}, new, old, lr=LR))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(given, before, strict=True))


def test_the_loss_without_tasks_is_the_base_classs():
    logits, whole = random(3, 3), batch(torch.zeros(3, 1, dtype=torch.float64), [0, 2, 1], mask=[1.0, 0.0, 1.0])
    assert torch.equal(loss_of(ER(), logits, whole), masked_mean(cross_entropy(logits, whole), whole.mask))
