"""Hand the inputs of a model's layers to a callback, batch by batch, and sum products of image patches."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.contract import Batch
from cfl.core import Tree, rng
from cfl.models import Layer, Model
from cfl.models.layers import margins

BLOCK = 4096  # pixels whose products are summed in float32


@contextmanager
def watch(
    model: Model, layers: Sequence[Layer], callback: Callable[[Layer, Tensor], None], *, patches: bool = True
) -> Iterator[None]:
    """Within the context, call callback(layer, inputs), inputs (batch, positions, d), for each call of a layer.

    patches: False passes the module's input itself. A dropout directly before a layer is left out of its inputs.
    """
    last: list[Tensor] = [torch.empty(0), torch.empty(0)]  # output and input of the last dropout

    def remember(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        last[:] = out, args[0]

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = (*args, *kwargs.values())[0]
            x = (last[1] if x is last[0] else x).detach()
            callback(layer, layer.inputs(x) if patches else x)

        return called

    handles = [
        model.module.get_submodule(layer.path).register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer in layers
    ]
    handles += [each.register_forward_hook(remember) for each in model.module.modules() if isinstance(each, _DropoutNd)]
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
    callback: Callable[[Layer, Tensor, Batch], None],
    *,
    patches: bool = True,
    dropout: bool = False,
) -> None:
    """Send batches through the model in evaluation mode and call callback(layer, inputs, batch) for each layer.

    patches: as in `watch`; dropout: draw dropout nevertheless, except directly before a layer.
    """
    current: list[Batch] = []
    watching = watch(model, layers, lambda layer, inputs: callback(layer, inputs, current[0]), patches=patches)
    with torch.no_grad(), model.evaluation(dropout), watching:
        for batch in batches:
            current[:] = [batch]
            model.logits(params, batch.x, task)


def some_patches(inputs: Tensor, ids: Tensor, most: int, key: int) -> Tensor:
    """Draw at most `most` positions per sample of (batch, positions, d), keyed by (key, sample); 0: all."""
    positions = inputs.shape[1]
    if not 0 < most < positions:
        return inputs
    drawn = [torch.randperm(positions, generator=rng.generator(rng.key(key, sample)))[:most] for sample in ids.tolist()]
    return inputs.gather(1, torch.stack(drawn).to(inputs.device)[:, :, None].expand(-1, -1, inputs.shape[2]))


def slides(layer: Layer) -> bool:
    """True if `Patches` supports the layer: a convolution with stride and dilation 1 and more than one kernel pixel."""
    conv = layer.module
    return isinstance(conv, nn.Conv2d) and {*conv.stride, *conv.dilation} == {1} and math.prod(conv.kernel_size) > 1


class Strip(NamedTuple):
    """Rows (or columns) `start` to `stop` of an image, times those at distances `first` to `last`; sign: 1 or -1."""

    start: int
    stop: int
    first: int
    last: int
    sign: int


class Patches:
    """Running X X^T of all patches of a convolution in images (batch, channels, *size).

    The sum of products of two pixels of a patch depends on their distance only, except for pixels near the edges of the
    image, which not all positions of the kernel cover. So the image is multiplied by itself, shifted by each distance
    (15 products for a 3 x 3 kernel instead of 81, computed as a convolution's gradient), and edges are subtracted.
    dtype: precision of the products of up to BLOCK pixels; their sum is float64.
    """

    def __init__(self, layer: Layer, size: Sequence[int], dtype: torch.dtype) -> None:
        assert isinstance(layer.module, nn.Conv2d)
        self.conv, self.dtype, self.kernel = layer.module, dtype, layer.module.kernel_size
        self.channels = layer.size // math.prod(self.kernel)
        self.own = slice(layer.group * self.channels, (layer.group + 1) * self.channels)
        left, right, top, bottom = margins(self.conv)
        self.extra = [] if self.conv.padding_mode == "zeros" else [left, right, top, bottom]
        if self.extra:  # padding that is not zero is part of the image
            size, left, right, top, bottom = (size[0] + top + bottom, size[1] + left + right), 0, 0, 0, 0
        (tall, wide), (height, width) = self.kernel, size
        self.rows = [_strips(i, tall, height, top, bottom, back=0) for i in range(tall)]
        self.columns = [_strips(j, wide, width, left, right, back=wide - 1) for j in range(wide)]
        pairs = {pair for i in self.rows for j in self.columns for pair in itertools.product(i, j)}
        self._sums = {pair: torch.zeros(()) for pair in pairs}

    def add(self, x: Tensor) -> None:
        """Add a batch of the module's input (batch, all channels, height, width)."""
        x = F.pad(x, self.extra, mode=self.conv.padding_mode) if self.extra else x
        x = x[:, self.own].to(self.dtype)
        tall, wide = self.kernel
        around = F.pad(x, (wide - 1, wide - 1, 0, tall - 1))
        for (rows, columns), total in self._sums.items():
            pixels = x[:, :, rows.start : rows.stop, columns.start : columns.stop]
            left, right = (by + wide - 1 for by in (columns.first, columns.last))
            partners = around[:, :, rows.start : rows.stop + rows.last, columns.start + left : columns.stop + right]
            images = max(1, BLOCK // pixels[0, 0].numel())
            for one, other in zip(pixels.split(images), partners.split(images), strict=True):
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
        for i in range(tall):  # mirror the other half
            gram[:, i + 1 :, :, :, i] = gram[:, i, :, :, i + 1 :].permute(2, 3, 4, 0, 1)
        return gram.view(2 * (self.channels * tall * wide,))


def _strips(offset: int, kernel: int, size: int, before: int, after: int, *, back: int) -> list[Strip]:
    """All `size` rows of an image, and the rows to subtract, which row `offset` of the kernel never covers.

    before, after: rows of padding; back: a partner lies at most so many rows before its row.
    """
    low = offset - before
    high = low + size + before + after - kernel + 1
    missed = [(start, stop) for start, stop in ((0, min(low, size)), (max(high, 0), size)) if start < stop]
    return [Strip(0, size, -back, kernel - 1, 1)] + [
        Strip(start, stop, max(-min(offset, back), 1 - stop), min(kernel - 1 - offset, size - 1 - start), -1)
        for start, stop in missed
    ]


def _lagged(x: Tensor, around: Tensor) -> Tensor:
    """Sum of x[p] around[p + lag]^T over images and pixels p of x: (channels, channels, lags down, lags across)."""
    flat = next((axis for axis in (2, 3) if around.shape[axis] == 1), 0)
    x, around = x.transpose(0, flat), around.transpose(0, flat)  # one image of many one-row images takes half the time
    lags = [there - here + 1 for there, here in zip(around.shape[2:], x.shape[2:], strict=True)]
    weight = x.new_empty(x.shape[1], x.shape[1], *lags)
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])  # stride 1, no padding, no groups
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):  # TF32 keeps three digits only
        return torch.ops.aten.convolution_backward(x, around, weight, None, *plain)[1]
