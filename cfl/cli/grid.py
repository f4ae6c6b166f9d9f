"""The option `--grid` of `cfl-run compare`, which takes several words."""

from collections.abc import Iterator, Sequence

import click
from typer.core import TyperCommand

from cfl.core import ConfigError

FLAG = "--grid"


class TakesGrid(TyperCommand):
    """A command whose `--grid` takes all the words `key=a,b` that follow it."""

    allow_extra_args = True  # refused here, with a reason

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for words that belong to no option."""
        left = super().parse_args(ctx, list(_repeated(args)))
        if ctx.args and not ctx.resilient_parsing:
            word = ctx.args[0]
            hint = f"the settings of a grid follow {FLAG}" if "=" in word else f"see '{ctx.command_path} --help'"
            raise ConfigError(f"unexpected argument '{word}'; {hint}")
        return left


def _repeated(args: Sequence[str]) -> Iterator[str]:
    """Put the flag before each word after the first: `--grid a=1,2 b=3,4` becomes `--grid a=1,2 --grid b=3,4`."""
    inside = first = False
    for word in args:
        if inside and not first and "=" in word and not word.startswith("-"):
            yield FLAG
        elif not first:
            inside = word == FLAG or word.startswith(f"{FLAG}=")
        first = word == FLAG
        yield word
