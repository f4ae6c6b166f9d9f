"""The error that ends a run stays in the run's folder until the run goes on."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

import cfl
from cfl.core import CheckpointError, ConfigError, UpdateError
from cfl.runtime.run_folder import RunFolder
from cfl.runtime.sinks import NullSink
from tests import toy


@dataclass(frozen=True)
class Fails(cfl.Strategy):
    """Raises an error in the server's step of a round, or in the report at the end of a task."""

    task: int = -1
    round: int = -1
    reports: bool = False

    def absorb(self, server, mean, info, lr):
        if (info.task, info.round) == (self.task, self.round):
            raise ValueError("two\nlines")
        return super().absorb(server, mean, info, lr)

    def report(self, server, model):
        if self.reports:
            raise OSError(28, "the disk is full")
        return {}


class Raises(NullSink):
    """Raises an error after so many rounds, or at the end."""

    def __init__(self, error, after=None):
        self.error, self.after = error, after

    def round(self, row):
        if row["rounds_done"] == self.after:
            raise self.error

    def finish(self, metrics):
        if self.after is None:
            raise self.error


def run(folder, strategy, sink=None, resume=False, **more):
    config = toy.config("tasks=2", "rounds=2", method="fedavg", **more)
    return cfl.run(config, stream=toy.stream(2), strategy=strategy, output=folder, sink=sink, resume=resume)


def error(folder):
    return json.loads((folder / "error.json").read_text())


def test_an_error_is_kept_with_its_place(tmp_path):
    with pytest.raises(UpdateError, match="the server's step failed"):
        run(tmp_path, Fails(task=1, round=0))
    found = error(tmp_path)
    assert (found["error"], found["task"], found["phase"], found["round"]) == ("UpdateError", 1, "train", 0)
    assert "two lines" in found["message"] and "\n" not in found["message"]
    assert datetime.fromisoformat(found["date"]).utcoffset() == timedelta(0)
    assert not (tmp_path / "metrics.json").exists()


def test_the_error_is_removed_when_the_run_goes_on(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, Fails(), sink=Raises(RuntimeError("no more paper"), after=3))
    assert [error(tmp_path)[name] for name in ("task", "phase", "round")] == [1, "train", 0]
    run(tmp_path, Fails(), resume=True)
    assert not (tmp_path / "error.json").exists() and (tmp_path / "metrics.json").exists()


def test_the_place_is_that_of_the_round_whose_task_ends(tmp_path):
    with pytest.raises(Exception, match="the disk is full"):
        run(tmp_path, Fails(reports=True))
    assert [error(tmp_path)[name] for name in ("task", "phase", "round")] == [0, "train", 1]


def test_an_error_after_the_last_round_has_no_place(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, Fails(), sink=Raises(RuntimeError("no more paper")))
    found = error(tmp_path)
    assert found.pop("date")
    assert found == {"error": "RuntimeError", "message": "no more paper", "task": None, "phase": None, "round": None}


def test_an_interrupt_is_no_failure(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Fails(), sink=Raises(KeyboardInterrupt(), after=1))
    assert not (tmp_path / "error.json").exists()


def test_a_wrong_resume_is_no_failure_of_the_run_in_the_folder(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Fails(), sink=Raises(KeyboardInterrupt(), after=2))
    with pytest.raises(CheckpointError):
        run(tmp_path, Fails(), resume=True, seed=1)
    assert not (tmp_path / "error.json").exists()


def test_an_error_that_cannot_be_written_does_not_hide_that_of_the_run(tmp_path, monkeypatch):
    def full(folder, name, data, write=RunFolder.write):
        if name == "error.json":
            raise ConfigError("the disk is full")
        write(folder, name, data)

    monkeypatch.setattr(RunFolder, "write", full)
    with (
        pytest.warns(UserWarning, match="the disk is full"),
        pytest.raises(UpdateError, match="the server's step failed"),
    ):
        run(tmp_path, Fails(task=0, round=0))
