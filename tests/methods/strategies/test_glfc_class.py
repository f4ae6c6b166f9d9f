"""GLFC over a growing head: both halves of the loss by loops over samples and classes, its old model, its limits."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Batch
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies import GLFC
from cfl.models import Model
from tests import toy

SIZES = [2, 3, 1]  # classes of each task: 0 and 1, 2 to 4, 5
Y, TASK = [2, 4, 3, 0, 1], [1, 1, 1, 0, 0]  # three new samples of task 1, two replayed ones of task 0
GROWN = Model(toy.mlp(5, 4, 2), (5,), SIZES, multi_head=True, growing=True)


# --- helpers ---------------------------------------------------------------------------------------------------------


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def entropy(z, target):
    """Binary cross-entropy of one output."""
    return -target * math.log(sigmoid(z)) - (1 - target) * math.log(1 - sigmoid(z))


def compensated(logits, y, task):
    """L_GC of task 1 and its weights, by loops: for each sample its weight times the mean over classes."""
    g = [1 - sigmoid(row[label]) for row, label in zip(logits, y, strict=True)]
    total, weights = 0.0, []
    for number, (row, label) in enumerate(zip(logits, y, strict=True)):
        group = [g[other] for other in range(len(y)) if task[other] == task[number]]
        weights.append(g[number] / (sum(group) / len(group)))
        losses = [entropy(z, float(label == c)) for c, z in enumerate(row)]
        total += weights[-1] * sum(losses) / len(losses)
    return total / len(y), weights


def related(logits, old, y):
    """L_RD by loops: the targets are the old model's sigmoids for its classes, and the labels for the others."""
    entries = []
    for row, before, label in zip(logits, old, y, strict=True):
        targets = [sigmoid(z) for z in before] + [float(label == c) for c in range(len(before), len(row))]
        entries += [entropy(z, target) for z, target in zip(row, targets, strict=True)]
    return sum(entries) / len(entries)


def batch_of(y, task, mask=None, x=None):
    mask = torch.ones(len(y)).double() if mask is None else torch.tensor(mask).double()
    tasks = None if task is None else torch.tensor(task)
    x = torch.zeros(len(y), 1) if x is None else x
    return Batch(x, torch.tensor(y), mask, torch.arange(len(y)), tasks)


def loss_of(strategy, logits, old, batch, task=1):
    """The loss where the old model gives `old`; its outputs for the classes of the task are noise."""
    noise = toy.random(len(old), logits.shape[1] - old.shape[1], seed=9)

    def forward(params, batch, *, dropout):
        assert params == "old" and not dropout
        return torch.cat([old, noise], dim=1)

    ctx = toy.context({"teacher": "old"}, {}, batch, model=GROWN, task=task, forward=forward)
    return strategy.loss(logits, ctx)


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("criterion", ["auto", "bce"])
def test_the_loss_is_both_parts_by_loops(relation, criterion):
    logits, old = 2 * toy.random(5, 5), 2 * toy.random(5, 2, seed=1)
    first, weights = compensated(logits.tolist(), Y, TASK)
    assert max(weights) - min(weights) > 0.3 and sum(weights[:3]) == pytest.approx(3)
    expected = (1 - relation) * first + relation * related(logits.tolist(), old.tolist(), Y)
    found = loss_of(GLFC(relation=relation, criterion=criterion), logits, old, batch_of(Y, TASK))
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_both_parts_count_half_as_published():
    assert GLFC().relation == 0.5 and GLFC().criterion == "auto"


def test_one_sample_by_hand():
    """Outputs 0, so that all sigmoids are 1/2 and each entropy is log 2 whatever the target; the only sample of its
    group has weight 1. The gradient by an output is (1/2 - target) / 3 classes: targets of L_GC are 0, 0, 1, those of
    L_RD 1/4, 3/4 (sigmoids of -log 3 and log 3) and 1. Their means are 1/8, 3/8 and 1."""
    model = Model(nn.Linear(1, 2).double(), (1,), [2, 1], multi_head=True, growing=True)
    old = torch.tensor([[-math.log(3), math.log(3), 0.0]]).double()
    ctx = toy.context({"teacher": {}}, {}, batch_of([2], None), model=model, task=1, forward=lambda *_, **__: old)
    slope, value = torch.func.grad_and_value(lambda z: GLFC().loss(z, ctx))(torch.zeros(1, 3).double())
    assert value.item() == pytest.approx(math.log(2))
    assert slope[0].tolist() == pytest.approx([(0.5 - 1 / 8) / 3, (0.5 - 3 / 8) / 3, (0.5 - 1) / 3])


