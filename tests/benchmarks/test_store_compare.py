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


def test_figures_command_and_curves_are_kept(store_compare, tmp_path):
    options = [word for text in FEW for word in ("--set", text)]
    asked = ["compare", "permuted-digits", "--methods", "fedavg,fot", "--seeds", "0,1", *options, "--quiet"]
    assert CliRunner().invoke(app, [*asked, "--no-plot", "--output", str(tmp_path)]).exit_code == 0
    written = json.loads((tmp_path / "compare.json").read_text())
    found = store_compare.stored(tmp_path)
    assert (found["benchmark"], found["command"]) == ("permuted-digits", written["command"])
    assert list(found["methods"]) == ["fedavg", "fot"]
    for name, figures in found["methods"].items():
        assert figures["acc"] == written["methods"][name]["acc"]
        assert not any(key.endswith("seconds") for key in figures)
        for seed, curve in enumerate(figures["accuracy_every_2_rounds"]):
            (run,) = tmp_path.glob(f"{name}-seed{seed}-*")
            matrix = json.loads((run / "metrics.json").read_text())["accuracy_matrix"]
            # twice a task; FOT measures its coverage after the first one, and the last value is of the task's end
            assert curve[-1] == matrix[1][1] and len(curve) == (5 if name == "fot" else 4)
    assert store_compare.stored(tmp_path, seconds=True)["methods"]["fot"]["seconds"]["mean"] > 0
