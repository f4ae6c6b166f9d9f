"""Tables of the papers: printed numbers, runs of a cell, and our scores."""

import json
import math
from pathlib import Path

import pytest
import torch

import cfl
from cfl import cli, streams
from cfl.assembly.resolve import dump
from cfl.core import ConfigError, plugins, rng
from cfl.experiments import reproduce
from cfl.experiments.compare import Run, digest, experiment
from cfl.experiments.reproduce import Cell, Score, Table
from cfl.report import reproduced

CELLS = [(table, cell) for table in reproduce.tables().values() for cell in table.cells]


@pytest.mark.slow
def test_every_cell_resolves_at_every_scale():
    for table, cell in CELLS:
        for scale in ("paper", "small", "smoke") if "method" in cell.spec else ():
            (run,) = cell.runs([3], scale, [], Path())
            assert run.config.seed == 3 and run.config.scale == scale
            assert run.config.benchmark in plugins.benchmarks.names(), table.name


@pytest.mark.slow
@pytest.mark.parametrize("column, size", [("5-Datasets", 32), ("Mini-ImageNet", 84)])
def test_columns_that_need_a_download_run_with_every_method(column, size):
    # Random images replace the data: a method that cannot train the preset's network fails at the start of the run.
    images, labels = torch.rand(24, 3, size, size, generator=rng.generator(0)), torch.arange(24) % 5
    stream = streams.from_tensors([(images, labels, images[:10], labels[:10])] * 2, multi_head=True)
    few = ["partition.clients=4", "cohort=2", "local.batch_size=3"]
    for cell in reproduce.table("fot-table1").only([column, "IID"]):
        for run in cell.runs([0], "smoke", few, Path()):
            assert cfl.run(run.config, stream=stream).metrics["acc"] >= 0, cell.row


def test_every_row_of_the_papers_has_a_method():
    assert {cell.row for _, cell in CELLS if "method" not in cell.spec and any(cell.paper.values())} == set()


@pytest.mark.slow
def test_cells_of_a_table_are_different_runs():
    for table in reproduce.tables().values():
        runs = [run for cell in table.cells for run in cell.runs([0], "paper", [], Path())]
        assert len({experiment(run.config) for run in runs}) == len(runs), table.name


def test_the_options_of_cells_are_those_of_the_paper():
    (fl,) = (c for c in reproduce.table("fot-table1").only(["FL", "IID", "PMNIST"]))
    paper, small = (fl.runs([0], scale, [], Path())[0].config for scale in ("paper", "small"))
    assert paper.rounds == (200, *[100] * 9) and paper.partition.name == "iid"  # FOT, appendix F.4
    assert small.rounds == cfl.resolve("permuted-mnist", scale="small").rounds
    (cell,) = reproduce.table("fedsol-table2").only(["FedSOL", "CIFAR-10 α=0.05"])
    (run,) = cell.runs([0], "paper", [], Path())
    assert (run.config.partition.name, run.config.partition.alpha, run.config.label) == ("lda", 0.05, "fedsol")
    assert cell.paper["acc"] == Score(60.01, 0.30)


@pytest.mark.parametrize(
    ("column", "sizes"),
    # FOT, Table 5: megabytes of model, {A} and {O}; generator that fits FedCIL's numbers; rounds per task
    [("CIFAR100", (1.42, 0.24, 0.048, 1.60, 1000)), ("Mini-ImageNet", (2.56, 0.64, 0.08, 2.92, 250))],
)
def test_table_13_is_the_arithmetic_of_table_5(column, sizes):
    model, sketch, basis, generator, rounds = sizes
    for row, extra in (("FOT", sketch + basis), ("FedCIL", rounds * 2 * generator)):
        (cell,) = reproduce.table("fot-table13").only([row, column])
        printed = [score.mean for score in cell.paper.values() if score]
        assert len(printed) == {"CIFAR100": 10, "Mini-ImageNet": 20}[column]
        expected = [t * rounds * 2 * model + (t - 1) * extra for t in range(1, len(printed) + 1)]
        assert printed == pytest.approx(expected, abs=0.051)  # printed with one decimal


def test_the_gap_is_in_standard_deviations_of_both_scores():
    assert Score(80.0, 3.0).gap(Score(90.0, 4.0)) == pytest.approx(-10 / 5)  # hypot(3, 4) = 5
    assert Score(80.0, 4.0).gap(Score(90.0)) == pytest.approx(-10 / 4)
    assert Score(80.0).gap(Score(90.0, 4.0)) is None  # a single run has no standard deviation


