"""A handle on any `nn.Module`, by inspection: parameters as a tree, heads per task, layers and their inputs.

Names in the tree are the module's own. What belongs to one task (the head of a task-incremental stream, the running
statistics of normalisation layers) carries the task after an "@": `head.weight@3`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from cfl.core import rng
from cfl.core.errors import ConfigError
from cfl.core.tree import Tree

NormStats = Literal["per_task", "batch", "running"]
NO_CLASS = -1e9  # logit of a class that a narrower head does not have: its softmax is 0, its logarithm is finite
_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)


@dataclass(frozen=True)
class Layer:
    """A Linear or Conv2d layer (one entry for each group of a grouped convolution) that can be projected.

    name: unique; path: the module's name; weight, bias: names in the tree (bias None where there is none);
    size: d, the length of an input vector (in_features, or channels x kernel height x kernel width of the group);
    rows: the outputs of this group, as a slice of the weight's first dimension.
    """

    name: str
    path: str
    weight: str
    bias: str | None
    size: int
    rows: slice
    group: int
    groups: int
    module: nn.Linear | nn.Conv2d

    def put(self, leaf: Tensor, part: Tensor) -> Tensor:
        """A weight or bias with this group's rows replaced by `part`, of any shape with as many numbers."""
        own = part.reshape(leaf[self.rows].shape).to(leaf.dtype)
        return torch.cat([leaf[: self.rows.start], own, leaf[self.rows.stop :]])

    def inputs(self, x: Tensor) -> Tensor:
        """What the layer multiplies its weight with: (batch, positions, d).

        x: what enters the module, (batch, ..., in_features) or (batch, channels, height, width). Patches are ordered
        channel, row, column, as `weight.reshape(out, -1)`; zero padding is part of a patch.
        """
        if isinstance(self.module, nn.Linear):
            return x.reshape(x.shape[0], -1, x.shape[-1])
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, margins(conv), mode=mode)
        channels = x.shape[1] // self.groups
        x = x[:, self.group * channels : (self.group + 1) * channels]
        return F.unfold(x, conv.kernel_size, dilation=conv.dilation, stride=conv.stride).transpose(1, 2)

    def dense(self) -> Layer:
        """The layer with the inputs that it had if it moved a pixel at a time; a Linear layer as it is."""
        if isinstance(self.module, nn.Linear):
            return self
        module = copy.copy(self.module)
        module.stride = (1, 1)
        return replace(self, module=module)


