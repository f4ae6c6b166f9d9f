"""The command `cfl-run`: train, compare, reproduce, list, describe and report.

Exit status: 0 for success, 1 for a run that cannot go on, 2 for wrong usage, 130 for an interrupt. Errors are one line.
"""
# ruff: noqa: B006  # Typer reads the type of an option's default, and no command changes its lists

import shlex
import sys
from collections.abc import Sequence, Sized
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import typer
from rich.console import Console

from cfl.assembly.resolve import resolve
from cfl.config.schema import RunConfig
from cfl.core import CflError, ConfigError, machine, plugins, unknown
from cfl.core.version import __version__
from cfl.experiments import reproduce as papers
from cfl.experiments.compare import alone, continuation, plan, reference, seeds_of
from cfl.experiments.parallel import run_all
from cfl.report import described, plots, reproduced, tables, write
from cfl.report.comparison import Comparison
from cfl.runtime import runner
from cfl.runtime.sinks import Sinks, console_sink
from cfl.runtime.tensorboard import TensorBoardSink

# Docstrings describe the arguments of a command: some versions of click do not show the help of a Typer argument.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

KINDS = {
    "benchmarks": plugins.benchmarks,
    "methods": plugins.strategies,
    "models": plugins.models,
    "regularizers": plugins.local,
}

