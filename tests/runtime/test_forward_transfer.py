"""`eval_later`: accuracies on the tasks to come, against predictions of the same models, and what they leave alone."""

import math

import pytest
import torch
from rich.console import Console

import cfl
from cfl.core import CheckpointError, ConfigError
from cfl.core.metrics import percent
from cfl.report import tables
from tests import toy
from tests.runtime.test_resume import finished, killed

LATER = "eval_later=true"


def run(*options, stream=None, method="fot", **more):
    return cfl.run(toy.config(*options, method=method), stream=stream or toy.stream(multi_head=False), **more)


class Models(cfl.Callback):
    """Keeps the global model after each task, and may end the run after the first."""

    def __init__(self, ends: bool = False) -> None:
        self.kept, self.ends = [], ends

    def on_task(self, view):
        self.kept.append(view.params)

    def stop(self, rows):
        return "run" if self.ends else None


@pytest.mark.parametrize("method", ["fot", "gpm", "ewc", "rgo", "target"])
def test_accuracies_are_those_of_the_models_before_the_task(method):
    stream, models, long = toy.stream(multi_head=False), Models(), ("local.lr=0.3", "local.epochs=5", "rounds=3")
    result = run(LATER, *long, stream=stream, method=method, callbacks=[models])

    def accuracies(params):
        tests = [task.test.gather(torch.arange(len(task.test))) for task in stream.tasks]
        with torch.no_grad():
            return [float((result.model.predict(params, x, 0).argmax(1) == y).double().mean()) for x, y in tests]

    before, *after = [accuracies(params) for params in (result.model.params, *models.kept)]
    assert result.metrics["accuracy_matrix"] == after and result.metrics["initial_accuracy"] == before
    assert len({before[2], after[0][2], after[1][2], after[2][2]}) > 2  # what is compared is not one number
    assert result.metrics["fwt"] == pytest.approx((after[0][1] - before[1] + after[1][2] - before[2]) / 2)


def test_all_else_is_as_without():
    with_later, without = run(LATER).metrics, run().metrics
    assert set(with_later) - set(without) == {"fwt", "initial_accuracy"}
    same = [name for name in without if "seconds" not in name and name != "accuracy_matrix"]
    assert [with_later[name] for name in same] == [without[name] for name in same]
    for task, (long, short) in enumerate(zip(with_later["accuracy_matrix"], without["accuracy_matrix"], strict=True)):
        assert long[: task + 1] == short[: task + 1] and None not in long


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_killed_run_ends_with_the_same_bytes(at, tmp_path, monkeypatch):
    run(LATER, output=tmp_path / "whole")
    with killed(monkeypatch, at, "after"):
        run(LATER, output=tmp_path / "parts")
    run(LATER, output=tmp_path / "parts", resume=True)
    assert finished(tmp_path / "parts") == finished(tmp_path / "whole")


def test_a_run_that_ends_early_has_no_transfer():
    metrics = run(LATER, callbacks=[Models(ends=True)]).metrics
    assert metrics["fwt"] is None
    assert None not in metrics["accuracy_matrix"][0]


def test_a_single_task_has_no_transfer():
    assert run(LATER, "tasks=1").metrics["fwt"] is None


def test_bounds_are_not_evaluated_and_a_note_says_so(capsys):
    metrics = run(LATER, method="joint", progress=True).metrics
    assert "fwt" not in metrics and metrics["accuracy_matrix"][0][1] is None
    assert "eval_later=true has no effect: joint does not train one model" in capsys.readouterr().out


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_heads_of_tasks_are_refused(scenario):
    with pytest.raises(ConfigError, match=f"with scenario={scenario} the model has no trained outputs"):
        run(LATER, f"scenario={scenario}", stream=toy.stream())


def test_statistics_of_tasks_are_refused():
    network = torch.nn.Sequential(torch.nn.Linear(toy.DIMENSIONS, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    with pytest.raises(ConfigError, match="the model has no statistics of them"):
        run(LATER, "model.norm_stats=per_task", model=network)
    assert math.isfinite(run(LATER, "model.norm_stats=running", model=network).metrics["fwt"])


def test_later_tasks_cannot_be_added(tmp_path):
    run(LATER, "tasks=2", output=tmp_path)
    with pytest.raises(CheckpointError, match="eval_later=true evaluates all tasks from the first one on"):
        run(LATER, output=tmp_path, resume=True)


def test_tables_show_it(tmp_path):
    metrics, console = run(LATER).metrics, Console(width=200, record=True)
    for part in tables.run(metrics, "toy", tmp_path):
        console.print(part)
    assert f"FWT {percent(metrics['fwt'])}%" in console.export_text()
    titles, rows = tables.compared_texts({"fot": tables.summary([metrics])})
    assert dict(zip(titles, rows[0], strict=True))["FWT %"] == percent(metrics["fwt"])
