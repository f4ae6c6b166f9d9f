"""`cfl-run completion`: a script for bash and zsh that holds all names, so that a shell completes them at once.

Click's own completion starts `cfl-run` at each key, and thereby imports torch, which takes a second.
"""

from collections.abc import Iterable

import click
import typer

from cfl.cli.app import app
from cfl.cli.look import KINDS
from cfl.config.option_names import option_names
from cfl.core import plugins
from cfl.core.version import __version__
from cfl.engines import ENGINES
from cfl.experiments import reproduce

_SCRIPT = """\
# Completion of cfl-run for bash and zsh, made by cfl {version}. Make it again after an installation of methods.
if [ -n "${{ZSH_VERSION-}}" ]; then autoload -Uz bashcompinit && bashcompinit; fi
_cfl_run() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" before="" after=""
    local at=1; while [ "${{COMP_WORDS[at]}}" = --plugin ]; do at=$((at + 2)); done
    case "$COMP_CWORD $current" in
        "$((at - 1)) "*) ;;
        "$at "*) words="{commands} --plugin --help --version" ;;
        *" -"*) case "${{COMP_WORDS[at]}}" in
{flags}
        esac ;;
        *) case "$previous" in
            {of_names}) words="{names}"; before="${{current%"${{current##*[,+]}}"}}" ;;
            {of_keys}) words="{keys}"; after="=" ;;
{choices}
            {other}) ;;
            *) case "${{COMP_WORDS[at]}}" in
{arguments}
            esac ;;
        esac ;;
    esac
    if [ -n "$after" ]; then compopt -o nospace 2> /dev/null; fi
    COMPREPLY=( $(compgen -P "$before" -S "$after" -W "$words" -- "${{current#"$before"}}") )
}}
complete -o default -F _cfl_run cfl-run
"""
_NAMES = ("--method", "--methods", "--local", "--against", "--highlight")
_KEYS = ("--set", "--vary", "--grid")


@app.command(epilog="Example: cfl-run completion > ~/.cfl-run-completion")
def completion() -> None:
    """Print a script that completes commands, names and options in bash and zsh.

    Put 'source ~/.cfl-run-completion' into ~/.bashrc or ~/.zshrc, with the file of the example.
    """
    print(script(), end="")


def script() -> str:
    """The script, with the names that are registered now."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    methods, local = plugins.strategies.names(), plugins.local.names()
    benchmarks, models = plugins.benchmarks.names(), plugins.models.names()
    keys = {key for method in methods for key in option_names(method, local)}
    choices = {"--engine": [*ENGINES, "flower", "auto"], "--scale": ["paper", "small", "smoke"]}
    arguments = {
        "benchmark": benchmarks,
        "name": [*benchmarks, *methods, *local, *models],
        "table": reproduce.tables(),
        "what": KINDS,
    }
    flags, valued, lines = [], set[str](), []
    for name, command in sorted(group.commands.items()):
        options = [one for one in command.params if isinstance(one, click.Option)]
        texts = [text for one in options for text in (*one.opts, *one.secondary_opts)]
        flags.append(_case(16, name, [*texts, "--help"]))
        valued |= {text for one in options if not one.is_flag for text in one.opts}
        known = [arguments[one.name] for one in command.params if one.name in arguments and one not in options]
        lines += [_case(20, name, words) for words in known[:1]]
    return _SCRIPT.format(
        version=__version__, commands=" ".join(group.commands), flags="\n".join(flags),
        of_names="|".join(_NAMES), names=" ".join([*methods, *local]), of_keys="|".join(_KEYS),
        keys=" ".join(sorted(keys)), choices="\n".join(_case(12, name, words) for name, words in choices.items()),
        other="|".join(sorted(valued - {*_NAMES, *_KEYS, *choices})), arguments="\n".join(lines),
    )  # fmt: skip


def _case(indent: int, name: str, words: Iterable[str]) -> str:
    return f'{" " * indent}{name}) words="{" ".join(words)}" ;;'