def test_only_takes_names_of_the_table_and_suggests_the_nearest():
    table = reproduce.table("fot-table1")
    assert {(c.row, c.column, c.part) for c in table.only(["FOT", "FL", "IID", "PMNIST"])} == {
        ("FOT", "PMNIST", "IID"),
        ("FL", "PMNIST", "IID"),
    }
    with pytest.raises(ConfigError, match="'PMNIST'"):
        table.only(["PMIST"])
    with pytest.raises(ConfigError, match="did you mean 'PMNIST'"):
        table.only(["pmnist"])
    with pytest.raises(ConfigError, match="did you mean 'fot-table12'"):
        reproduce.table("fot-tabel12")


def test_a_method_gets_its_own_options_and_fixed_options_are_refused():
    table = reproduce.table("fot-table1")

    def runs(*overrides, stored=()):
        found = table.runs(["FL", "FOT", "PMNIST", "IID"], [5], "smoke", overrides, Path(), stored)
        return {cell.row: each for cell, each in found.items()}

    own = runs("strategy.threshold=0.5", "local.lr=0.25")
    assert own["FOT"][0].config.strategy["threshold"] == 0.5
    assert {row: [run.config.local.lr for run in own[row]] for row in ("FL", "FOT")} == {"FL": [0.25], "FOT": [0.25]}
    with pytest.raises(ConfigError, match=r"did you mean 'strategy.threshold'"):
        runs("strategy.treshold=0.5")
    with pytest.raises(ConfigError, match=r"did you mean 'strategy.threshold'"):
        runs("treshold=0.5")
    for name in ("seed=3", "method=ewc", "benchmark=mnist", "scale=small"):
        with pytest.raises(ConfigError, match=f"--set cannot take {name.partition('=')[0]}; "):
            runs(name)
    with pytest.raises(ConfigError, match="'gone' is not a folder"):
        runs(stored=[Path("gone")])


def test_a_run_of_an_earlier_version_in_the_output_folder_counts(tmp_path):
    def folder():
        ((run,),) = reproduce.table("fot-table1").runs(["FOT", "PMNIST", "IID"], [5], "smoke", [], tmp_path).values()
        return run.config, run.folder

    config, new = folder()
    old = dump(config)
    del old["strategy"]["draw"]  # an option that the earlier version lacked; loading fills in its default
    (tmp_path / "fot-seed5-0123456789").mkdir()
    (tmp_path / "fot-seed5-0123456789" / "config.yaml").write_text(json.dumps(old))  # JSON is YAML
    assert folder() == (config, new)  # not finished
    (tmp_path / "fot-seed5-0123456789" / "metrics.json").write_text("{}")
    assert folder() == (config, tmp_path / "fot-seed5-0123456789") and new.name != "fot-seed5-0123456789"


def test_a_finished_run_of_any_engine_stands_for_a_cell(tmp_path):
    """Permuted MNIST has dropout, whose draws depend on the engine; a cell asks for an experiment."""

    def run(folder, *stored):
        only = ["FOT", "PMNIST", "IID"]
        ((found,),) = reproduce.table("fot-table1").runs(only, [5], "smoke", ["engine=auto"], folder, stored).values()
        return found

    planned = run(tmp_path / "new")
    other = planned.config.model_copy(update={"engine": "pool+vmapped", "block": 8})
    assert digest(other) != digest(planned.config) and experiment(other) == experiment(planned.config)
    folder = tmp_path / "kept" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(dump(other)))
    (folder / "metrics.json").write_text("{}")
    assert run(tmp_path / "kept").folder == run(tmp_path / "new", tmp_path / "kept").folder == folder != planned.folder


def test_scores_have_the_decimals_of_the_paper():
    """FOT, Table 4: 0.194 and 0.215; Table 12: 51.9; Table 1: 10.7 ± 0.61, so two decimals."""
    cells = {
        name: next(c for c in reproduce.table(name).cells if c.row == row and c.column == column)
        for name, row, column in (
            ("fot-table4-5", "Mini-ImageNet", "a client"),
            ("fot-table12", "0.80", "CIFAR100"),
            ("fot-table1", "GPM+FL", "5-Datasets"),
        )
    }
    shown = {}
    for name, cell in cells.items():
        ours = {cell: {measure: Score(0.12345, None, 1) for measure in cell.paper}}
        ((_, _, shown[name]),) = reproduced.blocks(reproduce.table(name), ours, "paper")
    (_, _, *printed, _), (_, _, *own, _) = shown["fot-table4-5"]
    assert (printed[:2], own[:2]) == (["0.194", "0.215"], ["0.123", "0.123"])
    assert shown["fot-table12"][0][2] == "51.9" and shown["fot-table12"][1][2] == "0.12"
    assert shown["fot-table1"][0][4:6] == ["10.70 ± 0.61", "0.12"]


