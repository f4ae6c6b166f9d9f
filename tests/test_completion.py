"""The script of `cfl-run completion`, in a real bash, and the examples of each command's help."""

import shlex
import subprocess

import click
import pytest
import typer

from cfl.cli import app
from cfl.cli.completion import script
from cfl.core import plugins

GROUP = typer.main.get_command(app)
_ASK = '{script}\nCOMP_WORDS=({words}); COMP_CWORD={at}; _cfl_run; printf "%s\\n" "${{COMPREPLY[@]}}"'


@pytest.fixture(scope="module")
def complete():
    text = script()

    def completed(line):
        """What bash offers at the end of a line, as a set."""
        words = ["cfl-run", *line.split(" ")]
        asked = _ASK.format(script=text, words=" ".join(f"'{word}'" for word in words), at=len(words) - 1)
        found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
        assert found.stderr == ""
        return set(found.stdout.split())

    return completed


METHODS = {*plugins.strategies.names(), *plugins.local.names()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {*GROUP.commands, "--plugin", "--help", "--version"}),
        ("--plugin m", set()),  # bash then offers files
        ("--plugin mine.py --plugin more.py desc", {"describe"}),
        ("--plugin mine.py train split-d", {"split-digits"}),
        ("--plugin mine.py train iris --met", {"--method"}),
        ("desc", {"describe"}),
        ("train split-d", {"split-digits"}),
        ("train --quiet permuted-", {"permuted-digits", "permuted-mnist"}),
        ("train iris --met", {"--method"}),
        ("train iris --no-", {"--no-plot"}),
        ("train iris --method fot", {"fot"}),
        ("train iris --method fot+fedso", {"fot+fedsol"}),
        ("compare iris --methods fedavg,ew", {"fedavg,ewc"}),
        ("compare iris --methods ", METHODS),
        ("compare iris --against fed", {name for name in METHODS if name.startswith("fed")}),
        ("report runs --highlight fed", {name for name in METHODS if name.startswith("fed")}),
        ("train iris --set local.mom", {"local.momentum="}),
        ("train iris --set strategy.infer_t", {"strategy.infer_tasks="}),
        ("train iris --set regularizer.fedprox.", {"regularizer.fedprox.mu="}),
        ("compare iris --vary class_o", {"class_order="}),
        ("train iris --engine vm", {"vmapped"}),
        ("train iris --scale s", {"small", "smoke"}),
        ("train iris --output ", set()),  # bash then offers files
        ("train iris --seed ", set()),
        ("describe fedprox", {"fedprox"}),
        ("describe resnet8", {"resnet8"}),
        ("reproduce fedproj-table3", {"fedproj-table3b"}),
        ("list mod", {"models"}),
    ],
)
def test_a_shell_completes(line, expected, complete):
    assert complete(line) == expected


def test_every_command_has_a_description_and_an_example_that_parses():
    for name, command in GROUP.commands.items():
        assert command.help and command.epilog, name
        program, called, *args = shlex.split(command.epilog.removeprefix("Example: ").partition(" > ")[0])
        assert (program, called) == ("cfl-run", name)
        GROUP.commands[called].make_context(called, args)  # raises on unknown options


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_fits_a_terminal_of_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises((SystemExit, click.exceptions.Exit)):
        GROUP.commands[name].main(["--help"], prog_name=f"cfl-run {name}")
    text = capsys.readouterr().out
    assert GROUP.commands[name].epilog in text  # in one line
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