T = TypeVar("T")
# Options that several commands share. T: type of the value, optional where a command has no default.
Benchmark = Annotated[T, typer.Argument()]
Seeds = Annotated[str, typer.Option(help="Seeds, such as 0..2 or 0,3,5.")]
Scale = Annotated[
    T, typer.Option(help="Length: paper (the preset as written; default), small (10 to 60 minutes) or smoke (seconds).")
]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set an option. Repeatable.")]
Engine = Annotated[
    T, typer.Option(help="How to compute the clients: loop (the usual default), vmapped, pool, pool+vmapped or auto.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Parallel runs (default: one per core; 1 if a run uses all cores or a GPU).")
]
Output = Annotated[T, typer.Option(help="Output folder (default: a folder under runs/).")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets (default: CFL_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Download missing data sets.")]
Plot = Annotated[bool, typer.Option(help="Draw the results to a PNG file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cfl {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Continual federated learning."""


@app.command()
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    quiet: Quiet = False,
    plot: Plot = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files to the output folder.")
    ] = False,
) -> None:
    """Train a method over the tasks of a benchmark.

    BENCHMARK: a name such as permuted-digits; see 'cfl-run list benchmarks'.
    """
    layers = dict(method=method, regularizers=local, overrides=overrides, seed=seed, engine=engine, scale=scale)
    resolved = _resolved(benchmark, file=config, **layers)
    folder = output or Path("runs") / alone(resolved)
    if resume and output is None and not (folder / "config.yaml").exists():
        raise ConfigError(f"'{folder}' holds no run to resume; repeat the options of that run, or pass its --output")
    metrics = _run(resolved, folder, resume, quiet, tensorboard, data_root=data_root, download=download)
    title = f"{resolved.benchmark}, {resolved.label}, seed {resolved.seed}"
    if plot:
        plots.accuracy(metrics["accuracy_matrix"], title, folder / "accuracy.png")
    _print(*tables.run(metrics, title, folder))


@app.command()
def compare(
    benchmark: Benchmark[str],
    methods: Annotated[str, typer.Option(help="Methods, such as fedavg,fot,fot+fedsol.")],
    seeds: Seeds = "0",
    scale: Scale[str | None] = None,
    overrides: Set = [],
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B", help="Run with each value. Repeatable.")] = [],
    against: Annotated[str | None, typer.Option(help="Reference method of paired tests (default: the first).")] = None,
    engine: Engine[str | None] = None,
    jobs: Jobs = None,
    data_root: DataRoot = None,
    download: Download = False,
    output: Output[Path | None] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Print the mean accuracy matrix of each method.")] = False,
    quiet: Quiet = False,
    plot: Plot = True,
) -> None:
    """Run methods x settings x seeds in parallel, and print tables of the results.

    BENCHMARK: a name such as permuted-digits; see 'cfl-run list benchmarks'.
    """
    folder = output or Path("runs") / f"compare-{benchmark}"
    # Resolve all runs before the first one starts: a wrong name must not show up after hours.
    groups = plan(benchmark, methods, seeds, folder, overrides=overrides, vary=vary, scale=scale, engine=engine)
    other = reference(groups, against)
    runs = [run for group in groups for run in group.runs]
    failed = run_all(runs, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    found = Comparison(benchmark, scale, groups, other)
    if not found.results:
        raise _failed(failed, runs)
    given: dict[str, Sequence[str | None]] = {"--methods": [methods], "--seeds": [seeds], "--set": overrides}
    given |= {"--vary": vary, "--scale": [scale], "--against": [against], "--engine": [engine]}
    words = [word for flag, values in given.items() for value in values if value for word in (flag, value)]
    found.write(folder / "compare.json", shlex.join(["cfl-run", "compare", benchmark, *words]))
    if plot:
        found.draw(folder / "compare.png")
    _print(*found.tables(matrix), f"results in {folder}")
    if failed:
        raise _failed(failed, runs)


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument()] = None,
    only: Annotated[list[str], typer.Option(metavar="NAME", help="Column, row or part of the table. Repeatable.")] = [],
    seeds: Seeds = "0..2",
    scale: Scale[str] = "paper",
    overrides: Set = [],
    engine: Engine[str] = "auto",
    jobs: Jobs = None,
    stored: Annotated[list[Path], typer.Option(help="Use the finished runs in this folder. Repeatable.")] = [],
    output: Output[Path] = Path("runs/reproduce"),
    show: Annotated[bool, typer.Option("--show", help="Show the finished runs, and run nothing.")] = False,
    data_root: DataRoot = None,
    download: Download = False,
    quiet: Quiet = False,
) -> None:
    """Run the missing runs of a paper's table, and print the results next to the paper's.

    TABLE: a name such as fot-table1; the default lists the tables.
    """
    if table is None:
        _print(tables.listing([(one.name, one.title, "") for one in papers.tables().values()], "tables"))
        return
    wanted = papers.table(table)
    runs = wanted.runs(only, seeds_of(seeds), scale, [f"engine={engine}", *overrides], output, stored)
    needed = [] if show else list(chain(*runs.values()))
    failed = run_all(needed, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    ours = {cell: papers.scores(wanted.measures, each) for cell, each in runs.items()}
    _print(*reproduced.shown(wanted, ours, scale))
    if failed:
        raise _failed(failed, needed)


@app.command("list")
def list_(what: Annotated[str | None, typer.Argument()] = None) -> None:
    """List the available names, each with a summary and its source.

    WHAT: benchmarks, methods, models or regularizers; the default lists all.
    """
    if what is not None and what not in KINDS:
        raise unknown("kind", what, KINDS)
    for kind, registry in KINDS.items():
        if what in (None, kind):
            rows = [(name, described.summary(registry.get(name)), registry.source(name)) for name in registry.names()]
            _print(tables.listing(rows, kind))


@app.command()
def describe(name: str) -> None:
    """Show hyper-parameters with default, valid values, meaning and source, or the preset of a benchmark.

    NAME: a benchmark, method, model or regularizer.
    """
    found = [kind for kind, registry in KINDS.items() if name in registry.names()]
    if not found:
        raise unknown("name", name, [known for registry in KINDS.values() for known in registry.names()])
    for kind in found:
        _print(*described.blocks(kind, name, KINDS[kind].get(name), KINDS[kind].source(name)))


@app.command()
def report(
    runs: list[Path],
    output: Annotated[list[Path], typer.Option("--output", "-o", help="FILE.html, FILE.md or FILE.tex. Repeatable.")],
) -> None:
    """Write a report of finished runs: an HTML page, or a Markdown or LaTeX table.

    RUNS: folders of runs, or folders that contain runs.
    """
    _print(*(f"written: {path}" for path in write.files(runs, output)))


def main(args: Sequence[str] | None = None) -> None:
    """Run `cfl-run` and exit. Errors are one line on standard error."""
    try:
        code = app(args, prog_name="cfl-run", standalone_mode=False)
    except CflError as error:
        _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except click.UsageError as error:
        if not str(error):  # without arguments, click has printed the help already
            sys.exit(error.exit_code)
        _fail(_usage(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def _fail(text: str, code: int) -> None:
    print("cfl-run: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)


def _failed(failed: Sized, runs: Sized) -> CflError:
    return CflError(f"{len(failed)} of {len(runs)} runs failed, see above")


def _usage(error: click.UsageError) -> str:
    text = error.format_message()
    if error.ctx and isinstance(error.ctx.command, click.Group) and text.startswith("No such command"):
        # Some versions of click and typer add a suggestion, others do not: replace it by the nearest command.
        text = text.partition(" Did you mean")[0]
        commands = error.ctx.command.list_commands(error.ctx)
        near = get_close_matches(text.partition("'")[2].partition("'")[0], commands, n=1, cutoff=0.4)
        return f"{text} {f'Did you mean {near[0]!r}?' if near else 'Known: ' + ', '.join(commands)}"
    return text


def _resolved(benchmark: str | None, **layers: Any) -> RunConfig:
    """Resolve a configuration and check that its benchmark is registered; `resolve` accepts any name."""
    if benchmark is not None:
        plugins.benchmarks.get(benchmark)
    config = resolve(benchmark, **layers)
    plugins.benchmarks.get(config.benchmark)
    return config


def _run(config: RunConfig, folder: Path, resume: bool, quiet: bool, tensorboard: bool, **data: Any) -> dict[str, Any]:
    machine.keep_memory()
    sink = Sinks(console_sink(quiet), *([TensorBoardSink(folder / "tensorboard")] if tensorboard else []))
    try:
        return runner.run(config, output=folder, resume=resume, sink=sink, **data).metrics
    except KeyboardInterrupt:
        print(_interrupted(folder, **data), file=sys.stderr)
        raise
    finally:
        sink.close()


def _interrupted(folder: Path, data_root: Path | None, download: bool) -> str:
    if not (folder / "config.yaml").exists():
        return "interrupted before the first round: nothing is saved; give the same command again"
    data = (["--data-root", str(data_root)] if data_root else []) + ["--download"] * download
    return f"interrupted; continue with: {shlex.join([*continuation(folder), *data])}"


def _print(*blocks: Any) -> None:
    """Print tables and texts to standard output."""
    # Pipes and logs get wide tables: a width of 80 would break their lines.
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    for block in blocks:
        console.print(block)