class Model:
    """A module, the tree of its initial parameters, and which of them each task trains.

    module: any nn.Module that maps (batch, *input_shape) to (batch, outputs);
    classes: outputs of each task's head; multi_head: one head per task, made from the module's last Linear layer;
    norm_stats: running statistics of batch normalisation "per_task", "running" (shared), or none ("batch").
    Raises ConfigError where the module's outputs do not fit the stream.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: Sequence[int],
        classes: Sequence[int],
        *,
        multi_head: bool,
        norm_stats: NormStats = "per_task",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.module = copy.deepcopy(module).to(device)
        self.tasks, self.multi_head, self.seed = len(classes), multi_head, seed
        if norm_stats == "batch":
            _drop_running_stats(self.module)
        called, outputs = _trace(self.module, input_shape, device)
        linear = [name for name, layer in called if isinstance(layer, nn.Linear | nn.Conv2d)]
        last = self.module.get_submodule(linear[-1]) if linear else None
        self.classifier = linear[-1] if isinstance(last, nn.Linear) else None
        self._check_outputs(outputs, classes)
        head = {_join(linear[-1], name) for name, _ in last.named_parameters()} if last and multi_head else set()
        self._parameters = [name for name, _ in self.module.named_parameters()]
        self._buffers = [name for name, _ in self.module.named_buffers()]
        self._places = _places(self.module)
        self._owned = head | set(self._buffers if norm_stats == "per_task" else ())
        body = [name for name in linear if not (multi_head and name == self.classifier)]
        self.layers = tuple(layer for name in body if not _tied(self.module, name) for layer in _layers(self, name))
        self.norms = _norms(called, [layer.path for layer in self.layers])
        self.params = self._initial(classes, seed)

    def is_parameter(self, name: str) -> bool:
        """Whether a name in the tree is of a parameter, and not of a buffer."""
        return name.partition("@")[0] in self._parameters

    def tree_name(self, name: str, task: int) -> str:
        """The name in the tree of what the module calls `name`, for a task."""
        return f"{name}@{task}" if name in self._owned else name

    def trainable(self, task: int, heads: Sequence[int] = ()) -> tuple[str, ...]:
        """Names in the tree of what a task may train: the body, its own head, and those of the tasks in `heads`."""
        own = [self.tree_name(name, task) for name in self._parameters]
        return tuple(dict.fromkeys([*own, *(name for head in heads for name in self.head(head))]))

    def buffers(self, task: int) -> tuple[str, ...]:
        """Names in the tree of the buffers (running statistics) that a task uses."""
        return tuple(self.tree_name(name, task) for name in self._buffers)

    @property
    def buffers_per_task(self) -> bool:
        """Whether tasks have running statistics of their own."""
        return self.tasks > 1 and self.buffers(0) != self.buffers(1)

    def head(self, task: int) -> tuple[str, ...]:
        """Names in the tree of the parameters of the last Linear layer, as a task uses it."""
        if self.classifier is None:
            return ()
        leaves = self.module.get_submodule(self.classifier).named_parameters()
        return tuple(self.tree_name(_join(self.classifier, name), task) for name, _ in leaves)

    def bind(self, params: Mapping[str, Tensor], task: int) -> Tree:
        """The tree's leaves of one task under the module's own names."""
        return {name: params[self.tree_name(name, task)] for name in (*self._parameters, *self._buffers)}

    def logits(self, params: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """Outputs (batch, classes of the task). In training mode the buffers in `params` are written in place."""
        return self._call(self.bind(params, task), x)

    def outputs(self, params: Mapping[str, Tensor], x: Tensor, task: int, heads: Sequence[int]) -> Tensor:
        """Outputs of several heads in one pass: (batch, heads, classes of the widest), see `cfl.contract.Forward`.

        task: whose buffers are used. A single-head model gives (batch, 1, classes).
        """
        if not self.multi_head:
            return self.logits(params, x, task)[:, None]
        leaves, sizes = self.bind(params, task), [len(params[self.head(head)[0]]) for head in heads]
        for name, *same in zip(self.head(task), *(self.head(head) for head in heads), strict=True):
            leaves[name.partition("@")[0]] = torch.cat([params[leaf] for leaf in same])
        parts = self._call(leaves, x).split(sizes, dim=1)
        return torch.stack([F.pad(part, (0, max(sizes) - part.shape[1]), value=NO_CLASS) for part in parts], dim=1)

    def own_logits(self, params: Mapping[str, Tensor], x: Tensor, task: int, own: Tensor) -> Tensor:
        """Outputs (batch, classes of the widest head) of each sample through the head of its task `own` (batch,)."""
        heads = [head for head in range(self.tasks) if all(name in params for name in self.head(head))]
        every = self.outputs(params, x, task, heads)
        if every.shape[1] == 1:
            return every[:, 0]
        chosen = (own[:, None] == torch.tensor(heads, device=own.device)).to(every.dtype)
        return every.gather(1, chosen.argmax(1)[:, None, None].expand(-1, 1, every.shape[2]))[:, 0]

    def features(self, params: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """What enters the last Linear layer: (batch, d). Raises ConfigError where there is none."""
        if self.classifier is None:
            raise ConfigError("features are what enters the last layer; end the model in nn.Linear")
        with self.watched_features() as seen:
            self.logits(params, x, task)
        return seen[-1]

    @contextlib.contextmanager
    def watched_features(self) -> Iterator[list[Tensor]]:
        """Inside, what enters the last Linear layer in each pass, (batch, d); empty where there is no such layer."""
        seen: list[Tensor] = []
        if self.classifier is None:
            yield seen
            return
        layer = self.module.get_submodule(self.classifier)
        hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(1)))
        try:
            yield seen
        finally:
            hook.remove()

    @contextlib.contextmanager
    def evaluation(self, dropout: bool = False) -> Iterator[None]:
        """Inside, the module is in evaluation mode; dropout: but for its `nn.Dropout` layers."""
        was_training = self.module.training
        self.module.eval()
        for layer in self.module.modules() if dropout else ():
            layer.training = isinstance(layer, _DropoutNd)
        try:
            yield
        finally:
            self.module.train(was_training)

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Inside, the module's `nn.Dropout` layers pass everything on."""
        active = [layer for layer in self.module.modules() if isinstance(layer, _DropoutNd) and layer.training]
        for layer in active:
            layer.training = False
        try:
            yield
        finally:
            for layer in active:
                layer.training = True

    def _call(self, leaves: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The module's outputs with these leaves as its own: `torch.func.functional_call` less its search each pass."""
        own = [(holder, key, holder[key]) for name in leaves for holder, key in self._places[name]]
        try:
            for name, leaf in leaves.items():
                for holder, key in self._places[name]:
                    holder[key] = leaf
            return self.module(x)
        finally:
            for holder, key, leaf in own:
                holder[key] = leaf

    def _check_outputs(self, outputs: int, classes: Sequence[int]) -> None:
        if self.multi_head and self.classifier is None:
            raise ConfigError(
                "the stream has a head for each task, but the model's last layer is not nn.Linear: end the model in a "
                "Linear layer, or use a single-head stream"
            )
        if not self.multi_head and outputs != classes[0]:
            raise ConfigError(f"the model has {outputs} outputs, but the stream has {classes[0]} classes")

    def _initial(self, classes: Sequence[int], seed: int) -> Tree:
        params: Tree = {}
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, leaf in own.items():
            owners = range(self.tasks) if name in self._owned else [None]
            for task in owners:
                params[name if task is None else f"{name}@{task}"] = leaf.detach().clone()
        if self.multi_head:
            template = self.module.get_submodule(str(self.classifier))
            assert isinstance(template, nn.Linear)
            for task, outputs in enumerate(classes):
                with rng.fork(rng.key(seed, "head", task)):
                    head = nn.Linear(template.in_features, outputs, template.bias is not None)
                for name, leaf in head.named_parameters():
                    params[f"{_join(str(self.classifier), name)}@{task}"] = leaf.detach().to(template.weight)
        return params


def _places(module: nn.Module) -> dict[str, list[tuple[dict, str]]]:
    """Where a module keeps each parameter and buffer: name to (dictionary, key), several of them where it is shared."""
    found: dict[int, list[tuple[dict, str]]] = {}
    for part in module.modules():
        for holder in (part._parameters, part._buffers):
            for key, leaf in holder.items():
                found.setdefault(id(leaf), []).append((holder, key))
    return {name: found[id(leaf)] for name, leaf in (*module.named_parameters(), *module.named_buffers())}


def _join(path: str, name: str) -> str:
    """The full name of a submodule's parameter; the module itself has the empty path."""
    return f"{path}.{name}" if path else name


def margins(conv: nn.Conv2d) -> list[int]:
    """Left, right, top, bottom padding of a convolution, in pixels."""
    margins: list[int] = []
    for axis in (1, 0):
        if conv.padding == "same":
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            margins += [total // 2, total - total // 2]
        else:
            margins += [0, 0] if conv.padding == "valid" else [int(conv.padding[axis])] * 2
    return margins


def _layers(model: Model, path: str) -> list[Layer]:
    module = model.module.get_submodule(path)
    assert isinstance(module, nn.Linear | nn.Conv2d)
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    outputs, size = module.weight.shape[0], math.prod(module.weight.shape[1:])
    return [
        Layer(
            name=path if groups == 1 else f"{path}.group{group}",
            path=path,
            weight=_join(path, "weight"),
            bias=_join(path, "bias") if module.bias is not None else None,
            size=size,
            rows=slice(group * outputs // groups, (group + 1) * outputs // groups),
            group=group,
            groups=groups,
            module=module,
        )
        for group in range(groups)
    ]


def _tied(module: nn.Module, path: str) -> bool:
    """Whether other modules share the layer's parameters: one layer's inputs are then not all that they multiply."""
    uses = [id(leaf) for _, leaf in module.named_parameters(remove_duplicate=False)]
    return any(uses.count(id(leaf)) > 1 for leaf in module.get_submodule(path).parameters())


def _trace(module: nn.Module, input_shape: Sequence[int], device: torch.device | str) -> tuple[list, int]:
    """The layers that a forward pass calls, each once, in the order of the first call; and the number of outputs."""
    called: dict[str, nn.Module] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, __, name=name, layer=layer: called.setdefault(name, layer) and None)
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d, *_NORMS))
    ]
    was_training = module.training
    dtype = next((param.dtype for param in module.parameters()), torch.float32)
    try:
        with torch.no_grad():
            outputs = module.eval()(torch.zeros(2, *input_shape, device=device, dtype=dtype)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the model does not take inputs of shape (batch, {tuple(input_shape)}): {error}") from error
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return list(called.items()), outputs


def _norms(called: list[tuple[str, nn.Module]], layers: list[str]) -> dict[str, int]:
    """Affine parameters of normalisation layers: name to the number of projected layers called up to it."""
    seen, found = set(), {}
    for path, module in called:
        if path in layers:
            seen.add(path)
        elif isinstance(module, _NORMS):
            found.update({_join(path, name): len(seen) for name, _ in module.named_parameters()})
    return found


def _drop_running_stats(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
