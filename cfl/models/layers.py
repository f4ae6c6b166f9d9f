"""The layers of a module whose weights methods can project, and its normalisation layers."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from cfl.core import Tree, rng

Projectable = nn.Linear | nn.Conv1d | nn.Conv2d
KINDS = "Linear, Conv1d or Conv2d, trained, with a weight of its own"  # the layers of `layers_of`, for messages
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)


@dataclass(frozen=True)
class Layer:
    """A Linear, Conv1d or Conv2d layer that can be projected; a grouped convolution has one entry for each group.

    name: unique; path: the module's name; weight, bias: names in the tree (bias None for a layer without bias);
    size: d, the length of an input vector (in_features, or channels x kernel positions of the group);
    rows: the outputs of this group, as a slice of the weight's first dimension;
    mixed: True if the first dimension of the module's input is not that of the samples, as for sequences first.
    """

    name: str
    path: str
    weight: str
    bias: str | None
    size: int
    rows: slice
    group: int
    groups: int
    module: Projectable
    mixed: bool = False

    @property
    def own_forward(self) -> bool:
        """True for a layer with another forward than torch's, which may change its inputs, weight or outputs."""
        own = type(self.module)
        kind = next(kind for kind in get_args(Projectable) if isinstance(self.module, kind))
        names = ("forward",) if kind is nn.Linear else ("forward", "_conv_forward")
        return any(name in vars(self.module) or getattr(own, name) is not getattr(kind, name) for name in names)

    def put(self, leaf: Tensor, part: Tensor) -> Tensor:
        """Replace this group's rows of a weight or bias by `part`, of any shape with as many numbers."""
        own = part.reshape(leaf[self.rows].shape).to(leaf.dtype)
        alone = len(own) == len(leaf)
        return own.contiguous() if alone else torch.cat([leaf[: self.rows.start], own, leaf[self.rows.stop :]])

    def inputs(self, x: Tensor) -> Tensor:
        """Input vectors that the layer multiplies with its weight: (batch, positions, d).

        x: input of the module, (batch, ..., in_features) or (batch, channels, [height,] width). Patches are ordered
        channel, row, column, as `weight.reshape(out, -1)`; zero padding is part of a patch.
        """
        if isinstance(self.module, nn.Linear):
            return x.reshape(x.shape[0], -1, x.shape[-1])
        conv, x = self.module, self.padded(x)
        row = (1,) if isinstance(conv, nn.Conv1d) else ()  # a sequence is an image with one row
        x = x.unsqueeze(2) if row else x
        kernel, dilation, stride = (row + own for own in (conv.kernel_size, conv.dilation, conv.stride))
        return F.unfold(x, kernel, dilation=dilation, stride=stride).transpose(1, 2)

    def padded(self, x: Tensor) -> Tensor:
        """This group's channels of the input of a convolution, (batch, channels, [height,] width), with its padding."""
        conv = self.module
        assert not isinstance(conv, nn.Linear)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, margins(conv), mode=mode)
        channels = x.shape[1] // self.groups
        return x[:, self.group * channels : (self.group + 1) * channels]

    def dense(self) -> Layer:
        """The layer with stride 1, so that `inputs` has a patch at each pixel; a Linear layer is returned unchanged."""
        if isinstance(self.module, nn.Linear):
            return self
        module = copy.copy(self.module)
        module.stride = (1,) * len(module.stride)
        return replace(self, module=module)


