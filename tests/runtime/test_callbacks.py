"""Callbacks: their figures are recorded, observers change nothing, and decisions survive a kill."""

import json
from dataclasses import dataclass

import pytest
import torch
from cfl.callbacks import EarlyStopping

import cfl
from cfl.assembly import methods
from cfl.core import CallbackError, CheckpointError, ConfigError
from cfl.runtime.builder import Place, build_session
from cfl.runtime.callback_set import CallbackSet
from tests import toy
from tests.runtime.test_resume import OPTIONS, Stop, finished, killed


def run(*callbacks, options=(), method="fedavg", **more):
    return cfl.run(toy.config(*OPTIONS, *options, method=method), stream=toy.stream(), callbacks=callbacks, **more)


def rows(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


class Probe(cfl.Callback):
    """Uses all of a view, and writes to what it gets."""

    def on_round(self, view):
        norm = toy.flat(view.params).norm()
        for leaf in view.params.values():
            leaf.zero_()
        x, y = view.samples(view.task)
        right = (view.logits(x) == view.logits(x).amax(1, keepdim=True))[torch.arange(len(y)), y].double().mean()
        x.zero_(), y.zero_(), torch.rand(3), torch.manual_seed(view.round)
        return {"norm": norm, "accuracy": right, "first": view.accuracy(0)}

    def on_task(self, view):
        return {"rounds": len(view.rows), "accuracy": view.accuracy(view.task)}

    def on_end(self, view):
        return {"ACC": sum(view.accuracy(task) for task in range(3)) / 3}


@dataclass(frozen=True)
class At(cfl.Callback):
    """Stops after the first round of a task, in phase train."""

    task: int = 0
    what: str = "phase"

    def stop(self, rows):
        last = rows[-1]
        return self.what if (last["task"], last["phase"], last["round"]) == (self.task, "train", 0) else None


@pytest.mark.parametrize(
    "engine",
    [
        ("engine=loop",),
        ("engine=vmapped", "block=2"),
        pytest.param(("engine=pool", "workers=1"), marks=pytest.mark.slow),
    ],
)
def test_an_observer_changes_no_bit_under_any_engine(engine, tmp_path):
    plain = run(options=engine, method="fot", output=tmp_path / "plain")
    seen = run(Probe(), options=engine, method="fot", output=tmp_path / "seen")
    assert all(leaf.equal(seen.params[name]) for name, leaf in plain.params.items())
    metrics, lines = seen.metrics, rows(tmp_path / "seen")
    for line in lines:
        del line["callbacks"]
    assert [{**line, "seconds": 0} for line in lines] == [{**line, "seconds": 0} for line in rows(tmp_path / "plain")]
    own = [report.pop("callbacks") for report in metrics["by_task"]]
    assert metrics.pop("callbacks") == {"Probe": {"ACC": pytest.approx(metrics["acc"])}}
    assert {**metrics, "seconds": 0} == {**plain.metrics, "seconds": 0}
    diagonal = [row[task] for task, row in enumerate(metrics["accuracy_matrix"])]
    # two training rounds, then gpse and coverage in all tasks but the last
    assert own == [{"Probe": {"rounds": n, "accuracy": value}} for n, value in zip([4, 4, 2], diagonal, strict=True)]


def test_figures_of_a_view_are_those_of_the_run(tmp_path):
    result = run(Probe(), options=["eval_every=1"], output=tmp_path)
    last = rows(tmp_path)[-1]
    assert last["callbacks"]["Probe"]["norm"] == pytest.approx(float(toy.flat(result.params).norm()))
    assert last["callbacks"]["Probe"]["first"] == result.accuracy_matrix[2, 0]
    for row in rows(tmp_path):
        assert row["callbacks"]["Probe"]["accuracy"] == pytest.approx(row["accuracy"])


@pytest.mark.parametrize("scenario", ["class", "task"])
def test_accuracy_is_that_of_the_matrix_in_every_scenario(scenario):
    found = []

    class Asks(cfl.Callback):
        def on_task(self, view):
            found.append([view.accuracy(task) for task in range(view.task + 1)])
            if scenario == "task":
                view.logits(view.samples(0)[0])

    more = {"stream": toy.stream(multi_head=scenario == "task"), "callbacks": [Asks()]}
    config = toy.config(f"scenario={scenario}", method="fedavg")
    if scenario == "task":
        with pytest.raises(CallbackError, match="a head for each task; pass task=0 to 0"):
            cfl.run(config, **more)
        return
    matrix = cfl.run(config, **more).accuracy_matrix
    assert found == [matrix[task, : task + 1].tolist() for task in range(3)]


def series(*values, name="accuracy"):
    return [{"phase": "train", name: value} for value in values]


@pytest.mark.parametrize(
    ("stopper", "values", "stops_at"),
    [
        (EarlyStopping(patience=2), [0.5, 0.6, 0.6, 0.5, 0.9], 3),  # two values that do not exceed 0.6
        (EarlyStopping(patience=2), [0.5, 0.4, 0.6, 0.5, 0.7], None),
        (EarlyStopping(patience=2, min_delta=0.25), [0.5, 0.6, 0.7, 0.9], 2),  # 0.7 exceeds 0.5 by 0.2
        (EarlyStopping(patience=1), [None, 0.5, None, None, 0.5], 4),  # patience counts recorded values
        (EarlyStopping("loss", patience=1), [2.0, 1.0, 1.5], 2),
        (EarlyStopping("A.b", patience=1, mode="min"), [2.0, 3.0], 1),
    ],
)
def test_early_stopping_decides_as_by_hand(stopper, values, stops_at):
    given = series(*values, name=stopper.metric)
    if stopper.metric == "A.b":
        given = [{"phase": "train", "callbacks": {"A": {"b": value}}} for value in values]
    decisions = [stopper.stop(given[: n + 1]) for n in range(len(given))]
    assert decisions.index("phase") == stops_at if stops_at is not None else not any(decisions)


@pytest.mark.parametrize("callbacks", [{"A": {"b.c": 0.5}}, {"A.b": {"c": 0.5}}, {"A": {"x": 0.1}, "A.b": {"c": 0.5}}])
def test_names_of_callbacks_and_metrics_may_have_dots(callbacks):
    stopper = EarlyStopping("A.b.c", patience=1, mode="max")
    rows = [{"phase": "train", "callbacks": callbacks}] * 2
    assert [stopper.stop(rows[:1]), stopper.stop(rows)] == [None, "phase"]


def test_a_stopped_phase_is_the_run_that_was_planned_so(tmp_path):
    stopped = run(At(0), output=tmp_path)
    planned = run(options=["rounds=[1,2,2]"])
    assert all(leaf.equal(planned.params[name]) for name, leaf in stopped.params.items())
    assert stopped.metrics.pop("stopped") == [
        {"task": 0, "phase": "train", "round": 0, "callback": "At", "skips": "phase", "rounds": 1}
    ]
    assert {**stopped.metrics, "seconds": 0} == {**planned.metrics, "seconds": 0}
    assert [(row["task"], row["round"]) for row in rows(tmp_path)] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert rows(tmp_path)[0]["stopped"] == {"callback": "At", "skips": "phase", "rounds": 1}
    assert rows(tmp_path)[0]["accuracy"] == stopped.accuracy_matrix[0, 0]


def test_the_note_of_a_stop_has_no_number_beside_those_of_the_progress(capsys):
    """The progress counts the rounds of the run from 1, rounds.jsonl those of a phase from 0."""
    run(At(1), progress=True)  # of three tasks of two rounds each
    assert "note: At ends phase train of task 1, 1 round early\n" in capsys.readouterr().out
    run(At(1, "run"), progress=True)
    assert "note: At ends the run, 3 rounds early\n" in capsys.readouterr().out


def test_the_other_phases_of_a_task_follow(tmp_path):
    run(At(1), method="fot", output=tmp_path)
    names = [row["phase"] for row in rows(tmp_path) if row["task"] == 1]
    assert names == ["train", "gpse", "coverage"]


def test_a_stopped_run_has_no_acc_and_the_accuracies_so_far(tmp_path):
    told = toy.Rows()
    result = run(At(1, "run"), method="fot", output=tmp_path, sink=told)
    assert [row["task"] for row in rows(tmp_path)] == [0] * 4 + [1] * 3
    assert told.rows[-1]["rounds_done"] == told.rows[-1]["rounds_total"] == 7
    known = json.loads((tmp_path / "metrics.json").read_text())
    assert known["acc"] is None and known["fgt"] is None and len(known["by_task"]) == 2
    assert [[value is not None for value in row] for row in known["accuracy_matrix"]] == [
        [True, False, False], [True, True, False], [False] * 3
    ]  # fmt: skip
    assert repr(result).endswith("ACC – % FGT – %)")
    assert [(stop["skips"], stop["rounds"]) for stop in known["stopped"]] == [("run", 3)]  # one of train, and task 2
    saved = cfl.load(tmp_path)
    assert saved.latest == 1 and all(leaf.equal(saved.params[name]) for name, leaf in result.params.items())
    before = finished(tmp_path)
    run(At(1, "run"), method="fot", output=tmp_path, resume=True)
    assert finished(tmp_path) == before


def test_early_stopping_judges_each_phase_by_its_own_rounds():
    """The second phase begins below the first one's best value, and rises."""
    rows = [*series(0.5, 0.9), *({**row, "phase": "again"} for row in series(0.6, 0.7, 0.7))]
    decisions = [EarlyStopping(patience=1).stop(rows[: n + 1]) for n in range(len(rows))]
    assert decisions == [None, None, None, None, "phase"]


class Also(At):
    """Another one that stops."""


@pytest.mark.parametrize(
    ("callbacks", "found"), [([At(), Also()], ("At", "phase")), ([At(), Also(0, "run")], ("Also", "run"))]
)
def test_of_several_that_stop_one_that_ends_the_run_decides_or_else_the_first(callbacks, found):
    (stop,) = run(*callbacks).metrics["stopped"]
    assert (stop["callback"], stop["skips"]) == found


class Ends(cfl.Callback):
    """Ends the run after every round."""

    def stop(self, rows):
        return "run"


def test_a_decision_that_skips_no_further_round_is_not_recorded():
    """After the first round gpse and coverage follow; skipped are one round of training, four of task 1, two of 2."""
    (stop,) = run(Ends(), method="fot").metrics["stopped"]
    assert (stop["phase"], stop["round"], stop["rounds"]) == ("train", 0, 1 + 4 + 2)


class Length(cfl.Callback):
    """Number of rounds of the task so far."""

    def on_round(self, view):
        return {"rounds": len(view.rows)}


STOPPERS = (Length(), Probe(), EarlyStopping("Length.rounds", mode="min", patience=1))  # after two rounds
SIX = ("rounds=4", "checkpoint_every=2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    result = run(*STOPPERS, options=SIX, method="fot", output=folder)
    return finished(folder), result


def test_the_reference_stops_each_task_early(reference):
    assert [stop["task"] for stop in reference[1].metrics["stopped"]] == [0, 1, 2]


@pytest.mark.parametrize("after", toy.quick(1, 4, 9, of=range(1, 10)))
def test_killed_in_every_round_a_run_with_decisions_ends_with_the_same_bytes(after, reference, tmp_path):
    assert reference[0][1].count("\n") == 10  # two rounds of training a task, and twice gpse and coverage
    with pytest.raises(BaseException) as death:
        run(*STOPPERS, options=SIX, method="fot", output=tmp_path, sink=Stop(after))
    assert type(death.value).__name__ == "Killed"
    result = run(*STOPPERS, options=SIX, method="fot", output=tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]
    assert all(leaf.equal(result.params[name]) for name, leaf in reference[1].params.items())


def test_killed_at_the_checkpoint_of_a_decision(tmp_path, monkeypatch):
    whole = run(At(0), output=tmp_path / "whole")
    for when in ("before it is written", "after it"):  # the decision moves the run from place 0 to place 2
        with killed(monkeypatch, 2, when):
            run(At(0), output=tmp_path / when)
        assert run(At(0), output=tmp_path / when, resume=True).metrics["acc"] == whole.metrics["acc"]
        assert finished(tmp_path / when) == finished(tmp_path / "whole")


def test_a_run_resumes_with_the_decisions_that_it_began_with(tmp_path):
    with pytest.raises(BaseException, match="^$"):
        run(At(0), Length(), output=tmp_path, sink=Stop(2))
    for others in ([At(1), Length()], [], [At(0)]):
        with pytest.raises(CheckpointError, match="depend on callbacks, and '(At|Length)' is new, missing or changed"):
            run(*others, output=tmp_path, resume=True)
    run(At(0), Length(), output=tmp_path, resume=True)
    run(output=tmp_path, resume=True)  # the run is over: no later round depends on a callback


def test_a_refused_callback_opens_no_engine():
    class Refuses(cfl.Callback):
        def check(self, config):
            raise ConfigError("not for this run")

    config, opened = toy.config(method="fedavg"), []
    with pytest.raises(ConfigError, match="not for this run"):
        build_session(
            config, toy.stream(), methods.build(config), place=Place(engine=opened.append), callbacks=[Refuses()]
        )
    assert not opened


def test_observers_may_come_and_go(tmp_path):
    with pytest.raises(BaseException, match="^$"):
        run(Length(), output=tmp_path, sink=Stop(2))
    run(Probe(), output=tmp_path, resume=True)
    assert [list(row["callbacks"]) for row in rows(tmp_path)] == [["Length"]] + [
        ["Probe"]
    ] * 5  # the killed round again


@pytest.mark.parametrize("method", ["on_round", "on_task", "on_end", "stop"])
def test_a_callback_that_fails_loses_nothing(method, tmp_path):
    class Drift(cfl.Callback):
        def on_round(self, view):
            return {"norm": toy.flat(view.params).norm()}

        def stop(self, rows):
            return "phase" if (rows[-1]["task"], rows[-1]["phase"]) == (1, "train") else None

    def fails(self, given):
        at = given[-1] if method == "stop" else given.row
        if (at["task"], at["round"]) == (2 if method == "on_end" else 1, 1 if method == "on_end" else 0):
            raise KeyError("mine")
        return original(self, given) if method != "on_end" else None

    options = ("checkpoint_every=100",)
    run(Drift(), options=options, output=tmp_path / "whole")
    original = getattr(Drift, method)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Drift, method, fails)
        text = f"callback 'Drift' failed in {method} .task ., phase train, round .*: KeyError: 'mine'; .*resume"
        with pytest.raises(CallbackError, match=text) as error:
            run(Drift(), options=options, output=tmp_path / "failed")
        assert "\n" not in str(error.value)
    before = (tmp_path / "failed" / "rounds.jsonl").read_text()
    trained = []
    run(
        Drift(), options=options, output=tmp_path / "failed", resume=True, observe=lambda info, *_: trained.append(info)
    )
    whole = (tmp_path / "whole" / "rounds.jsonl").read_text().count("\n")
    computed = {(info.task, info.round) for info in trained}
    assert len(computed) == whole - before.count("\n") - (
        method != "on_end"
    )  # the round of the failure is not repeated
    assert finished(tmp_path / "failed") == finished(tmp_path / "whole")


@pytest.mark.parametrize("level", ["client", "example"])
def test_epsilon_is_that_of_the_plan_and_that_of_the_rounds_run_stands_beside_it(level):
    class Sees(At):
        def stop(self, rows):
            assert all("loss" not in row and "accuracy" in row for row in rows)
            return super().stop(rows)

    private = [
        f"dp.level={level}",
        "dp.noise_multiplier=1",
        "dp.accountant=rdp",
        "agg.weights=uniform",
        "sampling=poisson",
    ]
    more = {"stream": toy.stream(1)}

    def metrics(rounds, *callbacks):
        config = toy.config(*private, f"rounds={rounds}", method="fedavg")
        return cfl.run(config, callbacks=callbacks, **more).metrics

    stopped, planned, short = metrics(3, Sees()), metrics(3), metrics(1)
    assert stopped["epsilon"] == planned["epsilon"] and stopped["epsilon_by_client"] == planned["epsilon_by_client"]
    assert stopped["epsilon_without_skipped"] == short["epsilon"] < planned["epsilon"]
    assert "epsilon_without_skipped" not in planned


class Wrong(cfl.Callback):
    def __init__(self, result, hook="on_round"):
        self.result = result
        self.hook = hook

    def on_round(self, view):
        if callable(self.result):
            return self.result(view)
        return self.result if self.hook == "on_round" else None

    def stop(self, rows):
        return self.result if self.hook == "stop" else None


def written(view):
    view.row["loss"] = 0


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            Wrong("phase"),
            "on_round of callback 'Wrong' must return a mapping from names to numbers, or None, not 'phase'",
        ),
        (Wrong({"a": 1, "b": "x"}), "not {'a': 1 and 'b': 'x'}"),
        (Wrong({1: 1}), "mapping from names to numbers"),
        (Wrong({"a": torch.ones(2)}), "not {'a': an object of type Tensor and dtype torch.float32}"),
        (Wrong("task", "stop"), "stop of callback 'Wrong' must return 'phase', 'run' or None, not 'task'"),
        (Wrong(written), "failed in on_round .task 0, phase train, round 0.: 'mappingproxy' object does not support"),
        (Wrong(lambda view: view.accuracy(1)), "task is 1; the run has tasks 0 to 0 so far"),
    ],
)
def test_what_a_callback_must_not_do_is_named(callback, message):
    with pytest.raises(CallbackError, match=message) as error:
        run(callback)
    assert "\n" not in str(error.value) and "(task 0, phase train, round 0)" in str(error.value)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: [Probe(), Probe()], (), "two callbacks have the name 'Probe'"),
        (lambda: [EarlyStopping()], (), "eval_every=0 records it once a task; set eval_every"),
        (lambda: [EarlyStopping("acuracy")], (), "unknown metric of EarlyStopping 'acuracy'; did you mean 'accuracy'"),
        (lambda: [EarlyStopping("A.b")], (), "'A.b' should rise; set mode to min or max"),
        (lambda: [EarlyStopping(mode="up")], (), "unknown mode of EarlyStopping 'up'"),
        (lambda: [EarlyStopping(patience=0)], (), "patience >= 1"),
        (lambda: [EarlyStopping(min_delta=float("nan"))], (), "min_delta >= 0, not 3 and nan"),
        (lambda: [EarlyStopping(patience="3")], (), "EarlyStopping.patience must be a whole number"),
        (
            lambda: [EarlyStopping("loss")],
            ("dp.noise_multiplier=1", "dp.amplify=false", "agg.weights=uniform"),
            "watches loss, which diff",
        ),
        (lambda: [Probe], (), "run: callbacks must be a list .each a Callback."),
    ],
)
def test_callbacks_that_cannot_work_are_refused_before_the_first_round(make, options, message):
    with pytest.raises(ConfigError, match=message):
        run(*make(), options=options)


