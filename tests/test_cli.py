import json
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import MISSING, dataclass, field
from importlib.metadata import EntryPoint
from typing import get_args

import numpy as np
import pytest
import typer

import cfl
from cfl import cli, streams
from cfl.aggregation import accounting
from cfl.config.option_names import GROUPS, option_names
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.core import plugins
from cfl.methods.regularizers.fedprox import FedProx
from cfl.methods.strategies.fot import FOT
from cfl.report import plots, tables
from cfl.report.described import PROTECTIONS, refused
from cfl.runtime import runner
from cfl.runtime.run_folder import RunFolder
from tests import toy
from tests.misuse.data import vast

SMALL = ("--set", "tasks=2", "--set", "rounds=1", "--set", "model.hidden=[8]", "--set", "partition.clients=4")


@pytest.mark.parametrize("command", ["train", "compare", "serve", "join", "evaluate", "report", "reproduce"])
def test_help_that_states_a_default_prints_no_other_one(command):
    """--wait-for said 'default: all' and '[default: 0]'."""
    options = typer.main.get_command(cli.app).commands[command].params
    told = [option for option in options if re.search(r"(\(|; )default", getattr(option, "help", None) or "")]
    assert [option.name for option in told if option.default is not None and option.show_default] == []


def test_the_help_names_each_engine():
    options = typer.main.get_command(cli.app).commands["train"].params
    (text,) = (option.help for option in options if option.name == "engine")
    assert all(
        re.search(rf"\b{re.escape(name)}\b", text) for name in get_args(RunConfig.model_fields["engine"].annotation)
    )


