"""GPSE, global principal subspace extraction (FOT, eq. 8-12): sketches of layer inputs at clients, bases at the server.

A client sends the sketch A_i = (I - O O^T) X_i G_i of each layer's inputs X_i, and two energies. From their sums the
server takes the leading directions that the rank rule asks for. To measure the coverage of a basis, clients send
energies only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cfl.contract import Client, RoundInfo
from cfl.core import ConfigError, Tree, option, rng
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import private_sketch as private
from cfl.methods.subspace.input_sums import ImageEnergies, add_inputs
from cfl.methods.subspace.layer_inputs import slides
from cfl.methods.subspace.sketch import Direct, Energies, Gram, pack, packed_size, unpack
from cfl.models import Layer

FILTERS = 160  # widest convolution whose energies come from convolutions with the basis, not from a Gram matrix
ROUNDED = 1e-3  # float32 error is negligible while the uncovered energy share exceeds this


@dataclass(frozen=True)
class GPSE:
    """Options of GPSE, its client half (`sketches`) and its server half (`extended`)."""

    threshold: float = option(
        0.85, "share of input energy to protect", source="ours; Table 9: 0.87 to 0.96", above=0.0, at_most=1.0
    )
    threshold_step: float = option(0.0, "added to the threshold after each task", source="Table 9", at_least=0.0)
    criterion: str = option(
        "energy", "rank rule", source="eq. 12; code: norm_ratio", choices=("energy", "norm_ratio", "eq12")
    )
    min_rank: int = option(0, "minimum number of new directions per task", source="code: 1", at_least=0)
    sketch: str = option(
        "auto", "send A = X* G, or the exact Gram matrix X* X*^T, or for each layer the smaller one (auto)",
        source="eq. 9: gaussian", choices=("auto", "gaussian", "gram"),
    )  # fmt: skip
    s_mult: float = option(5.0, "sketch columns of Linear layers, times d", source="paper: 5; MNIST: 1", above=0.0)
    s_mult_conv: float = option(5.0, "sketch columns of convolutions, times d", source="paper: 5; MNIST: 1", above=0.0)
    columns: int = option(0, "sketch columns of every layer, whatever its width (0: s_mult times d)", at_least=0)
    distribution: str = option("normal", "entries of G", source="eq. 9", choices=("normal", "uniform"))
    draw: str = option(
        "client", "key G by client (fast), or by sample (the sum is then the same for every partition of the samples)",
        choices=("client", "sample"),
    )  # fmt: skip
    max_patches: int = option(0, "patches per image, drawn at random (0: all)", at_least=0)
    project_at: str = option(
        "client", "who removes the span of the basis (server: clients get no basis, the sketch estimates coverage)",
        source="eq. 8", choices=("client", "server"),
    )  # fmt: skip
    dropout: bool = option(False, "draw dropout in GPSE, except right before a layer", source="code: in the MLP")
    augmented: bool = option(False, "augment training images in GPSE, too", source="code: Mini-ImageNet")
    dense_stem: bool = option(False, "first layer's patches always at stride 1", source="code: Mini-ImageNet")

    def __post_init__(self) -> None:
        if self.project_at == "server" and self.criterion != "energy":
            raise ConfigError(
                f"strategy.criterion={self.criterion} needs clients' |X*|: use strategy.project_at=client"
            )
        for name, usual in (("draw", "client"), ("distribution", "normal")):
            if self.sketch == "auto" and getattr(self, name) != usual:
                raise ConfigError(
                    f"strategy.{name}={getattr(self, name)} is for Gaussian sketches: set strategy.sketch=gaussian"
                )
        if self.draw == "sample" and (self.augmented or self.dropout):
            name = "augmented" if self.augmented else "dropout"
            raise ConfigError(f"strategy.{name}=true draws by client, not by sample: use strategy.draw=client")

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        level, summed = run["dp"]["level"], self.sketch == "gram" and self.project_at == "server"
        if level != "none" and self.criterion != "energy":
            return f"strategy.criterion={self.criterion} uses ratios of norms, which are unbounded; set it to energy"
        if level == "example" and not summed:
            return "only sums over samples are bounded per sample: set strategy.sketch=gram, strategy.project_at=server"
        return None

    def sketches(
        self, params: Tree, client: Client, known: Mapping[str, Tensor], layers: Sequence[Layer], info: RoundInfo
    ) -> Tree:
        """Client half: the sketch A = X* G (d, s) of each layer (eq. 8-9) and, if it projects, energies (eq. 10).

        known: layer name to its basis O (d, k). Layers with a full basis send nothing.
        Raises ConfigError for a layer that `add_inputs` refuses.
        """
        if self.dense_stem:
            layers = [layer.dense() if layer.path == info.model.stem else layer for layer in layers]
        layers = [layer for layer in layers if not bases.full(known[layer.name])]
        sums = {layer.name: self._empty_sum(layer, known[layer.name], client, info) for layer in layers}
        drawn = {"augmented": self.augmented, "dropout": self.dropout}
        rows = add_inputs(sums, layers, params, client, info, max_patches=self.max_patches, **drawn)
        at_client = self.project_at == "client"
        up: Tree = {}
        for layer in layers:
            inputs = sums[layer.name]
            if info.privacy:
                parts = len(layers) * (2 if at_client else 1)
                sketch, energies = private.scaled(inputs, info.privacy, rows[layer.name], parts)
            else:
                sketch, energies = inputs.release(), inputs.energies  # |X|^2, |X*|^2
            up[f"sketch/{layer.name}"] = sketch.to(params[layer.weight].dtype)
            if at_client:
                up[f"energy/{layer.name}"] = energies if self.criterion == "energy" else _ratio(energies, len(client))
        return up

    def energies(
        self, params: Tree, client: Client, known: Mapping[str, Tensor], layers: Sequence[Layer], info: RoundInfo
    ) -> Tree:
        """|X|^2 and |X*|^2 (2,) in float64 of each layer's inputs: they measure what the bases `known` cover."""
        sums: dict[str, Energies] = {}
        for layer in layers:
            basis = known[layer.name]
            if not slides(layer) or len(basis) > layer.size:
                sums[layer.name] = Energies(basis)
            elif len(basis) <= FILTERS:
                sums[layer.name] = ImageEnergies(basis, layer)
            else:  # the Gram matrix of whole images takes less time than residuals
                sums[layer.name] = Gram(basis, None, 0, self.products(basis.dtype, info.task))
        add_inputs(sums, layers, params, client, info, max_patches=self.max_patches)
        return {f"energy/{name}": inputs.energies for name, inputs in sums.items()}

    def extended(self, name: str, basis: Tensor, sums: Tree, info: RoundInfo) -> tuple[Tensor, Tensor]:
        """Server half: extend a layer's basis (d, k) by leading directions of its summed sketch (eq. 11-12).

        Returns the new basis and an estimate () of the share of the inputs' energy that it covers.
        Raises ValueError if the summed sketch contains a NaN or an infinity.
        """
        a = sums.get(f"sketch/{name}")
        if a is None:  # the basis is full
            return basis, basis.new_ones(())
        gram, noise = a.dim() == 1, info.privacy.noise if info.privacy else 0.0
        a = unpack(a) if gram else a
        residual = bases.residual_spectrum(a, basis, gram=gram, noise=noise, terms=info.expected)
        remaining = _remaining(name, basis, residual.share, sums, info)
        known = 1 - remaining if self.criterion == "energy" else 1 - remaining**2  # else the mean ratio of norms
        covered = known if self.criterion == "energy" else remaining
        rank = bases.choose_rank(residual.squared, covered, self._threshold(info.task), self.criterion, self.min_rank)
        f_r = (residual.squared[:rank].sum() / max(residual.energy, 1e-300)).clamp(max=1.0)
        return bases.expand(basis, residual.vectors[:, :rank]), known + (1 - known) * f_r

    def sizes(self, uploads: Tree, info: RoundInfo) -> Tree:
        """The sum of each Gram matrix' |eigenvalues|, which is its energy, and the L2 norm of all else: (clients,)."""
        norms = {name: leaf.double().reshape(len(leaf), -1).norm(dim=1) for name, leaf in uploads.items()}
        grams = {name: leaf for name, leaf in uploads.items() if name.startswith("sketch/") and leaf.dim() == 2}
        return norms | {name: torch.stack([_energy(own) for own in leaf]) for name, leaf in grams.items()}

    def poisoned(self, upload: Tree, key: int) -> Tree:
        """Sketches of inputs that have the same energy in every direction, which no basis covers."""
        return {name: _poisoned(name, leaf, rng.key(key, name)) for name, leaf in upload.items()}

    def products(self, dtype: torch.dtype, task: int) -> torch.dtype:
        """Precision of products of inputs in `dtype`: float32 where its errors do not affect the rank rule.

        `python benchmarks/gpse.py --parts precision` measures the errors.
        """
        coarse = dtype == torch.float32 and self._threshold(task) <= 1 - ROUNDED
        return torch.float32 if coarse else torch.float64

    def _empty_sum(self, layer: Layer, basis: Tensor, client: Client, info: RoundInfo) -> Gram | Direct:
        """Empty running sum for the layer's inputs, of the kind and size that the options select."""
        mult, d = self.s_mult if isinstance(layer.module, nn.Linear) else self.s_mult_conv, basis.shape[0]
        columns = self.columns or max(1, round(mult * d))
        gram = self.sketch == "gram" or self.sketch == "auto" and (d + 1) / 2 <= columns
        by_sample = self.draw == "sample"
        key = rng.long_key(info.model.seed, "sketch", info.key, layer.name, *(() if by_sample else (client.id,)))
        if gram or not by_sample and self.distribution == "normal":
            return Gram(basis, None if gram else columns, key, self.products(basis.dtype, info.task))
        return Direct(basis, columns, key, by_sample=by_sample, distribution=self.distribution)

    def _threshold(self, task: int) -> float:
        return min(1.0, self.threshold + task * self.threshold_step)