def test_without_replayed_samples_the_new_ones_are_still_weighted():
    logits, old, y = 2 * toy.random(3, 5), toy.random(3, 2, seed=1), [2, 4, 3]
    expected, weights = compensated(logits.tolist(), y, [1, 1, 1])
    assert weights != pytest.approx([1, 1, 1], abs=0.1)
    assert loss_of(GLFC(relation=0.0), logits, old, batch_of(y, None)).item() == pytest.approx(expected, abs=1e-12)


def test_a_step_through_the_model_takes_the_old_models_outputs_at_all_samples():
    model, strategy = GROWN, GLFC()
    old, now = ({name: toy.random(*leaf.shape, seed=seed) for name, leaf in model.params.items()} for seed in (1, 2))
    whole = batch_of(Y, TASK, x=toy.random(5, 5, seed=3))
    server = strategy.begin_task({"params": old}, 1, model)
    assert [*server["teacher"]] == [*model.trainable(0)]  # body and head of the classes before
    step = LocalStep(model, 1, frozenset(model.new_head(2)), ComposedMethod({"strategy": strategy}), optim.sgd())
    shared = {"params": now, "teacher": server["teacher"]}
    ctx = step.context(StepInputs(shared, whole, whole))
    logits, before = model.logits(now, whole.x, 1), model.logits(old, whole.x, 0)
    assert logits.shape == (5, 5) and before.shape == (5, 2)
    first, _ = compensated(logits.tolist(), Y, TASK)
    expected = (first + related(logits.tolist(), before.tolist(), Y)) / 2
    assert strategy.loss(logits, ctx).item() == pytest.approx(expected, abs=1e-12)


# --- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replayed", [False, True])
def test_the_first_task_is_the_plain_mean_of_binary_entropies(replayed):
    logits, y = toy.random(4, 2), [0, 1, 1, 0]
    entries = [entropy(z, float(c == label)) for row, label in zip(logits.tolist(), y) for c, z in enumerate(row)]
    whole = batch_of(y, [0] * 4 if replayed else None)
    if replayed:  # a memory of padding alone
        whole = whole._replace(mask=torch.tensor([1.0, 1, 1, 0]).double())
        entries = entries[:6]
    found = loss_of(GLFC(), logits, logits[:, :0], whole, task=0)
    assert found.item() == pytest.approx(sum(entries) / len(entries), abs=1e-12)


def test_cross_entropy_over_a_growing_head_is_fots_adaptation():
    """Without the distillation: no old model is stored or sent."""
    logits, plain = toy.random(5, 5), SimpleNamespace(growing=False)
    ctx = toy.context({}, {}, batch_of(Y, TASK), model=GROWN, task=1)
    elsewhere = toy.context({}, {}, batch_of(Y, TASK), model=plain, task=1)
    strategy = GLFC(criterion="ce")
    assert strategy.loss(logits, ctx).equal(GLFC().loss(logits, elsewhere))
    assert strategy.begin_task({"params": {}}, 1, GROWN) == {"params": {}}


@pytest.mark.parametrize("scenario", ["task", "domain"])
def test_other_scenarios_have_no_old_model_and_the_default_is_cross_entropy(scenario):
    stream, runs = toy.stream(multi_head=True), []
    for option in ("strategy.criterion=auto", "strategy.criterion=ce", "strategy.relation=0"):
        config = toy.config(f"scenario={scenario}", "strategy.memory=2", option, method="glfc")
        runs.append(cfl.run(config, stream=stream))
    er = cfl.run(toy.config(f"scenario={scenario}", "strategy.memory=2", method="er"), stream=stream)
    for other in runs[1:]:
        assert all(leaf.equal(other.params[name]) for name, leaf in runs[0].params.items())
    assert all(other.metrics["bytes_down"] == er.metrics["bytes_down"] for other in runs)  # heads, and no more