@pytest.mark.parametrize(("cohort", "participants", "epochs"), [(4, "sampled", 1), (2, "all", 3)])
def test_measures_of_a_run_match_its_files(cohort, participants, epochs, tmp_path):
    """A 64-8-10 MLP with biases, 3 tasks of one round; all 4 clients send sketches of d + 1 rows and s d columns."""
    options = ["tasks=3", "rounds=1", "partition.clients=4", "model.hidden=[8]", "strategy.min_rank=1"]
    options += [f"cohort={cohort}", f"strategy.participants={participants}", f"local.epochs={epochs}"]
    options += ["strategy.measure_coverage=false", "strategy.threshold=0.01", "strategy.s_mult=1"]
    config = cfl.resolve("permuted-digits", method="fot", overrides=options)
    metrics = cfl.run(config, output=tmp_path).metrics
    names = (
        "acc",
        "task2",
        "task4",
        "use",
        "model_mb",
        "sketch_mb",
        "basis_mb",
        "cost2",
        "epoch_seconds",
        "gpse_seconds",
    )
    found = {name: score.mean for name, score in reproduce.scores(names, [Run("", config, tmp_path)]).items()}
    assert found["acc"] == pytest.approx(100 * metrics["acc"])
    assert found["task2"] == pytest.approx(100 * metrics["accuracy_matrix"][2][1]) and math.isnan(found["task4"])
    widths = (65, 9)  # inputs of both layers, plus one for the bias
    numbers = 64 * 8 + 8 + 8 * 10 + 10
    assert found["model_mb"] == pytest.approx(4 * numbers / 1e6)
    energies = 2 * 8 * len(widths)  # |X|^2 and |X*|^2 of each layer, float64
    assert found["sketch_mb"] == pytest.approx((4 * sum(d * d for d in widths) + energies) / 1e6)
    first = metrics["by_task"][0]["subspace_use"]  # the basis sent after the second task; one direction per layer
    columns = [round(share * d) for share, d in zip(first.values(), widths, strict=True)]
    assert found["basis_mb"] == pytest.approx(4 * sum(k * d for k, d in zip(columns, widths, strict=True)) / 1e6)
    once = found["sketch_mb"] + found["basis_mb"]
    assert found["cost2"] == pytest.approx(2 * 20 * 2 * found["model_mb"] + once)  # 20 rounds in the preset
    timing = json.loads((tmp_path / "timing.json").read_text())["clients"]
    assert found["epoch_seconds"] == pytest.approx(timing["train"] / (3 * cohort * epochs))
    assert found["gpse_seconds"] == pytest.approx(timing["gpse"] / 8)  # 4 clients after 2 of 3 tasks


def test_measures_that_a_short_run_lacks_print_as_a_dash(tmp_path):
    """One task has neither forgetting nor a sketch; two tasks have no broadcast basis; seconds may not be stored."""
    names = ("fgt", "model_mb", "sketch_mb", "basis_mb", "cost2", "epoch_seconds", "gpse_seconds")
    few = ["cohort=4", "partition.clients=4", "model.hidden=[8]"]
    gone = {}
    for tasks, rounds in ((1, "2"), (2, "[1,3]")):
        options = [*few, f"tasks={tasks}", f"rounds={rounds}"]
        run = Run("", cfl.resolve("permuted-digits", method="fot", overrides=options), tmp_path / str(tasks))
        cfl.run(run.config, output=run.folder)
        found = {name: score.mean for name, score in reproduce.scores(names, [run]).items()}
        gone[tasks] = {name for name, mean in found.items() if math.isnan(mean)}
        assert found["model_mb"] == pytest.approx(4 * (64 * 8 + 8 + 8 * 10 + 10) / 1e6)  # float32, whatever the rounds
    assert gone == {1: {*names} - {"model_mb", "epoch_seconds"}, 2: {"basis_mb", "cost2"}}
    cell = Cell("", "FOT", "digits", {"fgt": Score(7.5)}, {})
    toy, ours = Table("toy", "Toy", ("fgt",), (), (cell,)), {cell: {"fgt": Score(math.nan, None, 1)}}
    for scale, expected in (("paper", ["FOT", "7.50", "–", "", "1"]), ("small", ["FOT", "7.50", "–", "1"])):
        ((_, _, (row,)),) = reproduced.blocks(toy, ours, scale)
        assert row == expected


def test_the_list_of_tables_has_a_name_and_a_title_each(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce"])
    head, *rows = [line for line in capsys.readouterr().out.splitlines() if line[:1] in ("┃", "│")]
    assert head.strip("┃").split("┃")[0].split() == ["name"] and head.count("┃") == 3  # no column is empty
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        [one.name, one.title] for one in reproduce.tables().values()
    ]