def _energy(gram: Tensor) -> Tensor:
    """Sum () of |eigenvalues| of a packed Gram matrix, in float64."""
    return torch.linalg.eigvalsh(unpack(gram.double())).abs().sum()


def _poisoned(name: str, leaf: Tensor, key: int) -> Tensor:
    """A leaf of a hostile client's upload: as large as its own, the same in every direction, and not covered at all."""
    if name.startswith("energy/"):
        return leaf[:1].expand_as(leaf).clone()
    if not name.startswith("sketch/"):
        return leaf
    if leaf.dim() == 1:
        identity = pack(torch.eye(packed_size(leaf), dtype=leaf.dtype, device=leaf.device))
        return identity * (_energy(leaf) / packed_size(leaf)).to(leaf)
    drawn = torch.randn(leaf.shape, generator=rng.generator(key)).to(leaf)
    return drawn * (leaf.norm() / drawn.norm())


def _ratio(energies: Tensor, samples: int) -> Tensor:
    """n_i and n_i |X*| / |X| (2,) of a client's energies: their sums over clients give the mean ratio of norms."""
    ratio = (energies[1] / energies[0].clamp(min=1e-300)).sqrt()
    return torch.stack([torch.ones_like(ratio), ratio]) * samples


def _remaining(name: str, basis: Tensor, estimate: float, sums: Tree, info: RoundInfo) -> float:
    """Share of a layer's input energy outside of the basis, or the mean ratio |X*| / |X| if clients send ratios.

    estimate: the share by the sketch, for clients that send no energies.
    """
    energies = sums.get(f"energy/{name}")
    if energies is None:
        return estimate
    if info.privacy and not basis.shape[1]:  # noise, missing clients and inputs of zero would look like coverage
        return 1.0
    if info.privacy:  # the energies of a client's inputs have mean 1
        whole = info.expected * private.share(info.privacy, len(sums))
        return min(1.0, max(0.0, float(energies) / whole))
    full, residual = energies.tolist()
    return residual / full if full > 0 else 0.0
