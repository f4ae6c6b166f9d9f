"""`cfl-run evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from cfl.cli.app import DataRoot, Download, app, display
from cfl.core import ConfigError, DataError
from cfl.report import tables
from cfl.runtime.model_file import own_objects
from cfl.runtime.runner import stream_of
from cfl.runtime.saved_run import load
from cfl.streams import npz
from cfl.streams.tensors import as_labels


@app.command(epilog="Example: cfl-run evaluate runs/mine")
def evaluate(
    folder: Path,
    data: Annotated[
        Path | None, typer.Option(help="FILE.npz with x (samples) and y (labels), in place of the test data.")
    ] = None,
    task: Annotated[int | None, typer.Option(help="Task of the samples in --data.")] = None,
    data_root: DataRoot = None,
    download: Download = False,
) -> None:
    """Evaluate the model of a finished or interrupted run.

    FOLDER: of the run. The model is evaluated on the test data of the run's benchmark, or on samples of your own.
    """
    run = load(folder)
    title = f"{run.about['stream']}, {run.config.label}, seed {run.config.seed}"
    if data is not None:
        x, y = npz.read(data, ("x", "y")).values()
        logits = run.logits(x, task)  # first: it refuses an x that has no length
        labels = as_labels(y, f"y in '{data}'", len(x))
        if not len(labels):
            raise DataError(f"'{data}' has no samples")
        if not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
            raise DataError(
                f"y in '{data}' has labels {int(labels.min())} to {int(labels.max())}, and the head has classes 0 to "
                f"{logits.shape[1] - 1}; number the labels as the run's targets"
            )
        right = logits.argmax(dim=1) == labels
        display(*tables.evaluated([(f"{data.name}: {len(x)} samples", float(right.double().mean()))], title))
        return
    if task is not None:
        raise ConfigError("--task is for samples in --data; without --data, all tasks are evaluated")
    if "stream" in own_objects(run.about, run.config.benchmark):
        raise ConfigError(
            f"the run in '{folder}' has a stream of its own, '{run.about['stream']}'; pass --data, or give the Python "
            "file that registers it to cfl-run --plugin"
        )
    stream = stream_of(run.config, data_root, download, public=False)
    display(*tables.evaluated([*zip(run.about["tasks"], run.accuracies(stream))], f"{title}, test data"))
