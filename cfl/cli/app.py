"""The application `cfl-run`: options that commands share, exit statuses, and what is printed.

Exit status: 0 for success, 1 for a run that cannot go on, 2 for wrong usage, 130 for an interrupt. Errors are one line.
"""
# ruff: noqa: B006  # Typer reads the type of an option's default, and no command changes its lists

import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import typer
from rich.console import Console

from cfl.core import CflError, ConfigError, plugins
from cfl.core.version import __version__

# Docstrings describe the arguments of a command: some versions of click do not show the help of a Typer argument.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

T = TypeVar("T")
# Options that several commands share. T: type of the value, optional where a command has no default.
Benchmark = Annotated[T, typer.Argument()]
Seeds = Annotated[str, typer.Option(help="Seeds, such as 0..2 or 0,3,5.")]
Scale = Annotated[
    T,
    typer.Option(
        help="Length: paper (the preset as written; default), small (mostly less than an hour) or smoke (seconds).",
        show_default=False,
    ),
]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set an option. Repeatable.")]
Engine = Annotated[
    T,
    typer.Option(
        help="How to compute the clients: loop (the usual default), vmapped, pool, pool+vmapped, flower or auto."
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel runs (default: cores / threads; 1 if a run uses all cores or a GPU)."),
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
    plugin: Annotated[
        list[Path], typer.Option(help="Python file that registers methods, benchmarks or models. Repeatable.")
    ] = [],
) -> None:
    """Continual federated learning."""
    plugins.add_files(plugin)


def display(*blocks: Any) -> None:
    """Print tables and texts to standard output."""
    # Pipes and logs get wide tables: a width of 80 would break their lines.
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))  # a command has to stay one line


def main(args: Sequence[str] | None = None) -> None:
    """Run `cfl-run` and exit. Errors and warnings are one line each on standard error."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
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


def _warn(message: Warning | str, *_: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _usage(error: click.UsageError) -> str:
    text = error.format_message()
    if text.startswith("No such option") and "--plugin" in text:
        return "--plugin comes before the command, as in: cfl-run --plugin my_method.py train"
    if error.ctx and isinstance(error.ctx.command, click.Group) and text.startswith("No such command"):
        # Some versions of click and typer add a suggestion, others do not: replace it by the nearest command.
        text = text.partition(" Did you mean")[0]
        commands = error.ctx.command.list_commands(error.ctx)
        near = get_close_matches(text.partition("'")[2].partition("'")[0], commands, n=1, cutoff=0.4)
        return f"{text} {f'Did you mean {near[0]!r}?' if near else 'Known: ' + ', '.join(commands)}"
    return text