# --- property --------------------------------------------------------------------------------------------------------


def test_an_old_model_that_is_right_leaves_the_gradient_of_new_classes_to_the_labels():
    """At the old model's outputs, the distillation has no gradient by the old classes."""
    old = toy.random(5, 2, seed=1)
    logits = torch.cat([old, toy.random(5, 3, seed=2)], dim=1)
    slope = torch.func.grad(lambda z: loss_of(GLFC(relation=1.0), z, old, batch_of(Y, TASK)))(logits)
    assert slope[:, :2].abs().max() < 1e-15
    goal = torch.tensor([[float(label == c) for c in range(2, 5)] for label in Y]).double()
    torch.testing.assert_close(slope[:, 2:], (logits[:, 2:].sigmoid() - goal) / 25)  # a mean of 5 times 5


def test_padding_changes_nothing():
    logits, old, kept = toy.random(5, 5), toy.random(5, 2, seed=1), [0, 2, 3]
    whole = batch_of(Y, TASK, mask=[1.0, 0.0, 1.0, 1.0, 0.0])
    few = batch_of([Y[i] for i in kept], [TASK[i] for i in kept])
    found = loss_of(GLFC(), logits, old, whole)
    assert found.item() == pytest.approx(loss_of(GLFC(), logits[kept], old[kept], few).item(), abs=1e-12)


def test_classes_that_the_loss_leaves_out_are_not_distilled():
    """With class_loss=current a new sample is told from those of its own task alone."""
    config = toy.config("scenario=class", "class_loss=current", "strategy.memory=2", method="glfc")
    sink = toy.Rows()
    cfl.run(config, stream=toy.stream(multi_head=True), sink=sink)
    assert all(row["loss"] < 2 for row in sink.rows if row["loss"] is not None)  # log 2 at outputs of 0


# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_old_model_is_that_of_the_task_before_and_travels_in_training_alone():
    Watched = toy.recording(GLFC)
    stream, strategy = toy.stream(multi_head=True), Watched(memory=2)
    cfl.run(toy.config("scenario=class", method="glfc"), stream=stream, strategy=strategy)
    ends = {}
    for info, down, after in strategy.rounds:
        sent = down.get("teacher", {})
        assert bool(sent) == (info.task > 0 and info.phase.train)
        expected = tree.select(ends[info.task - 1], sent) if sent else {}
        assert tree.equal(sent, expected)
        if sent:  # body and heads so far, all of which train
            assert set(sent) == set(info.model.trainable(info.task - 1))
        ends[info.task] = after["params"]


@pytest.mark.parametrize("relation", [0.0, 0.5])
def test_the_old_model_costs_one_model_without_the_new_head(relation):
    """An 8-6-6-2 MLP has 8*6+6 + 6*6+6 = 96 numbers in its body, and 6*2+2 = 14 in the head of each task."""
    options = ("scenario=class", "rounds=2", "strategy.memory=2")
    with_, without = (
        cfl.run(toy.config(*options, f"strategy.relation={each}", method="glfc"), stream=toy.stream(multi_head=True))
        for each in (relation, 0.0)
    )
    extra = 3 * 2 * 4 * ((96 + 14) + (96 + 28)) * (relation > 0)  # clients, rounds, bytes
    assert with_.metrics["bytes_down"] - without.metrics["bytes_down"] == extra


def test_clients_of_a_block_are_the_clients_alone():
    """Other engines are compared with all methods, in the tests of class-incremental runs."""
    both = [
        cfl.run(
            toy.config("scenario=class", "strategy.memory=2", *options, method="glfc"),
            stream=toy.stream(2, multi_head=True),
        )
        for options in ((), ("engine=vmapped", "block=3"))
    ]
    assert all(torch.allclose(leaf, both[1].params[key], atol=1e-5) for key, leaf in both[0].params.items())
