"""LoRA: trainable matrices of low rank beside frozen layers (Hu et al., ICLR 2022, section 4.1).

    y = W x + (alpha / r) B A x,    W (m, d) frozen, A (r, d), B (m, r)

A starts as `nn.Linear` starts its weights (Kaiming uniform), B at 0, so that the adapted network starts as the network
that it adapts. Beside a convolution, A is a convolution of the same geometry with r filters, and B one with a 1 x 1
kernel. A grouped convolution has a pair of rank r for each group, since W + (alpha / r) B A has to be such a
convolution too. A and B are layers of their own, so all methods find them by inspection.

Only adapters and the head train: all other parameters are frozen, those of normalisation layers among them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cfl.core import ConfigError, Tree, rng, unknown, warn
from cfl.core.errors import MOST_NAMES, few
from cfl.models.layers import Projectable, full_name, layers_of
from cfl.models.tracing import own_copy, trace


@dataclass(frozen=True)
class Lora:
    """Options of the adapters. rank: r; alpha: None for r, so that the factor is 1; targets: see `adapted`."""

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = ()


class Adapted(nn.Module):
    """A Linear, Conv1d or Conv2d layer `base` with an adapter: layers `a` and `b`, whose product counts `scale` times.

    Attributes that it lacks are those of `base`.
    """

    def __init__(self, base: Projectable, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a: nn.Module
        self.b: nn.Module
        if isinstance(base, nn.Linear):
            self.a = nn.Linear(base.in_features, rank, bias=False)
            self.b = nn.Linear(rank, base.out_features, bias=False)
        else:
            geometry: dict[str, Any] = {
                name: getattr(base, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")
            }
            inner = rank * base.groups
            kind: Any = nn.Conv1d if isinstance(base, nn.Conv1d) else nn.Conv2d
            self.a = kind(base.in_channels, inner, base.kernel_size, **geometry, bias=False)
            self.b = kind(inner, base.out_channels, 1, groups=base.groups, bias=False)
        nn.init.zeros_(cast("Tensor", self.b.weight))
        self.to(base.weight)

    def forward(self, input: Tensor) -> Tensor:
        change = self.b(self.a(input))  # before `base`, so that the first layer called is one that trains
        return self.base(input) + (change if self.scale == 1 else self.scale * change)

    @property
    def weight(self) -> Tensor:
        """W + (alpha / r) B A, for networks that read a layer's weight, as torch's transformer layers do."""
        return self.merged(self.base.weight, cast("Tensor", self.a.weight), cast("Tensor", self.b.weight))

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """W + (alpha / r) B A for leaves of `base`, `a` and `b`, in the shape of W."""
        groups = getattr(self.base, "groups", 1)
        parts = zip(b.flatten(1).chunk(groups), a.flatten(1).chunk(groups), strict=True)
        return weight + self.scale * torch.cat([up @ down for up, down in parts]).reshape(weight.shape)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as in_features, which the forward of a network may read
            return getattr(super().__getattr__("base"), name)


def adapted(
    module: nn.Module,
    input_shape: Sequence[int],
    options: Lora,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return a copy of a module with adapters beside its layers, frozen but for these and for the head.

    The head is the last Linear layer that is called; if it has requires_grad=False, it stays as it is.
    options.targets: names, or parts of names between dots, of the layers that get an adapter; empty for all Linear,
    Conv1d and Conv2d layers that are called and share no parameter, but the head. dtype: of the samples.
    Warns of a layer with a forward of its own, which gets none.
    Raises ConfigError for a target that is no such layer, and for a module without one.
    """
    own = own_copy(module, device)
    traced = trace(own, input_shape, device, dtype, seed)
    called, paths = traced.called, traced.projectable
    inner = paths[:-1] if paths and isinstance(called[paths[-1]], nn.Linear) else paths
    head = {id(leaf) for path in paths[len(inner) :] for leaf in called[path].parameters()}
    rest = [leaf for leaf in own.parameters() if id(leaf) not in head and leaf.is_floating_point()]
    for leaf in rest:
        leaf.requires_grad_(True)  # `layers_of` leaves out layers that do not train, which adapters are for
    possible = {layer.path: layer.own_forward for layer in layers_of(own, inner)}
    for leaf in rest:
        leaf.requires_grad_(False)
    for path in _plain(_chosen([*possible], options.targets), possible):
        base: Any = own.get_submodule(path)
        with rng.fork(rng.key(seed, "adapter", path)):
            layer = Adapted(base, options.rank, (options.alpha or options.rank) / options.rank)
        _replace(own, base, layer)
    return own


def merged(module: nn.Module, leaves: Tree) -> tuple[nn.Module, Tree]:
    """Return the network without adapters, and its leaves with the adapters added to the weights.

    leaves: of the adapted module, under its own names. A module without adapters and its leaves are returned unchanged.
    """
    found = _adapters(module)
    if not found:
        return module, leaves
    plain, own = copy.deepcopy(module), dict(leaves)
    for path, layer in found.items():
        _replace(plain, plain.get_submodule(path), plain.get_submodule(f"{path}.base"))
        pair = own.pop(f"{path}.a.weight"), own.pop(f"{path}.b.weight")
        own[f"{path}.base.weight"] = layer.merged(own[f"{path}.base.weight"], *pair)
    names = plain_names(module)
    return plain, {names.get(name, name): leaf for name, leaf in own.items()}


def plain_names(module: nn.Module) -> dict[str, str]:
    """The names of the parameters that have adapters, each to its name in the network without adapters."""
    return {
        full_name(path, f"base.{name}"): full_name(path, name)
        for path, layer in _adapters(module).items()
        for name, _ in layer.base.named_parameters()
    }


def pairs(module: nn.Module) -> list[tuple[str, str]]:
    """The names of A and B of each adapter."""
    return [(f"{path}.a.weight", f"{path}.b.weight") for path in _adapters(module)]


def notes(module: nn.Module) -> list[str]:
    """A line on the adapters of a module, if it has some."""
    found = _adapters(module)
    return [f"adapters of low rank beside {few([*found], MOST_NAMES)}; they and the head train"] if found else []


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a layer in the place of another, which a module may have under several names."""
    for holder in [part._modules for part in module.modules()]:
        holder.update({name: new for name, own in holder.items() if own is old})


def _adapters(module: nn.Module) -> dict[str, Adapted]:
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, Adapted)}


def _chosen(possible: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The layers that the targets name, in the order in which they are called; all of them without targets."""
    if not possible:
        raise ConfigError(
            "model.adapter=lora finds no layer for an adapter: the model calls no Linear, Conv1d or Conv2d layer but "
            "its head; set model.adapter=none"
        )
    for target in targets:
        if not any(_within(target, path) for path in possible):
            parts = {part for path in possible for part in (path, *path.split(".")) if not part.isdigit()}
            raise unknown("layer in model.adapter_targets:", target, parts | {*possible})
    return [path for path in possible if not targets or any(_within(target, path) for target in targets)]


def _plain(paths: Sequence[str], own_forward: Mapping[str, bool]) -> list[str]:
    """The layers with torch's own forward, which is W x: with another one, merged weights may give other outputs."""
    plain = [path for path in paths if not own_forward[path]]
    if odd := [path for path in paths if own_forward[path]]:
        text = f"no adapter fits a layer with a forward of its own: {few(odd, MOST_NAMES)}"
        if not plain:
            raise ConfigError(f"{text}; choose other model.adapter_targets, or set model.adapter=none")
        warn(text)
    return plain


def _within(target: str, path: str) -> bool:
    return f".{target}." in f".{path}."