def test_the_command_runs_missing_runs_and_prints_them_next_to_the_paper(tmp_path, capsys, monkeypatch):
    few = ["tasks=2", "rounds=1", "model.hidden=[8]", "partition.clients=4"]
    spec = {"benchmark": "permuted-digits", "method": "fedavg", "set": few, "exact": ["local.lr=0.5"], "reduced": []}
    cells = (
        Cell("", "FL", "digits", {"acc": Score(50.0, 2.0), "fgt": Score(7.5)}, spec),
        Cell("", "TARGET", "digits", {"acc": Score(60.0), "fgt": None}, {"set": [], "exact": [], "reduced": []}),
    )
    toy = Table("toy-table", "Toy, Table 1", ("acc", "fgt"), ("a note",), cells)
    monkeypatch.setattr(reproduce, "tables", lambda: {"toy-table": toy})

    def shown(*args):
        with pytest.raises(SystemExit) as stop:
            cli.main(["reproduce", "toy-table", "--seeds", "0..1", "--engine", "loop", "--quiet", *map(str, args)])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        return next(line for line in out.splitlines() if "FL" in line), out

    line, out = shown("--output", tmp_path, "--show")
    assert "50.00 ± 2.00" in line and "ours" in out and "a note" in out and not list(tmp_path.iterdir())
    line, out = shown("--output", tmp_path)
    runs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("fedavg-seed*/metrics.json"))]
    accs = [100 * run["acc"] for run in runs]
    mean, std = sum(accs) / 2, abs(accs[0] - accs[1]) / 2
    assert f"{mean:.2f} ± {std:.2f}" in line
    assert f"{mean - 50:+.2f} ({(mean - 50) / math.hypot(std, 2):+.1f} σ)" in line
    assert "TARGET" in out and "60.00" in out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again, _ = shown("--output", tmp_path / "elsewhere", "--stored", tmp_path)
    assert again == line and before == {path: path.stat().st_mtime_ns for path in before}
    assert not (tmp_path / "elsewhere").exists()
    scaled, out = shown("--output", tmp_path / "smoke", "--scale", "smoke", "--show")
    assert f"{mean:.2f}" not in scaled and "compare their order" in out


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ([], "auto"),
        (["--set", "engine=loop"], "loop"),
        (["--set", "engine=loop", "--engine", "pool"], "pool"),  # as for train and compare: the flag is the last layer
    ],
)
def test_the_engine_is_that_of_the_flag_before_that_of_an_option(words, engine, tmp_path, monkeypatch):
    planned = []

    def run_all(runs, **_):
        planned.extend(runs)
        return {}

    monkeypatch.setattr("cfl.cli.compare.run_all", run_all)
    with pytest.raises(SystemExit) as stop:
        only = ["--only", "PMNIST", "--only", "FL", "--only", "IID", "--seeds", "0"]
        cli.main(["reproduce", "fot-table1", *only, "--output", str(tmp_path), *words])
    assert stop.value.code == 0
    assert [run.config.engine for run in planned] == [engine]


def test_reduced_scales_have_options_of_their_own(tmp_path):
    spec = {
        "benchmark": "permuted-digits",
        "method": "fedavg",
        "set": [],
        "exact": ["rounds=7"],
        "reduced": ["rounds=3"],
    }
    cell = Cell("", "FL", "digits", {}, spec)
    assert [cell.runs([0], scale, [], tmp_path)[0].config.rounds for scale in ("paper", "smoke")] == [7, 3]


@pytest.mark.parametrize("column", ["CIFAR-10 β=0.3", "CIFAR-10 β=0.5", "CINIC-10 β=0.3", "CINIC-10 β=0.5"])
def test_the_small_resnet8_of_fedproj_is_narrow(column, tmp_path):
    cell = next(
        cell for cell in reproduce.tables()["fedproj-table1"].cells if (cell.row, cell.column) == ("FedAvg", column)
    )
    models = {scale: cell.runs([0], scale, [], tmp_path)[0].config.model for scale in ("paper", "small")}
    assert {model.name for model in models.values()} == {"resnet8"}
    assert models["small"].options["width"] == 16 < models["paper"].options["width"]


def test_table_13_has_the_bytes_of_methods_without_sketches():
    """R rounds of a client take R (up + down) / participations; FedCIL's rounds are of the phase "gan"."""
    (cell,) = reproduce.table("fot-table13").only(["FedCIL", "CIFAR100"])
    (run,) = cell.runs([0], "paper", [], Path())
    results = {"accuracy_matrix": [[0.5] * 10] * 10, "bytes_by_phase": {"gan": {"up": 3e9, "down": 2e9}}, "timing": {}}
    results |= {"acc": 0.5, "fgt": 0.1, "subspace_use": {}}
    found = {name: reproduce.measure(name)[1](results, run.config) for name in cell.paper}
    each = 5e9 / 1e6 / (5 * 10)  # five clients in one round of each of ten tasks
    assert found["cost1"] == pytest.approx(1000 * each) and found["cost10"] == pytest.approx(10_000 * each)
