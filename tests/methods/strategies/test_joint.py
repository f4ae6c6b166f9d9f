"""Joint training: the loss by hand, FedAvg as a limit, and the samples that train each head."""

import json
import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Batch
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies.joint import Joint
from cfl.models import Model
from tests import toy

CLASSES = [2, 4, 3]
X = torch.randn(6, 5, dtype=torch.float64, generator=rng.generator(1))
OWN = torch.tensor([1, 0, 2, 1, 1, 0])  # two samples of task 0, three of task 1, one of task 2
Y = torch.tensor([3, 1, 2, 0, 3, 0])
BATCH = Batch(X, Y, torch.ones(6, dtype=torch.float64), torch.arange(6), OWN)


# --- helpers ---------------------------------------------------------------------------------------------------------


def make(rule, classes=CLASSES, multi_head=True, **options):
    """A float64 5-4-classes MLP with a random head for each task, and the local step of task 0."""
    with rng.fork(1):
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes[0])).double()
    model = Model(module, (5,), classes, multi_head=multi_head)
    heads, frozen = rule.heads(0, len(classes)), rule.frozen(0, model)
    return model, LocalStep(model, 0, frozen, ComposedMethod({"strategy": rule}), optim.sgd(), heads=heads, **options)


def normed():
    with rng.fork(1):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@dataclass(frozen=True)
class Recorder(Joint):
    """Joint that keeps each batch, and (info, server before, server after, batches so far) of each round."""

    batches: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    def augment(self, batch, ctx):
        self.batches.append(batch)
        return batch

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        self.rounds.append((info, server, new, len(self.batches)))
        return new


def seen(batches):
    """The (task, sample) pairs of some batches, sorted."""
    pairs = [pair for batch in batches for pair in zip(batch.task.tolist(), batch.ids.tolist(), strict=True)]
    return sorted(pairs)


# --- by hand ---------------------------------------------------------------------------------------------------------

# Cross-entropies: ln 2 of logits (0, 0); ln(1 + 1/3) = ln(4/3) and ln(1 + 3) = ln 4 of logits (ln 3, 0).
# Task 0 has the one sample of ln 2; task 1 has ln(4/3), ln 4 and ln 4.
LOGITS = torch.tensor([[0.0, 0.0], *[[math.log(3), 0.0]] * 3], dtype=torch.float64)
BY_HAND = {
    "tasks": (math.log(2) + (math.log(4 / 3) + 2 * math.log(4)) / 3) / 2,
    "samples": (math.log(2) + math.log(4 / 3) + 2 * math.log(4)) / 4,
}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("mean", ["tasks", "samples"])
def test_loss_by_hand(mean, padding):
    own, y, mask = [0, 1, 1, 1], [0, 0, 1, 1], [1.0] * 4
    logits = LOGITS
    if padding:  # of a task with samples, and of one without: neither counts
        own, y, mask = [*own, 0, 2], [*y, 1, 1], [*mask, 0.0, 0.0]
        logits = torch.cat([logits, torch.full((2, 2), 5.0, dtype=torch.float64)])
    model, _ = make(Joint(), classes=[2, 2, 2])
    batch = Batch(
        torch.zeros(len(y), 5).double(),
        torch.tensor(y),
        torch.tensor(mask).double(),
        torch.arange(len(y)),
        torch.tensor(own),
    )
    value = Joint(mean=mean).loss(logits, toy.context({}, {}, batch, model))
    assert value.item() == pytest.approx(BY_HAND[mean], rel=1e-12)


def test_one_step_of_two_parameters_by_hand():
    # Logits (a_t x, -a_t x) of task t, through a body of weight 1 that the task's head multiplies: with heads at 0 the
    # probabilities are 1/2, so d CE / d head_k = (1/2 - [y = k]) x. Task 0 has x = 2, y = 0: (-1, 1). Task 1 has
    # x = 1, y = 1 and x = 3, y = 1: mean (1, -1). Each task counts half: steps of lr 0.5 go to (0.25, -0.25) and
    # (-0.25, 0.25). The body's gradient is that of heads at 0: none.
    with rng.fork(0):
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)).double()
    model = Model(module, (1,), [2, 2], multi_head=True)
    params = {name: torch.full_like(leaf, name == "0.weight") for name, leaf in model.params.items()}
    x, own = torch.tensor([[2.0], [1.0], [3.0]]).double(), torch.tensor([0, 1, 1])
    batch = Batch(x, own, torch.ones(3).double(), torch.arange(3), own)
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Joint()}), optim.sgd(), heads=(0, 1))
    local, loss = step(step.start(params), StepInputs({"params": params}, batch, lr=0.5))
    assert {name: leaf.flatten().tolist() for name, leaf in local.params.items()} == {
        "0.weight": [1.0],
        "1.weight@0": [0.25, -0.25],
        "1.weight@1": [-0.25, 0.25],
    }
    assert loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("mean", ["tasks", "samples"])
