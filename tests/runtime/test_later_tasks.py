"""A finished run that goes on with later tasks ends like a run that had all tasks from the start."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import cfl
from cfl.core import CheckpointError, ConfigError, plugins, tree
from cfl.runtime import checkpoint
from cfl.runtime.table import stoppers
from cfl.streams import Stream, selected
from tests import toy

KINDS = [(True, "task"), (False, "domain"), (True, "class")]


def stream(tasks: int = 3, multi_head: bool = True) -> Stream:
    return selected(toy.stream(3, multi_head=multi_head), tasks)


def run(folder: Path | None, tasks: int, *options: str, multi_head: bool = True, **others) -> cfl.Result:
    config = toy.config("model.dropout=[0.2,0.2]", *options, method=others.pop("method", "fot"))
    return cfl.run(config, stream=stream(tasks, multi_head), output=folder, **others)


def without_seconds(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if "seconds" not in name}


def equal(one: Path, other: Path) -> bool:
    """Whether the runs in two folders have the same figures, and the same trees in their last checkpoints."""
    figures = [without_seconds(json.loads((folder / "metrics.json").read_text())) for folder in (one, other)]
    first, second = (checkpoint.load_latest(folder / "checkpoints", None, pytest.fail)[0] for folder in (one, other))
    first.pop("run"), second.pop("run")  # the accuracies with NaN; they are in metrics.json, too
    same = [list(leaves) == list(second[name]) and tree.equal(leaves, second[name]) for name, leaves in first.items()]
    return figures[0] == figures[1] and list(first) == list(second) and all(same)


def refusal(folder: Path, *options: str, **others) -> str:
    with pytest.raises(CheckpointError, match="cannot go on with more tasks than its") as caught:
        run(folder, 3, *options, resume=True, **others)
    return str(caught.value)


EXTENDABLE = [name for name in plugins.strategies.names() if not plugins.strategies.get(name)().not_extendable]


@pytest.mark.parametrize("method", EXTENDABLE)
@pytest.mark.parametrize(("multi_head", "scenario"), toy.quick(KINDS[0], of=KINDS))
def test_a_run_in_parts_ends_with_the_bytes_of_the_whole(method, multi_head, scenario, tmp_path):
    if scenario == "class" and plugins.strategies.get(method)().not_class_incremental:
        pytest.skip(f"{method} cannot run with scenario=class")
    options = {"multi_head": multi_head, "method": method}
    run(tmp_path / "whole", 3, f"scenario={scenario}", **options)
    for tasks in (1, 2, 3):
        run(tmp_path / "parts", tasks, f"scenario={scenario}", resume=tasks > 1, **options)
    assert equal(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    "options",
    [
        ("regularizers=[scaffold,fedsol]", "secagg=full", "drop_rate=0.2", "strategy.criterion=energy"),
        ("regularizers=[feddyn]", "engine=vmapped", "block=2", "validation=0.2", "partition.name=shards"),
        (
            "dp.level=client",
            "dp.noise_multiplier=1",
            "agg.weights=uniform",
            "sampling=poisson",
            "strategy.after_last_task=true",
        ),
        ("local.lr_decay=0.9", "local.lr_restart=false", "sampling=round", "eval_every=1", "eval_local=1"),
        ("partition.name=dirichlet", "partition.task_share=0.5", "local.momentum=0.9", "local.weight_decay=0.1"),
    ],
    ids=lambda options: options[0],
)
def test_a_run_in_parts_ends_with_the_bytes_of_the_whole_under_options(options, tmp_path):
    run(tmp_path / "whole", 3, *options)
    run(tmp_path / "parts", 2, *options)
    run(tmp_path / "parts", 3, *options, resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_the_encodings_of_rgo_come_with_their_tasks(tmp_path):
    for tasks, name in ((3, "whole"), (1, "parts"), (3, "parts")):
        run(tmp_path / name, tasks, "strategy.encode=true", method="rgo", resume=(tmp_path / name).exists())
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_started_from_another_goes_on(tmp_path):
    run(tmp_path / "first", 3, "seed=5", method="fedavg")
    start = f"start={tmp_path / 'first'}"
    run(tmp_path / "whole", 3, start)
    run(tmp_path / "parts", 1, start)
    run(tmp_path / "parts", 3, start, resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_tasks_of_one_name_go_on(tmp_path):
    """`from_tensors` names tasks after their classes, and permuted tasks have the same classes."""
    sets = [samples for task in stream().tasks for samples in (task.train, task.test)]
    found = [samples.gather(torch.arange(len(samples))) for samples in sets]
    parts = [(*train, *test) for train, test in zip(found[::2], found[1::2], strict=True)]
    for name, tasks in (("whole", 3), ("parts", 2), ("parts", 3)):
        own = cfl.streams.from_tensors(parts[:tasks], multi_head=True)
        assert len({task.name for task in own.tasks}) < tasks
        folder = tmp_path / name
        cfl.run(toy.config(), stream=own, output=folder, resume=folder.exists())
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_fewer_tasks_of_one_name_are_refused(tmp_path):
    for tasks in (1, 3):
        cfl.run(toy.config(), stream=stream(tasks), output=tmp_path, resume=tasks > 1)
    with pytest.raises(CheckpointError, match="it has 3 tasks there, and 2 here"):
        cfl.run(toy.config(), stream=stream(2), output=tmp_path, resume=True)


def test_rounds_may_be_listed_for_each_task(tmp_path):
    run(tmp_path / "whole", 3, "rounds=[1,2,1]")
    run(tmp_path / "parts", 2, "rounds=[1,2]")
    run(tmp_path / "parts", 3, "rounds=[1,2,1]", resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_a_measured_engine_is_kept(tmp_path):
    chosen = run(tmp_path, 2, "engine=auto").config
    later = run(tmp_path, 3, "engine=auto", resume=True).config
    assert (later.engine, later.block, later.threads) == (chosen.engine, chosen.block, chosen.threads)


def test_tasks_are_selected_from_a_benchmark(tmp_path):
    def train(*options: str, **others) -> cfl.Result:
        config = cfl.resolve("split-digits", method="er", scale="smoke", overrides=[*options, "rounds=1"])
        return cfl.run(config, **others)

    train("tasks=2", output=tmp_path / "parts")
    train(output=tmp_path / "parts", resume=True)
    train(output=tmp_path / "whole")
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_the_metrics_of_the_first_tasks_stay_under_another_name(tmp_path):
    first = run(tmp_path, 2).metrics
    run(tmp_path, 3, resume=True)
    kept = json.loads((tmp_path / "metrics-2-tasks.json").read_text())
    assert without_seconds(kept) == without_seconds(json.loads(json.dumps(first)))
    assert len(json.loads((tmp_path / "metrics.json").read_text())["accuracy_matrix"]) == 3
    assert cfl.load(tmp_path).latest == 2


def test_the_user_is_told(tmp_path):
    run(tmp_path, 1)
    told: list[str] = []

    class Sink(toy.NullSink):
        def start(self, config, notes, total_rounds) -> None:
            told.extend(notes)

    run(tmp_path, 3, resume=True, sink=Sink())
    assert "the run had 1 of the 3 tasks" in told
    told.clear()
    run(tmp_path, 3, resume=True, sink=Sink())
    assert not any("the run had" in note for note in told)


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("at", range(7))
def test_a_kill_after_the_tasks_came_loses_nothing(at, tmp_path, monkeypatch):
    """The run is killed before or after one of its first checkpoints with the later tasks, or in between."""
    run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 2)
    save, calls = checkpoint.save, []

    def dies(*given, **options) -> Path:
        calls.append(given)
        if len(calls) == at // 2 + 1 and not at % 2:
            raise Killed
        path = save(*given, **options)
        if len(calls) == at // 2 + 1:
            raise Killed
        return path

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint, "save", dies)
        run(tmp_path / "parts", 3, resume=True)
    run(tmp_path / "parts", 3, resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def dies(*_, **__) -> None:
    raise Killed


@pytest.mark.parametrize("what", ["checkpoint.save", "run_folder.RunFolder.keep_metrics", "session.Session.round"])
def test_a_run_with_later_tasks_to_train_never_counts_as_finished(what, tmp_path, monkeypatch):
    """The session is killed before it renames the metrics of the first tasks, before its first checkpoint, or after."""
    run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 2)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(f"cfl.runtime.{what}", dies)
        run(tmp_path / "parts", 3, resume=True)
    kept = (tmp_path / "parts" / "metrics.json").exists()
    assert kept == what.endswith("keep_metrics")  # there, the checkpoint is of the first tasks as well
    run(tmp_path / "parts", 3, resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_a_damaged_checkpoint_with_the_later_tasks_leads_back_to_the_first_ones(tmp_path, monkeypatch):
    """The checkpoint before it is of the end of task 0, with the options of the first tasks."""
    run(tmp_path / "whole", 3, "rounds=[1,2,1]")
    run(tmp_path / "parts", 2, "rounds=[1,2]")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("cfl.runtime.session.Session.round", dies)
        run(tmp_path / "parts", 3, "rounds=[1,2,1]", resume=True)
    max((tmp_path / "parts" / "checkpoints").glob("checkpoint-*")).write_bytes(b"damaged")
    assert "it is not finished; resume it with its own tasks first" in refusal(tmp_path / "parts", "rounds=[1,2,1]")
    run(tmp_path / "parts", 2, "rounds=[1,2]", resume=True)
    run(tmp_path / "parts", 3, "rounds=[1,2,1]", resume=True)
    assert equal(tmp_path / "whole", tmp_path / "parts")


def test_metrics_that_cannot_be_renamed_are_an_error(tmp_path):
    """Each time: else the next session would go on beside a metrics.json that marks the run as finished."""
    run(tmp_path, 2)
    (tmp_path / "metrics-2-tasks.json" / "x").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"metrics-2-tasks\.json' cannot be written"):
            run(tmp_path, 3, resume=True)


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("joint", (), "it trains on the data of all tasks from the first round on"),
        ("olora", (), "model.adapter_rank has an equal part for each of its tasks"),
        ("fedprotip", (), "it takes no basis from its last task"),
        ("fedcil", (), "its generators have an input for each class of its tasks"),
        ("gpm", ("scenario=class", "strategy.infer_tasks=true"), "task inference divides the directions"),
        (
            "fot",
            ("dp.level=client", "dp.target_epsilon=9", "agg.weights=uniform", "sampling=poisson"),
            "the noise for dp.target_epsilon was",
        ),
    ],
)
def test_what_depends_on_the_number_of_tasks_is_refused(method, options, why, tmp_path):
    run(tmp_path, 2, *options, method=method)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert why in refusal(tmp_path, *options, method=method)
    assert "begin a run with all tasks" in refusal(tmp_path, *options, method=method)
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert not set(changed) - {".lock", "error.json"}


def test_an_unfinished_run_is_finished_first(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("cfl.runtime.session.Session.finish", dies)
        run(tmp_path / "trained", 2)  # all its rounds are done
    run(tmp_path / "trained", 3, resume=True)

    class Dies(toy.NullSink):
        def round(self, row) -> None:
            if row["task"] == 1:
                raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "half", 2, "checkpoint_every=1", sink=Dies())
    assert "it is not finished; resume it with its own tasks first" in refusal(tmp_path / "half", "checkpoint_every=1")


def test_other_rounds_for_its_tasks_are_refused(tmp_path):
    run(tmp_path, 2, "rounds=[1,2]")
    text = refusal(tmp_path, "rounds=[2,2,2]")
    assert "has round 0 of phase gpse in task 0 where a run of all tasks has round 1 of phase train in task 0" in text


def test_a_method_that_plans_its_last_task_otherwise_is_refused(tmp_path):
    """The sketches of the authors' code come from the last round of training, of all tasks but the last."""
    local = ("strategy.model=local", "strategy.participants=sampled")
    run(tmp_path, 2, *local)
    text = refusal(tmp_path, *local)
    assert "round 1 of phase train in task 1 where a run of all tasks has round 0 of phase train+gpse in task 1" in text


