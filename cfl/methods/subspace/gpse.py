"""GPSE, global principal subspace extraction (FOT, eq. 8-12): what clients send of their layers' inputs, and what of it
joins the server's bases.

A client sends the sketch A_i = (I - O O^T) X_i G_i of each layer's inputs X_i, and two energies; from the sums the
server takes the leading directions that the rank rule asks for. Where these are measured (coverage), clients send the
energies alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cfl.contract.data import Batch, Client
from cfl.contract.rounds import RoundInfo
from cfl.core import rng
from cfl.core.errors import ConfigError
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import private_sketch as private
from cfl.methods.subspace.layer_inputs import Patches, slides, some_patches, stream
from cfl.methods.subspace.projection import input_vectors
from cfl.methods.subspace.sketch import Direct, Energies, Gram, unpack
from cfl.models.handle import Layer

ROUNDED = 1e-3  # share of the energy beside which what float32 rounds off is nothing


@dataclass(frozen=True)
class GPSE:
    """Options of the extraction, and its two halves."""

    threshold: float = option(0.9, "share of input energy to protect", source="Table 9", above=0.0, at_most=1.0)
    threshold_step: float = option(0.0, "added to the threshold after each task", source="Table 9", at_least=0.0)
    criterion: str = option(
        "energy", "rank rule", source="eq. 12; code: norm_ratio", choices=("energy", "norm_ratio", "eq12")
    )
    min_rank: int = option(0, "least number of new directions a task", source="code: 1", at_least=0)
    sketch: str = option("gaussian", "send A = X* G, or the exact Gram matrix X* X*^T", choices=("gaussian", "gram"))
    s_mult: float = option(
        5.0, "sketch columns of a Linear layer, times d", source="paper: 5, and 1 for MNIST", above=0.0
    )
    s_mult_conv: float = option(
        5.0, "sketch columns of a convolution, times d", source="paper: 5, and 1 for MNIST", above=0.0
    )
    columns: int = option(0, "sketch columns of every layer, whatever its width (0: s_mult times d)", at_least=0)
    distribution: str = option("normal", "entries of G", source="eq. 9", choices=("normal", "uniform"))
    draw: str = option(
        "client", "key G by client (fast), or by sample: then the sum is the same however samples are dealt",
        choices=("client", "sample"),
    )  # fmt: skip
    max_patches: int = option(0, "patches taken of an image, drawn at random (0: all)", at_least=0)
    project_at: str = option(
        "client", "who removes the known span (the server: no basis goes down, coverage comes from the sketch)",
        source="eq. 8", choices=("client", "server"),
    )  # fmt: skip
    dropout: bool = option(False, "draw dropout in GPSE, but for that right before a layer", source="code: in the MLP")
    augmented: bool = option(False, "random changes of training images in GPSE too", source="code: Mini-ImageNet")
    dense_stem: bool = option(
        False, "first layer's patches at stride 1, whatever its own", source="code: Mini-ImageNet"
    )

    def __post_init__(self) -> None:
        if self.project_at == "server" and self.criterion != "energy":
            raise ConfigError(
                f"strategy.criterion={self.criterion} needs |X*| of each client: use strategy.project_at=client"
            )
        if self.draw == "sample" and (self.augmented or self.dropout):
            name = "augmented" if self.augmented else "dropout"
            raise ConfigError(f"strategy.{name}=true draws by client, not by sample: use strategy.draw=client")

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        level, summed = run["dp"]["level"], self.sketch == "gram" and self.project_at == "server"
        if level != "none" and self.criterion != "energy":
            return f"strategy.criterion={self.criterion} takes ratios of norms, which have no bound; set it to energy"
        if level == "example" and not summed:
            return "only sums over samples bound each one's part: set strategy.sketch=gram, strategy.project_at=server"
        return None

    def sketches(
        self, params: Tree, client: Client, known: Mapping[str, Tensor], layers: Sequence[Layer], info: RoundInfo
    ) -> Tree:
        """The client's half: of each layer the sketch A = X* G (d, s) (eq. 8-9) and, if it projects, energies (eq. 10).

        known: layer name to the basis O (d, k). Layers whose basis is full send nothing. Raises ConfigError for a layer
        that runs several times a pass where single samples are to be protected.
        """
        if self.dense_stem:
            stem = info.model.layers[0].path
            layers = [layer.dense() if layer.path == stem else layer for layer in layers]
        layers = [layer for layer in layers if not bases.full(known[layer.name])]  # such a basis has nothing to learn
        sums = {layer.name: self._accumulator(layer, known[layer.name], client, info) for layer in layers}
        self._stream(sums, layers, params, client, info, as_it_is=False)
        up: Tree = {}
        at_client = self.project_at == "client"
        for layer in layers:
            own = sums[layer.name]
            if info.privacy:
                parts = len(layers) * (2 if at_client else 1)
                released, energies = private.scaled(own, info.privacy, len(client), parts)
            else:
                released, energies = own.release(), own.energies  # |X|^2, |X*|^2
            up[f"sketch/{layer.name}"] = released.to(params[layer.weight].dtype)
            if at_client and self.criterion != "energy":  # n_i and n_i |X*| / |X|: their sums give the mean ratio
                ratio = (energies[1] / energies[0].clamp(min=1e-300)).sqrt()
                energies = torch.stack([torch.ones_like(ratio), ratio]) * len(client)
            if at_client:
                up[f"energy/{layer.name}"] = energies
        return up

    def energies(
        self, params: Tree, client: Client, known: Mapping[str, Tensor], layers: Sequence[Layer], info: RoundInfo
    ) -> Tree:
        """|X|^2 and |X*|^2 (2,) of each layer's inputs, float64: what of them the bases `known` cover."""
        sums = {layer.name: Energies(known[layer.name]) for layer in layers}
        self._stream(sums, layers, params, client, info, as_it_is=True)
        return {f"energy/{name}": own.energies for name, own in sums.items()}

    def extended(self, name: str, basis: Tensor, sums: Tree, info: RoundInfo) -> tuple[Tensor, Tensor]:
        """The server's half: leading directions of a layer's summed sketch join its basis (d, k) (eq. 11-12).

        With it comes the share () of the inputs' energy that the new basis covers, as far as the sums tell.
        Raises ValueError for a sum with a NaN or an infinity.
        """
        a = sums.get(f"sketch/{name}")
        if a is None:  # the basis is full
            return basis, basis.new_ones(())
        gram = self.sketch == "gram"
        a = unpack(a, basis.shape[0]) if gram else a
        noise = info.privacy.noise if info.privacy else 0.0
        vectors, squared, energy, remaining = bases.residual_spectrum(
            a, basis, gram=gram, noise=noise, terms=info.expected
        )
        if info.privacy and f"energy/{name}" in sums:
            whole = info.expected * private.share(info.privacy, len(sums))  # of each client's samples the energy is 1
            remaining = min(1.0, max(0.0, float(sums[f"energy/{name}"]) / whole))
        elif f"energy/{name}" in sums:
            full, residual = sums[f"energy/{name}"].tolist()
            remaining = residual / full if full > 0 else 0.0
        by_energy = self.criterion == "energy"  # else it is the mean of the clients' ratios of norms that remains
        given, known = (1 - remaining,) * 2 if by_energy else (remaining, 1 - remaining**2)
        rank = bases.choose_rank(squared, given, self._threshold(info.task), self.criterion, self.min_rank)
        f_r = (squared[:rank].sum() / max(energy, 1e-300)).clamp(max=1.0)
        return bases.expand(basis, vectors[:, :rank]), known + (1 - known) * f_r

    def _stream(
        self,
        sums: Mapping[str, Energies],
        layers: Sequence[Layer],
        params: Tree,
        client: Client,
        info: RoundInfo,
        *,
        as_it_is: bool,
    ) -> None:
        """Send the client's samples through the model, and add each layer's inputs to its sums.

        as_it_is: neither changes of images nor dropout, whatever the options.
        """
        calls: Counter[str] = Counter()
        images: dict[tuple[str, torch.Size], Patches] = {}

        def see(layer: Layer, x: Tensor, batch: Batch) -> None:
            calls[layer.name] += 1
            into = sums[layer.name]
            augment = len(into.basis) > layer.size
            if isinstance(into, Gram) and slides(layer) and not (self.max_patches or info.privacy or augment):
                kind = (layer.name, x.shape[2:])
                if kind not in images:
                    images[kind] = Patches(layer, x.shape[2:], into.products)
                images[kind].add(x)
                return
            inputs = some_patches(
                layer.inputs(x), batch.ids, self.max_patches, rng.key(info.key, "patches", layer.name)
            )
            vectors = input_vectors(inputs, layer, augment)
            into.add(private.unit_energy(vectors) if info.privacy else vectors, batch.ids)

        changed, dropout = (option and not as_it_is for option in (self.augmented, self.dropout))
        batches = client.batches(64, key=rng.key(info.key, "augment", client.id) if changed else None)
        with rng.fork(rng.key(info.key, "dropout", client.id), client.device):
            stream(info.model, params, info.task, batches, layers, see, patches=False, dropout=dropout)
        for (name, _), seen in images.items():
            into = sums[name]
            assert isinstance(into, Gram)
            into.add_gram(seen.gram())
        for name, times in calls.items():
            if info.privacy and info.privacy.level == "example" and times > client.steps(64):
                raise ConfigError(
                    f"layer '{name}' runs several times a pass, so that no sample's part in it is bounded; "
                    "set dp.level=client"
                )

    def _accumulator(self, layer: Layer, known: Tensor, client: Client, info: RoundInfo) -> Gram | Direct:
        mult = self.s_mult if isinstance(layer.module, nn.Linear) else self.s_mult_conv
        columns = self.columns or max(1, round(mult * known.shape[0]))
        by_sample = self.draw == "sample"
        key = rng.key(info.key, "sketch", layer.name, *(() if by_sample else (client.id,)))
        if self.sketch == "gram" or not by_sample and self.distribution == "normal":
            return Gram(known, None if self.sketch == "gram" else columns, key, self._products(known.dtype, info))
        return Direct(known, columns, key, by_sample=by_sample, distribution=self.distribution)

    def _products(self, dtype: torch.dtype, info: RoundInfo) -> torch.dtype:
        """float32 where a threshold cannot see its errors (`python benchmarks/gpse.py --parts precision`)."""
        coarse = dtype == torch.float32 and self._threshold(info.task) <= 1 - ROUNDED
        return torch.float32 if coarse else torch.float64

    def _threshold(self, task: int) -> float:
        return min(1.0, self.threshold + task * self.threshold_step)
