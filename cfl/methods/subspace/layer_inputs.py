"""Hand the inputs of a model's layers to a callback, batch by batch, and sum products of image patches."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.contract import Batch
from cfl.core import Tree, rng
from cfl.models import Layer, Model
from cfl.models.layers import input_of, margins, on_input

FREQUENCIES = 32  # whose products are computed at a time: those of 256 channels take 8 MB


@contextmanager
def watch(
    model: Model, layers: Sequence[Layer], callback: Callable[[Layer, Tensor], None], *, patches: bool = True
) -> Iterator[None]:
    """Within the context, call callback(layer, inputs), inputs (batch, positions, d), for each call of a layer.

    patches: False passes the module's input itself. A dropout directly before a layer is left out of its inputs.
    """
    last: list[Tensor] = [torch.empty(0), torch.empty(0)]  # output and input of the last dropout

    def remember(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> None:
        last[:] = out, input_of(args, named)

    def see(layer: Layer, x: Tensor) -> None:
        x = (last[1] if x is last[0] else x).detach()
        callback(layer, layer.inputs(x) if patches else x)

    dropouts = [each for each in model.module.modules() if isinstance(each, _DropoutNd)]
    handles = [each.register_forward_hook(remember, with_kwargs=True) for each in dropouts]
    handles += [on_input(model.module.get_submodule(layer.path), partial(see, layer)) for layer in layers]
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
    (15 products for a 3 x 3 kernel instead of 81, from a Fourier transform of the image), and edges are subtracted.
    dtype: precision of the products of a batch; their sum is float64.
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
        pairs = (pair for i in self.rows for j in self.columns for pair in itertools.product(i, j))
        self._whole, self._pairs = (self.rows[0][0], self.columns[0][0]), list(dict.fromkeys(pairs))
        self._sums: dict[tuple[Strip, Strip], Tensor] = {}

    def add(self, x: Tensor) -> None:
        """Add a batch of the module's input (batch, all channels, height, width)."""
        x = F.pad(x, self.extra, mode=self.conv.padding_mode) if self.extra else x
        flat = x[:, self.own].reshape(len(x) * self.channels, -1).to(self.dtype)
        x = flat.T.contiguous().view(*x.shape[2:], len(x), self.channels)  # (height, width, batch, channels)
        for pair in self._pairs:
            found = _correlated(x, *self.kernel) if pair == self._whole else _lagged(x, *pair)
            self._sums[pair] = self._sums[pair].add_(found) if pair in self._sums else found.double()

    def gram(self) -> Tensor:
        """X X^T (d, d), float64."""
        tall, wide = self.kernel
        gram = self._sums[self._whole].new_empty(2 * (tall, wide) + 2 * (self.channels,))
        for i, j in itertools.product(range(tall), range(wide)):
            for rows, columns in itertools.product(self.rows[i], self.columns[j]):
                down = min(rows.last, tall - 1 - i) + 1
                left, right = max(columns.first, -j), min(columns.last, wide - 1 - j) + 1
                part = self._sums[rows, columns][:down, left - columns.first : right - columns.first]
                into = gram[i, j, i : i + down, j + left : j + right]
                if (rows, columns) == self._whole:  # the first
                    into.copy_(part)
                else:
                    into.add_(part, alpha=rows.sign * columns.sign)
        for i in range(tall):  # mirror the other half
            gram[i + 1 :, :, i] = gram[i, :, i + 1 :].permute(1, 2, 0, 4, 3)
        return gram.permute(4, 0, 1, 5, 2, 3).reshape(2 * (self.channels * tall * wide,))


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


def _correlated(x: Tensor, tall: int, wide: int) -> Tensor:
    """Sum of x[p] x[p + lag]^T over images and pixels p: (lags down, lags across, channels, channels).

    x: (height, width, images, channels). Lags are 0 to tall - 1 down and 1 - wide to wide - 1 across. The Fourier
    transform of a correlation is a product of transforms (Wiener-Khinchin): one for each frequency P = conj(F) F^T,
    instead of one for each lag. A sum over the frequencies of P exp(i f lag) turns it back.
    """
    channels = x.shape[3]
    high, half = x.shape[0] + tall - 1, (x.shape[1] + wide + 1) // 2  # with room for all lags, so that none wraps
    period = 2 * half - 1  # odd, so that each frequency across but 0 has a conjugate one, which `half` leaves out
    down, across = _waves(high, 0, tall, high), _waves(half, 1 - wide, wide, period)
    across[1:] *= 2
    back = torch.einsum("fi,gj->ijfg", down, across).reshape(-1, high * half) / (high * period)
    even, odd = x.new_zeros(2, len(back), channels**2)
    parts = (*_transformed(x, high, half), back.real.T.to(x), back.imag.T.to(x))
    for real, imag, cos, sin in zip(*(part.split(FREQUENCIES) for part in parts), strict=True):
        even.addmm_(cos.T, torch.baddbmm(real.mT @ real, imag.mT, imag).flatten(1))  # Re P
        odd.addmm_(sin.T, (real.mT @ imag).flatten(1))  # Im P is this less its transpose
    even, odd = (each.view(tall, -1, channels, channels) for each in (even, odd))
    return even - odd + odd.mT


def _transformed(x: Tensor, high: int, half: int) -> Tensor:
    """Fourier transform of x (height, width, ...) with zeros around: real and imaginary part (2, high * half, ...).

    By products with matrices of two real numbers for a complex one: an FFT of small images takes longer, and so does
    moving its frequencies to the front.
    """
    height, width = x.shape[:2]
    down, across = _waves(high, 0, height, high).conj(), _waves(half, 0, width, 2 * half - 1).conj()
    rows = torch.cat([across.real, across.imag]).to(x) @ x.flatten(2)
    both = torch.stack([torch.stack([down.real, -down.imag], -1), torch.stack([down.imag, down.real], -1)])
    found = both.view(2 * high, 2 * height).to(x) @ rows.view(2 * height, -1)
    return found.view(2, high * half, *x.shape[2:])


def _waves(count: int, start: int, stop: int, period: int) -> Tensor:
    """exp(2 pi i f p / period) of frequencies f below `count` at pixels p from `start` to `stop`, complex."""
    angle = torch.outer(torch.arange(count), torch.arange(start, stop)).double() * (2 * math.pi / period)
    return torch.polar(torch.ones_like(angle), angle)


def _lagged(x: Tensor, rows: Strip, columns: Strip) -> Tensor:
    """Sum of x[p] x[p + lag]^T over images and the pixels p of strips: (lags down, lags across, channels, channels).

    x: (height, width, images, channels). Partners outside of the image are zero.
    """
    lags = list(itertools.product(*(range(strip.first, strip.last + 1) for strip in (rows, columns))))
    sums = x.new_empty(len(lags), x.shape[3], x.shape[3])
    for lag, total in zip(lags, sums, strict=True):
        own, partners = [], []
        for strip, by, size in zip((rows, columns), lag, x.shape, strict=False):
            start, stop = max(strip.start, -by), min(strip.stop, size - by)
            own.append(slice(start, max(start, stop)))
            partners.append(slice(start + by, max(start, stop) + by))
        torch.mm(x[tuple(own)].flatten(0, 2).T, x[tuple(partners)].flatten(0, 2), out=total)
    return sums.view(rows.last - rows.first + 1, -1, *sums.shape[1:])
