import csv
import json
import shutil
import sys

import pytest

import cfl
from cfl import cli
from cfl.core import ConfigError
from cfl.report import runs, spreadsheet, write


def rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_a_row_for_each_run_has_the_figures_of_its_files(stored, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(stored), "-o", str(tmp_path / "runs.csv")])
    assert stop.value.code == 0
    found = rows((tmp_path / "runs.csv").read_text())
    assert [(row["method"], row["seed"]) for row in found] == [
        ("fot", "0"),
        ("fot", "1"),
        ("fedavg", "0"),
        ("fedavg", "1"),
    ]
    for row in found:
        metrics, timing = (
            json.loads((stored / row["folder"] / name).read_text()) for name in ("metrics.json", "timing.json")
        )
        assert (row["benchmark"], row["scenario"]) == ("permuted-digits", "domain")
        for name in ("acc", "fgt", "learning_accuracy"):
            assert float(row[f"{name}_fraction"]) == metrics[name]
        for name in ("bytes_up", "bytes_down", "client_bytes", "seconds"):
            assert float(row[name]) == metrics[name]
        assert float(row["server_seconds"]) == sum(timing["server"].values())
        matrix = metrics["accuracy_matrix"]
        assert float(row["task_0_learned_fraction"]) == matrix[0][0]
        assert [float(row[f"task_{task}_accuracy_fraction"]) for task in (0, 1)] == matrix[1]
    # no option differs within a method
    names = ["method", "benchmark", "scenario", "seed", "acc_fraction"]
    assert list(found[0])[:5] == names and list(found[0])[-1] == "folder"


def test_runs_that_differ_in_options_and_tasks_share_a_file(tmp_path):
    for tasks in (1, 2):
        small = [f"tasks={tasks}", "rounds=1", f"model.hidden=[{8 * tasks}]", "partition.clients=4"]
        two_tasks = cfl.resolve("permuted-digits", overrides=small)
        cfl.run(two_tasks, output=tmp_path / f"{tasks}")
    one, two = rows(spreadsheet.text(runs.read([tmp_path])))
    assert (one["tasks"], one["model.hidden"]) == ("1", "[8]") and two["model.hidden"] == "[16]"
    assert one["fgt_fraction"] == one["task_1_accuracy_fraction"] == "" != two["fgt_fraction"]
    frame = cfl.load(tmp_path / "2").frame()
    assert frame.shape[0] == 1 and frame["local.lr"][0] == cfl.resolve("permuted-digits").local.lr
    assert cfl.run(two_tasks).frame()["acc_fraction"][0] == frame["acc_fraction"][0]
    shared = {name for name in two if two[name]} - {"folder"}
    assert {name: str(frame[name][0]) for name in shared} == {name: two[name] for name in shared}


def test_an_unknown_suffix_is_refused(stored, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in .html, .csv, .md, .tex, .png, .pdf, not 'runs.xls'"):
        write.files([stored], [tmp_path / "runs.xls"])


def test_a_frame_needs_a_finished_run_and_pandas(stored, tmp_path, monkeypatch):
    shutil.copytree(stored / "seed0", tmp_path / "killed")
    (tmp_path / "killed" / "metrics.json").unlink()
    with pytest.raises(ConfigError, match="killed' is not finished; continue it with --resume"):
        cfl.load(tmp_path / "killed").frame()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="a frame needs pandas; run pip install pandas"):
        cfl.load(stored / "seed0").frame()


def test_runs_that_a_file_leaves_out_are_counted(stored, tmp_path):
    config = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=1", "seed=7"])
    cfl.run(config, output=tmp_path / "cut")
    (tmp_path / "cut" / "metrics.json").unlink()  # beside the one that the fixture has
    with pytest.warns(UserWarning, match=r"of the runs, 2 are unfinished; runs\.csv leaves them out"):
        write.files([stored, tmp_path], [tmp_path / "runs.csv"])
    with pytest.warns(UserWarning, match=r"of the runs, 1 is unfinished; runs\.csv, runs\.md leave it out"):
        write.files([stored], [tmp_path / "runs.csv", tmp_path / "runs.md"])
