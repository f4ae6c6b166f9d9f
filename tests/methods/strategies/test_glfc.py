"""GLFC's gradient compensation: weights by hand, FedAvg as a limit, and weights without gradient."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies import GLFC
from cfl.methods.strategies.glfc import compensation
from cfl.models import Model
from cfl.models.handle import NO_CLASS
from tests import toy

LR = 0.1
PLAIN = SimpleNamespace(growing=False)  # a model whose head does not grow
Y, TASK = [0, 2, 1, 0, 2], [1, 1, 1, 0, 0]  # three new samples, two replayed


# --- helpers ---------------------------------------------------------------------------------------------------------


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=rng.generator(seed))


def joined(y, task, mask=None):
    """A batch as `augment` returns it; the loss does not depend on its inputs."""
    mask = torch.ones(len(y)).double() if mask is None else torch.tensor(mask).double()
    tasks = None if task is None else torch.tensor(task)
    return Batch(torch.zeros(len(y), 1), torch.tensor(y), mask, torch.arange(len(y)), tasks)


def loss_of(strategy, logits, whole, task=1):
    return strategy.loss(logits, toy.context({}, {}, whole, model=PLAIN, task=task))


def reference(logits, y, task, criterion="ce", constant=True):
    """The loss by torch's own criteria, group by group; constant: weights are constants of the gradient."""
    if criterion == "ce":
        losses = F.cross_entropy(logits, torch.tensor(y), reduction="none")
        p = logits.softmax(1)[range(len(y)), y]
    else:
        goal = F.one_hot(torch.tensor(y), logits.shape[1]).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, goal, reduction="none").mean(1)
        p = logits.sigmoid()[range(len(y)), y]
    g = (1 - p).detach() if constant else 1 - p
    total = 0
    for group in ([i for i in range(len(y)) if task[i] == 1], [i for i in range(len(y)) if task[i] != 1]):
        total = total + (g[group] / g[group].mean() * losses[group]).sum()
    return total / len(y)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_weights_by_hand():
    g, group = torch.tensor([0.2, 0.6, 0.9, 0.4]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    # the mean over the group is 0.4, so the weights are 0.2 / 0.4, 0.6 / 0.4 and 0.4 / 0.4, and 0 outside of the group
    assert compensation(g, group).tolist() == pytest.approx([0.5, 1.5, 0.0, 1.0])


def test_loss_by_hand():
    # p of the labels: 1/4 and 3/4 (new), 1/2 (replayed). So g is 3/4 and 1/4, with weights 3/2 and 1/2; and 1/2, with
    # weight 1. The cross-entropies are log 4, log 4/3 and log 2.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [5.0, 5.0]]).double()
    expected = (1.5 * math.log(4) + 0.5 * math.log(4 / 3) + math.log(2)) / 3
    assert loss_of(GLFC(), logits, joined([0, 1, 0], [1, 1, 0])).item() == pytest.approx(expected)


def test_binary_loss_by_hand():
    # Sigmoids of 0, log 3 and -log 3 are 1/2, 3/4 and 1/4. Sample 0 (label 0): log 2 for the label, -log(1 - 3/4) =
    # log 4 for the other class, g = 1/2. Sample 1 (label 1): log 2 and log 4/3, g = 1/4. The mean of g is 3/8, so the
    # weights are 4/3 and 2/3. The replayed sample has weight 1 and twice log 2.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [0.0, 0.0]]).double()
    each = [(math.log(2) + math.log(4)) / 2, (math.log(2) + math.log(4 / 3)) / 2, math.log(2)]
    expected = (4 / 3 * each[0] + 2 / 3 * each[1] + each[2]) / 3
    found = loss_of(GLFC(criterion="bce"), logits, joined([0, 1, 0], [1, 1, 0]))
    assert found.item() == pytest.approx(expected)


def test_one_step_of_two_parameters_by_hand():
    # W = (0, 0): p = 1/2, so g is the same for all and every weight is 1. The gradient of a sample's loss is
    # (p - one-hot) x: (-1/2, 1/2) for the new one (x = 1, y = 0), (1, -1) for the replayed (x = 2, y = 1); mean (1/4,
    # -1/4).
    model = Model(nn.Linear(1, 2, bias=False).double(), (1,), [2, 2], multi_head=False)
    model.params["weight"] = torch.zeros(2, 1, dtype=torch.float64)
    ones, none = torch.ones(1).double(), torch.zeros(1, dtype=torch.int64)
    new = Batch(torch.ones(1, 1).double(), none, ones, none)
    old = Batch(torch.full((1, 1), 2.0).double(), none + 1, ones, none, none)
    step = LocalStep(model, 1, frozenset(), ComposedMethod({"strategy": GLFC()}), optim.sgd(), heads=(0, 1))
    after, _ = step(step.start(model.params), StepInputs({"params": model.params}, new, old, lr=LR))
    assert after.params["weight"].flatten().tolist() == pytest.approx([-LR / 4, LR / 4], abs=1e-15)


# --- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_without_memory_it_is_fedavg_to_the_byte(multi_head):
    options, stream = ("local.momentum=0.9", "model.dropout=[0.2,0.2]"), toy.stream(multi_head=multi_head)
    fedavg = cfl.run(toy.config(*options, method="fedavg"), stream=stream)
    glfc = cfl.run(toy.config(*options, "strategy.memory=0", method="glfc"), stream=stream)
    assert all(torch.equal(glfc.params[name], leaf) for name, leaf in fedavg.params.items())
    assert glfc.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_first_task_is_fedavg_to_the_byte(multi_head):
    models = []
    for kind, options in ((Strategy, {}), (GLFC, {"memory": 4})):
        seen = {}

        class Watched(kind):
            def broadcast(self, server, info, seen=seen):
                seen.setdefault(info.task, tree.clone(server["params"]))
                return super().broadcast(server, info)

        stream = toy.stream(multi_head=multi_head)
        cfl.run(toy.config(method="fedavg"), stream=stream, strategy=Watched(**options))
        models.append(seen)
    fedavg, glfc = models
    assert all(torch.equal(glfc[1][name], leaf) for name, leaf in fedavg[1].items())
    assert any(not torch.equal(glfc[2][name], leaf) for name, leaf in fedavg[2].items())  # the second replays


def test_where_all_are_equally_wrong_it_is_the_mean_over_all():
    logits = torch.zeros(5, 3, dtype=torch.float64)
    assert loss_of(GLFC(), logits, joined(Y, TASK)).item() == pytest.approx(math.log(3), abs=1e-12)


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_a_memory_of_padding_alone_has_weights_of_one(criterion):
    logits, strategy = random(5, 3), GLFC(criterion=criterion)
    whole = joined(Y, TASK, mask=[1.0, 1.0, 1.0, 0.0, 0.0])
    plain = loss_of(strategy, logits[:3], joined(Y[:3], None))
    assert loss_of(strategy, logits, whole).item() == pytest.approx(plain.item(), abs=1e-12)


def test_binary_cross_entropy_of_the_first_task_against_torch():
    logits, y = random(4, 3), [0, 2, 1, 2]
    goal = F.one_hot(torch.tensor(y), 3).double()
    expected = F.binary_cross_entropy_with_logits(logits, goal)
    assert loss_of(GLFC(criterion="bce"), logits, joined(y, None)).item() == pytest.approx(expected.item(), abs=1e-12)


# --- property --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_weights_have_mean_one_in_their_group_and_are_nought_outside(seed):
    g = random(9, seed=seed).abs().clamp(max=1)
    group = (torch.arange(9) % 3 != seed % 3).double()
    weights = compensation(g, group)
    assert (weights * group).sum().item() == pytest.approx(6, abs=1e-12)  # six members
    assert (weights * (1 - group)).abs().max() == 0
    assert torch.allclose(weights[group > 0] / g[group > 0], 1 / g[group > 0].mean())  # all by the same factor


@pytest.mark.parametrize("worst", [0.0, 1e-9])
def test_a_group_without_errors_keeps_weights_of_one(worst):
    g, group = torch.full((4,), worst), torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert torch.equal(compensation(g, group), group)
    assert torch.equal(compensation(g, torch.zeros(4)), torch.zeros(4))  # a group without members


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_labels_known_for_certain_give_a_finite_loss_and_gradient(criterion):
    logits = torch.full((5, 3), -200.0)
    logits[range(5), Y] = 200.0  # p is 1 in float32, g is 0 for all
    slope, value = torch.func.grad_and_value(lambda at: loss_of(GLFC(criterion=criterion), at, joined(Y, TASK)))(logits)
    assert value.item() == 0 and torch.isfinite(slope).all()


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_the_weights_are_constants(criterion):
    logits, strategy = 2 * random(5, 3), GLFC(criterion=criterion)
    slope, value = torch.func.grad_and_value(lambda at: loss_of(strategy, at, joined(Y, TASK)))(logits)
    slopes = {}
    for constant in (True, False):
        at = logits.clone().requires_grad_()
        expected = reference(at, Y, TASK, criterion, constant)
        expected.backward()
        slopes[constant] = at.grad
        assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(slope, slopes[True], atol=1e-12)
    assert not torch.allclose(slopes[True], slopes[False], atol=1e-3)  # it does make a difference


def test_replayed_samples_of_several_tasks_are_one_group():
    logits = random(5, 3)
    once, apart = (loss_of(GLFC(), logits, joined(Y, task), task=2) for task in ([2, 2, 2, 0, 0], [2, 2, 2, 0, 1]))
    assert torch.equal(once, apart)


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_classes_that_a_head_does_not_have_are_of_no_account(criterion):
    """New samples have a head of two classes, a replayed sample one of three. Logits of new samples are padded with a
    number whose softmax and sigmoid are 0, so their losses are those of two classes."""
    strategy, narrow, wide = GLFC(criterion=criterion), random(3, 2), random(1, 3, seed=1)
    padded = torch.cat([F.pad(narrow, (0, 1), value=NO_CLASS), wide])
    slope, value = torch.func.grad_and_value(lambda at: loss_of(strategy, at, joined([0, 1, 1, 2], [1, 1, 1, 0])))(
        padded
    )
    new = reference(narrow, [0, 1, 1], [1, 1, 1], criterion)
    old = reference(wide, [2], [1], criterion)  # alone in its group: weight 1
    assert value.item() == pytest.approx(((3 * new + old) / 4).item(), abs=1e-12)
    assert slope[:3, 2].abs().max() == 0


# --- conformance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_padding_changes_nothing(criterion):
    """Samples with mask 0, new or replayed, have no influence, whatever their outputs and labels."""
    logits, strategy, kept = random(5, 3), GLFC(criterion=criterion), [0, 2, 3]
    logits[[1, 4]] *= 1e3
    whole = joined(Y, TASK, mask=[1.0, 0.0, 1.0, 1.0, 0.0])
    few = joined([Y[i] for i in kept], [TASK[i] for i in kept])
    slope, value = torch.func.grad_and_value(lambda at: loss_of(strategy, at, whole))(logits)
    slope_of_few, value_of_few = torch.func.grad_and_value(lambda at: loss_of(strategy, at, few))(logits[kept])
    assert value.item() == pytest.approx(value_of_few.item(), abs=1e-12)
    assert torch.allclose(slope[kept], slope_of_few, atol=1e-12)
    assert slope[[1, 4]].abs().max() == 0


@pytest.mark.parametrize("criterion", ["ce", "bce"])
def test_stacked_clients_under_vmap_are_the_clients_one_by_one(criterion):
    """The second client's memory is all padding; the loss must not branch on it."""
    strategy, logits = GLFC(criterion=criterion), random(2, 5, 3)
    y, task = torch.tensor([Y] * 2), torch.tensor([TASK] * 2)
    mask = torch.tensor([[1.0, 1, 1, 1, 1], [1.0, 1, 1, 0, 0]]).double()

    def loss(logits, y, mask, task):
        return loss_of(strategy, logits, Batch(torch.zeros(5, 1), y, mask, torch.arange(5), task))

    toy.assert_stacked_is_each_alone(loss, logits, y, mask, task)


def test_a_run_replays_through_old_heads_that_stay_to_the_bit():
    seen = {}

    class Watched(GLFC):
        def broadcast(self, server, info):
            seen.setdefault(info.task, tree.clone(server["params"]))
            return super().broadcast(server, info)

    config = toy.config("local.weight_decay=0.01", method="glfc")
    result = cfl.run(config, stream=toy.stream(multi_head=True), strategy=Watched(memory=2))
    for task in (0, 1):
        assert all(torch.equal(result.params[name], seen[task + 1][name]) for name in result.model.head(task))
    assert all(not torch.equal(result.params[name], seen[2][name]) for name in result.model.head(2))