def test_a_metric_that_is_never_recorded_is_named():
    class Counts(cfl.Callback):
        def on_round(self, view):
            return {"rows": len(view.rows)}

    with pytest.raises(CallbackError, match="failed in on_task .*watches 'Counts.b', which no round of task 0"):
        run(Counts(), EarlyStopping("Counts.b", mode="max"))
    with pytest.raises(ConfigError, match="unknown callback in the metric 'Count.rows' of 'EarlyStopping'.*'Counts'"):
        run(EarlyStopping("Count.rows", mode="max"), Counts())


def test_a_task_whose_clients_all_drop_out_has_nothing_to_watch():
    """With drop_rate=0.97 all four clients of each round leave."""
    config = toy.config("tasks=2", "rounds=1", "drop_rate=0.97", method="fedavg")
    result = cfl.run(config, stream=toy.stream(2), callbacks=[EarlyStopping("loss")])
    assert len(result.metrics["by_task"]) == 2


def test_early_stopping_needs_no_size_of_a_secret_cohort():
    """Rows lack `clients` there, which the check after a task reads. The run has one task, so one entry."""
    config = toy.config("tasks=1", "rounds=2", "eval_every=1", *PRIVATE, "sampling=poisson")
    assert len(cfl.run(config, stream=toy.stream(1), callbacks=[EarlyStopping(patience=1)]).metrics["by_task"]) == 1


