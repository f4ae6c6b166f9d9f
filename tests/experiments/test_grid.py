"""A grid: its runs, and the choice among its settings by held-out samples alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cfl
from cfl.core import ConfigError, rng
from cfl.experiments.compare import plan
from cfl.experiments.grid import choices, commands
from cfl.report import searched

RATES = "local.lr=0.01,0.05"
FEW = ["tasks=2", "rounds=1", "partition.clients=4", "model.hidden=[8]"]


def grid(methods="fedavg,fot", seeds="0", folder=Path("runs"), options=(RATES,), **more):
    return plan("split-digits", methods, seeds, folder, grid=options, **more)


def finish(groups, *scores):
    """Write metrics for the runs of each group; None for a run that failed."""
    for group, own in zip(groups, scores, strict=True):
        for run, score in zip(group.runs, own, strict=True):
            if score is not None:
                run.folder.mkdir(parents=True)
                figures = {"seed": run.config.seed, "acc": 1 - score, "fgt": 0.0, "validation_acc": score}
                (run.folder / "metrics.json").write_text(json.dumps(figures))


def test_the_runs_of_a_grid_hold_samples_out():
    groups = grid(options=(RATES, "strategy.threshold=0.9,0.94"))
    assert [group.label for group in groups] == [
        "fedavg, local.lr=0.01",
        "fedavg, local.lr=0.05",
        "fot, local.lr=0.01, strategy.threshold=0.9",
        "fot, local.lr=0.01, strategy.threshold=0.94",
        "fot, local.lr=0.05, strategy.threshold=0.9",
        "fot, local.lr=0.05, strategy.threshold=0.94",
    ]
    assert {run.config.validation for group in groups for run in group.runs} == {0.1}
    assert all(not group.varied for group in groups) and groups[1].searched == {"local.lr": 0.05}
    own = grid(overrides=["validation=0.25"])
    assert {run.config.validation for group in own for run in group.runs} == {0.25}
    assert plan("split-digits", "fedavg", "0", Path())[0].runs[0].config.validation == 0


def test_the_best_mean_over_the_seeds_is_chosen_and_of_equal_ones_the_first(tmp_path):
    groups = grid("fot", "0..1", tmp_path, ("local.lr=0.01,0.05,0.1,0.2",))
    finish(groups, (0.5, 0.9), (0.75, 0.875), (0.875, 0.75), (0.8, 0.8))  # means 0.7, 0.8125 twice, and 0.8
    (choice,) = choices(groups)
    assert choice.scores == [0.7, 0.8125, 0.8125, 0.8]
    assert choice.best is groups[1]


def test_a_setting_with_a_failed_run_is_not_chosen(tmp_path):
    groups = grid("fot,fedavg", "0..1", tmp_path)
    finish(groups, (0.5, 0.5), (0.9, None), (0.9, None), (None, None))
    first, second = choices(groups)
    assert first.scores == [0.5, None] and first.best is groups[0]
    assert second.scores == [None, None] and second.best is None
    columns = [list(column.cells) for column in searched.table([first, second]).columns]
    assert columns[1:] == [
        ["50.00 ± 0.00", "90.00", "90.00", "–"],
        ["2", "1", "1", "0"],
        ["yes", "no: 1 of 2 runs failed", "no: 1 of 2 runs failed", "no: 2 of 2 runs failed"],
    ]
    assert list(searched.notes([first, second])) == ["no setting of fedavg is chosen: runs of each of its 2 failed"]
    kept = searched.stored([first, second])
    assert {name: (row["chosen"], row["failed"]) for name, row in kept.items()} == {
        "fot, local.lr=0.01": (True, 0), "fot, local.lr=0.05": (False, 1),
        "fedavg, local.lr=0.01": (False, 1), "fedavg, local.lr=0.05": (False, 2),
    }  # fmt: skip
    assert kept["fot, local.lr=0.01"]["setting"] == {"local.lr": 0.01}
    assert kept["fot, local.lr=0.01"]["validation_acc"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("scores", "notes"),
    [
        ((0.5, 0.6, 0.4), []),
        ((0.5, 0.4, 0.6), ["fedavg, local.lr=0.5: local.lr=0.5 is the largest value; try larger ones, too"]),
        ((0.6, 0.4, 0.5), ["fedavg, local.lr=0.01: local.lr=0.01 is the smallest value; try smaller ones, too"]),
        ((0.5, 0.5, 0.5), ["fedavg, local.lr=0.01: all 3 settings have the same score; the first one is chosen"]),
    ],
)
def test_a_choice_at_the_end_of_three_numbers_and_among_ties_is_said(scores, notes, tmp_path):
    groups = grid("fedavg", folder=tmp_path, options=("local.lr=0.5,0.01,0.1",))
    groups.sort(key=lambda group: group.searched["local.lr"])
    finish(groups, *((score,) for score in scores))
    assert list(searched.notes(choices(groups))) == notes


def test_a_grid_is_searched_within_each_varied_setting(tmp_path):
    groups = grid("fedavg", folder=tmp_path, vary=["partition.name=iid,shards"])
    finish(groups, (0.5,), (0.6,), (0.4,), (0.3,))
    assert [choice.best.label for choice in choices(groups)] == [
        "fedavg, partition.name=iid, local.lr=0.05",
        "fedavg, partition.name=shards, local.lr=0.01",
    ]
    assert groups[0].counterparts(groups, "fedavg") == groups[:2]  # paired by what is varied


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (("local.lrr=1,2",), {}, "did you mean 'local.lr'"),
        (("local.lr=0,1",), {}, r"local.lr must be a number in \(0, inf\), not 0"),
        (("local.lr",), {}, "--grid takes key=value,value"),
        (("seed=0,1",), {}, "--grid cannot take seed; name the seeds in --seeds"),
        ((RATES, RATES), {}, "--grid takes local.lr once"),
        ((RATES,), {"vary": [RATES]}, "local.lr is in --vary and in --grid"),
        (("validation=0.1,0.2",), {}, "all runs hold out the same samples: set validation once, by --set"),
        ((RATES,), {"vary": ["validation=0.1,0.2"]}, "all runs hold out the same samples"),
        ((RATES,), {"overrides": ["validation=0"]}, "set validation above 0, or leave it out"),
    ],
)
def test_a_wrong_grid_is_an_error_before_any_run(options, more, message):
    with pytest.raises(ConfigError, match=message):
        grid(options=options, **more)


def test_commands_run_the_chosen_settings_on_all_samples():
    """Methods of equal settings share a command; a hyper-parameter of one method is ignored by the others."""
    options = (RATES, "strategy.threshold=0.9,0.94")
    fedavg, fot = ([g for g in grid(options=options) if g.method == name] for name in ("fedavg", "fot"))
    asked, flags = ["validation=0.2", "model.hidden=[8]"], ["--seeds", "0..1"]
    head, tail = ["cfl-run", "compare", "split-digits", "--methods"], ["--seeds", "0..1"]
    hidden, rate = ["--set", "model.hidden=[8]"], ["--set", "local.lr=0.05"]
    assert commands("split-digits", [fedavg[1], fot[3]], ["fedavg", "fot"], asked, flags) == [
        [*head, "fedavg,fot", *hidden, *rate, "--set", "strategy.threshold=0.94", *tail]
    ]
    apart = commands("split-digits", [fedavg[0], fot[3]], ["fedavg", "fot"], asked, flags)
    assert [words[4] for words in apart] == ["fedavg", "fot"]
    assert apart[0][5:] == [*hidden, "--set", "local.lr=0.01", *tail]
    # All runs of fot may have failed: an option of its own is then in no command.
    alone = commands("split-digits", [fedavg[0]], ["fedavg", "fot"], [*asked, "strategy.min_rank=3"], flags)
    assert alone == apart[:1]
    (config,) = (run.config for run in plan("split-digits", "fot", "0", Path(), overrides=apart[1][6:12:2])[0].runs)
    assert config == fot[3].runs[0].config.model_copy(update={"validation": 0.0, "model": config.model})


def test_commands_name_the_files_of_plug_ins(tmp_path, monkeypatch):
    """Without them, a shell would not know the method of such a file."""
    file = tmp_path / "of_grid.py"
    file.write_text("")
    monkeypatch.setenv("CFL_PLUGINS", str(file))
    (words,) = commands("split-digits", [grid(methods="fot")[0]], ["fot"], [], [])
    assert words[:5] == ["cfl-run", "--plugin", str(file), "compare", "split-digits"]


def test_test_samples_have_no_part_in_the_choice(tmp_path):
    """With noise in place of the test labels, the validation accuracies and the choice are the same."""
    stream = cfl.streams.build("split-digits", tasks=2)
    noisy = [
        replace(task, test=replace(task.test, targets=task.test.targets[torch.randperm(len(task.test), generator=g)]))
        for task, g in zip(stream.tasks, map(rng.generator, (0, 1)), strict=True)
    ]
    found = []
    for name, data in (("true", stream), ("noise", replace(stream, tasks=tuple(noisy)))):
        groups = grid("fedavg", folder=tmp_path / name, overrides=FEW, options=("local.lr=0.001,0.1",))
        for group in groups:
            for run in group.runs:
                cfl.run(run.config, stream=data, output=run.folder)
        (choice,) = choices(groups)
        found.append((choice.scores, choice.best.label, [group.results()[0]["acc"] for group in groups]))
    (scores, best, accuracies), (again, same, others) = found
    assert scores == again and best == same == "fedavg, local.lr=0.1"
    assert accuracies[1] > 0.8 and others[1] < 0.7  # two classes a task: noise leaves a half
