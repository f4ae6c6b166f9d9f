"""Commands of several runs: `cfl-run compare` and `cfl-run reproduce`."""
# ruff: noqa: B006  # Typer reads the type of an option's default, and no command changes its lists

import shlex
from collections.abc import Mapping, Sequence, Sized
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from cfl.cli.app import (
    Benchmark,
    DataRoot,
    Download,
    Engine,
    Jobs,
    Output,
    Plot,
    Quiet,
    Scale,
    Seeds,
    Set,
    app,
    display,
)
from cfl.cli.grid import TakesGrid
from cfl.core import CflError, plugins
from cfl.experiments import reproduce as papers
from cfl.experiments.compare import plan, reference, seeds_of
from cfl.experiments.grid import choices, commands
from cfl.experiments.parallel import run_all
from cfl.report import reproduced, tables
from cfl.report.comparison import Comparison


@app.command(cls=TakesGrid, epilog="Example: cfl-run compare permuted-digits --methods fedavg,fot --seeds 0..2")
def compare(
    benchmark: Benchmark[str],
    methods: Annotated[str, typer.Option(help="Methods, such as fedavg,fot,fot+fedsol.")],
    seeds: Seeds = "0",
    scale: Scale[str | None] = None,
    overrides: Set = [],
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B", help="Run with each value. Repeatable.")] = [],
    grid: Annotated[
        list[str],
        typer.Option(metavar="KEY=A,B ...", help="Choose each method's setting among these, by held-out samples."),
    ] = [],
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
    settings: dict[str, Any] = dict(overrides=overrides, vary=vary, grid=grid, scale=scale, engine=engine)
    groups = plan(benchmark, methods, seeds, folder, **settings)
    other = reference(groups, against)
    runs = [run for group in groups for run in group.runs]
    failed = run_all(runs, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    searched = choices(groups) if grid else []
    shown = [choice.best for choice in searched if choice.best] if grid else groups
    found = Comparison(benchmark, scale, shown, other, searched)
    if not found.results:
        raise _failed(failed, runs)
    words = _words({"--methods": [methods], "--seeds": [seeds], "--set": overrides, "--vary": vary, "--grid": grid})
    words += _words({"--scale": [scale], "--against": [against], "--engine": [engine], "--output": [str(output or "")]})
    found.write(folder / "compare.json", shlex.join([*plugins.program(), "compare", benchmark, *words]))
    display(*found.tables(matrix), f"results in {folder}")
    if plot:
        found.draw(folder / "compare.png")
    if grid:
        flags = _words({"--seeds": [seeds], "--scale": [scale], "--engine": [engine]})
        flags += _words({"--data-root": [str(data_root or "")], "--output": [f"{folder}-chosen"]})
        again = commands(benchmark, shown, [*dict.fromkeys(group.method for group in groups)], overrides, flags)
        display("to run the chosen settings on all training samples:", *(f"  {shlex.join(words)}" for words in again))
    if failed:
        display(tables.failures(failed))
        raise _failed(failed, runs)


@app.command(epilog="Example: cfl-run reproduce fot-table1 --only PMNIST --scale small --seeds 0")
def reproduce(
    table: Annotated[str | None, typer.Argument()] = None,
    only: Annotated[list[str], typer.Option(metavar="NAME", help="Column, row or part of the table. Repeatable.")] = [],
    seeds: Seeds = "0..2",
    scale: Scale[str] = "paper",
    overrides: Set = [],
    engine: Annotated[
        str | None, typer.Option(help="Way to compute the clients, as for train (default: auto).")
    ] = None,
    jobs: Jobs = None,
    stored: Annotated[list[Path], typer.Option(help="Use the finished runs in this folder. Repeatable.")] = [],
    output: Annotated[Path, typer.Option(help="Output folder, for all tables.")] = Path("runs/reproduce"),
    show: Annotated[bool, typer.Option("--show", help="Show the finished runs, and run nothing.")] = False,
    data_root: DataRoot = None,
    download: Download = False,
    quiet: Quiet = False,
) -> None:
    """Run the missing runs of a paper's table, and print the results next to the paper's.

    TABLE: a name such as fot-table1; the default lists the tables.
    """
    if table is None:
        display(tables.listing([(one.name, one.title) for one in papers.tables().values()], "tables"))
        return
    wanted = papers.table(table)
    options = ["engine=auto", *overrides, *([f"engine={engine}"] if engine else [])]
    runs = wanted.runs(only, seeds_of(seeds), scale, options, output, stored)
    needed = [] if show else list(chain(*runs.values()))
    failed = run_all(needed, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    ours = {cell: papers.scores(wanted.measures, each) for cell, each in runs.items()}
    display(*reproduced.shown(wanted, ours, scale))
    if failed:
        display(tables.failures(failed))
        raise _failed(failed, needed)


def _words(given: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return flags with their values as words of a command, without empty values."""
    return [word for flag, values in given.items() for value in values if value for word in (flag, value)]


def _failed(failed: Sized, runs: Sized) -> CflError:
    return CflError(f"{len(failed)} of {len(runs)} runs failed, see above")