class Watching(cfl.Callback):
    """Keeps the names of the figures that it sees, and decides nothing, though it could."""

    def __init__(self):
        self.seen = []

    def on_round(self, view):
        self.seen.append(set(view.row))

    def stop(self, rows):
        self.seen.append(set(rows[-1]))


PRIVATE = ("dp.level=client", "dp.noise_multiplier=1", "dp.accountant=rdp", "agg.weights=uniform")
OF_DATA = {"loss", "local", "clipped", "shortened", "excluded", "missing", "aborted"}
OF_COHORTS = {"clients", "dropped", "bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down", "seconds"}


@pytest.mark.parametrize(
    ("options", "hidden"),
    [(("dp.amplify=false",), OF_DATA), (("sampling=poisson",), OF_DATA | OF_COHORTS)],
)
def test_with_privacy_a_deciding_callback_sees_no_figure_that_is_not_protected(options, hidden):
    """Its decision shows in the model. A cohort of Poisson sampling that is secret has a size that is, too."""
    config, watching = toy.config("tasks=1", "rounds=2", *PRIVATE, *options), Watching()
    cfl.run(config, stream=toy.stream(1), callbacks=[watching])
    assert len(watching.seen) >= 4 and not any(names & hidden for names in watching.seen)
    made = CallbackSet([watching], config, toy.stream(1))
    made.stop(dict.fromkeys(OF_DATA | OF_COHORTS, 0) | {"task": 0, "phase": "train", "round": 0})
    assert watching.seen[-1] == (OF_DATA | OF_COHORTS) - hidden | {"task", "phase", "round"}
