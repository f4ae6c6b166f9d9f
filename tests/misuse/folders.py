"""Run folders that are damaged, in use or of another run, and `tasks` with a stream of one's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import cfl
from cfl.assembly.resolve import dump
from cfl.core import Busy, CheckpointError, ConfigError
from cfl.runtime.run_folder import RunFolder
from tests import toy


def run(folder: Path | None, *options: str, resume: bool = False, **given: object) -> cfl.Result:
    config = toy.config("rounds=1", *options, method="fedavg")
    return cfl.run(config, output=folder, resume=resume, **{"stream": toy.stream(), **given})


def resumed(damage: Callable[[Path], object], *options: str) -> Callable[[Path], object]:
    """Damage the folder of a finished run, then resume it."""

    def call(tmp_path: Path) -> object:
        run(tmp_path)
        damage(tmp_path)
        return run(tmp_path, *options, resume=True)

    return call


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "rounds.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def replaced_by_folder(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def in_use(resume: bool) -> Callable[[Path], object]:
    """Begin or resume a run in a folder in which a run is going on."""

    def call(tmp_path: Path) -> object:
        holder = RunFolder(tmp_path)
        holder.append_round({"round": 0})
        try:
            return run(tmp_path, resume=resume)
        finally:
            holder.close()

    return call


class Holds(cfl.Strategy):
    """Holds something that is no option."""

    def __init__(self, held: object) -> None:
        self.held = held


def with_strategies(first: object, second: object) -> Callable[[Path], object]:
    def call(tmp_path: Path) -> object:
        run(tmp_path, strategy=Holds(first))
        return run(tmp_path, strategy=Holds(second), resume=True)

    return call


def named(*names: str) -> cfl.Stream:
    """The toy stream, its tasks with these names."""
    stream = toy.stream(len(names))
    pairs = zip(stream.tasks, names, strict=True)
    return replace(stream, tasks=tuple(replace(task, name=name) for task, name in pairs))


FEW = ["rounds=1", "partition.clients=4", "local.batch_size=4"]
REMEDY = "put the (whole )?file back.* another --output"
CASES = {
    "garbage in rounds.jsonl": (
        resumed(lines(lambda rows: [rows[0], b"garbage\n", *rows[2:]])),
        ConfigError,
        rf"line 2 of '.*rounds\.jsonl' is damaged.*{REMEDY}",
    ),
    "a line of rounds.jsonl that is no round": (
        resumed(lines(lambda rows: [b"[1, 2]\n", *rows[1:]])),
        ConfigError,
        rf"line 1 of '.*rounds\.jsonl' is damaged.*{REMEDY}",
    ),
    "bytes in rounds.jsonl that are no text": (
        resumed(lines(lambda rows: [*rows[:2], b"\xff\n"])),
        ConfigError,
        rf"line 3 of '.*rounds\.jsonl' is damaged.*{REMEDY}",
    ),
    "a shortened rounds.jsonl": (
        resumed(lines(lambda rows: rows[:1])),
        ConfigError,
        rf"rounds\.jsonl' was shortened: it has 1 rounds, and the checkpoint 3; {REMEDY}",
    ),
    "a folder in place of rounds.jsonl": (
        resumed(replaced_by_folder("rounds.jsonl")),
        ConfigError,
        rf"rounds\.jsonl' cannot be read \(Is a directory\); {REMEDY}",
    ),
    "config.yaml is not YAML": (
        resumed(text("config.yaml", "method: [fot\n")),
        ConfigError,
        r"config\.yaml' is not valid YAML at line 2; put the file back or move it away",
    ),
    "config.yaml is not YAML, and the engine is to be measured": (
        resumed(text("config.yaml", "method: [fot\n"), "engine=auto"),
        ConfigError,
        r"config\.yaml' is not valid YAML at line 2; put the file back or move it away",
    ),
    "config.yaml holds no options": (
        resumed(text("config.yaml", "- 1\n")),
        ConfigError,
        r"config\.yaml' must hold options as 'key: value'; put the file back or move it away",
    ),
    "a name in config.yaml in place of a group of options": (
        resumed(text("config.yaml", "attack: none\n"), "engine=auto"),
        ConfigError,
        r"attack in '.*config\.yaml' must be a group of options, not 'none'; put the file back or move it away",
    ),
    "a folder in place of config.yaml": (
        resumed(replaced_by_folder("config.yaml")),
        ConfigError,
        r"cannot read the configuration '.*config\.yaml': Is a directory; put the file back or move it away",
    ),
    "made_of.json is damaged": (
        resumed(text("made_of.json", "{")),
        ConfigError,
        r"made_of\.json' is damaged; move",
    ),
    "a number in made_of.json in place of hashes": (
        resumed(text("made_of.json", '{"place": 3}')),
        ConfigError,
        r"made_of\.json' is damaged .*; move",
    ),
    "a run where another process runs": (in_use(False), Busy, r"process \d+ uses '.*'; wait for it, or choose another"),
    "a resume where another process runs": (
        in_use(True),
        Busy,
        r"process \d+ uses '.*'; wait for it, or choose another",
    ),
    "a folder that holds a run": (
        lambda tmp_path: [run(tmp_path), run(tmp_path)],
        ConfigError,
        "already holds a run; use --resume",
    ),
    "a resume with other data": (
        lambda tmp_path: [run(tmp_path, "tasks=1"), run(tmp_path, "tasks=1", stream=toy.stream(2, 47), resume=True)],
        CheckpointError,
        "choose another --output.*: the data of task 'task 0' changed since the run began",
    ),
    "a resume with fewer tasks": (
        lambda tmp_path: [run(tmp_path), run(tmp_path, stream=toy.stream(2), resume=True)],
        CheckpointError,
        "it has 3 tasks there, and 2 here",
    ),
    "a resume with more tasks and another first one": (
        lambda tmp_path: [run(tmp_path, stream=toy.stream(2)), run(tmp_path, stream=toy.stream(3, 47), resume=True)],
        CheckpointError,
        "the data of task 'task 0' changed since the run began",
    ),
    "a resume with an attribute that is another function": (
        with_strategies(torch.relu, torch.tanh),
        CheckpointError,
        "strategy.held changed since the run began",
    ),
    "more tasks than your own stream has": (
        lambda: run(None, "tasks=9"),
        ConfigError,
        "tasks is 9, but stream 'toy' has 3; set tasks=null for all",
    ),
    "a task that your own stream does not have": (
        lambda: run(None, "tasks=[one, tow]", stream=named("one", "two")),
        ConfigError,
        "unknown task of 'toy' 'tow'; did you mean 'two'",
    ),
    "rounds that do not fit the tasks of your own stream": (
        lambda: run(None, "rounds=[1,2]"),
        ConfigError,
        "rounds lists 2 numbers for 3 tasks; give one number per task",
    ),
}

WELCOME = {
    "a resume with a tensor and a function of equal content": lambda tmp_path: with_strategies(
        [torch.zeros(5000), torch.relu], [torch.zeros(5000), torch.relu]
    )(tmp_path),
    "a resume without config.yaml": lambda tmp_path: resumed(lambda folder: (folder / "config.yaml").unlink())(
        tmp_path
    ),
    "a damaged line after the checkpoint": lambda tmp_path: resumed(lines(lambda rows: [*rows, b"garbage\n"]))(
        tmp_path
    ),
    "a resume with more tasks": lambda tmp_path: [
        run(tmp_path, stream=toy.stream(2)),
        run(tmp_path, resume=True),
    ],
    "fewer tasks of your own stream": lambda: len(run(None, "tasks=1").accuracy_matrix) == 1,
    "fewer tasks with a number of rounds each": lambda: run(None, "tasks=2", "rounds=[1,2]"),
    "tasks of your own stream by name": lambda: (
        len(run(None, "tasks=[two]", stream=named("one", "two")).accuracy_matrix) == 1
    ),
    "your own stream under a preset with another number of tasks": lambda: (
        len(cfl.run(cfl.resolve("permuted-digits", overrides=FEW), stream=toy.stream()).accuracy_matrix) == 3
        and dump(cfl.resolve("permuted-digits"))["tasks"] == 5
    ),
}
