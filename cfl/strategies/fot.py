"""FOT: Federated Orthogonal Training (Bakman et al., ICLR 2024).

FedProject (eq. 5-7), every round: the aggregated step loses its component in the span of earlier tasks' layer inputs,
    Delta W <- Delta W - (Delta W O) O^T            (the paper prints the left side for transposed weights, eq. 6)
GPSE (eq. 8-12), once after each task but the last: clients send Gaussian sketches A_i = (I - O O^T) X_i G_i of their
layer inputs and two energies; from the sum the server takes the leading directions that the rank rule asks for.

Deviations, each an option (see docs/fot.md): the rank rule counts energy (eq. 12 as printed protects nothing in the
first task; "norm_ratio" is the authors' code), biases are projected along with the weights as a constant input, norm
affine parameters freeze after the first task. The model that clients sketch is the global one, in a round of its own.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cfl import plugins, rng
from cfl.errors import ConfigError
from cfl.models.handle import Layer, Model
from cfl.options import option
from cfl.strategies.base import Strategy
from cfl.subspace import basis as bases
from cfl.subspace import private
from cfl.subspace.layer_inputs import Patches, slides, some_patches, stream
from cfl.subspace.projection import covered, input_vectors, project_step, step_energies, width
from cfl.subspace.sketch import Direct, Energies, Gram, unpack
from cfl.tree import Tree
from cfl.types import Batch, Client, Parts, Phase, RoundInfo, Server

ROUNDED = 1e-3  # share of the energy beside which what float32 rounds off is nothing
_HALF = ("fot", "freeze", "finetune")


@plugins.strategies.register("fot")
@dataclass(frozen=True)
class FOT(Strategy):
    """Federated Orthogonal Training: keep the aggregate off earlier tasks' layer inputs (Bakman et al., 2024)."""

    source: ClassVar[str] = "Bakman et al., ICLR 2024, Algorithm 1"
    sends: ClassVar[str] = (
        "its update w_global - w_local, every round; after each task but the last, of the inputs of each layer a "
        "sketch and two energies; with strategy.project_at=server no energies, with strategy.freeze_first=true nothing "
        "of the first layer's inputs, which are the data"
    )
    per_sample: ClassVar[bool] = True

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
    participants: str = option("all", "clients in GPSE", source="code: sampled", choices=("all", "sampled"))
    model: str = option("global", "model that is sketched", source="code: local", choices=("global", "local"))
    dropout: bool = option(False, "draw dropout in GPSE, but for that right before a layer", source="code: in the MLP")
    augmented: bool = option(False, "random changes of training images in GPSE too", source="code: Mini-ImageNet")
    dense_stem: bool = option(
        False, "first layer's patches at stride 1, whatever its own", source="code: Mini-ImageNet"
    )
    after_last_task: bool = option(False, "GPSE after the last task too", source="Algorithm 1: yes; code: no")
    bias: str = option("augment", "biases", source="code: free", choices=("augment", "free", "freeze"))
    norm_affine: str = option("freeze", "norm weights and biases", source="code: free", choices=("freeze", "free"))
    freeze_first: bool = option(False, "freeze the first layer after task 1; never sketch raw inputs", source="Table 6")
    first_half: str = option("fot", "what is done to the first half of the layers", source="Table 14", choices=_HALF)
    second_half: str = option("fot", "what is done to the second half of the layers", source="Table 14", choices=_HALF)
    measure_coverage: bool = option(True, "measure what a new basis really covers (not counted in bytes)")

    def __post_init__(self) -> None:
        if self.project_at == "server" and self.criterion != "energy":
            raise ConfigError(
                f"strategy.criterion={self.criterion} needs |X*| of each client: use strategy.project_at=client"
            )
        if self.model == "local" and self.participants == "all":
            raise ConfigError("strategy.model=local sketches the last cohort: use strategy.participants=sampled")
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

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        if task == tasks - 1 and not self.after_last_task:
            return [Phase("train", rounds)]
        if self.model == "local":  # the authors' code: GPSE rides on the last training round
            phases = [Phase("train", rounds - 1), Phase("train+gpse", work=True)]
        else:
            gpse = Phase(
                "gpse", cohort="available" if self.participants == "all" else "sampled", train=False, work=True
            )
            phases = [Phase("train", rounds), gpse]
        coverage = Phase("coverage", cohort="available", train=False, work=True, diagnostic=True)
        return [*phases, coverage] if self.measure_coverage else phases

    def init_server(self, params: Tree, model: Model) -> Server:
        device = next(iter(params.values())).device
        layers = self._projected(model)
        basis = {layer.name: bases.empty(self._width(layer), device) for layer in layers}
        return self.begin_task({"basis": basis}, 0, model)

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        # of each layer's steps in this task, the energy before and after the projection
        return {**server, "steps": {name: basis.new_zeros(2) for name, basis in server["basis"].items()}}

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        if task == 0:
            return frozenset()
        layers = [layer for layer in model.layers if self._treatment(layer, model) == "freeze"]
        names = {name for layer in layers for name in (layer.weight, layer.bias) if name}
        names |= {layer.bias for layer in self._projected(model) if layer.bias and self.bias == "freeze"}
        by_path = list({layer.path: layer for layer in model.layers}.values())  # once, however many groups it has
        for name, after in model.norms.items():  # a norm belongs to the layer before it
            near = {self._treatment(layer, model) for layer in by_path[max(after - 1, 0) :][:1]}
            if "freeze" in near or self.norm_affine == "freeze" and "finetune" not in near:
                names.add(name)
        return frozenset(names)

    def broadcast(self, server: Server, info: RoundInfo) -> Parts:
        down = super().broadcast(server, info)
        if info.phase.work and (self.project_at == "client" or info.phase.diagnostic):
            dtype = next(iter(down["params"].values())).dtype
            down["basis"] = {name: basis.to(dtype) for name, basis in server["basis"].items()}
        return down

    def work(self, params: Tree, client: Client, shared: Parts, state: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        """GPSE at a client: for each layer the sketch A_i of X*_i (eq. 8-9) and its energies (eq. 10-11)."""
        diagnostic, at_client = info.phase.diagnostic, self.project_at == "client"
        sums: dict[str, Energies] = {}
        layers = self._projected(info.model)
        if self.dense_stem and not diagnostic:
            layers = [layer.dense() if layer.path == info.model.layers[0].path else layer for layer in layers]
        for layer in layers:
            known = shared.get("basis", {}).get(layer.name, params[layer.weight].new_zeros(self._width(layer), 0))
            if diagnostic:
                sums[layer.name] = Energies(known)
            elif known.shape[1] < known.shape[0]:  # a full basis has nothing to learn
                sums[layer.name] = self._accumulator(layer, known, client, info)

        calls: Counter[str] = Counter()
        images: dict[tuple[str, torch.Size], Patches] = {}

        def see(layer: Layer, x: Tensor, batch: Batch) -> None:
            calls[layer.name] += 1
            into, plain = sums[layer.name], not (self.max_patches or info.privacy or self._width(layer) > layer.size)
            if plain and isinstance(into, Gram) and slides(layer):
                kind = (layer.name, x.shape[2:])
                if kind not in images:
                    images[kind] = Patches(layer, x.shape[2:], into.products)
                images[kind].add(x)
                return
            inputs = some_patches(
                layer.inputs(x), batch.ids, self.max_patches, rng.key(info.key, "patches", layer.name)
            )
            vectors = input_vectors(inputs, layer, self._augment)
            into.add(private.unit_energy(vectors) if info.privacy else vectors, batch.ids)

        watched = [layer for layer in layers if layer.name in sums]
        drawn = self.dropout and not diagnostic
        changes = rng.key(info.key, "augment", client.id) if self.augmented and not diagnostic else None
        batches = client.batches(64, key=changes)
        with rng.fork(rng.key(info.key, "dropout", client.id), client.device):
            stream(info.model, params, info.task, batches, watched, see, patches=False, dropout=drawn)
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
        up: Tree = {}
        for layer in watched:
            energies, released = sums[layer.name].energies, sums[layer.name].release()
            if info.privacy:
                parts = len(watched) * (2 if at_client else 1)
                released, energies = private.scaled(sums[layer.name], info.privacy, len(client), parts)
            if released is not None:
                up[f"sketch/{layer.name}"] = released.to(params[layer.weight].dtype)
            if diagnostic or at_client and self.criterion == "energy":
                up[f"energy/{layer.name}"] = energies  # |X|^2, |X*|^2
            elif at_client:  # n_i and n_i |X*| / |X|: the server gets the mean ratio of norms, weighted by n_i
                ratio = (energies[1] / energies[0].clamp(min=1e-300)).sqrt()
                up[f"energy/{layer.name}"] = torch.stack([torch.ones_like(ratio), ratio]) * len(client)
        return up, state

    def absorb(self, server: Server, mean: Parts, info: RoundInfo, lr: float) -> Server:
        layers = self._projected(info.model)
        new = dict(super().absorb(server, mean, info, lr))
        if info.phase.train:  # FedProject: the whole step of the server, whatever rule made it (eq. 5-7)
            old, whole = server["params"], new["params"]
            new["params"] = project_step(old, whole, server["basis"], layers, self._augment)
            before, after = (step_energies(old, to, layers, self._augment) for to in (whole, new["params"]))
            new["steps"] = {
                name: sums + torch.stack([before[name], after[name]]) for name, sums in server["steps"].items()
            }
        if info.phase.diagnostic:
            pairs = {name.removeprefix("energy/"): pair for name, pair in mean["work"].items()}
            new["coverage"] = {name: 1 - pair[1] / pair[0].clamp(min=1e-300) for name, pair in pairs.items()}
        elif info.phase.work:
            new["basis"] = {layer.name: self._extended(layer, server, mean["work"], info) for layer in layers}
            if info.privacy and not any(
                new["basis"][name].shape[1] > old.shape[1] for name, old in server["basis"].items()
            ):
                warnings.warn(f"the noise hides all directions ({info.place}): nothing more is protected", stacklevel=2)
        return new

    def notes(self, model: Model) -> list[str]:
        return covered(model, self._projected(model), self.frozen(1, model), self._augment)

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        use = {name: basis.shape[1] / basis.shape[0] for name, basis in server["basis"].items()}
        coverage = {name: float(share) for name, share in server.get("coverage", {}).items()}
        removed = {name: float(1 - after / before) for name, (before, after) in server["steps"].items() if before > 0}
        return {"subspace_use": use, "coverage": coverage, "removed": removed}

    def _extended(self, layer: Layer, server: Server, sums: Tree, info: RoundInfo) -> Tensor:
        """GPSE at the server: the leading directions of the summed sketch join the basis (eq. 11-12)."""
        basis, a = server["basis"][layer.name], sums.get(f"sketch/{layer.name}")
        if a is None:
            return basis
        gram = self.sketch == "gram"
        a = unpack(a, basis.shape[0]) if gram else a
        noise = info.privacy.noise if info.privacy else 0.0
        vectors, squared, remaining = bases.residual_spectrum(a, basis, gram=gram, noise=noise)
        if info.privacy and f"energy/{layer.name}" in sums:
            whole = info.expected * private.share(info.privacy, len(sums))  # of each client's samples the energy is 1
            remaining = min(1.0, max(0.0, float(sums[f"energy/{layer.name}"]) / whole))
        elif f"energy/{layer.name}" in sums:
            full, residual = sums[f"energy/{layer.name}"].tolist()
            remaining = residual / full if full > 0 else 0.0
        covered = 1 - remaining if self.criterion == "energy" else remaining
        rank = bases.choose_rank(squared, covered, self._threshold(info.task), self.criterion, self.min_rank)
        return bases.expand(basis, vectors[:, :rank])

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

    @property
    def _augment(self) -> bool:
        return self.bias == "augment"

    def _width(self, layer: Layer) -> int:
        return width(layer, self._augment)

    def _treatment(self, layer: Layer, model: Model) -> str:
        paths = list(dict.fromkeys(each.path for each in model.layers))
        position = paths.index(layer.path)
        if self.freeze_first and position == 0:
            return "freeze"
        return self.first_half if position < math.ceil(len(paths) / 2) else self.second_half

    def _projected(self, model: Model) -> list[Layer]:
        return [layer for layer in model.layers if self._treatment(layer, model) == "fot"]
