"""`cfl-run train`."""
# ruff: noqa: B006  # Typer reads the type of an option's default, and no command changes its lists

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cfl.assembly.resolve import resolve
from cfl.cli.app import Benchmark, DataRoot, Download, Engine, Output, Plot, Quiet, Scale, Set, app, display
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, machine, plugins
from cfl.experiments.compare import alone
from cfl.report import plots, tables
from cfl.report.repeat import continuation
from cfl.runtime import runner
from cfl.runtime.mlflow import MlflowSink
from cfl.runtime.model_file import check_described
from cfl.runtime.sinks import Sink, Sinks, console_sink
from cfl.runtime.tensorboard import TensorBoardSink
from cfl.runtime.wandb import WandbSink


@app.command(epilog="Example: cfl-run train permuted-digits --method fot --set local.lr=0.1")
def train(
    benchmark: Benchmark[str | None] = None,
    method: Annotated[str | None, typer.Option(help="Method, such as fot or fot+fedsol (default: fedavg).")] = None,
    local: Annotated[list[str], typer.Option("--local", help="Add a local regularizer. Repeatable.")] = [],
    seed: Annotated[int | None, typer.Option(help="Seed of all random draws (default: 0).")] = None,
    scale: Scale[str | None] = None,
    overrides: Set = [],
    config: Annotated[Path | None, typer.Option(help="Repeat the run of this resolved config.yaml.")] = None,
    output: Output[Path | None] = None,
    data_root: DataRoot = None,
    download: Download = False,
    engine: Engine[str | None] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Start from the model of the run in this folder (option start).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    quiet: Quiet = False,
    plot: Plot = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files to the output folder.")
    ] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Write to mlflow.db beside the output folder.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Write files for 'wandb sync' to the output folder.")] = False,
) -> None:
    """Train a method over the tasks of a benchmark.

    BENCHMARK: a name such as permuted-digits; see 'cfl-run list benchmarks'.
    """
    overrides = [*overrides, *([f"start={json.dumps(start)}"] if start is not None else [])]
    layers = dict(regularizers=local, overrides=overrides, seed=seed, engine=engine, scale=scale)
    resolved = _resolved(benchmark, config, method, **layers)
    folder = output or Path("runs") / alone(resolved)
    if resume and output is None and not (folder / "config.yaml").exists():
        raise ConfigError(f"'{folder}' holds no run to resume; repeat the options of that run, or pass its --output")
    sinks: list[Sink] = [TensorBoardSink(folder / "tensorboard")] if tensorboard else []
    sinks += [MlflowSink(folder)] if mlflow else []
    sinks += [WandbSink(folder)] if wandb else []
    sink = Sinks(*sinks, console_sink(quiet))  # the console last: the others take seconds to start
    flags = ["--data-root", str(data_root)] if data_root else []
    flags += ["--download"] * download + ["--tensorboard"] * tensorboard + ["--mlflow"] * mlflow + ["--wandb"] * wandb
    metrics = _run(resolved, folder, resume, sink, flags, data_root=data_root, download=download)
    display(*tables.run(metrics, resolved.title, folder))
    if plot:
        plots.accuracy(metrics["accuracy_matrix"], resolved.title, folder / "accuracy.png")


def _resolved(benchmark: str | None, file: Path | None, method: str | None, **layers: Any) -> RunConfig:
    """Resolve a configuration and check that its benchmark is registered; `resolve` accepts any name."""
    if benchmark is not None:
        plugins.benchmarks.get(benchmark)
    config = resolve(benchmark, file=file, method=method, **layers)
    with plugins.read_from(file):
        plugins.benchmarks.get(config.benchmark)
    if file is not None:
        check_described(file, config.benchmark, but=("strategy", "regularizers") if method is not None else ())
    return config


def _run(
    config: RunConfig, folder: Path, resume: bool, sink: Sink, flags: Sequence[str] = (), **data: Any
) -> dict[str, Any]:
    machine.keep_memory()
    try:
        return runner.run(config, output=folder, resume=resume, sink=sink, **data).metrics
    except KeyboardInterrupt:
        print(_interrupted(folder, flags), file=sys.stderr)
        raise
    finally:
        sink.close()


def _interrupted(folder: Path, flags: Sequence[str]) -> str:
    if not (folder / "config.yaml").exists():
        return "interrupted before the first round: nothing is saved; give the same command again"
    return f"interrupted; continue with: {shlex.join([*continuation(folder), *flags])}"
