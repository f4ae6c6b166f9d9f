"""Executes the notebooks of the tutorials and stores their outputs: `make notebooks`."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SECONDS = 120  # limit of a cell


def executed(path: Path, folder: Path | str) -> nbformat.NotebookNode:
    """Return the notebook with new outputs, without warnings. folder: where its cells run and write."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources, record_timing=False, coalesce_streams=True).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # such as the lines of tqdm on a missing widget
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(executed(Path(name), scratch), name)
