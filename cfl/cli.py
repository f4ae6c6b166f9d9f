"""The command `cfl-run`: train, compare, reproduce, list, describe, report.

Exit status: 0 done; 1 a run that cannot go on; 2 wrong use, in one line; 130 interrupted.
"""

import shlex
import sys
from collections.abc import Sequence, Sized
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from cfl.config.schema import RunConfig
from cfl.core.errors import CflError, ConfigError, unknown
from cfl.core.version import __version__

# What an argument is stands in the docstring of its command: not every version of click has typer show its help.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set an option; may be given again.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets (default: CFL_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a data set that is missing.")]
Scale = Annotated[
    str | None,
    typer.Option(help="paper (the preset as written; default), small (ten minutes to an hour) or smoke (seconds)."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Engine = Annotated[
    str | None, typer.Option(help="How clients are computed: loop (default), vmapped, pool, pool+vmapped or auto.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Runs at a time (default: one a core; one where a run takes all cores).")
]
Plot = Annotated[bool, typer.Option(help="Draw the results to a PNG file.")]


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
    benchmark: Annotated[str | None, typer.Argument()] = None,
    method: Annotated[str | None, typer.Option(help="Method (default fedavg), such as fot or fot+fedsol.")] = None,
    local: Annotated[list[str], typer.Option("--local", help="Local regularizer; may be given again.")] = [],  # noqa: B006
    seed: Annotated[int | None, typer.Option(help="Seed of every draw (default 0).")] = None,
    scale: Scale = None,
    overrides: Set = [],  # noqa: B006
    config: Annotated[Path | None, typer.Option(help="A resolved config.yaml to run again.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run (default under runs/).")] = None,
    data_root: DataRoot = None,
    download: Download = False,
    engine: Engine = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    quiet: Quiet = False,
    plot: Plot = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard's event files into the folder of the run.")
    ] = False,
) -> None:
    """Train a method over the tasks of a benchmark.

    BENCHMARK: such as permuted-digits; see 'cfl-run list benchmarks'.
    """
    from cfl.experiments.compare import alone
    from cfl.report import plots, tables

    settings = _resolved(
        benchmark,
        method=method,
        regularizers=local,
        overrides=overrides,
        seed=seed,
        file=config,
        engine=engine,
        scale=scale,
    )
    folder = output or Path("runs") / alone(settings)
    if resume and output is None and not (folder / "config.yaml").exists():
        raise ConfigError(f"'{folder}' holds no run to resume; give the run's own options, or its folder with --output")
    metrics = _run(settings, folder, resume, quiet, tensorboard, data_root=data_root, download=download)
    title = f"{settings.benchmark}, {settings.label}, seed {settings.seed}"
    if plot:
        plots.accuracy(metrics["accuracy_matrix"], title, folder / "accuracy.png")
    _print(tables.matrix(metrics["accuracy_matrix"], f"Accuracy: {title}"))
    if own := metrics.get("local_accuracy"):
        mean = tables.percent(sum(own) / len(own))
        _print(f"Local models of the last cohort: {mean}% on average, {tables.percent(min(own))}% the worst")
    if "epsilon" in metrics:
        spent = f"epsilon {metrics['epsilon']:.3g} at delta {metrics['delta']:g}"
        _print(f"Differential privacy: {spent} per client, of {metrics['epsilon_of']}")
    shown = {name.upper(): tables.percent(metrics[name]) for name in ("acc", "fgt")}
    scores = [f"{name} {value}%" for name, value in shown.items() if value != tables.NONE]
    _print(f"{', '.join(scores)}; results in {folder}")


