"""TARGET: its loss by brute force, its limits, its traffic, and what the server keeps."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import cfl
from cfl.contract import Batch
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies.fedavg import FedAvg
from cfl.methods.strategies.target import TARGET
from cfl.models import Model, build
from cfl.streams import Pool, Stream, Task, TaskSamples, with_scenario
from tests import toy

SMALL = dict(rounds=3, warmup=1, g_steps=2, samples=10, latent=4, width=4, student_steps=2, batch=5)
CLASSES = (2, 3, 2)


@dataclass(frozen=True)
class Recorder(TARGET):
    """TARGET, with a list `seen` of (info, what came down, server after) of each round."""

    seen: list = field(default_factory=list)

    def absorb(self, server, mean, info, lr):
        after = super().absorb(server, mean, info, lr)
        self.seen.append((info, self.broadcast(server, info), after))
        return after


def images(tasks=3, count=24):
    """A stream of 8-bit images of 8 x 8 pixels, two classes a task, normalised."""
    source, parts = rng.generator(7), []
    pool = Pool(
        torch.randint(256, (2 * count * tasks, 1, 8, 8), generator=source).to(torch.uint8),
        torch.tensor([[[0.4]]]),
        torch.tensor([[[0.2]]]),
    )
    for task in range(tasks):
        y = torch.arange(count) % 2
        rows = torch.arange(count) + 2 * count * task
        parts.append(Task(f"t{task}", TaskSamples(pool, rows, y), TaskSamples(pool, rows + count, y), 2))
    return Stream("images", tuple(parts), (1, 8, 8), multi_head=True)


def run(strategy, scenario="class", stream=None, *overrides, **more):
    options = ["rounds=2", f"scenario={scenario}", *overrides]
    return cfl.run(toy.config(*options, method="fedavg"), stream=stream or images(), strategy=strategy, **more)


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["class", "task", "domain"])
@pytest.mark.parametrize("temperature", [2.0, 0.5])
def test_a_step_goes_down_the_loss_written_class_by_class(scenario, temperature):
    classes = (3, 3, 3) if scenario == "domain" else CLASSES
    rule = TARGET(strength=1.5, temperature=temperature, batch=4)
    module = build("mlp", (5,), classes[0], {"hidden": [4]}).double()
    model = Model(module, (5,), classes, multi_head=scenario != "domain", growing=scenario == "class")
    step = LocalStep(model, 2, rule.frozen(2, model), ComposedMethod({"strategy": rule}), optim.sgd(), heads=(0, 1, 2))
    draws = rng.generator(2)
    params, teacher = (
        tree.map(lambda leaf: torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype), model.params) for _ in "ab"
    )
    x, u = (torch.randn(count, 5, dtype=torch.float64, generator=draws) for count in (6, 7))
    y = torch.arange(6) % classes[2] + (5 if scenario == "class" else 0)  # of 2 + 3 old classes
    shared = {
        "params": params, "teacher": teacher, "synthetic": {"x": u}, "start": {"row": torch.tensor(3)},
    }  # fmt: skip
    batch = Batch(x, y, torch.ones(6, dtype=torch.float64), torch.arange(6))
    # rows 3 + 7919 * client + 4 * step + 0, 1, 2, 3, modulo 7
    rows = [(3 + 7919 * 2 + 4 * 1 + place) % 7 for place in range(4)]

    def objective(at):
        leaves, total = {**params, **at}, 0.0
        logits = model.logits(leaves, x, 2)
        loss = F.cross_entropy(logits[:, 5:], y - 5) if scenario == "class" else F.cross_entropy(logits, y)
        for row in rows:
            if scenario == "class":  # one softmax over the old classes
                pairs = [(model.logits(teacher, u[row : row + 1], 1), model.logits(leaves, u[row : row + 1], 1))]
            else:  # one a head
                heads = (0,) if scenario == "domain" else (0, 1)
                pairs = [tuple(model.logits(at, u[row : row + 1], head) for at in (teacher, leaves)) for head in heads]
            terms = [-(F.softmax(a / temperature, 1) * F.log_softmax(b / temperature, 1)).sum() for a, b in pairs]
            total = total + sum(terms) / len(terms) / 4
        return loss + 1.5 * total

    start = step.start(params)
    before = tree.clone(start.params)
    inputs = StepInputs(shared, batch, lr=0.1, step=1, client=torch.tensor(2))
    after, _ = step(start, inputs)
    gradient = torch.func.grad(objective)(before)
    for name, leaf in before.items():
        torch.testing.assert_close(after.params[name], leaf - 0.1 * gradient[name], atol=1e-12, rtol=0)
    old = [name for name in before if name.endswith(("@0", "@1"))]
    assert len(old) == (0 if scenario == "domain" else 4), "the old heads train, too"


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["class", "task", "domain"])
def test_without_distillation_it_is_fedavg_with_the_loss_over_the_classes_of_the_task(scenario):
    ours = run(TARGET(strength=0.0, **SMALL), scenario)
    theirs = run(FedAvg(), scenario, None, "class_loss=current")
    for name, leaf in theirs.params.items():
        torch.testing.assert_close(ours.params[name], leaf, atol=1e-6, rtol=1e-5)


def test_the_first_task_is_that_of_fedavg():
    ours, theirs = (run(strategy, "class", images(1)) for strategy in (TARGET(**SMALL), FedAvg()))
    assert tree.equal(ours.params, theirs.params)
    assert ours.metrics["bytes_up"] == theirs.metrics["bytes_up"] and ours.metrics["client_bytes"] == 0


def test_secure_sums_change_nothing():
    options = ("agg.weights=uniform",)
    plain, secure = (run(TARGET(**SMALL), "class", None, *options, f"secagg={kind}") for kind in ("none", "full"))
    for name, leaf in plain.params.items():  # integers of 24 binary places, over 12 rounds
        torch.testing.assert_close(secure.params[name], leaf, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("scenario", ["class", "task", "domain"])
def test_it_runs_in_each_scenario(scenario):
    matrix = run(TARGET(**SMALL), scenario).accuracy_matrix
    assert ((matrix >= 0) & (matrix <= 1)).sum() == 6


def test_batch_normalisation_has_the_statistics_of_the_teachers_task():
    stream = images()
    for norm_stats, scenario in (("per_task", "task"), ("running", "class"), ("batch", "task")):
        recorder = Recorder(**SMALL)
        with rng.fork(0):
            module = torch.nn.Sequential(
                torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten(),
                torch.nn.Linear(72, 2),
            )  # fmt: skip
        run(recorder, scenario, stream, f"model.norm_stats={norm_stats}", model=module)
        (end,) = (after for info, _, after in recorder.seen if info.task == 0 and info.phase.name == "generate"
                  and info.round == 2)  # fmt: skip
        first = next(down for info, down, _ in recorder.seen if info.task == 1)
        names = {"per_task": ("1.running_mean@1", "1.running_mean@0"), "running": ("1.running_mean",) * 2}
        if norm_stats in names:
            here, there = names[norm_stats]
            assert torch.equal(first["teacher"][here], end["params"][there]), "of the new task's name"
        else:
            assert not any("running" in name for name in first["teacher"])


def test_one_synthetic_sample_a_step_is_refused_for_a_model_that_takes_none():
    """Batch normalisation has no variance of one sample; without it the run goes on."""
    config, rule = toy.config("tasks=2", "rounds=1", "model.norm_stats=running"), TARGET(**{**SMALL, "batch": 1})
    network = toy.net(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    with pytest.raises(ConfigError, match="strategy.batch=1, but the model fails on a batch of one sample"):
        cfl.run(config, stream=toy.stream(tasks=2), model=network, strategy=rule)
    cfl.run(config, stream=toy.stream(tasks=2), strategy=rule)


# --- the server, and traffic -----------------------------------------------------------------------------------------


def test_what_comes_down_and_what_it_costs():
    recorder = Recorder(**SMALL)
    found = run(recorder, "class", None, "cohort=4")
    p = tree.nbytes({name: leaf for name, leaf in found.params.items() if "@" not in name})
    head = tree.nbytes({name: leaf for name, leaf in found.params.items() if "@0" in name})
    synthetic = 30 * 64 + 4 + 4  # 3 rounds of 10 images of 8 x 8 bytes, mean and deviation
    model, teacher = [p + head * (task + 1) for task in range(3)], [0, p + head, p + 2 * head]
    # 4 clients, 2 rounds a task; the teacher and the samples once a task, a row number of 8 bytes every round
    expected = 4 * sum(2 * model[task] + (teacher[task] + synthetic + 2 * 8 if task else 0) for task in range(3))
    assert found.metrics["bytes_down"] == expected
    assert found.metrics["bytes_up"] == 4 * sum(2 * size for size in model)
    assert found.metrics["client_bytes"] == teacher[2] + synthetic
    trained = [(info, down) for info, down, _ in recorder.seen if info.phase.train]
    assert all("synthetic" not in down for info, down in trained if info.task == 0)


def test_the_teacher_is_the_model_of_the_last_task_and_does_not_change():
    recorder = Recorder(**SMALL)
    run(recorder, "task")
    ends = [after for info, _, after in recorder.seen if info.phase.name == "generate" and info.round == 2]
    for task in (1, 2):
        downs = [down for info, down, _ in recorder.seen if info.task == task and info.phase.train]
        for down in downs:
            assert down["teacher"], "weights of the body and of the heads so far"
            for name, leaf in down["teacher"].items():
                assert torch.equal(leaf, ends[task - 1]["params"][name])
            sent, made = (trees["synthetic"]["x"].flatten(1).tolist() for trees in (down, ends[task - 1]))
            assert sorted(sent) == sorted(made) and sent != made  # in random order
        assert downs[0]["start"]["row"] != downs[1]["start"]["row"]  # of 30 rows, drawn in every round


def test_generation_draws_from_its_own_keys_and_leaves_the_model_alone():
    recorder = Recorder(**SMALL)
    first = run(recorder, "class")
    generating = [(down, after) for info, down, after in recorder.seen if info.phase.name == "generate"]
    assert len(generating) == 2 * 3  # not after the last task
    for down, after in generating:
        assert all(torch.equal(leaf, after["params"][name]) for name, leaf in down["params"].items())
    torch.manual_seed(123)
    again = run(TARGET(**SMALL), "class")
    assert tree.equal(first.params, again.params)


def test_labels_are_those_of_classes_seen_and_images_show_each():
    stream, recorder = with_scenario(images(), "class"), Recorder(**{**SMALL, "samples": 40})
    found = cfl.run(toy.config("rounds=1", method="fedavg"), stream=stream, strategy=recorder)
    after = {info.task: after for info, _, after in recorder.seen if info.phase.name == "generate"}
    for task in (0, 1):
        assert after[task]["labels"]["y"].unique().tolist() == list(range(2 * (task + 1)))
        shown = recorder.images(after[task], found.model)
        assert shown.shape == (2 * (task + 1), 8, 1, 8, 8) and shown.dtype == torch.uint8
        rows = after[task]["labels"]["y"] == 1
        assert torch.equal(shown[1], after[task]["synthetic"]["x"][rows][:8])
    assert recorder.images({"params": {}}, found.model) is None
    assert [report["synthetic_samples"] for report in found.metrics["by_task"]] == [120, 120, 120]


def test_a_later_head_may_be_wider():
    """The student has no heads of later tasks, and its logits are as wide as the teacher's."""
    parts = []
    for task, classes in enumerate((2, 4)):
        x, y = torch.rand(16, 8, generator=rng.generator(task)), torch.arange(16) % classes
        parts.append((x, y, x, y))
    found = run(TARGET(**SMALL), "task", cfl.from_tensors(parts, multi_head=True))
    assert found.metrics["by_task"][0]["synthetic_samples"] == 30  # 3 rounds of 10, of which 2 train the student


def test_samples_of_bytes_need_not_be_images():
    x, y = torch.arange(16 * 8).view(16, 8).to(torch.uint8), torch.arange(16) % 2
    stream = cfl.from_tensors([(x, y, x, y)] * 2, multi_head=True)
    assert run(TARGET(**SMALL), "task", stream).metrics["by_task"][0]["synthetic_samples"] == 30  # 3 rounds of 10
