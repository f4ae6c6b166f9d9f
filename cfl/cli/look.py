"""Commands that run nothing: `cfl-run list`, `describe` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from cfl.cli.app import app, display
from cfl.config.option_names import GROUPS, option_names, strategy_options
from cfl.core import ConfigError, plugins, unknown
from cfl.report import described, tables, write

KINDS = {
    "benchmarks": plugins.benchmarks,
    "methods": plugins.strategies,
    "models": plugins.models,
    "regularizers": plugins.local,
}


@app.command("list", epilog="Example: cfl-run list methods")
def list_(what: Annotated[str | None, typer.Argument()] = None) -> None:
    """List the available names, each with a summary and its source.

    WHAT: benchmarks, methods, models or regularizers; the default lists all.
    """
    if what is not None and what not in KINDS:
        raise unknown("kind", what, KINDS)
    for kind, registry in KINDS.items():
        if what in (None, kind):
            display(tables.listing([_listed(registry, name) for name in registry.names()], kind))


def _listed(registry: plugins.Registry, name: str) -> tuple[str, str, str]:
    """Name, summary and source; of an object that cannot be loaded, the error in place of its summary."""
    try:
        return name, described.summary(registry.get(name)), registry.source(name)
    except ConfigError as error:
        return name, str(error), ""


@app.command(epilog="Example: cfl-run describe fot")
def describe(name: str) -> None:
    """Show hyper-parameters with default, valid values, meaning and source, or the preset of a benchmark.

    NAME: a benchmark, method, model, regularizer, option such as agg.weights or strategy.threshold, or group (agg).
    """
    found = [kind for kind, registry in KINDS.items() if name in registry.names()]
    options = described.any_option(name)
    if not found and not options:
        names = [known for registry in KINDS.values() for known in registry.names()]
        dotted = [*option_names(regularizers=plugins.local.names()), *strategy_options()]
        raise unknown("name", name, [*names, *GROUPS, *dotted])
    for kind in found:
        display(*described.blocks(kind, name, KINDS[kind].get(name), KINDS[kind].source(name)))
    display(*options)


@app.command(epilog="Example: cfl-run report runs --output report.html")
def report(
    runs: list[Path],
    output: Annotated[
        list[Path], typer.Option("--output", "-o", help="FILE.html, .csv, .md, .tex, .png or .pdf. Repeatable.")
    ],
    highlight: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Draw the lines of this method wide, and the others narrow.")
    ] = None,
) -> None:
    """Write a report of finished runs: an HTML page, a CSV file, a Markdown or LaTeX table, or a figure.

    RUNS: folders of runs, or folders that contain runs.
    """
    display(*(f"written: {path}" for path in write.files(runs, output, highlight)))
