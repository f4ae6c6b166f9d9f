import json

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cfl
from cfl import cli
from cfl.runtime.sinks import NullSink, Sinks
from cfl.runtime.tensorboard import TensorBoardSink
from tests.report.conftest import SMALL

ROUNDS = ["tasks=2", "rounds=2", *SMALL[2:]]


def events(folder):
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return read, {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


class Stop(NullSink):
    """Ends a run after some rounds, as a kill does."""

    def __init__(self, after):
        self.after = after

    def round(self, row):
        if row["rounds_done"] == self.after:
            raise RuntimeError("killed")


def test_the_events_are_the_rounds_and_the_results(tmp_path):
    setup = [word for text in ROUNDS for word in ("--set", text)]
    args = ["train", "permuted-digits", "--method", "fot", *setup, "--quiet", "--no-plot"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*args, "--tensorboard", "--output", str(tmp_path)])
    assert stop.value.code == 0
    read, found = events(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for tag, values in found.items():
        name, _, phase = tag.partition("/")
        if name in ("loss", "accuracy", "bytes_up", "bytes_down"):
            own = [(n, row[name]) for n, row in enumerate(rows, 1) if row[name] is not None]
            expected = [(n, value) for n, value in own if phase in ("", rows[n - 1]["phase"])]
        elif name == "task":
            ends = [n for n, row in enumerate(rows, 1) if n == len(rows) or rows[n]["task"] > row["task"]]
            column = [line[int(phase)] for line in metrics["accuracy_matrix"]]
            expected = [(end, value) for end, value in zip(ends, column, strict=True) if value is not None]
        else:
            expected = [(len(rows), metrics[(phase or name).lower()])]
        assert [step for step, _ in values] == [step for step, _ in expected]
        np.testing.assert_allclose([v for _, v in values], [v for _, v in expected], rtol=1e-6)  # stored as float32
    phases = {f"{name}/{row['phase']}" for name in ("bytes_up", "bytes_down") for row in rows}
    totals = {"total/bytes_up", "total/bytes_down"}
    assert set(found) == {"loss", "accuracy", "task/0", "task/1", "ACC", "FGT", *totals, *phases}
    text = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(text.strip("`")) == yaml.safe_load((tmp_path / "config.yaml").read_text())


def test_a_resumed_run_continues_at_its_round_and_hides_repeated_rounds(tmp_path):
    config = cfl.resolve("permuted-digits", overrides=[*ROUNDS, "checkpoint_every=2"])
    sink = TensorBoardSink(tmp_path / "tensorboard")
    with pytest.raises(RuntimeError, match="killed"):  # after three rounds, two of them in a checkpoint
        cfl.run(config, output=tmp_path, sink=Sinks(sink, Stop(3)))
    sink.close()
    assert [step for step, _ in events(tmp_path)[1]["loss"]] == [1, 2, 3]
    sink = TensorBoardSink(tmp_path / "tensorboard")
    cfl.run(config, output=tmp_path, resume=True, sink=sink)
    sink.close()
    assert [step for step, _ in events(tmp_path)[1]["loss"]] == [1, 2, 3, 4]


class Seen(cfl.Callback):
    """Counts the tasks."""

    def on_task(self, view):
        return {"tasks": view.task + 1}


def test_metrics_at_the_end_of_a_task_are_events_of_its_last_round(tmp_path):
    """Two rounds of each task."""
    sink = TensorBoardSink(tmp_path / "tensorboard")
    cfl.run(cfl.resolve("permuted-digits", method="fedavg", overrides=ROUNDS), sink=sink, callbacks=[Seen()])
    sink.close()
    assert events(tmp_path)[1]["Seen/tasks"] == [(2, 1.0), (4, 2.0)]


def test_a_run_that_resumes_after_its_last_round_hides_no_round(tmp_path):
    config = cfl.resolve("permuted-digits", overrides=ROUNDS)
    for resume in (False, True):
        sink = TensorBoardSink(tmp_path / "tensorboard")
        cfl.run(config, output=tmp_path, resume=resume, sink=sink)
        sink.close()
    found = events(tmp_path)[1]
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["task/1"]] == [4]


def test_several_sinks_get_the_same_calls():
    class Log(NullSink):
        def __init__(self):
            self.told = []

        def __getattribute__(self, name):
            if name in ("told", "__class__"):
                return object.__getattribute__(self, name)
            return lambda *args: self.told.append((name, *args))

    logs = Log(), Log()
    sinks = Sinks(*logs)
    config = cfl.resolve("permuted-digits")
    told = [("start", config, ["note"], 3), ("round", {"loss": 1}), ("task", {"task": 0}), ("note", "a"), ("warn", "b")]
    told += [("finish", {"acc": 1}), ("close",)]
    for name, *args in told:
        getattr(sinks, name)(*args)
    assert logs[0].told == logs[1].told == told
