"""`benchmarks/store_compare.py`: what is kept of a comparison."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cfl.cli import app

ROOT = Path(__file__).parents[2]
FEW = ["tasks=2", "rounds=4", "model.hidden=[8]", "partition.clients=4", "eval_every=2"]


@pytest.fixture(scope="module")
def store_compare(script):
    return script("store_compare")


def compare(folder, methods, *more):
    options = [word for text in FEW for word in ("--set", text)]
    words = ["compare", "permuted-digits", "--methods", methods, *options, *more, "--quiet", "--no-plot"]
    assert CliRunner().invoke(app, [*words, "--output", str(folder)]).exit_code == 0
    return json.loads((folder / "compare.json").read_text())


@pytest.mark.slow
def test_figures_command_and_curves_are_those_of_the_last_comparison(store_compare, tmp_path):
    compare(tmp_path, "fot", "--seeds", "7", "--set", "local.lr=0.2")
    written = compare(tmp_path, "fedavg,fot", "--seeds", "0,1", "--vary", "strategy.threshold=0.8,0.95")
    found = store_compare.stored(tmp_path)
    assert (found["benchmark"], found["command"]) == ("permuted-digits", written["command"])
    assert list(found["methods"]) == ["fedavg", "fot, strategy.threshold=0.8", "fot, strategy.threshold=0.95"]
    for name, figures in found["methods"].items():
        assert figures["acc"] == written["methods"][name]["acc"] and figures["seeds"] == [0, 1]
        assert not any(key.endswith("seconds") for key in figures)
        curves = figures["accuracy_every_2_rounds"]
        ends = [json.loads((tmp_path / run / "metrics.json").read_text()) for run in written["runs"][name]]
        assert [run["seed"] for run in ends] == [0, 1] and all(len(curve) == 4 for curve in curves)  # two tasks, twice
        assert [curve[-1] for curve in curves] == [run["accuracy_matrix"][1][1] for run in ends]
    assert store_compare.stored(tmp_path, seconds=True)["methods"]["fedavg"]["seconds"]["mean"] > 0
