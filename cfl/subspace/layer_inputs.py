"""See what enters a model's layers, batch by batch, without storing it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.models.handle import Layer, Model, _margins as margins
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

    Pixel (i, j) of a patch and pixel (i', j') are at the same distance in many pairs of places: what they add up to
    differs by border rows and columns alone. Of 9 x 9 blocks of a 3 x 3 kernel 13 are multiplied out.
    """
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    channels = layer.size // math.prod(conv.kernel_size)
    x = F.pad(x, margins(conv), mode=mode)[:, layer.group * channels : (layer.group + 1) * channels]
    x = x.permute(2, 3, 0, 1).double().contiguous()  # (height, width, batch, channels)
    (tall, wide), (height, width) = conv.kernel_size, x.shape[:2]
    down, across = height - tall + 1, width - wide + 1  # positions of the kernel
    gram = x.new_empty(channels, tall, wide, channels, tall, wide)
    for dy in range(tall):
        upper, lower = x[: height - dy], x[dy:]
        for dx in range(1 - wide if dy else 0, wide):

            def products(start: int, stop: int) -> Tensor:
                """Of columns from start to stop with those dx to their right, for each row: (rows, channels, channels)."""
                left, right = upper[:, start:stop].flatten(1, 2), lower[:, start + dx : stop + dx].flatten(1, 2)
                return left.mT @ right

            first, last = max(0, -dx), wide - 1 - max(0, dx)
            rows = products(first, first + across)
            for j in range(first, last + 1):
                if j > first:
                    rows += products(j - 1 + across, j + across) - products(j - 1, j)
                block = rows[:down].sum(0)
                for i in range(tall - dy):
                    if i:
                        block = block + rows[i - 1 + down] - rows[i - 1]
                    gram[:, i, j, :, i + dy, j + dx] = block
                    gram[:, i + dy, j + dx, :, i, j] = block.T
    return gram.reshape(layer.size, layer.size)
