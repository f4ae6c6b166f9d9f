"""LwF: the distillation by hand and by brute force, its teacher, and the traffic of runs."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies.lwf import LwF
from cfl.models import Model
from tests import toy

CLASSES = [2, 4, 3]
X = torch.randn(6, 5, dtype=torch.float64, generator=rng.generator(1))
BATCH = Batch(X, torch.arange(6) % 3, torch.ones(6, dtype=torch.float64), torch.arange(6))


# --- helpers ---------------------------------------------------------------------------------------------------------


HEADS = SimpleNamespace(growing=False)  # a model with a head a task


def random_like(params, seed):
    draws = rng.generator(seed)
    return {name: torch.randn(leaf.shape, dtype=leaf.dtype, generator=draws) for name, leaf in params.items()}


def make(rule, task=2, multi_head=True, classes=CLASSES, **options):
    """A float64 5-4-classes MLP with random weights, and the local step of a task."""
    with rng.fork(1):
        module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes[0])).double()
    model = Model(module, (5,), classes, multi_head=multi_head)
    heads, frozen = rule.heads(task, len(classes)), rule.frozen(task, model)
    return model, LocalStep(
        model, task, frozen, ComposedMethod({"strategy": rule}), optim.sgd(), heads=heads, **options
    )


def entropies(model, params, teacher, x, temperature, heads):
    """(batch,) sums over heads of H(softmax(z* / T), softmax(z / T)), head by head."""
    total = torch.zeros(len(x), dtype=x.dtype)
    for head in heads:
        targets = F.softmax(model.logits(teacher, x, head) / temperature, dim=1)
        outputs = F.softmax(model.logits(params, x, head) / temperature, dim=1)
        total = total - (targets * outputs.log()).sum(1)
    return total


Recorder = toy.recording(LwF)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_penalty_and_its_gradient_by_hand():
    # T = 2. Head 0: teacher (2 ln 3, 0), p = (3/4, 1/4); student (0, 0), q = (1/2, 1/2): H = ln 2.
    # Head 1: teacher (0, 0), p = (1/2, 1/2); student (2 ln 3, 0), q = (3/4, 1/4): H = -ln(3/16) / 2.
    # lambda / T (q - p) = 4 / 2 (-1/4, 1/4) for head 0 and 2 (1/4, -1/4) for head 1.
    high = 2 * math.log(3)
    teacher = {"z": torch.tensor([[[high, 0.0], [0.0, 0.0]]], dtype=torch.float64)}
    student = {"z": torch.tensor([[[0.0, 0.0], [high, 0.0]]], dtype=torch.float64)}
    asked = []

    def forward(params, batch, heads, *, dropout=True):
        asked.append((heads, dropout))
        return params["z"]

    batch = Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1).double(), torch.zeros(1))
    ctx = toy.context({"teacher": teacher}, {}, batch, model=HEADS, task=2, forward=forward)
    rule = LwF(strength=4.0, temperature=2.0)
    value = rule.penalty(student, torch.zeros(1, 2), ctx)
    assert value.item() == pytest.approx(4 * (math.log(2) - math.log(3 / 16) / 2))
    assert asked == [((0, 1), False), ((0, 1), True)]  # the teacher's outputs are free of dropout
    gradient = torch.func.grad(lambda params: rule.penalty(params, torch.zeros(1, 2), ctx))(student)["z"]
    expected = torch.tensor([[[-0.5, 0.5], [0.5, -0.5]]]).double()
    torch.testing.assert_close(gradient, expected, atol=1e-15, rtol=0)


def test_with_a_growing_head_one_softmax_over_the_old_classes_is_distilled():
    # T = 2. Teacher (2 ln 3, 0 | 0): p = (3, 1, 1) / 5; student (0, 0 | 0): q = 1 / 3, so H = ln 3. Padding is 0.
    pad = -1e9
    teacher = {"z": torch.tensor([[[2 * math.log(3), 0.0], [0.0, pad]]], dtype=torch.float64)}
    student = {"z": torch.tensor([[[0.0, 0.0], [0.0, pad]]], dtype=torch.float64)}

    def forward(params, batch, heads, *, dropout=True):
        return params["z"]

    batch = Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1).double(), torch.zeros(1))
    growing = SimpleNamespace(growing=True)
    ctx = toy.context({"teacher": teacher}, {}, batch, model=growing, task=2, forward=forward)
    rule = LwF(strength=4.0, temperature=2.0)
    assert rule.penalty(student, torch.zeros(1, 3), ctx).item() == pytest.approx(4 * math.log(3))
    gradient = torch.func.grad(lambda params: rule.penalty(params, torch.zeros(1, 3), ctx))(student)["z"]
    # lambda / T (q - p) = 2 (1/3 - 3/5, 1/3 - 1/5, 1/3 - 1/5)
    expected = 2 * torch.tensor([[[1 / 3 - 3 / 5, 1 / 3 - 1 / 5], [1 / 3 - 1 / 5, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("train_old_heads", [False, True])
@pytest.mark.parametrize("temperature", [2.0, 0.5, 0.1])
def test_a_step_goes_down_the_loss_written_head_by_head(temperature, train_old_heads):
    # The heads have 2 and 4 classes: the padding of the narrower head must not reach a gradient.
    rule = LwF(strength=1.5, temperature=temperature, train_old_heads=train_old_heads)
    model, step = make(rule)
    params, teacher = (random_like(model.params, seed) for seed in (2, 3))
    start = step.start(params)
    before = tree.clone(start.params)
    old = {*model.head(0), *model.head(1)}
    assert old & set(start.params) == (old if train_old_heads else set())

    def objective(at):
        leaves = {**params, **at}
        distilled = entropies(model, leaves, teacher, X, temperature, (0, 1)).mean()
        return F.cross_entropy(model.logits(leaves, X, 2), BATCH.y) + 1.5 * distilled

    after, loss = step(start, StepInputs({"params": params, "teacher": teacher}, BATCH, lr=0.1))
    gradient = torch.func.grad(objective)(before)
    for name, leaf in before.items():
        assert gradient[name].isfinite().all() and gradient[name].abs().max() > 1e-4
        torch.testing.assert_close(after.params[name], leaf - 0.1 * gradient[name], atol=1e-13, rtol=0)
    assert loss.item() == pytest.approx(F.cross_entropy(model.logits(params, X, 2), BATCH.y).item())  # CE alone


def test_gradient_by_the_logits_is_lambda_over_t_times_the_difference_of_softmaxes():
    rule = LwF(strength=3.0, temperature=2.0)
    draws = rng.generator(4)
    teacher, student = ({"z": torch.randn(6, 2, 4, dtype=torch.float64, generator=draws)} for _ in range(2))

    def forward(params, batch, heads, *, dropout=True):
        return params["z"]

    ctx = toy.context({"teacher": teacher}, {}, BATCH, model=HEADS, task=2, forward=forward)
    gradient = torch.func.grad(lambda params: rule.penalty(params, X, ctx))(student)["z"]
    expected = 3.0 / 2.0 * (F.softmax(student["z"] / 2, dim=2) - F.softmax(teacher["z"] / 2, dim=2)) / 6
    torch.testing.assert_close(gradient, expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("task", [1, 2])
def test_a_single_head_gives_one_term_however_many_tasks_there_were(task):
    rule = LwF(strength=1.5)
    model, step = make(rule, task=task, multi_head=False, classes=[3, 3, 3])
    params, teacher = (random_like(model.params, seed) for seed in (2, 3))
    ctx = step.context(StepInputs({"params": params, "teacher": teacher}, BATCH))
    expected = 1.5 * entropies(model, params, teacher, X, 2.0, (0,)).mean()
    assert rule.penalty(params, X, ctx).item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_teacher_is_free_of_dropout_and_the_student_is_not():
    # With a dropout rate of 1 the student's body outputs 0, and its logits are the bias; the teacher has no dropout.
    rule = LwF(strength=1.0)
    with rng.fork(1):
        module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(1.0), nn.Linear(4, 3)).double()
    model = Model(module, (5,), [3, 3], multi_head=False)
    teacher, params = model.params, random_like(model.params, 2)
    step = LocalStep(model, 1, frozenset(), ComposedMethod({"strategy": rule}), optim.sgd(), heads=(0, 1))
    ctx = step.context(StepInputs({"params": params, "teacher": teacher}, BATCH))
    model.module.train()
    with rng.fork(0):
        value = rule.penalty(params, X, ctx)
    targets = (X @ teacher["0.weight"].T + teacher["0.bias"]) @ teacher["2.weight"].T + teacher["2.bias"]
    outputs = params["2.bias"].expand(6, 3)
    expected = -(F.softmax(targets / 2, dim=1) * F.log_softmax(outputs / 2, dim=1)).sum(1).mean()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("temperature", [2.0, 0.25, 0.1])
def test_the_penalty_of_heads_of_unequal_width_is_that_of_each_alone(temperature):
    rule = LwF(temperature=temperature)
    model, step = make(rule)
    params, teacher = (random_like(model.params, seed) for seed in (2, 3))
    ctx = step.context(StepInputs({"params": params, "teacher": teacher}, BATCH))
    expected = entropies(model, params, teacher, X, temperature, (0, 1)).mean()
    assert rule.penalty(params, X, ctx).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("option,value", [("strength", -1.0), ("temperature", 0.0)])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=rf"strategy\.{option}"):
        build(LwF, {option: value}, "strategy")


# --- limits ----------------------------------------------------------------------------------------------------------


def _normed():
    with rng.fork(1):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("norm_stats", ["per_task", "running"])
@pytest.mark.parametrize("multi_head", [False, True])
def test_strength_zero_is_fedavg_to_the_byte(multi_head, norm_stats):
    # The passes of the distillation must not change the running statistics of the network.
    options = ("local.momentum=0.9", "local.weight_decay=0.01", "local.lr=0.2", f"model.norm_stats={norm_stats}")
    stream = toy.stream(multi_head=multi_head)
    fedavg = cfl.run(toy.config(*options, method="fedavg"), stream=stream, model=_normed())
    nothing, some = (
        cfl.run(toy.config(*options, f"strategy.strength={strength}", method="lwf"), stream=stream, model=_normed())
        for strength in (0, 1)
    )
    assert all(torch.equal(nothing.params[name], leaf) for name, leaf in fedavg.params.items())
    assert nothing.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]
    assert not all(torch.equal(some.params[name], leaf) for name, leaf in fedavg.params.items())


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_first_task_is_fedavg_to_the_byte(multi_head):
    # This includes dropout draws: the first task has no passes other than FedAvg's.
    rule, options = Recorder(), ("model.dropout=[0.2,0.2]", "local.lr=0.2")
    cfl.run(toy.config(*options, method="lwf"), stream=toy.stream(multi_head=multi_head), strategy=rule)
    alone = cfl.run(toy.config(*options, "tasks=1", method="fedavg"), stream=toy.stream(1, multi_head=multi_head))
    after = next(after for info, _, after in rule.rounds if (info.task, info.round) == (0, 1))
    assert all(torch.equal(after["params"][name], leaf) for name, leaf in alone.params.items())


def test_at_the_teacher_the_distillation_has_no_gradient():
    # At q = p the first step of a task is FedAvg's up to rounding; later steps are not.
    after = []
    for rule in (Strategy(), LwF(strength=5.0)):
        model, step = make(rule)
        local = step.start(model.params)
        for index in range(2):
            local, _ = step(
                local, StepInputs({"params": model.params, "teacher": model.params}, BATCH, lr=0.5, step=index)
            )
            after.append(tree.clone(local.params))
    for name in model.trainable(2):
        torch.testing.assert_close(after[0][name], after[2][name], atol=1e-14, rtol=0)
    assert (after[1]["0.weight"] - after[3]["0.weight"]).abs().max() > 1e-4


# --- property --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_old_heads_keep_their_outputs_on_the_new_data_the_better_the_stronger():
    moved = []
    for strength in (0.0, 1.0, 10.0):
        rule = Recorder(strength=strength)
        stream = toy.stream(2, multi_head=True)
        options = ("tasks=2", "cohort=4", "rounds=20", "local.lr=0.2")
        result = cfl.run(toy.config(*options, method="lwf"), stream=stream, strategy=rule)
        before = next(after["params"] for info, _, after in rule.rounds if (info.task, info.round) == (0, 19))
        x, _ = stream.tasks[1].train.gather(torch.arange(48))
        result.model.module.eval()
        old, new = (F.softmax(result.model.logits(params, x, 0) / 2, dim=1) for params in (before, result.params))
        moved.append((old - new).abs().mean().item())
    assert moved[0] > 1.5 * moved[1] > 1.5**2 * moved[2] > 0  # 0.223, 0.093, 0.016


# --- the teacher and the heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_teacher_is_the_global_model_at_the_end_of_the_previous_task(multi_head):
    rule = Recorder()
    cfl.run(toy.config(method="lwf"), stream=toy.stream(multi_head=multi_head), strategy=rule)
    ends = {info.task: after for info, _, after in rule.rounds if info.round == 1}
    assert len(rule.rounds) == 6 and set(ends) == {0, 1, 2}
    for info, down, after in rule.rounds:
        assert set(down) == ({"params", "teacher"} if info.task else {"params"})
        if info.task:
            last = ends[info.task - 1]["params"]
            heads = {name for name in last if name.endswith("@" + str(info.task - 1))}
            # old heads do not train, so the model's heads are the teacher's
            assert bool(heads) == multi_head and heads <= set(down["params"]) - set(down["teacher"])
            seen = {**down["params"], **down["teacher"]}
            assert all(torch.equal(seen[name], last[name]) for name in {*down["teacher"], *heads})
        if (info.task, info.round) == (1, 0):  # within a task the model changes and the teacher does not
            assert not torch.equal(after["params"]["1.weight"], after["teacher"]["1.weight"])
            assert torch.equal(ends[0]["params"]["1.weight"], after["teacher"]["1.weight"])


@pytest.mark.parametrize("train_old_heads", [False, True])
def test_old_heads_stay_as_they_were_unless_they_train(train_old_heads):
    rule = Recorder(train_old_heads=train_old_heads)
    config = toy.config("local.weight_decay=0.1", "local.lr=0.2", method="lwf")
    result = cfl.run(config, stream=toy.stream(multi_head=True), strategy=rule)
    for task in range(2):
        end = next(after["params"] for info, _, after in rule.rounds if (info.task, info.round) == (task, 1))
        same = [torch.equal(result.params[name], end[name]) for name in result.model.head(task)]
        assert same == [not train_old_heads] * 2


# The 8-6-6-2 MLP has 96 parameters in its body and 14 in a head; 3 clients take part in 2 rounds of each task.
DOWN = {
    (False, False): [110, 110 + 110, 110 + 110],  # the model, and from the second task on the teacher
    (True, False): [96 + 14, (96 + 28) + 96, (96 + 42) + 96],  # frozen heads are the teacher's, too
    (True, True): [96 + 14, (96 + 28) + (96 + 14), (96 + 42) + (96 + 28)],
}


@pytest.mark.parametrize(("multi_head", "train_old_heads"), DOWN)
def test_the_teacher_comes_down_in_every_round_of_later_tasks(multi_head, train_old_heads):
    config = toy.config(f"strategy.train_old_heads={str(train_old_heads).lower()}", method="lwf")
    moved = cfl.run(config, stream=toy.stream(multi_head=multi_head)).metrics
    up = [96 + 14, 96 + 28, 96 + 42] if train_old_heads else [110, 110, 110]
    assert moved["bytes_down"] == 4 * 3 * 2 * sum(DOWN[multi_head, train_old_heads])
    assert moved["bytes_up"] == 4 * 3 * 2 * sum(up)
    assert moved["client_bytes"] == 0  # clients keep nothing


# --- conformance -----------------------------------------------------------------------------------------------------


def test_the_penalty_writes_to_nothing_and_sends_no_gradient_to_the_teacher():
    rule = LwF()
    model, step = make(rule)
    params, teacher = random_like(model.params, 2), random_like(model.params, 3)
    before = tree.clone(params), tree.clone(teacher)

    def penalty(params, teacher):
        return rule.penalty(params, X, step.context(StepInputs({"params": params, "teacher": teacher}, BATCH)))

    gradient = torch.func.grad(penalty, argnums=1)(params, teacher)
    assert all(not leaf.any() for leaf in gradient.values())
    for given, kept in zip((params, teacher), before, strict=True):
        assert all(torch.equal(given[name], leaf) for name, leaf in kept.items())


def test_padding_changes_nothing():
    model, step = make(LwF())
    shared = {"params": random_like(model.params, 2), "teacher": random_like(model.params, 3)}
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0]).double()
    short, padded, empty = (
        step(step.start(shared["params"]), StepInputs(shared, batch, lr=0.1))[0]
        for batch in (
            Batch(*(leaf[:4] for leaf in BATCH[:4])), BATCH._replace(mask=mask), BATCH._replace(mask=0 * mask)
        )
    )  # fmt: skip
    for name, leaf in short.params.items():
        torch.testing.assert_close(padded.params[name], leaf, atol=1e-14, rtol=0)
        before = shared["params"][name]
        assert torch.equal(empty.params[name], before) and not torch.equal(leaf, before)
