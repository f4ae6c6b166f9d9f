import io
import sys
import time

import pytest
from rich.progress import Progress

import cfl
from cfl.config.schema import RunConfig
from cfl.runtime.sinks import NullSink, PlainSink, RichSink, Sinks, console_sink, task_line, usual_sink
from tests import toy

ROW = {"task": 0, "phase": "train", "round": 0, "clients": 2, "loss": 0.5, "accuracy": None, "lr": 0.1, "seconds": 0.1}


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
    assert task_line({"task": 1, "name": "b", "accuracy": [0.5, 0.25], "validation": [1.0, 0.75]}) == (
        "after task 1 (b): validation accuracy 100.0% 75.0%"
    )
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
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    sink = PlainSink(out)
    sink.start(RunConfig(benchmark="digits"), [], 14)
    for done in (9, 10):  # an earlier session has finished eight
        sink.round({**ROW, "rounds_done": done, "rounds_total": 14})
    assert [line.rpartition(", ")[2] for line in out.getvalue().splitlines()[1:]] == ["0:50 left", "0:40 left"]


def test_the_live_bar_of_a_resumed_run_starts_at_its_round(monkeypatch, capsys):
    jumps, update = [], Progress.update
    watched = lambda bar, *args, **more: (jumps.append(bar.tasks[0].completed), update(bar, *args, **more))  # noqa: E731
    monkeypatch.setattr(Progress, "update", watched)
    sink = RichSink()
    sink.start(RunConfig(benchmark="digits"), [], 100)
    for done in (51, 52):
        sink.round({**ROW, "rounds_done": done, "rounds_total": 100})
    sink.close()
    assert jumps == [50, 51]  # one round at each update, the first included
    assert "52/100" in capsys.readouterr().out


@pytest.mark.parametrize("sink", [PlainSink, RichSink])
def test_warnings_go_to_standard_error(sink, capsys):
    sink().warn("checkpoint damaged")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "warning: checkpoint damaged\n")


def test_the_silent_sink_warns_nevertheless():
    with pytest.warns(UserWarning, match="damaged") as caught:
        NullSink().warn("damaged")
    assert caught[0].filename == __file__  # the warning names the caller


def test_a_run_shows_its_progress_where_somebody_watches(monkeypatch, capsys):
    assert isinstance(usual_sink(None), NullSink)  # captured output is no terminal
    assert isinstance(usual_sink(True), PlainSink) and isinstance(usual_sink(False), NullSink)
    from ipykernel.kernelapp import IPKernelApp

    assert isinstance(usual_sink(None), NullSink)  # an import of ipykernel does not make a notebook
    monkeypatch.setattr(IPKernelApp, "initialized", lambda: True)
    assert isinstance(usual_sink(None), PlainSink)  # a notebook, whose output is no terminal either
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(usual_sink(None), RichSink) and isinstance(usual_sink(False), NullSink)


@pytest.mark.parametrize("held", [0.0, 0.25])
def test_no_test_accuracy_is_shown_while_samples_are_held_out(held, capsys):
    cfl.run(
        toy.config("tasks=1", "rounds=2", "eval_every=1", f"validation={held}"), stream=toy.stream(1), progress=True
    )
    rounds = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  round")]
    assert len(rounds) == 2 and all((", accuracy " in line) == (not held) for line in rounds)


def test_progress_of_a_run_from_python(capsys):
    config = toy.config("rounds=2")
    cfl.run(config, stream=toy.stream(), progress=True)
    shown = capsys.readouterr().out
    assert "round 1/" in shown and "after task 0" in shown
    cfl.run(config, stream=toy.stream())
    assert capsys.readouterr().out == ""
    with pytest.raises(cfl.errors.ConfigError, match="progress is for runs without a sink"):
        cfl.run(config, stream=toy.stream(), progress=False, sink=PlainSink())


def test_the_console_decides(capsys):
    assert isinstance(console_sink(True), NullSink)
    assert isinstance(console_sink(False), PlainSink)  # captured output is not a terminal


class Rows(list, NullSink):
    """A sink that is a list, and so false until the first round."""

    def round(self, row):
        self.append(row)


def test_a_sink_may_be_an_empty_list():
    rows = Rows()
    cfl.run(toy.config("tasks=1", "rounds=2"), stream=toy.stream(1), sink=rows)
    assert [row["round"] for row in rows] == [0, 1]


def test_all_sinks_are_closed_after_one_that_fails():
    closed = []

    class Fails(NullSink):
        def close(self):
            closed.append("first")
            raise OSError("no space left")

    class Last(NullSink):
        def close(self):
            closed.append("last")

    with pytest.raises(OSError, match="no space left"):
        Sinks(Fails(), Last()).close()
    assert closed == ["first", "last"]