def invoke(*args):
    """Return the exit status of `cfl-run` with these arguments."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return stop.value.code


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("trian",), "'train'"),
        (("train", "permuted-digits", "--metod", "fot"), "'--method'"),
        (("train", "permuted-digit"), "'permuted-digits'"),
        (("train", "permuted-digits", "--method", "fott"), "'fot'"),
        (("train", "permuted-digits", "--local", "fedpro"), "'fedprox'"),
        (("train", "permuted-digits", "--engine", "lop"), "'loop'"),
        (("train", "permuted-digits", "--set", "local.lrr=1"), "'local.lr'"),
        (("train", "permuted-digits", "--set", "partition.name=shard"), "'shards'"),
        (("train", "permuted-digits", "--method", "fot", "--set", "strategy.threshold=0"), "(0, 1]"),
        (("train", "permuted-digits", "--seed", "x"), "'--seed'"),
        (("train",), "cfl-run list benchmarks"),
        (("compare", "permuted-digits", "--methods", "fedavg,fott"), "'fot'"),
        (("compare", "permuted-digits", "--methods", "fot", "--seeds", "2..0"), "write 0..2"),
        (("describe", "fott"), "'fot'"),
        (("list", "methds"), "unknown kind 'methds'; did you mean 'methods'"),
        (("compare", "permuted-digits", "--methods", "fedavg,fedavg"), "each method once"),
        (("compare", "permuted-digits", "--methods", "fedavg,"), "--methods has an empty name in 'fedavg,'"),
        (
            ("compare", "permuted-digits", "--methods", "fedavg,fot", "--set", "strategy.thresold=0.9"),
            "'strategy.threshold'",
        ),
    ],
)
def test_wrong_usage_exits_2_with_one_line_and_a_suggestion(args, hint, capsys):
    assert invoke(*args) == 2
    streams = capsys.readouterr()
    assert len(streams.err.splitlines()) == 1 and hint in streams.err
    assert streams.out == ""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("train", "BENCHMARK: a name such as permuted-digits; see 'cfl-run list benchmarks'."),
        ("compare", "BENCHMARK: a name such as permuted-digits; see 'cfl-run list benchmarks'."),
        ("reproduce", "TABLE: a name such as fot-table1; the default lists the tables."),
        ("list", "WHAT: benchmarks, methods, models or regularizers; the default lists all."),
        ("describe", "NAME: a benchmark, method, model, regularizer, option such as agg.weights or strategy.threshold"),
        ("report", "RUNS: folders of runs, or folders that contain runs."),
    ],
)
def test_the_help_describes_the_argument(command, text, capsys):
    assert invoke(command, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(text) == 1
    assert invoke("--help") == 0
    assert text.partition(":")[0] not in capsys.readouterr().out  # only the first line of each docstring


def test_the_version_is_that_of_the_package(capsys):
    assert invoke("--version") == 0
    assert capsys.readouterr().out.split() == ["cfl", cfl.__version__]


def test_a_warning_of_a_method_is_one_line(tmp_path, capsys):
    options = ("--set", "strategy.threshold=1.0", "--output", str(tmp_path), "--no-plot", "--quiet")
    assert invoke("train", "permuted-digits", "--method", "fot", *SMALL, *options) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the projection removed ") and "strategy.threshold (now 1)" in line


def test_missing_data_exits_1_with_one_line(tmp_path, capsys):
    args = ("train", "permuted-mnist", "--data-root", str(tmp_path), "--output", str(tmp_path / "run"), "--quiet")
    assert invoke(*args) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_train_writes_the_folder_and_its_config_repeats_it(tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    assert invoke("train", "permuted-digits", "--method", "fot", *SMALL, "--output", str(first), "--seed", "3") == 0
    shown = capsys.readouterr().out
    metrics = json.loads((first / "metrics.json").read_text())
    assert f"ACC {metrics['acc']:.1%}" in shown and "after task 1" in shown
    assert (first / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (metrics["seed"], metrics["method"], metrics["accuracy_matrix"][0][1]) == (3, "fot", None)

    config = str(first / "config.yaml")
    assert invoke("train", "--config", config, "--output", str(again), "--quiet", "--no-plot") == 0
    assert (again / "config.yaml").read_bytes() == (first / "config.yaml").read_bytes()
    assert json.loads((again / "metrics.json").read_text())["accuracy_matrix"] == metrics["accuracy_matrix"]
    assert not (again / "accuracy.png").exists()
    assert invoke("train", "--config", config, "--output", str(again), "--quiet") == 2  # already holds a run
    assert invoke("train", "--config", str(first), "--output", str(tmp_path / "third")) == 2  # a folder, not its file
    assert f"pass the file in it, '{config}'" in capsys.readouterr().err


def test_another_file_named_model_beside_a_configuration_is_not_of_a_run(tmp_path):
    (tmp_path / "mine.yaml").write_text("benchmark: permuted-digits\ntasks: 2\nrounds: 1\n")
    (tmp_path / "model.json").write_text('{"architectures": ["BertModel"], "hidden_size": 384}')
    output = ("--output", str(tmp_path / "run"), "--quiet", "--no-plot")
    assert invoke("train", "--config", str(tmp_path / "mine.yaml"), *output) == 0


def test_a_configuration_with_an_unknown_benchmark_says_how_to_make_it_known(tmp_path, capsys):
    """Its benchmark is recorded only; the list of benchmarks alone does not say that a file may register one."""
    config = tmp_path / "config.yaml"
    config.write_text("benchmark: sensors\n")
    assert invoke("train", "--config", str(config), "--output", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "unknown benchmark 'sensors'" in said and "give that file to cfl-run --plugin" in said


@pytest.mark.parametrize(
    ("objects", "kind"),
    [
        ({"stream": toy.stream(2)}, "stream (toy)"),
        ({"model": toy.mlp(64, 4, 10)}, "network (Net)"),
        ({"strategy": FOT()}, "strategy (FOT)"),
        ({"regularizers": {"fedprox": FedProx()}}, "regularizers (fedprox)"),
    ],
)
def test_the_configuration_of_a_run_with_objects_is_not_taken_for_the_run(objects, kind, tmp_path, capsys):
    """Else the command would train on the digits that the file names, say that all is well, and not repeat the run."""
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=["tasks=2", "rounds=1", "partition.clients=2"])
    cfl.run(config, output=tmp_path / "run", **objects)
    again = ("train", "--config", str(tmp_path / "run" / "config.yaml"), "--output", str(tmp_path / "again"), "--quiet")
    assert invoke(*again) == 2
    assert f"does not describe its run, whose {kind} came from Python" in capsys.readouterr().err
    if "stream" not in objects:  # the nodes of a federation have the data
        assert invoke("serve", str(tmp_path / "run" / "config.yaml"), "--output", str(tmp_path / "served")) == 2
        assert f"does not describe its run, whose {kind} came from Python" in capsys.readouterr().err
    (tmp_path / "run" / "metrics.json").unlink()
    assert invoke("report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html")) == 2
    assert "continue with: your program, with resume=True" in capsys.readouterr().err
    if "strategy" in objects:
        assert invoke(*again, "--method", "er", "--no-plot") == 0


def test_a_figure_that_cannot_be_written_comes_after_the_table(tmp_path, capsys):
    (tmp_path / "accuracy.png").mkdir()
    assert invoke("train", "permuted-digits", *SMALL, "--output", str(tmp_path), "--quiet") == 2
    shown = capsys.readouterr()
    assert f"results in {tmp_path}" in shown.out
    assert shown.err.splitlines()[-1] == (
        f"cfl-run: '{tmp_path / 'accuracy.png'}' cannot be written (Is a directory); choose another --output"
    )


def test_compare_tabulates_and_skips_finished_runs(tmp_path, capsys):
    args = ("compare", "permuted-digits", "--methods", "fedavg,fot", "--seeds", "0..1", *SMALL, "--quiet", "--matrix")
    args += ("--output", str(tmp_path))
    assert invoke(*args, "--set", "strategy.threshold=0.8") == 0  # fedavg has no such option
    assert "±" in capsys.readouterr().out
    kept = {name: read_yaml(run_of(tmp_path, name) / "config.yaml")["strategy"] for name in ("fedavg", "fot")}
    assert kept["fedavg"] == {} and kept["fot"]["threshold"] == 0.8
    report = json.loads((tmp_path / "compare.json").read_text())["methods"]["fot"]
    runs = [json.loads((run_of(tmp_path, "fot", seed) / "metrics.json").read_text())["acc"] for seed in (0, 1)]
    assert report["acc"]["mean"] == pytest.approx(sum(runs) / 2)
    assert report["acc"]["std"] == pytest.approx(abs(runs[0] - runs[1]) / 2)  # population std of two values
    assert f"--output {tmp_path}" in json.loads((tmp_path / "compare.json").read_text())["command"]
    assert (tmp_path / "compare.png").exists()

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.json")}
    assert invoke(*args, "--vary", "strategy.threshold=0.8,0.85") == 0  # two more runs
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.json")}
    assert len(after) == 6 and before.items() < after.items()


def run_of(folder, method, seed=0):
    """Return the folder of the run; its name ends in a hash."""
    (found,) = folder.glob(f"{method}-seed{seed}-*")
    return found


@pytest.mark.slow
def test_compare_takes_an_engine_as_train_does(tmp_path):
    args = ("compare", "permuted-digits", "--methods", "fedavg", *SMALL, "--set", "block=2", "--set", "engine=loop")
    assert invoke(*args, "--engine", "vmapped", "--quiet", "--no-plot", "--output", str(tmp_path)) == 0
    assert read_yaml(run_of(tmp_path, "fedavg") / "config.yaml")["engine"] == "vmapped"  # the flag wins over --set
    command = json.loads((tmp_path / "compare.json").read_text())["command"]
    assert command.endswith(f"--engine vmapped --output {tmp_path}")


@pytest.mark.slow
def test_compare_shows_the_epsilon_of_methods(tmp_path, capsys):
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "cohort=4", "dp.accountant=rdp")
    settings = [text for one in private for text in ("--set", one)]
    args = ("compare", "permuted-digits", "--methods", "fedavg,single_task", "--seeds", "0", *SMALL, *settings)
    assert invoke(*args, "--quiet", "--no-plot", "--output", str(tmp_path)) == 0
    title, *rows = cells(capsys.readouterr().out)
    spent = title.index("epsilon")
    assert spent == title.index("FGT %") + 1
    # 2 tasks of one round with all 4 clients: two releases without amplification
    epsilon = accounting.epsilon([accounting.Releases(1.0, 2)], 1.0, 1e-5, "rdp")
    written = json.loads((tmp_path / "compare.json").read_text())["methods"]
    assert [row[0] for row in rows] == list(written) == ["fedavg", "single_task"]
    for row in rows:
        assert row[spent] == f"{epsilon:.2f}"
        assert written[row[0]]["epsilon"] == {"mean": pytest.approx(epsilon), "std": 0.0}


def cells(shown):
    """Return the text in the cells of a table, by row, with the titles first."""
    lines = [line.replace("┃", "│") for line in shown.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_compare_continues_after_a_failed_run(tmp_path, capsys):
    args = ("compare", "permuted-digits", "--methods", "fedavg,ewc", "--seeds", "0", *SMALL, "--quiet", "--no-plot")
    # lambda x lr x Fisher is far above 2, so steps on the penalty diverge
    assert invoke(*args, "--set", "strategy.strength=1e9", "--output", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert "ewc, seed 0 failed: client" in shown.err and "1 of 2 runs failed" in shown.err
    assert "failed runs" in shown.out and "ewc, seed 0" in shown.out.partition("failed runs")[2]
    (kept,) = tmp_path.glob("ewc-seed0-*/error.json")
    assert json.loads(kept.read_text())["error"] == "UpdateError"
    assert list(json.loads((tmp_path / "compare.json").read_text())["methods"]) == ["fedavg"]


def test_compare_searches_a_grid_and_shows_what_it_chose(tmp_path, capsys):
    few = ("--set", "tasks=2", "--set", "rounds=2", "--set", "model.hidden=[8]", "--set", "partition.clients=4")
    grid = ("--grid", "local.lr=0.001,0.1", "strategy.threshold=0.9")
    folder = tmp_path / "grid"
    args = ("compare", "split-digits", "--methods", "fot,fedavg", "--seeds", "0..1", *few)
    assert invoke(*args, *grid, "--no-plot", "--output", str(folder)) == 0
    shown = capsys.readouterr().out
    progress, _, results = shown.partition("split-digits, 2 seeds, settings chosen by validation ACC")
    assert progress.count("done, validation ACC") == 8 and "done, ACC" not in progress and ": accuracy" not in progress
    written = json.loads((folder / "compare.json").read_text())
    # with steps of 0.001 two rounds change next to nothing
    labels = ["fot, local.lr=0.1, strategy.threshold=0.9", "fedavg, local.lr=0.1"]
    assert [*written["methods"]] == labels == [name for name, row in written["grid"].items() if row["chosen"]]
    assert [*written["paired"]] == [f"{labels[1]} less {labels[0]}"] and len(written["grid"]) == 4
    chosen = written["methods"][labels[1]]
    runs = [json.loads((folder / name / "metrics.json").read_text()) for name in written["runs"][labels[1]]]
    assert chosen["validation_acc"]["mean"] == pytest.approx(sum(run["validation_acc"] for run in runs) / 2)
    assert chosen["acc"]["mean"] == pytest.approx(sum(run["acc"] for run in runs) / 2)
    table, _, all_settings = results.partition("grid: accuracy on the held-out training samples")
    assert "ACC %" in table and "val. ACC %" in table
    (titles, *rows), _ = (cells(part) for part in all_settings.split("paired differences"))
    assert titles == ["setting", "val. ACC %", "seeds", "chosen"]
    assert [row[0] for row in rows if row[3] == "yes"] == labels and len(rows) == 4
    again = shlex.split(shown.splitlines()[-1])
    assert again[:5] == ["cfl-run", "compare", "split-digits", "--methods", "fot,fedavg"]
    assert again[-4:] == ["--seeds", "0..1", "--output", f"{folder}-chosen"]
    assert {"local.lr=0.1", "strategy.threshold=0.9", "tasks=2"} < {*again} and "validation" not in "".join(again)

    same = ("--grid", "local.lr=0.001,0.1", "--grid=strategy.threshold=0.9", "--quiet")  # and nothing runs again
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")}
    assert invoke(*args, *same, "--no-plot", "--output", str(folder)) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.json")} == before and len(before) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("strategy.threshold=0.9,0.94",), "unexpected argument 'strategy.threshold=0.9,0.94'; the settings of a grid"),
        (("local.lr=1,2", "--grid", "local.momentum=0,0.9"), "unexpected argument 'local.lr=1,2'; the settings"),
        (("--grid", "local.lr=1,2", "--seeds", "0", "local.momentum=0,0.9"), "unexpected argument 'local.momentum=0"),
        (("--grid", "local.lr=1,2", "fot"), "unexpected argument 'fot'; see 'cfl-run compare --help'"),
        (("--grid", "local.lr=1,2", "--vary", "local.lr=1,2"), "local.lr is in --vary and in --grid"),
        (("--grid", "local.lr=1,2", "local.lrr=1,2"), "did you mean 'local.lr'"),
        (("--grid",), "requires an argument"),
    ],
)
def test_words_outside_of_a_grid_are_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert invoke("compare", "split-digits", "--methods", "fedavg", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_run_prints_the_command_that_continues_it(tmp_path, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    folder = tmp_path / "my run"
    args = ("train", "permuted-digits", "--output", str(folder), "--download", "--data-root", "da ta", "--tensorboard")
    assert invoke(*args) == 130
    assert "nothing is saved; give the same command again" in capsys.readouterr().err  # stopped while loading

    RunFolder(folder).write_config({})
    assert invoke(*args) == 130
    again = shlex.split(capsys.readouterr().err.partition("continue with: ")[2])
    wanted = ["--config", f"{folder}/config.yaml", "--output", str(folder), "--resume", "--data-root", "da ta"]
    assert again == ["cfl-run", "train", *wanted, "--download", "--tensorboard"]


def test_resume_names_the_first_option_that_differs(tmp_path, capsys):
    args = ("train", "permuted-digits", *SMALL, "--output", str(tmp_path), "--quiet", "--no-plot")
    assert invoke(*args) == 0
    capsys.readouterr()
    for more, there, here in (
        (["local.lr=0.1", "rounds=2"], "rounds=1", "rounds=2"),  # in the order of the options
        (["local.lr=0.1", "method=fot"], "method=fedavg", "method=fot"),
        (["engine=vmapped", "block=2"], "engine=loop", "engine=vmapped"),
    ):
        assert invoke(*args, "--resume", *(word for text in more for word in ("--set", text))) == 1
        hint = "choose another --output, or repeat the options, code and data of that run"
        assert capsys.readouterr().err.endswith(f"another configuration; {hint}: {there} there, {here} here\n")
    assert invoke(*args, "--resume", "--set", "workers=7") == 0  # not part of the comparison


def test_resume_without_a_folder_and_with_other_options_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ("train", "permuted-digits", *SMALL, "--quiet", "--no-plot")
    assert invoke(*args) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    assert invoke(*args, "--resume", "--set", "local.lr=0.1") == 2
    assert "holds no run to resume; repeat the options of that run, or pass its --output" in capsys.readouterr().err
    assert [folder] == list((tmp_path / "runs").iterdir())
    assert invoke(*args, "--resume") == 0


def test_quiet_keeps_warnings(tmp_path, monkeypatch, capsys):
    def damaged(config, *, sink, **kwargs):
        sink.warn("damaged")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", damaged)
    assert invoke("train", "permuted-digits", "--output", str(tmp_path), "--quiet") == 130
    assert capsys.readouterr().err.startswith("warning: damaged\n")


def test_list_and_describe_name_sources_and_defaults(capsys):
    assert invoke("list") == 0
    shown = capsys.readouterr().out
    for name in ("permuted-mnist", "fedavg", "fot", "alexnet_cl", "fedprox", "ICLR 2024"):
        assert name in shown
    for name, parts in {
        "fot": ("strategy.threshold", "(0, 1]", "Table 9"),
        "fedprox": ("regularizer.fedprox.mu",),
        "mlp": ("model.hidden", "Sequence[int]", "hidden: widths of the hidden layers;"),
        "permuted-mnist": ("cohort: 64", "appendix F"),
    }.items():
        assert invoke("describe", name) == 0
        shown = capsys.readouterr().out
        assert all(part in shown for part in parts)


def test_describe_says_which_options_are_required(monkeypatch, capsys):
    @dataclass(frozen=True)
    class Needs(cfl.Strategy):
        """A method with options that have no default."""

        strength: float = cfl.option(MISSING, "how much")
        plain: int = field(kw_only=True)

    monkeypatch.setattr(plugins.strategies, "_items", {**plugins.strategies._items, "needs": Needs})
    assert invoke("describe", "needs") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["strategy.strength", "required", "number", "how much"] in shown
    assert ["strategy.plain", "required", "whole number", ""] in shown
    assert ["all else", "depends on the values of strength, plain"] in shown


def test_describe_says_which_options_of_a_model_are_required(monkeypatch, capsys):
    def build(input_shape, outputs, width: int, depth: int = 2):
        """A model."""

    monkeypatch.setattr(plugins.models, "_items", {**plugins.models._items, "needs": build})
    assert invoke("describe", "needs") == 0
    shown = capsys.readouterr().out.replace("│", " ").split("\n")
    assert any(line.split() == ["model.width", "required", "int"] for line in shown)
    assert any(line.split() == ["model.depth", "2", "int"] for line in shown)


def test_describe_shows_annotations_that_cannot_be_read(monkeypatch, capsys):
    def build(input_shape, outputs, sizes: "Unknown" = (2,)):  # noqa: F821  # imported for type checkers alone
        """A model."""

    monkeypatch.setattr(plugins.models, "_items", {**plugins.models._items, "typed": build})
    assert invoke("describe", "typed") == 0
    shown = capsys.readouterr().out.replace("│", " ").split("\n")
    assert any(line.split() == ["model.sizes", "(2,)", "Unknown"] for line in shown)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("agg.weights", ["samples", "one of samples, uniform", "weight of a client in the mean"]),
        ("seed", ["0", f"a whole number in [0, {2**128 - 1}]", "seed of every random draw"]),
        ("public.name", ["null", "a name or null", "data set; `stream` for the benchmark's own public part"]),
        ("benchmark", ["required", "a name", "name of the benchmark; see `cfl-run list benchmarks`"]),
        ("strategy", ["{}", "a group", "hyper-parameters of the method"]),
    ],
)
def test_describe_shows_an_option_of_a_run(name, row, capsys):
    assert invoke("describe", name) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines] == [[name, *row]]


def test_describe_shows_an_option_of_all_methods_that_have_it(capsys):
    owners = [name for name in plugins.strategies.names() if hasattr(plugins.strategies.get(name), "threshold")]
    assert {"fot", "gpm"} <= {*owners} and invoke("describe", "strategy.threshold") == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "│" in line]
    expected = {f"strategy.threshold ({name})": str(plugins.strategies.get(name).threshold) for name in owners}
    assert {row[1]: row[2] for row in rows if row[1]} == expected
    assert invoke("describe", "regularizer.fedprox.mu") == 0
    assert "│ regularizer.fedprox.mu │" in capsys.readouterr().out
    assert invoke("describe", "strategy.thresold") == 2
    assert "did you mean 'strategy.threshold'?" in capsys.readouterr().err


def test_describe_loads_no_other_method(monkeypatch):
    """A package whose method cannot be loaded is in the way of that method alone."""
    monkeypatch.setattr(plugins, "_points", lambda group: (EntryPoint("broken", "nowhere:X", group),))
    assert invoke("describe", "agg.weights") == invoke("describe", "fedprox") == 0


def test_a_method_that_cannot_be_loaded_is_listed_as_such_and_stays_out_of_other_errors(monkeypatch, capsys):
    monkeypatch.setattr(plugins, "_points", lambda group: (EntryPoint("broken", "nowhere:X", group),))
    assert invoke("list", "methods") == 0
    shown = capsys.readouterr().out
    assert "│ fot " in shown and "method 'broken' cannot be loaded from nowhere:X:" in shown
    assert invoke("train", "permuted-digits", "--set", "treshold=0.8") == 2
    assert "did you mean 'strategy.threshold'?" in capsys.readouterr().err


def test_describe_shows_every_option_of_a_run_and_all_of_a_group(capsys):
    for name in [*option_names(), *GROUPS]:
        assert invoke("describe", name) == 0
        shown = capsys.readouterr().out
        inside = [f"{name}.{one}" for one in GROUPS.get(name, ())]
        assert all(f"│ {one} " in shown for one in inside or [name])
        assert (f"{name} (options of a run): " in shown) == bool(inside)
    assert invoke("describe", "agg.weigth") == 2
    assert "unknown name 'agg.weigth'; did you mean 'agg.weights'?" in capsys.readouterr().err


def test_the_summary_is_mean_and_population_deviation():
    costs = ("bytes_up", "bytes_down", "client_bytes", "client_seconds", "server_seconds", "seconds")
    runs = [{"seed": seed, "acc": acc, "fgt": 0.0, **dict.fromkeys(costs, 2)} for seed, acc in enumerate((0.2, 0.4))]
    row = tables.summary(runs)
    assert row["acc"] == {"mean": pytest.approx(0.3), "std": pytest.approx(0.1)}
    assert row["bytes_up"] == {"mean": 2.0, "std": 0.0} and row["seeds"] == [0, 1]
    assert "epsilon" not in row
    assert "epsilon" not in tables.compared_texts({"fot": row})[0]

    row = tables.summary([{**run, "epsilon": 1.0 + 2 * run["seed"]} for run in runs])
    assert row["epsilon"] == {"mean": pytest.approx(2.0), "std": pytest.approx(1.0)}  # of 1 and 3
    titles, (texts,) = tables.compared_texts({"fot": row})
    assert texts[titles.index("epsilon")] == "2.00"


def test_the_mean_matrix_keeps_unseen_tasks_empty():
    first, second = {"accuracy_matrix": [[0.2, None], [0.4, 0.6]]}, {"accuracy_matrix": [[0.4, None], [0.0, 1.0]]}
    rows = tables.mean_matrix([first, second])
    assert rows[0][1] is None
    np.testing.assert_allclose([rows[0][0], *rows[1]], [0.3, 0.2, 0.8])


def test_plots_draw_streams_of_one_and_of_many_tasks(tmp_path):
    for tasks in (1, 20):
        rows = [[0.5 if task <= after else None for task in range(tasks)] for after in range(tasks)]
        plots.accuracy(rows, "title", tmp_path / f"{tasks}.png")
        assert (tmp_path / f"{tasks}.png").stat().st_size > 1000


NAMES = [
    (name, kind.get(name))
    for kind in (plugins.strategies, plugins.local)
    for name in kind.names()
    if kind.get(name).__module__.startswith("cfl.")
]


@pytest.mark.parametrize(("name", "item"), NAMES, ids=[name for name, _ in NAMES])
def test_describe_prints_uploads_what_the_server_learns_and_protections(name, item, capsys):
    assert invoke("describe", name) == 0
    shown = capsys.readouterr().out.partition("\nprivacy ")[2]
    rows, title = {}, None
    for line in shown.splitlines():  # long answers continue in lines with an empty first cell
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 2:
            title = cells[0] or title
            rows[title] = f"{rows.get(title, '')} {cells[1]}".strip()
    assert list(rows) == ["a client sends", "the server learns", "secagg=full", "dp.level=client", "dp.level=example"]
    assert rows["a client sends"] == (item.sends or "nothing besides the update")
    shows = "" if item.gathers == "stack" or item().sees_each else "; only the sum with secure aggregation"
    assert rows["the server learns"] == f"each client's upload{shows}"
    for option, further in PROTECTIONS.items():
        reason = refused(name, [option, *further])
        assert rows[option] == (f"not supported: {reason}" if reason else "supported")


@pytest.mark.parametrize(("base", "inherited"), [(FOT, FOT.sends), (FedProx, "nothing besides the update")])
def test_describe_does_not_state_inherited_uploads_for_a_class_with_its_own(base, inherited, monkeypatch, capsys):
    class Mine(base):
        def finish(self, params, ctx, steps):
            return super().finish(params, ctx, steps)

    class Same(base):
        pass

    registry = plugins.local if base is FedProx else plugins.strategies
    monkeypatch.setattr(registry, "_items", registry._items | {"mine": Mine, "same": Same})
    assert invoke("describe", "mine") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "not stated: Mine has uploads of its own; give it a class attribute sends" in shown and "Source" not in shown
    assert invoke("describe", "same") == 0
    assert inherited[:50] in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_describe_names_sketches_and_counts(capsys):
    for name, parts in {
        "fot": (
            "a sketch or the Gram matrix of each layer",
            "strategy.freeze_first=true",
            "not supported: 'fot' cannot run",
        ),
        "fednova": ("the number of its local steps", "not supported: 'fednova' cannot run like this"),
        "fedet": ("its logits on the public data", "which secagg=full hides"),
        "ewc": ("its update w_global - w_local", "set dp.level=client"),
    }.items():
        assert invoke("describe", name) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert all(part in shown for part in parts)
    assert invoke("describe", "mlp") == 0
    assert "the server learns" not in capsys.readouterr().out  # a model sends nothing


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        (["dp.target_epsilon=1"], "set agg.weights=uniform"),
        (["secagg=full", "cohort=1"], "a secure sum of one client is its upload"),
    ],
)
def test_impossible_protection_exits_2_before_any_run(more, hint, tmp_path, capsys):
    settings = [text for one in more for text in ("--set", one)]
    folder = tmp_path / "run"
    assert invoke("train", "permuted-digits", *SMALL, *settings, "--output", str(folder), "--quiet") == 2
    streams = capsys.readouterr()
    assert len(streams.err.splitlines()) == 1 and hint in streams.err
    assert not folder.exists()


def test_train_prints_the_epsilon(tmp_path, capsys):
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "cohort=4", "dp.accountant=rdp")
    settings = [text for one in private for text in ("--set", one)]
    folder = tmp_path / "run"
    args = ("train", "permuted-digits", *SMALL, *settings, "--output", str(folder), "--quiet", "--no-plot")
    assert invoke(*args) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Differential privacy: epsilon {metrics['epsilon']:.3g} at delta 1e-05 per client, for all uploads" in shown
    assert metrics["epsilon_by_client"].keys() == {"0", "1", "2", "3"}
    assert metrics["noise_multiplier"] == 1.0


def test_evaluate_repeats_the_last_evaluation_and_takes_own_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert invoke("train", "permuted-digits", *SMALL, "--quiet", "--no-plot", "--output", "first") == 0
    capsys.readouterr()
    assert invoke("evaluate", "first") == 0
    shown = capsys.readouterr().out
    last = json.loads((tmp_path / "first" / "metrics.json").read_text())["accuracy_matrix"][-1]
    assert all(f"{value:.1%}" in shown for value in last) and f"ACC {100 * sum(last) / 2:.1f}%" in shown
    x = np.zeros((4, 64), dtype=np.float32)
    label = int(cfl.load("first").predict(x)[0])
    np.savez(tmp_path / "mine.npz", x=x, y=[label, label, label, (label + 1) % 10])
    assert invoke("evaluate", "first", "--data", "mine.npz") == 0
    assert "mine.npz: 4 samples" in (shown := capsys.readouterr().out) and "75.0%" in shown
    assert invoke("train", "permuted-digits", *SMALL, "--no-plot", "--from", "first", "--output", "second") == 0
    assert "note: starts from the model in 'first'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (("evaluate", "nothing"), 2, "'nothing' holds no run"),
        (("evaluate", "run", "--task", "0"), 2, "--task is for samples in --data"),
        (("evaluate", "run", "--data", "absent.npz"), 1, "there is no file 'absent.npz'; write it with"),
        (("evaluate", "run", "--data", "array.npy"), 1, "array.npy cannot be read as an npz file: it is no"),
        (("evaluate", "run", "--data", "labels.npz"), 1, "has labels 5 to 6, and the head has classes 0 to 1"),
        (("evaluate", "run", "--data", "nan.npz"), 1, "x has NaN or infinity"),
        (("evaluate", "run", "--data", "none.npz"), 1, "'none.npz' has no samples"),
        (("evaluate", "run", "--data", "number.npz"), 1, "x have shape (); give (n, d)"),
        (("evaluate", "run", "--data", "objects.npz"), 1, "array x of objects.npz cannot be read: it is damaged"),
        (("evaluate", "run", "--data", "vast.npz"), 1, "array x of vast.npz cannot be read: it is damaged"),
        (("evaluate", "run"), 2, "has a stream of its own, 'custom'; pass --data"),
        (("train", "permuted-digits", "--from", "nothing"), 2, "'nothing' holds no run"),
        (("train", "permuted-digits", "--from", ""), 2, "start (--from) is an empty text; name the folder of a run"),
    ],
)
def test_evaluate_and_from_name_what_is_wrong(args, status, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((20, 3)), np.arange(20) % 2
    config = cfl.resolve("permuted-digits", overrides=["rounds=1", "partition.clients=1"])
    cfl.run(config, stream=cfl.from_tensors([(x, y, x, y)]), output="run")
    np.save("array.npy", x)
    np.savez("labels.npz", x=x, y=y + 5)
    np.savez("nan.npz", x=x * np.nan, y=y)
    np.savez("none.npz", x=x[:0], y=y[:0])
    np.savez("number.npz", x=np.float32(3), y=y[:1])
    np.savez("objects.npz", x=np.array([{}]), y=y)
    with zipfile.ZipFile("vast.npz", "w") as file:
        file.writestr("x.npy", vast())
        file.writestr("y.npy", vast())
    assert invoke(*args) == status
    assert text in capsys.readouterr().err


def test_evaluate_shows_all_tasks_of_a_benchmark_of_ones_own(tmp_path, monkeypatch, capsys):
    """Its tasks have one name, its stream has none, and its `build` takes all tasks whatever is asked for."""

    def build(tasks, seed, data_root, download, class_order):
        x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
        return cfl.from_tensors([(turn * x, y, turn * x, y) for turn in (1, 2, 3)], multi_head=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins.benchmarks, "_items", dict(plugins.benchmarks._items))
    plugins.benchmarks.register("twins")(streams.Benchmark(build, "three alike", "a test"))
    config = cfl.resolve("twins", overrides=["rounds=1", "partition.clients=2", "cohort=2", "tasks=2"])
    last = cfl.run(config, output="run").metrics["accuracy_matrix"][-1]
    assert len(last) == 2
    assert invoke("evaluate", "run") == 0
    shown = capsys.readouterr().out
    assert shown.count("classes 0 1") == 2 and f"ACC {100 * sum(last) / 2:.1f}%" in shown
    monkeypatch.setattr(plugins.benchmarks, "_items", {"permuted-digits": plugins.benchmarks.get("permuted-digits")})
    assert invoke("evaluate", "run") == 2
    said = "a stream of its own, 'twins'; pass --data, or give the Python file that registers it to cfl-run --plugin"
    assert said in capsys.readouterr().err


DAMPED = """
from dataclasses import dataclass

