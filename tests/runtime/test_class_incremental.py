"""Runs with scenario=class: one head that grows, and test samples whose task nobody names."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cfl
from cfl.contract import Batch
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, plugins
from cfl.engines.evaluate import accuracies
from cfl.engines.step import LocalStep
from cfl.methods.strategies import FedAvg
from cfl.models import Model
from cfl.models.mlp import mlp
from cfl.streams import with_scenario
from tests import toy
from tests.flower.federation import unlike
from tests.runtime.test_resume import Killed, finished

REFUSED = {"single_task": "it has a model for each task", "rgo": "its paper knows the task of each sample"}
METHODS = [name for name in plugins.strategies.names() if name not in REFUSED]
CLASS = ("scenario=class",)
ENGINES = (
    ("engine=vmapped", "block=2"), ("engine=pool", "workers=2"), ("engine=flower", "flower.address=in-process"),
)  # fmt: skip


def run(*options, method="fedavg", **more):
    return cfl.run(toy.config(*CLASS, *options, method=method), stream=toy.stream(multi_head=True), **more)


def matrix(result):
    return np.array(result.metrics["accuracy_matrix"], dtype=float)


def test_without_replay_only_the_last_task_is_left():
    """The loss of a new sample lowers the outputs of all other classes. So a model that keeps none of its old tasks has
    the mean over three tasks of 0, 0 and what the last one has, and a third of that is its ACC. Chance is 1 / 6."""
    found = matrix(run("rounds=20", "local.lr=0.3"))
    assert found[0, 0] > 0.9 and found[2, 2] > 0.9
    assert found[2, :2].tolist() == [0, 0]


@pytest.mark.slow
def test_all_data_at_once_are_learned():
    assert run("rounds=40", "local.lr=0.3", "cohort=4", "model.hidden=[16]", method="joint").metrics["acc"] > 0.9


def test_the_first_task_is_that_of_scenario_task_to_the_bit():
    alone = cfl.run(toy.config("tasks=1", method="fedavg"), stream=toy.stream(multi_head=True))
    found = run("tasks=1")
    assert all(leaf.equal(found.params[name]) for name, leaf in alone.params.items())


def test_a_prediction_is_right_among_the_classes_of_all_tasks_so_far():
    """All outputs are biases: class 3, of task 1, has the largest. After task 0 class 1 has it."""
    stream = with_scenario(toy.stream(multi_head=True), "class")
    model = Model(mlp((8,), 2, hidden=()), (8,), stream.heads, multi_head=True, growing=True)
    params = {name: torch.zeros_like(leaf) for name, leaf in model.params.items()}
    for part, values in enumerate(([1.0, 2.0], [0.0, 3.0], [9.0, 9.0])):
        params[model.new_head(part)[1]] = torch.tensor(values)
    tests = {task: stream.tasks[task].test for task in range(3)}
    share = [float((tests[task].targets == target).double().mean()) for task, target in ((0, 1), (1, 3))]
    assert accuracies(model, {0: params}, {0: tests[0]}, 16) == [share[0]]
    assert accuracies(model, {0: params, 1: params}, tests, 16) == [0.0, share[1]]


@pytest.mark.parametrize("replayed", [False, True])
def test_the_masked_loss_is_that_over_the_classes_of_the_samples_task(replayed):
    """Task 1 of three has the classes 2 and 3; a replayed sample of task 0 chooses among all four."""
    model = Model(mlp((8,), 2, hidden=(6,)), (8,), (2, 2, 2), multi_head=True, growing=True)
    fedavg, sgd = ComposedMethod({"strategy": FedAvg()}), optim.build("sgd", 0.0, 0.0)
    step = LocalStep(model, 1, frozenset(), fedavg, sgd, masked=True)
    x, y, task = torch.randn(4, 8), torch.tensor([2, 3, 3, 2]), None
    if replayed:
        y, task = torch.tensor([2, 3, 0, 1]), torch.tensor([1, 1, 0, 0])
    logits = model.logits(model.params, x, 1)
    expected = [
        F.cross_entropy(one[2:], label - 2) if label >= 2 else F.cross_entropy(one, label)
        for one, label in zip(logits, y, strict=True)
    ]
    found = step._among_new(logits, Batch(x, y, torch.ones(4), torch.arange(4), task))
    assert torch.allclose(F.cross_entropy(found, y, reduction="none"), torch.stack(expected))


def assert_engines_agree(method, loss):
    options = (f"class_loss={loss}", "tasks=2")
    plain = run(*options, method=method)
    for engine in ENGINES:
        found = run(*options, *engine, method=method)
        assert all(torch.allclose(leaf, found.params[name], atol=1e-5) for name, leaf in plain.params.items()), engine
        assert list(unlike(plain.metrics, found.metrics, 0.03)) == [], engine  # a test sample of 40 more or less


@pytest.mark.parametrize("method", toy.quick("fot", "glfc", of=METHODS))
def test_engines_agree(method):
    assert_engines_agree(method, "seen")


@pytest.mark.parametrize("method", ["fedavg", "er"])
def test_engines_agree_where_a_new_sample_chooses_among_the_classes_of_its_task(method):
    assert_engines_agree(method, "current")


@pytest.mark.parametrize("method", ["fedavg", "er", "fot"])
def test_a_killed_run_resumes_to_the_same_bytes(method, tmp_path):
    config, stream = toy.config(*CLASS, method=method), toy.stream(multi_head=True)
    cfl.run(config, stream=stream, output=tmp_path / "whole")
    rounds = len((tmp_path / "whole/rounds.jsonl").read_text().splitlines())

    class Dies(toy.NullSink):
        def round(self, row):
            if row["rounds_done"] == rounds - 2:
                raise Killed

    with pytest.raises(Killed):
        cfl.run(config, stream=stream, output=tmp_path / "part", sink=Dies())
    cfl.run(config, stream=stream, output=tmp_path / "part", resume=True)
    assert finished(tmp_path / "part") == finished(tmp_path / "whole")


def test_the_broadcast_grows_with_the_classes(tmp_path):
    """The head of two classes on six features has 2 x 6 + 2 = 14 numbers of 4 bytes for each task so far."""
    per_client = []
    for tasks in (1, 2, 3):
        found = run(f"tasks={tasks}", "rounds=1").metrics["bytes_down"]
        per_client.append(found / 3)  # clients a round
    first, second, third = per_client
    assert (second - first) - first == 14 * 4 and (third - second) - (second - first) == 14 * 4


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_need_the_task_are_refused(method):
    with pytest.raises(ConfigError, match=f"{method} cannot run with scenario=class: {REFUSED[method]}"):
        run(method=method)


@pytest.mark.parametrize("method", ["fot", "gpm"])
def test_parts_that_no_basis_protects_stay_as_they_are(method):
    """After task 0 its part of the head does not move: the run of one task has the same."""
    one, three = run("tasks=1", method=method).params, run(method=method).params
    names = [name for name in one if name.endswith("@0")]
    assert names and all(three[name].equal(one[name]) for name in names)
