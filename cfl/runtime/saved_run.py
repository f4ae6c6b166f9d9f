"""The model of a finished or interrupted run, loaded from the run's folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cfl.assembly import arguments, network, resolve
from cfl.config.overrides import flat, read_yaml
from cfl.config.schema import RunConfig
from cfl.contract import Server, Strategy
from cfl.contract.composed import STRATEGY
from cfl.core import ConfigError, DataError, Tree, content, plugins, tree, warn
from cfl.core.metrics import percent
from cfl.core.typed import typed
from cfl.models import Model, adapters
from cfl.runtime import checkpoint, export, model_file, table
from cfl.runtime.run_folder import MODEL, read_json
from cfl.runtime.serving import Predictor
from cfl.streams import Stream, with_scenario
from cfl.streams.tensors import as_inputs


@dataclass(eq=False)
class SavedRun:
    """The model of a run, as `cfl.load` returns it.

    config: of the run; metrics: as in metrics.json, empty before the run has ended; model: the network and its tree of
    initial parameters; server: all trees of the server, such as "params" and a method's "basis"; latest: number of the
    last task trained so far; about: contents of model.json.
    """

    folder: Path
    config: RunConfig
    metrics: dict[str, Any]
    model: Model
    strategy: Strategy
    server: Server
    latest: int
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        score = f"ACC {percent(self.metrics['acc'])} %" if self.metrics else "not finished"
        return f"SavedRun({str(self.folder)!r}, {self.config.title}, {self.latest + 1} tasks trained, {score})"

    @property
    def params(self) -> Tree:
        """Parameters and buffers of the global model; names with "@" belong to one task."""
        return self.server["params"]

    @property
    def heads(self) -> dict[int, Tree]:
        """Task to the parameters of its head, or of its part of a growing head; all tasks may share one head."""
        return {task: tree.select(self.params, self.model.new_head(task)) for task in range(self.latest + 1)}

    @property
    def model_options(self) -> dict[str, Any]:
        """The options with which `cfl.models.build` makes the network that the configuration names."""
        return dict(network.options(self.config, self.about["vocabulary"]))

    @property
    def bases(self) -> Tree:
        """Layer to the orthonormal basis (d, rank) that the server protects; empty for methods without one."""
        return self.server.get("basis", {})

    @typed
    def predict(self, x: Any, task: int | None = None) -> Tensor:
        """Return the predicted class of each sample, (n,) int64, numbered as the run's targets. See `logits`."""
        return self.logits(x, task).argmax(dim=1)

    @typed
    def logits(self, x: Any, task: int | None = None) -> Tensor:
        """Return the outputs (n, classes) for samples.

        x: (n, *input_shape), tensor, array or lists; uint8 images are scaled and normalised as in training of `task`,
        and other numbers are taken as they are. Permute the pixels for a task of permuted images. Texts (n, 2, l) may
        be shorter.
        task: of all samples; needed if each task has its own head, and for uint8 images if tasks are normalised
        differently. Without it, the method infers the task of each
        sample if it can; it is needed otherwise if tasks have other parts of their own, such as running statistics.
        With scenario=class, the classes of the given or inferred task compete, or else all classes seen.
        Raises ConfigError for a task that is unknown or missing, DataError for samples of another shape or type.
        """
        self._check_task(task)
        return self._predictor.logits(self._inputs(x, task), task, self.latest)

    @typed
    def accuracies(self, stream: Stream) -> list[float]:
        """Return the fraction of correct predictions on the test samples of each task trained so far.

        stream: with the tasks of the run, in their order. Raises DataError if its samples or classes do not fit.
        """
        stream = with_scenario(stream, self.config.scenario)
        found = {"input_shape": list(stream.input_shape), "classes": list(stream.heads), "scenario": stream.scenario}
        for name, value in found.items():
            if value != self.about[name]:
                raise DataError(
                    f"stream '{stream.name}' has {name} {value}, and the run in '{self.folder}' has {self.about[name]}"
                )
        tests = {task: stream.tasks[task].test for task in range(self.latest + 1)}
        return self._predictor.accuracies(tests, self._predictor.inference(self.latest))

    def frame(self) -> Any:
        """Return the finished run as a pandas DataFrame of one row: options by dotted name, and figures with units.

        Raises ConfigError for a run that is not finished, and if pandas is not installed.
        """
        if not self.metrics:
            raise ConfigError(f"the run in '{self.folder}' is not finished; continue it with --resume")
        timing = read_json(self.folder / "timing.json", dict[str, dict[str, float]])
        options = flat(resolve.dump(self.config))
        return table.frame(table.row(self.metrics, self.about["scenario"], options, timing))

    @typed
    def export(self, path: Path | str, task: int | None = None) -> Path:
        """Write the model to a file, and return its path. The suffix of the path chooses the format.

        .safetensors: the parameters under the names of the network, for `load_state_dict`; .onnx: the network in
        evaluation mode, which needs the extra `cfl[onnx]`, with a free batch size.
        Adapters are added to the weights, under the names of the network without adapters.
        task: whose head and buffers the file gets; needed if each task has its own. The default is the last task.
        Raises ConfigError for another suffix, an unknown or missing task, or a folder that cannot be written.
        """
        self._check_task(task)
        if task is None:
            self._predictor.check_shared(self.latest)
            task = self.latest
        leaves = self.model.bind(self.strategy.serve(self.server, task), task)
        about = {name: self.about[name] for name in ("input_shape", "classes", "scenario")}
        about |= {"norm_stats": self.config.model.norm_stats}
        about |= {"options": self.model_options} if self.about["model"] is None else {}
        return export.write(Path(path), *adapters.merged(self.model.module, leaves), {**about, "task": task})

    def _check_task(self, task: int | None) -> None:
        if task is not None and not 0 <= task <= self.latest:
            raise ConfigError(f"task is {task}; the run in '{self.folder}' has trained tasks 0 to {self.latest}")

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.model, self.strategy, self.server, self.about["scenario"], self.config.eval_batch_size)

    def _inputs(self, x: Any, task: int | None) -> Tensor:
        x = as_inputs(x, "x")
        shape, found, words = self.about["input_shape"], list(x.shape[1:]), self.about["vocabulary"]
        if words is not None and len(found) == 2:
            shape = [shape[0], max(1, min(shape[1], found[1]))]  # texts may be shorter, as batches of them are
        if found != shape:
            raise DataError(
                f"x has samples of shape {tuple(x.shape[1:])}, and the run in '{self.folder}' has "
                f"{tuple(self.about['input_shape'])}"
            )
        if not torch.isfinite(x).all():
            raise DataError("x has NaN or infinity")
        if words is not None and not ((x[:, 0] >= 0) & (x[:, 0] < words)).all():
            raise DataError(f"x has token ids outside of 0 to {words - 1}; make it with the tokenizer of the run")
        if x.dtype == torch.uint8 and words is None:
            if not (pixels := self._pixels(task)):
                raise DataError(
                    f"x is uint8, but the run in '{self.folder}' has not seen images of this type; give numbers scaled "
                    "as in training"
                )
            mean, std = pixels.get("mean"), pixels.get("std")
            x = x.float() / 255
            x = x if mean is None else x - torch.tensor(mean)
            x = x if std is None else x / torch.tensor(std)
        return x

    def _pixels(self, task: int | None) -> dict[str, Any]:
        """Normalisation of a task's 8-bit images. Raises ConfigError for a missing task where the tasks differ."""
        found: list[dict[str, Any]] = self.about["pixels"]
        if len(found) == 1:
            return found[0]
        if task is None:
            raise ConfigError(
                f"the tasks of the run in '{self.folder}' normalise images differently; pass the task of x, or images "
                "as normalised numbers in place of uint8"
            )
        return found[task]


