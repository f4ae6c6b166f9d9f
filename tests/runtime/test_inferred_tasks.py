"""Test samples whose task a strategy infers: accuracies by brute force, and promises of the hook."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import cfl
from cfl.contract import Strategy
from cfl.core import UpdateError
from cfl.streams import with_scenario
from tests import toy


def run(strategy, *options, **more):
    config = toy.config("tasks=2", *options, method="fedavg")
    return cfl.run(config, stream=more.pop("stream", toy.stream(2)), strategy=strategy, **more)


@dataclass(frozen=True)
class Infers(Strategy):
    """Infers tasks from where the largest input is. Another model serves each task: that at the end of the task."""

    calls: list = field(default_factory=list)

    def init_server(self, params, model):
        return {f"of{task}": params for task in range(3)}

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        return {**new, f"of{info.task}": new["params"]}

    def serve(self, server, task):
        return server[f"of{task}"]

    def infer_task(self, server, x, task, model):
        self.calls.append((task, tuple(x.shape)))
        return inferred(x, task)


def inferred(x, task):
    """Right for most samples of the first class of a task; a matter of chance for those of the second."""
    return x[:, ::2].argmax(dim=1).clamp(max=task)


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_an_inferred_task_decides_model_and_classes_of_each_sample(scenario, tmp_path):
    stream, strategy = with_scenario(toy.stream(3, multi_head=True), scenario), Infers()
    options = ("tasks=3", f"scenario={scenario}", "eval_batch_size=7", "local.lr=0.3")
    found = run(strategy, *options, stream=stream, output=tmp_path / "run")
    servers = dict(toy_servers(stream, options))
    for trained in range(3):
        right = 0
        for tested in range(trained + 1):
            test, correct = stream.tasks[tested].test, 0
            x, y = test.gather(torch.arange(len(test)))
            for sample, label in zip(x, y.tolist(), strict=True):
                own = int(inferred(sample[None], trained))
                logits = found.model.logits(servers[trained][f"of{own}"], sample[None], trained)[0]
                first = 2 * own if scenario == "class" else 0
                correct += first + int(logits[first : first + 2].argmax()) == label
                right += own == tested
            assert found.accuracy_matrix[trained, tested] == pytest.approx(correct / len(test))
        share = right / (40 * (trained + 1))
        assert found.metrics["by_task"][trained]["task_accuracy"] == pytest.approx(share)
        assert share < 1 or trained == 0  # after the first task there is but one to infer
    written = json.loads((tmp_path / "run/metrics.json").read_text())
    assert written["task_accuracy"] == found.metrics["by_task"][-1]["task_accuracy"]


def toy_servers(stream, options):
    """The server's trees at the end of each task, of the same run."""

    @dataclass(frozen=True)
    class Watched(Infers):
        def report(self, server, model):
            ends.append(server)
            return {}

    ends = []
    run(Watched(), *options, stream=stream)
    return enumerate(ends)


def test_where_the_scenario_names_the_task_none_is_inferred():
    strategy = Infers()
    found = run(strategy, stream=toy.stream(2, multi_head=True))
    assert strategy.calls == [] and "task_accuracy" not in found.metrics
    assert np.isfinite(found.accuracy_matrix[1]).all()


def test_an_evaluation_within_a_task_infers_too():
    sink, strategy = toy.Rows(), Infers()
    run(strategy, "scenario=class", "eval_every=1", stream=toy.stream(2, multi_head=True), sink=sink)
    assert all(row["accuracy"] is not None for row in sink.rows)
    # a batch of all tasks so far at the end of each task, and in the other round one of its own
    assert [task for task, _ in strategy.calls] == [0, 0, 1, 1, 1]


def test_a_strategy_that_infers_none_is_evaluated_as_ever():
    class Silent(Strategy):
        def infer_task(self, server, x, task, model):
            return None

    options, stream = ("scenario=class",), toy.stream(2, multi_head=True)
    silent, plain = run(Silent(), *options, stream=stream), run(Strategy(), *options, stream=stream)
    assert silent.metrics["accuracy_matrix"] == plain.metrics["accuracy_matrix"]
    assert "task_accuracy" not in silent.metrics


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x, task: torch.zeros(len(x)), r"a float32 tensor of shape \(40,\); it has to return None, or an int64"),
        (lambda x, task: torch.zeros(len(x), 1, dtype=torch.int64), r"an int64 tensor of shape \(40, 1\); it has to"),
        (lambda x, task: [0] * len(x), "a list of 40; it has to"),
        (lambda x, task: torch.full((len(x),), task + 1), "the task 1, where tasks are 0 to 0; it has to"),
        (lambda x, task: torch.full((len(x),), -1), "the task -1, where tasks are 0 to 0; it has to"),
    ],
)
def test_a_wrong_inference_names_the_hook(wrong, text):
    class Wrong(Strategy):
        def infer_task(self, server, x, task, model):
            return wrong(x, task)

    with pytest.raises((cfl.errors.HookError, UpdateError), match=f"Wrong.infer_task returned {text}"):
        run(Wrong(), "scenario=class", stream=toy.stream(2, multi_head=True))


@pytest.mark.parametrize(("scenario", "told"), [("task", False), ("domain", True), ("class", True)])
def test_a_run_warns_that_parameters_of_the_true_task_predict(scenario, told, recwarn):
    """A strategy that serves what each task ended with, and infers no task, uses the task of a test sample."""

    @dataclass(frozen=True)
    class KeepsTasks(Strategy):
        def init_server(self, params, model):
            return {f"of{task}": params for task in range(model.tasks)}

        def absorb(self, server, mean, info, lr):
            new = super().absorb(server, mean, info, lr)
            return {**new, f"of{info.task}": new["params"]}

        def serve(self, server, task):
            return server[f"of{task}"]

    for strategy, warned in ((KeepsTasks(), told), (Strategy(), False)):
        recwarn.clear()
        cfl.run(toy.config(f"scenario={scenario}"), stream=toy.stream(multi_head=True), strategy=strategy)
        texts = [str(one.message) for one in recwarn]
        assert any("those with the task of each test sample given" in text for text in texts) == warned