def test_a_step_goes_down_the_loss_of_each_sample_through_its_own_head(mean):
    model, step = make(Joint(mean=mean))

    def objective(at):
        parts = [F.cross_entropy(model.logits(at, X[OWN == t], t), Y[OWN == t], reduction="none") for t in range(3)]
        return sum(part.mean() for part in parts) / 3 if mean == "tasks" else torch.cat(parts).mean()

    after, loss = step(step.start(model.params), StepInputs({"params": model.params}, BATCH, lr=0.1))
    assert set(after.params) == set(model.params)  # all heads
    gradient = torch.func.grad(objective)(model.params)
    assert loss.item() == pytest.approx(objective(model.params).item(), rel=1e-12)
    for name, leaf in model.params.items():
        assert gradient[name].abs().max() > 1e-4
        torch.testing.assert_close(after.params[name], leaf - 0.1 * gradient[name], atol=1e-14, rtol=0)


def test_only_heads_whose_tasks_are_in_the_batch_move():
    model, step = make(Joint())
    there = OWN != 1
    batch = Batch(*(leaf[there] for leaf in BATCH))
    after, _ = step(step.start(model.params), StepInputs({"params": model.params}, batch, lr=0.1))
    assert all(torch.equal(after.params[name], model.params[name]) for name in model.head(1))
    assert not any(torch.equal(after.params[name], model.params[name]) for name in (*model.head(0), *model.head(2)))


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_a_stream_of_one_task_is_fedavg_to_the_byte(multi_head):
    # Statistics per task are allowed with a single task.
    options = ("tasks=1", "local.momentum=0.9", "local.lr=0.2", "rounds=4")
    joint, fedavg = (
        cfl.run(toy.config(*options, method=method), stream=toy.stream(1, multi_head=multi_head), model=normed())
        for method in ("joint", "fedavg")
    )
    assert all(torch.equal(joint.params[name], leaf) for name, leaf in fedavg.params.items())
    assert joint.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]


@pytest.mark.parametrize("mean", ["tasks", "samples"])
def test_with_one_head_and_whole_batches_it_is_fedavg_on_the_union_of_the_tasks(mean):
    # One client makes one step per round with all samples, whose order matters only for rounding. All tasks have 48
    # samples, so both means are equal. Joint training has the rounds of all tasks, 3 x 4. A Dirichlet partition gives
    # all samples to one client, and allows a batch larger than a share.
    stream = toy.stream()
    parts = [(*task.train.gather(torch.arange(48)), *task.test.gather(torch.arange(40))) for task in stream.tasks]
    union = cfl.from_tensors([tuple(torch.cat(leaves) for leaves in zip(*parts, strict=True))])
    options = ("partition.name=dirichlet", "partition.clients=1", "local.batch_size=200", "local.lr=0.5")
    joint = cfl.run(toy.config(*options, "rounds=4", f"strategy.mean={mean}", method="joint"), stream=stream)
    fedavg = cfl.run(toy.config(*options, "rounds=12", "tasks=1", method="fedavg"), stream=union)
    for name, leaf in fedavg.params.items():
        torch.testing.assert_close(joint.params[name], leaf, atol=1e-5, rtol=0)
        assert (leaf - joint.model.params[name]).abs().max() > 1e-3  # it trained


# --- property --------------------------------------------------------------------------------------------------------


