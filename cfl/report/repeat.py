"""The command that repeats a run, and how a run goes on."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cfl.assembly.resolve import dump, resolve
from cfl.config.overrides import assignment, flat
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, plugins
from cfl.runtime.model_file import objects_in
from cfl.runtime.run_folder import read_config


def command(config: RunConfig) -> list[str] | None:
    """Return a `cfl-run train` command that gives this configuration and needs all its options; None if not found.

    If the folder of `model.weights` is absent, the command has the sizes that would follow from its files.
    """
    folder = config.model.weights
    first = []
    if folder is not None and not Path(folder).is_dir():  # no configuration with this folder can be resolved
        first = [assignment("model.weights", folder)]
        config = config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})
    rest = _given(config)
    if rest is None:
        return None
    flags = ["--method", config.label, "--seed", str(config.seed)]
    flags += ["--scale", config.scale] if config.scale != "paper" else []
    options = [word for text in [*first, *rest] for word in ("--set", text)]
    return [*plugins.program(), "train", config.benchmark, *flags, *options]


def continuation(folder: Path) -> list[str]:
    """Return the command that continues the run in a folder."""
    return [*plugins.program(), "train", "--config", str(folder / "config.yaml"), "--output", str(folder), "--resume"]


def continuing(folder: Path) -> str:
    """Say how the run in a folder goes on: by a command, or by the program whose objects it has."""
    with suppress(ConfigError):  # the command names a damaged file
        benchmark = read_config(folder).get("benchmark", "")
        own = objects_in(folder, benchmark)
        if own and own != {"stream": [benchmark]}:  # that benchmark is registered where its plug-in is loaded
            return "your program, with resume=True"
    return shlex.join(continuation(folder))


def _given(config: RunConfig) -> list[str] | None:
    """Return the assignments that make this configuration of the preset, without needless ones; None if not found.

    It first sets every option that differs from the preset, then removes the options that follow from others.
    """
    given: list[str] = []
    wanted = flat(dump(config))
    for _ in range(3):  # an option may select a variant of the preset, which sets further options
        now = flat(dump(found)) if (found := resolved(config, given)) else wanted
        given += [assignment(name, value) for name, value in wanted.items() if name not in now or now[name] != value]
    if resolved(config, given) != config:
        return None
    for text in list(given):
        fewer = [other for other in given if other != text]
        given = fewer if resolved(config, fewer) == config else given
    return given


def resolved(config: RunConfig, overrides: Sequence[str]) -> RunConfig | None:
    """Resolve the preset with the same benchmark, method, seed and scale; None if the overrides are invalid."""
    try:
        return resolve(config.benchmark, method=config.label, seed=config.seed, scale=config.scale, overrides=overrides)
    except ConfigError:
        return None
