"""See what enters a model's layers, batch by batch, without storing it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.models.handle import Layer, Model, _margins
from cfl.subspace.basis import outer
from cfl.tree import Tree
from cfl.types import Batch


@contextmanager
def watch(
    model: Model, layers: Sequence[Layer], see: Callable[[Layer, Tensor], None], *, patches: bool = True
) -> Iterator[None]:
    """Call see(layer, inputs) with inputs (batch, positions, d) whenever a forward pass reaches one of the layers.

    patches: False hands over what enters the module, as it is.
    """

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = (*args, *kwargs.values())[0].detach()
            see(layer, layer.inputs(x) if patches else x)

        return called

    handles = [
        model.module.get_submodule(layer.path).register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stream(
    model: Model,
    params: Tree,
    task: int,
    batches: Iterator[Batch],
    layers: Sequence[Layer],
    see: Callable[[Layer, Tensor, Batch], None],
    *,
    patches: bool = True,
) -> None:
    """Send batches through the model in evaluation mode and hand each layer's inputs to see(layer, inputs, batch)."""
    current: list[Batch] = []
    seen = watch(model, layers, lambda layer, inputs: see(layer, inputs, current[0]), patches=patches)
    with torch.no_grad(), model.evaluation(), seen:
        for batch in batches:
            current[:] = [batch]
            model.logits(params, batch.x, task)


def slides(layer: Layer) -> bool:
    """Whether `patch_gram` knows this layer: a convolution that moves a pixel at a time."""
    conv = layer.module
    return isinstance(conv, nn.Conv2d) and {*conv.stride, *conv.dilation} == {1} and math.prod(conv.kernel_size) > 1


def patch_gram(layer: Layer, x: Tensor) -> Tensor:
    """X X^T (d, d), float64, of all patches that the convolution takes from x (batch, channels, height, width).

    Of two rows i and i' of a patch only the distance counts, but for the image's first and last rows: of the 9 pairs of
    a 3 x 3 kernel's rows 3 are multiplied out, and of patches only one row at a time is unfolded.
    """
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    tall, wide = conv.kernel_size
    channels = layer.size // (tall * wide)
    x = x[:, layer.group * channels : (layer.group + 1) * channels]
    x = F.pad(x, _margins(conv), mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    x = x.permute(2, 0, 3, 1).double().contiguous().unfold(2, wide, 1)  # (height, batch, across, channels, wide)
    lines = x.transpose(3, 4).reshape(len(x), -1, wide * channels)
    down, shape = len(lines) - tall + 1, (wide, channels, wide, channels)  # down: positions of the kernel
    gram = x.new_empty(channels, tall, wide, channels, tall, wide)
    for lag in range(tall):

        def pairs(start: int, stop: int, lag: int = lag) -> Tensor:
            """The products of the lines from start to stop with those `lag` below them."""
            upper, lower = (lines[start + by : stop + by].flatten(0, 1) for by in (0, lag))
            return outer(upper.T) if lag == 0 else upper.T @ lower

        block = pairs(0, down)
        for i in range(tall - lag):
            if i:
                block += pairs(i - 1 + down, i + down) - pairs(i - 1, i)
            gram[:, i, :, :, i + lag] = block.view(shape).permute(1, 0, 3, 2)
            gram[:, i + lag, :, :, i] = block.T.reshape(shape).permute(1, 0, 3, 2)
    return gram.view(layer.size, layer.size)