import cfl


@cfl.plugins.strategies.register("damped-in-a-file")
@dataclass(frozen=True)
class Damped(cfl.Strategy):
    def absorb(self, server, mean, info, lr):
        return super().absorb(server, mean, info, lr * 0.5)
"""


@pytest.mark.slow
def test_a_file_with_a_method_serves_all_commands(tmp_path):
    file = tmp_path / "damped_in_a_file.py"
    file.write_text(DAMPED)

    def command(*args):
        words = [sys.executable, "-c", "from cfl.cli import main; main()", *args]
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)

    few = ["permuted-digits", "--set", "tasks=2", "--set", "rounds=1", "--output", "runs"]
    methods = ["--methods", "fedavg,damped-in-a-file", "--jobs", "2"]
    found = command("--plugin", file.name, "compare", *methods, *few)
    assert found.returncode == 0 and "damped-in-a-file" in found.stdout, found.stderr
    (run,) = (tmp_path / "runs").glob("damped-in-a-file-*")
    again = ["train", "--config", str(run / "config.yaml"), "--output", str(run), "--resume"]
    refused = command(*again).stderr
    assert "unknown method 'damped-in-a-file'" in refused and "give that file to cfl-run --plugin" in refused
    assert command("--plugin", file.name, *again).returncode == 0
    file.write_text(DAMPED.replace("0.5", "0.6"))
    assert "the code of" in command("--plugin", file.name, *again).stderr
    late = command("train", "--plugin", file.name, "permuted-digits")
    assert late.stderr == "cfl-run: --plugin comes before the command, as in: cfl-run --plugin my_method.py train\n"
