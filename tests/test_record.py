import errno
import io
import json
import math
import os

import numpy as np
import pytest

from cfl.config import RunConfig
from cfl.config.overrides import read_yaml
from cfl.errors import ConfigError
from cfl.record import NullSink, PlainSink, RichSink, RunFolder, console_sink

ROW = {"task": 0, "phase": "train", "round": 0, "clients": 2, "loss": 0.5, "accuracy": None, "lr": 0.1, "seconds": 0.1}


def test_metrics_are_whole_ordered_and_free_of_nan(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    folder.write_metrics({"fgt": math.nan, "acc": np.float64(0.5), "accuracy_matrix": [(0.1, float("inf"))]})
    text = (folder.path / "metrics.json").read_text()
    assert json.loads(text) == {"fgt": None, "acc": 0.5, "accuracy_matrix": [[0.1, None]]}
    assert text.index("fgt") < text.index("acc")  # the order given, not the alphabet's
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "checkpoints", "metrics.json"]


def test_configuration_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"local": {"weight_decay": 1e-05}, "rounds": (3, 1)})
    assert read_yaml(tmp_path / "config.yaml") == {"local": {"weight_decay": 1e-05}, "rounds": [3, 1]}


def test_no_line_twice_after_a_kill(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(3):
        folder.append_round({"round": number})
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')  # torn by a kill
    folder.close()
    again = RunFolder(tmp_path, resume=True)
    again.truncate_rounds(2)
    again.append_round({"round": 2})
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]
    with pytest.raises(ConfigError, match="has 3 whole lines, 4 were expected"):
        again.truncate_rounds(4)


@pytest.mark.parametrize("name", ["rounds.jsonl", "metrics.json"])
def test_a_folder_that_holds_a_run_is_kept(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds a run already; use --resume or another --output"):
        RunFolder(tmp_path)
    assert RunFolder(tmp_path, resume=True).checkpoints.is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()  # not by permissions: the superuser has them all
    with pytest.raises(ConfigError, match="file/run' cannot be written .*another --output"):
        RunFolder(tmp_path / "file" / "run")


def test_plain_lines_show_twenty_rounds_and_every_task():
    out = io.StringIO()
    sink = PlainSink(out)
    sink.start(RunConfig(benchmark="digits", regularizers=("fedprox",)), ["biases are free"], 100)
    for done in range(1, 101):
        sink.round({**ROW, "rounds_done": done, "rounds_total": 100})
    sink.task({"task": 0, "name": "first", "accuracy": [0.5, None]})
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["digits, fedprox, seed 0: 100 rounds", "note: biases are free"]
    assert sum(line.startswith("  round") for line in lines) == 20  # every fifth of 100
    assert lines[-1] == "after task 0 (first): accuracy 50.0%"
    assert "loss 0.500" in lines[2] and "left" in lines[2] and "left" not in lines[-2]


def test_the_live_bar_shows_task_loss_and_accuracy(capsys):
    sink = RichSink()
    sink.start(RunConfig(benchmark="digits"), ["covers all"], 1)
    sink.round({**ROW, "accuracy": 0.25, "rounds_done": 1, "rounds_total": 1})
    sink.task({"task": 0, "name": "first", "accuracy": [0.25]})
    sink.finish({})
    sink.close()
    shown = capsys.readouterr().out
    assert "note: covers all" in shown and "after task 0 (first): accuracy 25.0%" in shown and "1/1" in shown


def test_the_time_left_counts_this_sessions_rounds(monkeypatch):
    clock = iter([100.0, 110.0, 120.0])  # start, and ten seconds a round
    monkeypatch.setattr("cfl.record.time.monotonic", lambda: next(clock))
    out = io.StringIO()
    sink = PlainSink(out)
    sink.start(RunConfig(benchmark="digits"), [], 14)
    for done in (9, 10):  # eight were done before
        sink.round({**ROW, "rounds_done": done, "rounds_total": 14})
    assert [line.rpartition(", ")[2] for line in out.getvalue().splitlines()[1:]] == ["0:50 left", "0:40 left"]


def test_the_live_bar_of_a_resumed_run_starts_at_its_place():
    sink = RichSink()
    sink.start(RunConfig(benchmark="digits"), [], 100)
    jumps = []
    advance = sink._bar.update
    sink._bar.update = lambda *args, **kwargs: (jumps.append(sink._bar.tasks[0].completed), advance(*args, **kwargs))
    for done in (51, 52):
        sink.round({**ROW, "rounds_done": done, "rounds_total": 100})
    sink.close()
    assert jumps == [50, 51] and sink._bar.tasks[0].completed == 52  # one round at each update, the first included


@pytest.mark.parametrize("sink", [PlainSink, RichSink])
def test_warnings_go_to_standard_error(sink, capsys):
    sink().warn("checkpoint damaged")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "warning: checkpoint damaged\n")


def test_the_silent_sink_warns_nevertheless():
    with pytest.warns(UserWarning, match="damaged") as caught:
        NullSink().warn("damaged")
    assert caught[0].filename == __file__  # the caller is named


def test_a_round_that_cannot_be_written_names_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "rounds.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"rounds\.jsonl' cannot be written .*another --output"):
        folder.append_round({"round": 0})


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_metrics({"acc": 0.5})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"metrics\.json' cannot be written \(No space left on device\)"):
        folder.write_metrics({"acc": 1.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints", "metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"acc": 0.5}


def test_the_console_decides(capsys):
    assert isinstance(console_sink(True), NullSink)
    assert isinstance(console_sink(False), PlainSink)  # a captured output is no terminal