def test_changed_data_of_an_earlier_task_are_named(tmp_path):
    run(tmp_path, 1)
    with pytest.raises(CheckpointError, match="the data of task 'classes 0 1' changed since the run began"):
        cfl.run(
            toy.config("model.dropout=[0.2,0.2]"),
            stream=toy.stream(3, 47, multi_head=True),
            output=tmp_path,
            resume=True,
        )


def test_classes_that_later_tasks_add_to_the_one_head_are_named(tmp_path):
    """`from_tensors` gives all labels of all tasks one head: 0 to 3 are four classes, 0 to 5 are six."""
    parts = []
    for task in range(3):
        y = torch.arange(40) % 2 + 2 * task
        x = torch.nn.functional.one_hot(y, 8).float()
        parts.append((x, y, x, y))
    cfl.run(toy.config(), stream=cfl.from_tensors(parts[:2]), output=tmp_path)
    with pytest.raises(CheckpointError, match="its first head has 4 classes there, and 6 here"):
        cfl.run(toy.config(), stream=cfl.from_tensors(parts), output=tmp_path, resume=True)


def test_another_option_is_named(tmp_path):
    run(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cohort"):
        run(tmp_path, 3, "cohort=1", resume=True)


def test_a_run_that_a_callback_ended_is_refused(tmp_path):
    class Ends(cfl.Callback):
        def stop(self, rows):
            return "run"

    run(tmp_path, 2, callbacks=[Ends()])
    with pytest.raises(CheckpointError, match="a callback ended it"):
        run(tmp_path, 3, callbacks=[Ends()], resume=True)


def test_a_run_that_a_callback_ended_after_its_last_round_is_refused_and_yet_complete(tmp_path):
    class EndsLast(cfl.Callback):
        def stop(self, rows):
            return "run" if rows[-1]["task"] == 1 and len(rows) == 2 else None

    metrics = run(tmp_path, 2, "rounds=2", callbacks=[EndsLast()]).metrics
    assert metrics["stopped"] == [
        {"task": 1, "phase": "train", "round": 1, "callback": "EndsLast", "skips": "run", "rounds": 0}
    ]
    assert metrics["acc"] is not None and stoppers(metrics) == []  # comparisons and reports take it for a whole run
    with pytest.raises(CheckpointError, match="a callback ended it"):
        run(tmp_path, 3, "rounds=2", callbacks=[EndsLast()], resume=True)


class StopsAtOnce(cfl.Callback):
    """Ends the training of task 0 after its first round."""

    def stop(self, rows):
        return "phase" if (rows[-1]["task"], rows[-1]["phase"]) == (0, "train") else None


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("method", ["fedavg", "fot"])  # FOT has further rounds at the end of tasks
def test_rounds_that_a_callback_skipped_are_part_of_the_plan(method, rounds, tmp_path):
    """Of 3 rounds it skips 2, of other `rounds` all but the first."""
    others = {"method": method, "callbacks": [StopsAtOnce()]}
    run(tmp_path, 1, "rounds=3", **others)
    text = refusal(tmp_path, f"rounds={rounds}", **others)
    what = f"it skipped 2 of the rounds of phase train in task 0 where a run of all tasks skips {rounds - 1} (if"
    assert what in text


def test_a_run_with_skipped_rounds_goes_on(tmp_path):
    for tasks, name in ((3, "whole"), (1, "parts"), (3, "parts")):
        again = (tmp_path / name).exists()
        run(tmp_path / name, tasks, "rounds=3", callbacks=[StopsAtOnce()], resume=again)
    assert equal(tmp_path / "whole", tmp_path / "parts")


class Looks(cfl.Strategy):
    """Trains on the data of the last task, too, and says nothing of it."""

    def sees(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(sorted({task, tasks - 1}))


class Sized(cfl.Strategy):
    """The server keeps a tree whose size is the number of tasks."""

    def init_server(self, params, model):
        return {"own": {"by_task": torch.zeros(model.tasks)}}


@pytest.mark.parametrize(
    ("strategy", "why"),
    [(Looks(), "trains on the data of other tasks in task 0"), (Sized(), "the server's tree 'own' depends on")],
    ids=["sees", "init_server"],
)
def test_a_dependence_that_a_strategy_does_not_state_is_found(strategy, why, tmp_path):
    run(tmp_path, 2, method="fedavg", strategy=strategy)
    assert why in refusal(tmp_path, method="fedavg", strategy=strategy)


class Scaled(cfl.Strategy):
    """Scales its updates by the number of tasks."""

    def absorb(self, server, mean, info, lr):
        return super().absorb(server, mean, info, lr / info.tasks)


class Stated(Scaled):
    """Says so."""

    not_extendable: ClassVar[str] = "its steps depend on the number of tasks"


def test_the_conformance_kit_finds_what_depends_on_the_number_of_tasks():
    with pytest.raises(cfl.testing.ConformanceError, match="ends with another .* than a run of all tasks; let nothing"):
        cfl.testing.check_strategy(Scaled())
    cfl.testing.check_strategy(Stated())


def test_the_folder_may_move(tmp_path):
    run(tmp_path / "here", 1)
    shutil.move(tmp_path / "here", tmp_path / "there")
    run(tmp_path / "there", 3, resume=True)
    run(tmp_path / "whole", 3)
    assert equal(tmp_path / "there", tmp_path / "whole")
