"""What a run is made of beyond its options: data, network, methods, and the code of other packages, each as a hash."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from cfl.assembly import methods, resolve
from cfl.config.overrides import change
from cfl.config.schema import RunConfig, TextConfig
from cfl.contract.composed import ComposedMethod, prefix
from cfl.core import Tree, content, plugins, warn
from cfl.models.tracing import constants
from cfl.runtime import checkpoint
from cfl.streams import Stream

Options = Mapping[str, Any]
CHECKPOINTS = "in its checkpoints"
SOURCES = ("the model in", "the tokenizer")  # parts of `code` whose files may be gone when a run is finished


@dataclass(eq=False)
class Fingerprint:
    """What the checkpoints of a run depend on.

    network: the module before it has run, since it may keep what it computes; own: whether it is the user's;
    public: whether the methods read the stream's public data; states: where the states of the clients are kept;
    start: the initial parameters if some were taken from another run or from pretrained weights, else empty.
    """

    config: RunConfig
    composed: ComposedMethod
    network: nn.Module
    stream: Stream
    public: bool
    own: bool
    states: str
    start: Tree

    @cached_property
    def text(self) -> str:
        """Hash of options and parts. Checkpoints store it."""
        start = {"starting model": content.digest(self.start)} if self.start else {}
        return checkpoint.fingerprint({**decisive(resolve.dump(self.config)), "parts": self.parts, **start})

    @cached_property
    def parts(self) -> dict[str, str]:
        """Hashes of all that the options do not describe, by names for messages."""
        return {**self.stream.digests(self.public), **self.without_data}

    @cached_property
    def without_data(self) -> dict[str, str]:
        """The parts other than data."""
        masks = constants(self.network, ())
        kept = {"a mask of the network": content.digest(masks)} if masks else {}
        return {**self._methods(), **self._network(), **kept}

    def of_first(self, tasks: int, options: Options) -> "Fingerprint":
        """The fingerprint of a run with the first tasks alone. options: that differ, such as `tasks` and `rounds`."""
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        config, stream = self.config.model_copy(update=own), replace(self.stream, tasks=self.stream.tasks[:tasks])
        start = {name: leaf for name, leaf in self.start.items() if int(name.partition("@")[2] or 0) < tasks}
        return replace(self, config=config, stream=stream, start=start)

    def changed(self, there: Options, parts: Mapping[str, str]) -> str:
        """Name the first thing that differs from the options and the parts in the run's folder; empty if unknown."""
        if text := self.changed_option(there):
            return text
        for name in {**self.parts, **parts} if parts else ():
            if name not in parts:
                return f"that run lacks {name}"
            if name not in self.parts:
                return f"only that run has {name}"
            if parts[name] != self.parts[name]:
                return f"{name} changed since the run began"
        source = self.config.start or self.config.model.weights
        return f"the model in '{source}' changed since the run began" if self.start else ""

    def changed_option(self, there: Options) -> str:
        """Name the first option that differs from those in the run's folder; empty if none does, or none are there."""
        return change(decisive(there), decisive(resolve.dump(self.config))) if there else ""

    def _methods(self) -> dict[str, str]:
        members, built = self.composed.members, methods.build(self.config)
        found = {"the list of methods": content.digest([[owner, _name(own)] for owner, own in members.items()])}
        for owner, member in members.items():
            own = {name: content.digest(value) for name, value in content.state(member).items()}
            plain = {name: content.digest(value) for name, value in content.state(built.get(owner)).items()}
            if content.foreign(type(member)):
                found[f"the code of {_name(member)}"] = content.digest(type(member))
            if content.foreign(type(member)) or own != plain:
                found |= {f"{prefix(owner)}.{name}": value for name, value in own.items()}
        return found

    def _network(self) -> dict[str, str]:
        factory = plugins.models.get(self.config.model.name)
        if not self.own and not content.foreign(factory):
            leaves = {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in self.network.named_parameters()}
            return {"the network": content.digest(leaves)}
        kinds = {_name(part): type(part) for part in self.network.modules() if content.foreign(type(part))}
        named = {} if self.own else {f"the code of model '{self.config.model.name}'": factory}
        named |= {f"the code of {name}": kind for name, kind in sorted(kinds.items())}
        return {name: content.digest(part) for name, part in {**named, "the network": self.network}.items()}


def code(config: RunConfig) -> dict[str, str]:
    """Hash what a configuration names outside of `cfl`, by names for messages.

    That is the code of other packages, the models that the run starts from, and the tokenizer.
    """
    named = {f"method '{config.method}'": plugins.strategies.get(config.method)}
    named |= {f"regularizer '{name}'": plugins.local.get(name) for name in config.regularizers}
    named |= {f"model '{config.model.name}'": plugins.models.get(config.model.name)}
    if config.benchmark in plugins.benchmarks.names():  # else the run has a stream of the user's own
        named |= {f"benchmark '{config.benchmark}'": plugins.benchmarks.get(config.benchmark).build}
    found = {f"the code of {name}": content.digest(item) for name, item in named.items() if content.foreign(item)}
    for folder, pattern, hashed in (
        (config.model.weights, "*.safetensors", _contents),
        (config.start, "checkpoints/checkpoint-*.safetensors", _trained),  # last: a run with both starts from here
    ):
        files = sorted(Path(folder).glob(pattern)) if folder is not None else []
        if files:
            marks = tuple((str(path), path.stat().st_mtime_ns) for path in files)
            found[f"{SOURCES[0]} '{folder}'"] = hashed(marks)
    if (path := config.text.tokenizer) is not None and Path(path).is_file():
        found[f"{SOURCES[1]} '{path}'"] = _contents(((path, Path(path).stat().st_mtime_ns),))
    return found


@cache
def _trained(marks: tuple[tuple[str, int], ...]) -> str:
    """Hash the parameters in the last of a run's checkpoints. marks: these files, and when each was written."""
    found = checkpoint.load_latest(Path(marks[0][0]).parent, None, warn)
    assert found is not None  # there are checkpoints
    return content.digest(found[0]["server/params"])


@cache
def _contents(marks: tuple[tuple[str, int], ...]) -> str:
    """Hash files. marks: the files, and when each was written."""
    return content.digest([sha256(Path(path).read_bytes()).hexdigest() for path, _ in marks])


def decisive(options: Options) -> dict[str, Any]:
    """The options that a checkpoint depends on: all but number and place of processes, which change no result.

    Options that earlier versions lack count where they are set, so that a newer version continues an older run.
    """
    new = dict(start=None, validation=0.0, precision="float32", compile=None, text=dict(TextConfig()), eval_later=False)
    secure = {name: own for name, own in options.get("secure", {}).items() if (name, own) != ("consistency", False)}
    options = {**options, "secure": secure}
    later = {name for name, value in new.items() if options.get(name, value) == value}
    model = {name: own for name, own in options.get("model", {}).items() if (name, own) != ("weights", None)}
    if options.get("attack", {}).get("name", "none") == "none":
        later.add("attack")
    if model.get("adapter", "none") == "none":
        model = {name: own for name, own in model.items() if not name.startswith("adapter")}
    options = {**options, "model": model}
    return {name: value for name, value in options.items() if name not in {"workers", "flower", *later}}


def _name(item: Any) -> str:
    kind = type(item)
    return f"{kind.__module__}.{kind.__qualname__}" if content.foreign(kind) else kind.__qualname__
