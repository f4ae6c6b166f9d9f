"""See what enters a model's layers, batch by batch, without storing it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.contract.data import Batch
from cfl.core import rng
from cfl.core.tree import Tree
from cfl.models.handle import Layer, Model, margins

BLOCK = 4096  # pixels whose products are summed in float32


@contextmanager
def watch(
    model: Model, layers: Sequence[Layer], see: Callable[[Layer, Tensor], None], *, patches: bool = True
) -> Iterator[None]:
    """Call see(layer, inputs) with inputs (batch, positions, d) whenever a forward pass reaches one of the layers.

    patches: False hands over what enters the module, as it is. What a dropout right before a layer does is left out.
    """
    last: list[Tensor] = [torch.empty(0), torch.empty(0)]  # what the last dropout gave, and what it got

    def dropped(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        last[:] = out, args[0]

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = (*args, *kwargs.values())[0]
            x = (last[1] if x is last[0] else x).detach()
            see(layer, layer.inputs(x) if patches else x)

        return called

    handles = [
        model.module.get_submodule(layer.path).register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer in layers
    ]
    handles += [each.register_forward_hook(dropped) for each in model.module.modules() if isinstance(each, _DropoutNd)]
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
    dropout: bool = False,
) -> None:
    """Send batches through the model in evaluation mode and hand each layer's inputs to see(layer, inputs, batch).

    dropout: whether it is drawn all the same; a layer's inputs are then those before a dropout of its own.
    """
    current: list[Batch] = []
    seen = watch(model, layers, lambda layer, inputs: see(layer, inputs, current[0]), patches=patches)
    with torch.no_grad(), model.evaluation(dropout), seen:
        for batch in batches:
            current[:] = [batch]
            model.logits(params, batch.x, task)


def some_patches(inputs: Tensor, ids: Tensor, most: int, key: int) -> Tensor:
    """At most `most` of the positions (batch, positions, d) of each sample, drawn by (key, sample); 0 takes all."""
    positions = inputs.shape[1]
    if not 0 < most < positions:
        return inputs
    drawn = [torch.randperm(positions, generator=rng.generator(rng.key(key, sample)))[:most] for sample in ids.tolist()]
    return inputs.gather(1, torch.stack(drawn).to(inputs.device)[:, :, None].expand(-1, -1, inputs.shape[2]))


def slides(layer: Layer) -> bool:
    """Whether `Patches` knows this layer: a convolution that moves a pixel at a time."""
    conv = layer.module
    return isinstance(conv, nn.Conv2d) and {*conv.stride, *conv.dilation} == {1} and math.prod(conv.kernel_size) > 1


class Strip(NamedTuple):
    """Rows (or columns) of an image from start to stop, multiplied with those `first` to `last` further on."""

    start: int
    stop: int
    first: int
    last: int
    sign: int


class Patches:
    """Running X X^T of all patches that a convolution takes from images (batch, channels, *size).

    Of the products of two pixels of a patch only their distance counts, but for pixels near the image's edges, which
    only some places of the kernel see. So the whole image is multiplied with itself moved by each distance (15 products
    for a 3 x 3 kernel in place of 81; it is what a convolution's gradient is), and the edges come off.
    dtype: precision of the products of up to BLOCK pixels; what is summed is float64.
    """

    def __init__(self, layer: Layer, size: Sequence[int], dtype: torch.dtype) -> None:
        assert isinstance(layer.module, nn.Conv2d)
        self.conv, self.dtype, self.kernel = layer.module, dtype, layer.module.kernel_size
        self.channels = layer.size // math.prod(self.kernel)
        self.own = slice(layer.group * self.channels, (layer.group + 1) * self.channels)
        left, right, top, bottom = margins(self.conv)
        self.extra = [] if self.conv.padding_mode == "zeros" else [left, right, top, bottom]
        if self.extra:  # then the margins are part of the image
            size, left, right, top, bottom = (size[0] + top + bottom, size[1] + left + right), 0, 0, 0, 0
        (tall, wide), (height, width) = self.kernel, size
        self.rows = [_strips(i, tall, height, top, bottom, back=0) for i in range(tall)]
        self.columns = [_strips(j, wide, width, left, right, back=wide - 1) for j in range(wide)]
        pairs = {pair for i in self.rows for j in self.columns for pair in itertools.product(i, j)}
        self._sums = {pair: torch.zeros(()) for pair in pairs}

    def add(self, x: Tensor) -> None:
        """Take in what enters the module, (batch, all channels, height, width)."""
        x = F.pad(x, self.extra, mode=self.conv.padding_mode) if self.extra else x
        x = x[:, self.own].to(self.dtype)
        tall, wide = self.kernel
        around = F.pad(x, (wide - 1, wide - 1, 0, tall - 1))
        for (rows, columns), total in self._sums.items():
            ours = x[:, :, rows.start : rows.stop, columns.start : columns.stop]
            left, right = (by + wide - 1 for by in (columns.first, columns.last))
            theirs = around[:, :, rows.start : rows.stop + rows.last, columns.start + left : columns.stop + right]
            images = max(1, BLOCK // ours[0, 0].numel())
            for one, other in zip(ours.split(images), theirs.split(images), strict=True):
                total = _lagged(one, other).double().add_(total)
            self._sums[rows, columns] = total

    def gram(self) -> Tensor:
        """X X^T (d, d), float64."""
        tall, wide = self.kernel
        gram = next(iter(self._sums.values())).new_zeros(self.channels, tall, wide, self.channels, tall, wide)
        for i, j in itertools.product(range(tall), range(wide)):
            for rows, columns in itertools.product(self.rows[i], self.columns[j]):
                down = min(rows.last, tall - 1 - i) + 1
                left, right = max(columns.first, -j), min(columns.last, wide - 1 - j) + 1
                part = self._sums[rows, columns][..., :down, left - columns.first : right - columns.first]
                gram[:, i, j, :, i : i + down, j + left : j + right].add_(part, alpha=rows.sign * columns.sign)
        for i in range(tall):  # the other half, mirrored
            gram[:, i + 1 :, :, :, i] = gram[:, i, :, :, i + 1 :].permute(2, 3, 4, 0, 1)
        return gram.view(2 * (self.channels * tall * wide,))


def _strips(offset: int, kernel: int, size: int, before: int, after: int, *, back: int) -> list[Strip]:
    """An image's rows of which `size`, all, and those that a kernel's row `offset` never sees, to be subtracted.

    back: how far back partners of the whole image lie.
    """
    low = offset - before
    high = low + size + before + after - kernel + 1
    missed = [(start, stop) for start, stop in ((0, min(low, size)), (max(high, 0), size)) if start < stop]
    return [Strip(0, size, -back, kernel - 1, 1)] + [
        Strip(start, stop, max(-min(offset, back), 1 - stop), min(kernel - 1 - offset, size - 1 - start), -1)
        for start, stop in missed
    ]


def _lagged(x: Tensor, around: Tensor) -> Tensor:
    """Sums of x[p] around[p + lag]^T over images and pixels p of x: (channels, channels, lags down, lags across)."""
    flat = next((axis for axis in (2, 3) if around.shape[axis] == 1), 0)
    x, around = x.transpose(0, flat), around.transpose(0, flat)  # one row of many images as one image: half the time
    lags = [there - here + 1 for there, here in zip(around.shape[2:], x.shape[2:], strict=True)]
    weight = x.new_empty(x.shape[1], x.shape[1], *lags)
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])  # strides 1, no padding, no groups
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):  # TF32 keeps three digits
        return torch.ops.aten.convolution_backward(x, around, weight, None, *plain)[1]
