"""The tutorials run: every notebook from its first cell to its last, and the script of a new user."""

import json
from pathlib import Path

import nbformat
import pytest

from cfl.core import plugins
from tests.toy import DATA, need_data

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_outputs_are_stored(path, script, tmp_path):
    """Numbers may differ in the last digits on another processor, so the kinds of the outputs are compared."""

    def outputs(notebook):
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return [(cell.execution_count, [sorted(one.get("data", ["text"])) for one in cell.outputs]) for cell in cells]

    stored = outputs(nbformat.read(path, as_version=4))
    assert stored == outputs(script("tools/docs/execute.py").executed(path, tmp_path))
    assert any("image/png" in kinds for _, shown in stored for kinds in shown)


@pytest.mark.slow
@pytest.mark.data
def test_the_script_of_a_new_user_runs(script, tmp_path, monkeypatch):
    need_data("fashion-mnist")
    plugins.strategies.names()  # the built-ins register on import, which must not happen in the copy
    monkeypatch.setattr(plugins.strategies, "_items", dict(plugins.strategies._items))
    short = ["--images", "200", "--rounds", "2"]
    found = script("docs/tutorials/new_user.py").main(["--data", DATA, "--output", str(tmp_path), *short])
    assert (tmp_path / "report.html").is_file()
    stored = json.loads((tmp_path / "blended/metrics.json").read_text())["accuracy_matrix"]
    assert found == stored[-1] and len(found) == 3  # the loaded model is the one that the run evaluated last