@app.command()
def compare(
    benchmark: str,
    methods: Annotated[str, typer.Option(help="Methods, such as fedavg,fot,fot+fedsol.")],
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0..2 or 0,3,5.")] = "0",
    scale: Scale = None,
    overrides: Set = [],  # noqa: B006
    vary: Annotated[
        list[str], typer.Option(metavar="KEY=A,B", help="Run with each of the values; may be given again.")
    ] = [],  # noqa: B006
    against: Annotated[str | None, typer.Option(help="Method for paired differences (default: the first).")] = None,
    engine: Engine = None,
    jobs: Jobs = None,
    data_root: DataRoot = None,
    download: Download = False,
    output: Annotated[Path | None, typer.Option(help="Folder of the runs (default under runs/).")] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Show the mean accuracy matrix of each method.")] = False,
    quiet: Quiet = False,
    plot: Plot = True,
) -> None:
    """Train methods x settings x seeds side by side, and tabulate them.

    BENCHMARK: such as permuted-digits; see 'cfl-run list benchmarks'.
    """
    from cfl.experiments.compare import plan
    from cfl.experiments.parallel import run_all
    from cfl.report import paired, plots, tables
    from cfl.run.run_folder import write_json

    folder = output or Path("runs") / f"compare-{benchmark}"
    # All are resolved before the first runs: a wrong name must not wait for hours.
    groups = plan(benchmark, methods, seeds, folder, overrides=overrides, vary=vary, scale=scale, engine=engine)
    reference = groups[0].method if against is None else against
    if reference not in (known := {group.method for group in groups}):
        raise unknown("method of --against", reference, known)
    runs = [run for group in groups for run in group.runs]
    failed = run_all(runs, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    results = {group.label: found for group in groups if (found := group.results())}
    if not results:
        raise _failed(failed, runs)
    summaries = {name: tables.summary(found) for name, found in results.items()}
    gaps = paired.against(groups, reference)
    given = {"--methods": [methods], "--seeds": [seeds], "--set": overrides, "--vary": vary}
    single = {"--scale": scale, "--against": against, "--engine": engine}
    given |= {name: [one] for name, one in single.items() if one}
    words = [word for name, values in given.items() for one in values for word in (name, one)]
    command = shlex.join(["cfl-run", "compare", benchmark, *words])
    folders = {
        group.label: [run.folder.name for run in group.runs if run.config.seed in summaries[group.label]["seeds"]]
        for group in groups
        if group.label in summaries
    }
    figures = {"benchmark": benchmark, "command": command, "runs": folders, "methods": summaries, "paired": gaps}
    write_json(folder / "compare.json", figures)
    matrices = {name: tables.mean_matrix(found) for name, found in results.items()}
    most = max(map(len, results.values()))
    title = f"{benchmark}, {most} seed{'s' * (most > 1)}" + (f", {scale} scale" if scale else "")
    if plot:
        plots.comparison(summaries, matrices, title, folder / "compare.png")
    for name, rows in matrices.items() if matrix else ():
        _print(tables.matrix(rows, f"Accuracy: {name}"))
    _print(tables.compared(summaries, title))
    if gaps:
        _print(paired.table(gaps))
    _print(f"results in {folder}")
    if failed:
        raise _failed(failed, runs)


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument()] = None,
    only: Annotated[
        list[str], typer.Option(metavar="NAME", help="A column, row or part of the table; may be given again.")
    ] = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0..2 or 0,3,5.")] = "0..2",
    scale: Annotated[
        str, typer.Option(help="paper, small (ten minutes to an hour a run) or smoke (seconds).")
    ] = "paper",
    overrides: Set = [],  # noqa: B006
    engine: Annotated[str, typer.Option(help="How clients are computed; see 'train'.")] = "auto",
    jobs: Jobs = None,
    stored: Annotated[list[Path], typer.Option(help="Folder with finished runs to use; may be given again.")] = [],  # noqa: B006
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/reproduce"),
    show: Annotated[bool, typer.Option("--show", help="Run nothing, show what there is.")] = False,
    data_root: DataRoot = None,
    download: Download = False,
    quiet: Quiet = False,
) -> None:
    """Run what a paper's table needs and is not there yet, and show it beside the paper's.

    TABLE: such as fot-table1; without one, the tables are listed.
    """
    from cfl.experiments import reproduce as papers
    from cfl.experiments.compare import seeds_of
    from cfl.experiments.parallel import run_all
    from cfl.report import reproduced, tables

    if table is None:
        _print(tables.listing([(one.name, one.title, "") for one in papers.tables().values()], "tables"))
        return
    wanted = papers.table(table)
    runs = wanted.runs(only, seeds_of(seeds), scale, [f"engine={engine}", *overrides], output, stored)
    needed = [] if show else list(chain(*runs.values()))
    failed = run_all(needed, jobs=jobs, quiet=quiet, data_root=data_root, download=download)
    ours = {cell: papers.scores(wanted.measures, each) for cell, each in runs.items()}
    for text in reproduced.shown(wanted, ours, scale):
        _print(text)
    if failed:
        raise _failed(failed, needed)


