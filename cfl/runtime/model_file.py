"""The file model.json in a run's folder: the shapes and classes of its model, and the user's own objects in it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import nn

from cfl.contract.composed import STRATEGY
from cfl.core import CheckpointError, ConfigError, content, plugins
from cfl.models import Model
from cfl.runtime.run_folder import MODEL, first_fault, plain, read_json
from cfl.streams import Stream

_Size = Annotated[int, Field(ge=1)]
_Pixels = dict[Literal["mean", "std"], list[Any] | float | None]


class _About(BaseModel):
    """Contents of model.json, see `contents`; earlier versions wrote no vocabulary, regularizers or masks.

    pixels: `Pixels` of each task, or a single one of all tasks; earlier versions wrote it without a list.
    """

    model_config = ConfigDict(strict=True)
    input_shape: list[_Size]
    classes: list[_Size]
    outputs: _Size
    vocabulary: _Size | None = None
    scenario: Literal["task", "domain", "class"]
    stream: str
    tasks: list[str]
    pixels: Annotated[
        list[_Pixels],
        Field(min_length=1),
        BeforeValidator(lambda found: [found] if isinstance(found, dict) else found),
    ]
    model: str | None
    strategy: str | None
    regularizers: list[str] = []
    masks: str | None = None


def read(folder: Path) -> dict[str, Any]:
    """Read a run's model.json; empty if the file does not exist. Raises CheckpointError for a damaged file."""
    path = folder / MODEL
    if not path.exists():
        return {}
    try:
        return _About.model_validate(read_json(path)).model_dump()
    except ValidationError as error:
        raise CheckpointError(
            f"'{path}' is damaged ({first_fault(error)}); continue the run with --resume, which writes it again"
        ) from None


def own_objects(about: Mapping[str, Any], benchmark: str) -> dict[str, list[str]]:
    """Names of the user's own objects that a run had in place of what its options name, by what they are.

    about: contents of its model.json, or of a file of that name; benchmark: its option. A stream counts as the user's
    own if it has another name than the benchmark, or if no such benchmark is registered.
    """
    fields = {"stream": "stream", "network": "model", "strategy": "strategy"}
    if about.get("stream") == benchmark and benchmark in plugins.benchmarks.names():
        del fields["stream"]
    own = {kind: [about[name]] for kind, name in fields.items() if about.get(name)}
    return own | ({"regularizers": names} if (names := about.get("regularizers")) else {})


def objects_in(folder: Path, benchmark: str) -> dict[str, list[str]]:
    """`own_objects` of the run in a folder; empty without a model.json. Raises ConfigError for a damaged one."""
    return own_objects(read_json(folder / MODEL), benchmark)


def check_described(file: Path, benchmark: str, but: Collection[str] = ()) -> None:
    """Raise ConfigError if the run that wrote a config.yaml had objects of the user's own, which no file describes.

    benchmark: option of the file; but: kinds of objects that the next run replaces.
    """
    for kind, names in objects_in(file.parent, benchmark).items():
        if kind not in but:
            own = f"{kind} ({', '.join(names)})"
            raise ConfigError(f"'{file}' does not describe its run, whose {own} came from Python; repeat the run there")


def contents(stream: Stream, model: nn.Module | None, members: Mapping[str, object], handle: Model) -> dict[str, Any]:
    """Contents of model.json: what `cfl.load` needs beside the configuration and a checkpoint.

    model: the user's own, None for that which the configuration names; members: the user's own strategy and
    regularizers, by owner; handle: on the network.
    """
    strategy = members.get(STRATEGY)
    pixels = [plain(scale._asdict()) if (scale := task.train.pool.pixels) else {} for task in stream.tasks]
    return {
        "input_shape": list(stream.input_shape),
        "classes": list(stream.heads),
        "outputs": stream.tasks[0].classes,
        "vocabulary": stream.vocabulary,
        "scenario": stream.scenario,
        "stream": stream.name,
        "tasks": [task.name for task in stream.tasks],
        "pixels": pixels if any(one != pixels[0] for one in pixels) else pixels[:1],
        "model": None if model is None else type(model).__name__,
        "strategy": None if strategy is None else type(strategy).__name__,
        "regularizers": [owner for owner in members if owner != STRATEGY],
        **({"masks": content.digest(handle.masks)} if handle.masks else {}),
    }
