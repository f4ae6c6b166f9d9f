"""Passes of a client's samples through the model that add each layer's inputs to the layer's running sum."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.contract import Batch, Client, RoundInfo
from cfl.core import ConfigError, Tree, rng
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import private_sketch as private
from cfl.methods.subspace.layer_inputs import Patches, slides, some_patches, stream
from cfl.methods.subspace.projection import input_vectors, width
from cfl.methods.subspace.sketch import Direct, Energies, Gram
from cfl.models import Layer

BATCH = 128  # samples per forward pass


def drawn_batches(client: Client, info: RoundInfo, samples: int = 0) -> Iterator[Batch]:
    """Yield the client's samples in batches: all in random order, or `samples` of them, drawn by round and client."""
    source = rng.generator(rng.key(info.key, "samples", client.id))
    order = torch.randperm(len(client), generator=source)[: samples or None].to(client.device)
    return client.batches(BATCH, order, together=info.model.joins_last)


def layer_grams(
    params: Tree,
    client: Client,
    info: RoundInfo,
    samples: int = 0,
    *,
    known: Mapping[str, Tensor] | None = None,
    augment: bool = False,
    layers: Sequence[Layer] | None = None,
) -> dict[str, Gram]:
    """Return the sum X X^T of each layer's inputs, by layer name, over `samples` of the client's samples (0: all).

    known: layer name to a basis O (d, k); the sum is then that of the residual X - O O^T X; augment: append the
    constant 1 of a bias to the inputs; layers: None for all that can be projected.
    """
    layers, sums = info.model.layers if layers is None else layers, {}
    for layer in layers:
        empty = bases.empty(width(layer, augment), client.device)
        sums[layer.name] = Gram((known or {}).get(layer.name, empty), None, key=0)

    def add(layer: Layer, inputs: Tensor, batch: Batch) -> None:
        sums[layer.name].add(input_vectors(inputs, layer, augment), batch.ids)

    stream(info.model, params, info.task, drawn_batches(client, info, samples), layers, add)
    return sums


def add_inputs(
    sums: Mapping[str, Energies],
    layers: Sequence[Layer],
    params: Tree,
    client: Client,
    info: RoundInfo,
    *,
    max_patches: int = 0,
    augmented: bool = False,
    dropout: bool = False,
) -> Counter[str]:
    """Send the client's samples through the model once and add each layer's inputs to `sums`, by layer name.

    Returns the number of each layer's inputs by their first dimensions: the client's samples, for each call once.
    max_patches: as in `some_patches`; augmented: apply the random changes of training images; dropout: draw dropout.
    With `info.privacy`, the inputs of each sample to a layer are scaled to unit energy.
    Raises ConfigError if a layer runs several times per pass and dp.level is "example", or if the samples are not the
    first dimension of a layer's inputs and `max_patches`, draws by sample or dp.level=example need to tell them apart.
    """
    by_sample = any(isinstance(own, Direct) and own.by_sample for own in sums.values())
    bounded = info.privacy is not None and info.privacy.level == "example"
    asks = {"dp.level=example": bounded, "strategy.draw=sample": by_sample, "strategy.max_patches": max_patches}
    for option in (name for name, on in asks.items() if on):
        _check_rows(layers, option)
    inputs = _Pass(sums, max_patches, info)
    key = rng.key(info.key, "augment", client.id) if augmented else None
    batches = client.batches(BATCH, key=key, together=info.model.joins_last)
    with rng.fork(rng.key(info.key, "dropout", client.id), client.device):
        stream(info.model, params, info.task, batches, layers, inputs.add, patches=False, dropout=dropout)
    for into, patches in inputs.images.values():
        into.add_gram(patches.gram())
    if bounded:
        _check_calls(inputs.calls, client.steps(BATCH))
    return inputs.rows


class ImageEnergies(Energies):
    """Running energies of the patches of a convolution with stride 1: its basis' directions are the filters."""

    def __init__(self, basis: Tensor, layer: Layer) -> None:
        super().__init__(basis)
        assert isinstance(layer.module, nn.Conv2d)
        kernel = layer.module.kernel_size
        self.layer, self.filters = layer, basis.T.reshape(-1, len(basis) // math.prod(kernel), *kernel)

    def add_images(self, x: Tensor) -> None:
        """Add a batch of the module's input (batch, all channels, height, width)."""
        x = self.layer.padded(x).to(self.basis.dtype)
        squares = x.square().sum(1, keepdim=True)
        whole = F.conv2d(squares, squares.new_ones(1, 1, *self.filters.shape[2:])).sum(dtype=torch.float64)
        inside = torch.zeros_like(whole)
        if len(self.filters):
            x = x.contiguous(memory_format=torch.channels_last)
            inside = F.conv2d(x, self.filters).square().sum(dtype=torch.float64)
        self.add_energies(whole, inside)


class _Pass:
    """State of a pass: sums, calls and inputs by layer, and by layer and image size the products of whole images."""

    def __init__(self, sums: Mapping[str, Energies], max_patches: int, info: RoundInfo) -> None:
        self.sums, self.max_patches, self.info = sums, max_patches, info
        self.images: dict[tuple[str, torch.Size], tuple[Gram, Patches]] = {}
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def add(self, layer: Layer, x: Tensor, batch: Batch) -> None:
        """Add x, the input of a layer's module, to the layer's sum: as whole images if possible, else as vectors."""
        self.calls[layer.name] += 1
        self.rows[layer.name] += len(x)
        into = self.sums[layer.name]
        augment = len(into.basis) > layer.size
        images = slides(layer) and not (self.max_patches or self.info.privacy or augment)
        if images and isinstance(into, Gram):
            self._add_images(layer, x, into)
        elif images and isinstance(into, ImageEnergies):
            into.add_images(x)
        else:
            into.add(self._vectors(layer, x, batch.ids, augment), batch.ids)

    def _add_images(self, layer: Layer, x: Tensor, into: Gram) -> None:
        """Add whole images to the products of their patches, which join the layer's sum after the pass."""
        kind = (layer.name, x.shape[2:])
        if kind not in self.images:
            self.images[kind] = into, Patches(layer, x.shape[2:], into.products)
        self.images[kind][1].add(x)

    def _vectors(self, layer: Layer, x: Tensor, ids: Tensor, augment: bool) -> Tensor:
        """Input vectors (batch, positions, d) of a layer: at most `max_patches` per sample; unit energy if private."""
        key = rng.key(self.info.key, "patches", layer.name)
        vectors = input_vectors(some_patches(layer.inputs(x), ids, self.max_patches, key), layer, augment)
        return private.unit_energy(vectors) if self.info.privacy else vectors


def _check_rows(layers: Sequence[Layer], option: str) -> None:
    """Raise ConfigError for a layer whose inputs cannot be told apart by sample, as an option needs."""
    for layer in layers:
        if layer.mixed:
            raise ConfigError(
                f"{option} needs inputs (batch, ...), but the samples are not the first dimension of the inputs of "
                f"layer '{layer.name}'; change the network, or leave the option out"
            )


def _check_calls(calls: Mapping[str, int], batches: int) -> None:
    """Raise ConfigError for a layer with more calls than batches: each call adds a unit of energy per sample."""
    for name, count in calls.items():
        if count > batches:
            raise ConfigError(
                f"layer '{name}' runs several times per forward pass, so a sample's contribution to its sketch is not "
                "bounded; set dp.level=client"
            )