def test_a_round_goes_once_over_each_sample_that_its_clients_hold_of_any_task():
    rule = Recorder()
    config = toy.config("cohort=4", method="joint")
    cfl.run(config, stream=toy.stream(multi_head=True), strategy=rule)
    everything = sorted((task, int(row)) for task, of in enumerate(toy.stream().tasks) for row in of.train.index)
    starts = [0, *(count for *_, count in rule.rounds)]
    assert len(rule.rounds) == 3 * 2  # the rounds of the whole stream
    for before, after in zip(starts, starts[1:], strict=False):
        assert seen(rule.batches[before:after]) == everything
        # 36 samples a client, 4 a batch: 9 steps each.
        assert after - before == 4 * 9
    mixed = [len(batch.task.unique()) > 1 for batch in rule.batches]
    # A batch of 4 of 3 x 12 samples is of one task with probability 3 C(12, 4) / C(36, 4) = 0.025.
    assert sum(mixed) > 0.9 * len(mixed)
    assert max(len(batch.task.unique()) for batch in rule.batches) == 3


def test_every_head_trains_in_every_round():
    rule = Recorder()
    result = cfl.run(toy.config(method="joint"), stream=toy.stream(multi_head=True), strategy=rule)
    for _, before, after, _ in rule.rounds:
        assert not any(torch.equal(before["params"][name], leaf) for name, leaf in after["params"].items())
    # 96 parameters in the body, 14 in each head: all go down and up, to and from 3 clients in 6 rounds.
    assert result.metrics["bytes_up"] == result.metrics["bytes_down"] == 6 * 3 * 4 * (96 + 3 * 14)


def test_forgetting_is_not_defined(tmp_path):
    cfl.run(toy.config(method="joint"), stream=toy.stream(), output=tmp_path)
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["fgt"] is None and written["bwt"] is None
    assert 0 < written["acc"] <= 1


@pytest.mark.parametrize("multi_head", [False, True])
def test_clients_with_data_of_one_task_alone_take_part(multi_head):
    # Two of eight clients own each task: six shares in total. If at least four clients have one, some have only one.
    rule, stream = Recorder(), toy.stream(multi_head=multi_head)
    options = ("partition.clients=8", "partition.task_share=0.25", "cohort=8", "rounds=1")
    result = cfl.run(toy.config(*options, method="joint"), stream=stream, strategy=rule)
    everything = sorted((task, int(row)) for task, of in enumerate(stream.tasks) for row in of.train.index)
    assert [seen(rule.batches[: rule.rounds[0][3]]), len(rule.rounds)] == [everything, 3]
    cohorts = {info.clients for info, *_ in rule.rounds}
    assert len(cohorts) == 1 and 4 <= len(cohorts.pop()) <= 6  # all that hold data of any task, in every round
    assert all(leaf.isfinite().all() for leaf in result.params.values())


# --- running statistics ----------------------------------------------------------------------------------------------


def test_running_statistics_of_single_tasks_are_refused():
    with pytest.raises(ConfigError, match=r"model\.norm_stats=running"):
        cfl.run(toy.config(method="joint"), stream=toy.stream(), model=normed())


@pytest.mark.parametrize("norm_stats", ["running", "batch"])
def test_shared_statistics_and_those_of_batches_run(norm_stats):
    options = ("local.lr=0.2", "rounds=6", f"model.norm_stats={norm_stats}")
    result = cfl.run(toy.config(*options, method="joint"), stream=toy.stream(multi_head=True), model=normed())
    buffers = {name for name in result.params if "running" in name}
    assert buffers == ({"1.running_mean", "1.running_var"} if norm_stats == "running" else set())
    assert not any(torch.equal(result.params[name], result.model.params[name]) for name in buffers)
    assert result.metrics["acc"] > 0.8


# --- conformance -----------------------------------------------------------------------------------------------------


def test_padding_changes_nothing():
    model, step = make(Joint())
    mask = torch.tensor([1.0, 1, 0, 1, 1, 0]).double()  # the only sample of task 2 is padding
    there = mask.bool()
    short, padded, empty = (
        step(step.start(model.params), StepInputs({"params": model.params}, batch, lr=0.1))[0]
        for batch in (
            Batch(*(leaf[there] for leaf in BATCH)), BATCH._replace(mask=mask), BATCH._replace(mask=0 * mask)
        )
    )  # fmt: skip
    for name, leaf in short.params.items():
        torch.testing.assert_close(padded.params[name], leaf, atol=1e-14, rtol=0)
        assert torch.equal(empty.params[name], model.params[name])
        assert torch.equal(leaf, model.params[name]) == (name in model.head(2))


def test_the_loss_over_a_task_s_classes_alone_is_refused():
    with pytest.raises(ConfigError, match="samples of all tasks.*set class_loss=seen"):
        toy.config("scenario=class", "class_loss=current", method="joint")