def margins(conv: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Left and right, and of a Conv2d top and bottom padding, in pixels."""
    found: list[int] = []
    for axis in reversed(range(len(conv.kernel_size))):
        if conv.padding == "same":
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            found += [total // 2, total - total // 2]
        else:
            found += [0, 0] if conv.padding == "valid" else [int(conv.padding[axis])] * 2
    return found


def full_name(path: str, name: str) -> str:
    """Name in the module of the parameter `name` of the submodule at `path`; the module itself has the empty path."""
    return f"{path}.{name}" if path else name


def input_of(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The input of a layer's call, given by position or by name; None for a call without arguments."""
    return next(iter((*args, *named.values())), None)


def on_input(layer: nn.Module, see: Callable[[Any], None]) -> RemovableHandle:
    """Call see(x) with the input of each call of a layer."""
    return layer.register_forward_pre_hook(lambda _, args, named: see(input_of(args, named)), with_kwargs=True)


def new_heads(module: nn.Module, path: str, classes: Sequence[int], seed: int) -> Tree:
    """Draw a layer like the Linear layer at `path` for each task, by the seed: leaves named "path.name@task".

    classes: outputs of each.
    """
    template, found = module.get_submodule(path), Tree()
    assert isinstance(template, nn.Linear)
    for task, outputs in enumerate(classes):
        with rng.fork(rng.key(seed, "head", task)):
            head = nn.Linear(template.in_features, outputs, template.bias is not None)
        for name, leaf in head.named_parameters():
            found[f"{full_name(path, name)}@{task}"] = leaf.detach().to(template.weight)
    return found


def layers_of(module: nn.Module, paths: Iterable[str], mixed: Collection[str] = ()) -> tuple[Layer, ...]:
    """Layers of the submodules at `paths` that train, except those that share or compute a parameter.

    The inputs of a layer that shares a parameter are only some of the inputs that its weight multiplies.
    A bias with requires_grad=False is left out: it cannot change what the layer's weight computes.
    mixed: paths of the layers whose inputs do not have the samples as their first dimension.
    """
    names, uses = {name for name, _ in module.named_parameters(remove_duplicate=False)}, owners(module)
    layers: list[Layer] = []
    for path in paths:
        layer = module.get_submodule(path)
        assert isinstance(layer, Projectable)
        if full_name(path, "weight") not in names:  # computed of other parameters, as by weight_norm
            continue
        if layer.weight.requires_grad and all(uses[id(leaf)] == 1 for leaf in layer.parameters()):
            layers += _groups(layer, path, path in mixed)
    return tuple(layers)


def owners(module: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its id; a module under several names is one."""
    return Counter(id(leaf) for part in module.modules() for leaf in part.parameters(recurse=False))


def norm_parameters(called: Mapping[str, nn.Module], layers: Sequence[Layer]) -> dict[str, int]:
    """Affine parameters of the normalisation layers: name to the number of projected modules called before the layer.

    called: layers by path, in the order of their first call.
    """
    projected, before, found = {layer.path for layer in layers}, 0, {}
    for path, module in called.items():
        if path in projected:
            before += 1
        elif isinstance(module, NORMS):
            found.update({full_name(path, name): before for name, _ in module.named_parameters()})
    return found


def drop_running_stats(module: nn.Module) -> None:
    """Make batch normalisation use the statistics of the batch in both modes, in place."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def leaf_slots(module: nn.Module) -> dict[str, list[tuple[dict, str]]]:
    """Dictionaries and keys under which a module keeps each parameter and buffer; a shared one has several."""
    found: dict[int, list[tuple[dict, str]]] = {}
    for submodule in module.modules():
        for holder in (submodule._parameters, submodule._buffers):
            for key, leaf in holder.items():
                found.setdefault(id(leaf), []).append((holder, key))
    return {name: found[id(leaf)] for name, leaf in (*module.named_parameters(), *module.named_buffers())}


def _groups(module: Projectable, path: str, mixed: bool) -> list[Layer]:
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    outputs, size = module.weight.shape[0], math.prod(module.weight.shape[1:])
    return [
        Layer(
            name=path if groups == 1 else f"{path}.group{group}",
            path=path,
            weight=full_name(path, "weight"),
            bias=full_name(path, "bias") if module.bias is not None and module.bias.requires_grad else None,
            size=size,
            rows=slice(group * outputs // groups, (group + 1) * outputs // groups),
            group=group,
            groups=groups,
            module=module,
            mixed=mixed,
        )
        for group in range(groups)
    ]