@typed
def load(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    strategy: Strategy | type[Strategy] | None = None,
) -> SavedRun:
    """Load the model of a finished or interrupted run from the run's folder, on the CPU.

    model, strategy: your own objects, if the run had some. Raises ConfigError for a folder without a run, a missing or
    a different object; CheckpointError for damaged files.
    """
    folder = Path(folder)
    trees, latest = checkpointed(folder)
    about, file = model_file.read(folder), folder / "config.yaml"
    with plugins.read_from(file):
        config = resolve.load(read_yaml(file))
    for name, given in (("model", model), ("strategy", strategy)):
        if given is None and about[name] is not None:
            held = f"a {name} of its own, {about[name]}"
            raise ConfigError(f"the run in '{folder}' has {held}; pass it to cfl.load as {name}=...")
    if model is None:  # not its truth value: a network may have a length of 0
        model = network.build(config, about["input_shape"], about["outputs"], about.get("vocabulary"))
    handle = network.handle(config, model, about["input_shape"], about["classes"], about["scenario"], "cpu")
    if _shapes(trees["params"]) != _shapes(handle.params):
        raise ConfigError(f"the network does not fit the parameters in '{folder}'; pass that of the run as model=...")
    check_masks(handle, about["masks"], folder)
    own = arguments.members(config, strategy, None)[STRATEGY]
    assert isinstance(own, Strategy)
    wanted, kind = about["strategy"] or plugins.strategies.get(config.method).__name__, type(own).__name__
    if kind != wanted:  # it may serve other parameters, or infer tasks otherwise
        raise ConfigError(f"the run in '{folder}' has a strategy {wanted}; pass an object of it, not of {kind}")
    return SavedRun(folder, config, read_json(folder / "metrics.json"), handle, own, trees, latest, about)


def check_masks(model: Model, there: str | None, folder: Path) -> None:
    """Raise ConfigError for a network with other masks than that of the run in a folder: no checkpoint has them.

    there: their hash in the folder's model.json, None if it has none.
    """
    if model.masks and there not in (None, content.digest(model.masks)):
        raise ConfigError(
            f"the masks {', '.join(model.masks)} of the network differ from those of the run in '{folder}'; build it "
            "with the same ones"
        )


def checkpointed(folder: Path) -> tuple[Server, int]:
    """Return the server's trees in the last checkpoint of a run's folder, and the number of its last task."""
    if (folder / "metrics.json").exists() and not any((folder / "checkpoints").glob("checkpoint-*")):
        raise ConfigError(f"'{folder}' has no checkpoints: only options and results of a run are there, not its model")
    if not (folder / MODEL).exists():
        held = (folder / "config.yaml").exists()
        raise ConfigError(
            f"'{folder}' has no {MODEL}: an earlier version made the run; continue it with --resume to write the file"
            if held
            else f"'{folder}' holds no run; give the --output of one"
        )
    found = checkpoint.load_latest(folder / "checkpoints", None, warn)
    if found is None:
        raise ConfigError(f"the run in '{folder}' has no checkpoint yet; wait for its first round")
    trees, meta = found
    server = {name.removeprefix("server/"): leaves for name, leaves in trees.items() if name.startswith("server/")}
    ended = len(json.loads(meta["reports"])) - 1  # perhaps without a client, where all dropped out
    return server, max(ended, *meta["last_task"].values(), 0)


def _shapes(params: Tree) -> dict[str, torch.Size]:
    return {name: leaf.shape for name, leaf in params.items()}