@app.command("list")
def list_(
    what: Annotated[str | None, typer.Argument()] = None,
) -> None:
    """List what there is, with a line on each and its source.

    WHAT: benchmarks, methods, models or regularizers; without one, all are listed.
    """
    from cfl.report import described, tables

    kinds = _registries()
    if what is not None and what not in kinds:
        raise unknown("kind", what, kinds)
    for kind, registry in kinds.items():
        if what in (None, kind):
            rows = [(name, described.summary(registry.get(name)), registry.source(name)) for name in registry.names()]
            _print(tables.listing(rows, kind))


@app.command()
def describe(name: str) -> None:
    """Show hyper-parameters, defaults, meaning and source.

    NAME: a benchmark, method, model or regularizer.
    """
    from cfl.report import described

    kinds = _registries()
    found = [kind for kind, registry in kinds.items() if name in registry.names()]
    if not found:
        raise unknown("name", name, [known for registry in kinds.values() for known in registry.names()])
    for kind in found:
        for block in described.blocks(kind, name, kinds[kind].get(name), kinds[kind].source(name)):
            _print(block)


@app.command()
def report(
    runs: list[Path],
    output: Annotated[
        list[Path], typer.Option("--output", "-o", help="FILE.html, FILE.md or FILE.tex; may be given again.")
    ],
) -> None:
    """Write a page on runs, or the table of their results.

    RUNS: folders of runs, or folders that hold them.
    """
    from cfl.report import write

    for path in write.files(runs, output):
        _print(f"written: {path}")


def main(args: Sequence[str] | None = None) -> None:
    """Run `cfl-run` and exit: errors are one line on standard error."""
    try:
        code = app(args, prog_name="cfl-run", standalone_mode=False)
    except CflError as error:
        _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except click.UsageError as error:
        if not str(error):  # no arguments: the help is on the screen already
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
        # click and typer both add a suggestion in some versions and none in others; one of ours is put in their place.
        text = text.partition(" Did you mean")[0]
        commands = error.ctx.command.list_commands(error.ctx)
        near = get_close_matches(text.partition("'")[2].partition("'")[0], commands, n=1, cutoff=0.4)
        return f"{text} {f'Did you mean {near[0]!r}?' if near else 'Known: ' + ', '.join(commands)}"
    return text


def _resolved(benchmark: str | None, **layers: Any) -> "RunConfig":
    from cfl.assembly.resolve import resolve
    from cfl.core import plugins

    if benchmark is not None:
        plugins.benchmarks.get(benchmark)
    config = resolve(benchmark, **layers)
    plugins.benchmarks.get(config.benchmark)
    return config


def _run(
    config: "RunConfig", folder: Path, resume: bool, quiet: bool, tensorboard: bool = False, **data: Any
) -> dict[str, Any]:
    from cfl.run.runner import run
    from cfl.run.sinks import Sinks, console_sink
    from cfl.run.tensorboard import TensorBoardSink

    sink = Sinks(console_sink(quiet), *([TensorBoardSink(folder / "tensorboard")] if tensorboard else []))
    try:
        return run(config, output=folder, resume=resume, sink=sink, **data).metrics
    except KeyboardInterrupt:
        print(_continuation(folder, **data), file=sys.stderr)
        raise
    finally:
        sink.close()


def _continuation(folder: Path, data_root: Path | None, download: bool) -> str:
    """What to tell the user of an interrupted run."""
    if not (folder / "config.yaml").exists():
        return "interrupted before the first round, nothing is saved; give the same command again"
    again = ["cfl-run", "train", "--config", str(folder / "config.yaml"), "--output", str(folder), "--resume"]
    again += (["--data-root", str(data_root)] if data_root else []) + ["--download"] * download
    return f"interrupted; continue with: {shlex.join(again)}"


def _registries() -> dict[str, Any]:
    from cfl.core import plugins

    return {
        "benchmarks": plugins.benchmarks,
        "methods": plugins.strategies,
        "models": plugins.models,
        "regularizers": plugins.local,
    }


def _print(what: Any) -> None:
    from rich.console import Console

    # Pipes and logs get the whole table: a width of 80 would break its lines.
    Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False).print(what)
