"""FOT: Federated Orthogonal Training (Bakman et al., ICLR 2024).

FedProject (eq. 5-7), every round: remove from the aggregated step its component in the span of earlier layer inputs,
    Delta W <- Delta W - (Delta W O) O^T            (eq. 6 prints it for transposed weights, with O O^T on the left)
GPSE (eq. 8-12), once after each task but the last: for each layer clients send a sketch A_i = (I - O O^T) X_i G_i of
their inputs X_i, or the Gram matrix of (I - O O^T) X_i if it has fewer numbers, and two energies. From the sums the
server takes the leading directions that the rank rule asks for.
`cfl.methods.subspace.gpse` implements GPSE; `cfl.methods.subspace.layer_policy` selects projected and frozen layers.

Deviations, each with an option (see docs/fot.md): the rank rule uses energies (eq. 12 as printed protects nothing in
the first task; "norm_ratio" is the authors' code). Biases are projected with the weights, as weights of a constant
input. Norm weights and biases freeze after the first task. Clients sketch the global model, in a separate round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cfl.contract import Client, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import ConfigError, Tree, option, plugins, tree, warn
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import removed_energy
from cfl.methods.subspace.gpse import GPSE
from cfl.methods.subspace.layer_policy import LayerPolicy
from cfl.methods.subspace.projection import project_step
from cfl.methods.subspace.task_inference import PHASE, OptionalTaskInference
from cfl.models import Model


@plugins.strategies.register("fot")
@dataclass(frozen=True)
class FOT(OptionalTaskInference, LayerPolicy, GPSE, Strategy):
    """Federated Orthogonal Training: project aggregates off earlier tasks' layer inputs (Bakman et al., 2024)."""

    source: ClassVar[str] = "Bakman et al., ICLR 2024, Algorithm 1"
    sends: ClassVar[str] = (
        "its update w_global - w_local, every round; after each task but the last, a sketch or the Gram matrix of each "
        "layer's inputs (strategy.sketch), and two energies; with strategy.project_at=server no energies; with "
        "strategy.freeze_first=true nothing of the first layer's inputs, which are the data; with "
        "strategy.infer_tasks=true and scenario=class, after each task the sum of second moments of the classifier's "
        "inputs, and the number of samples"
    )
    per_sample: ClassVar[bool] = True

    participants: str = option("all", "clients in GPSE", source="code: sampled", choices=("all", "sampled"))
    model: str = option("global", "model that is sketched", source="code: local", choices=("global", "local"))
    after_last_task: bool = option(False, "GPSE after the last task, too", source="Algorithm 1: yes; code: no")
    measure_coverage: bool = option(True, "measure the coverage of a new basis (not counted in bytes)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model == "local" and self.participants == "all":
            raise ConfigError("strategy.model=local sketches the last cohort: use strategy.participants=sampled")

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        joint = run["dp"]["level"] == "client" and run["dp"]["protect"] == "all" and self.model == "local"
        if joint and self.project_at == "client":
            return (
                "dp.level=client clips energies along with the update, so they would seem covered: set "
                "strategy.project_at=server, or strategy.model=global"
            )
        return OptionalTaskInference.refuses(self, run) or GPSE.refuses(self, run)

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        if task == tasks - 1 and not self.after_last_task:
            return [Phase("train", rounds), *self.feature_phases()]
        if self.model == "local":  # the authors' code: GPSE in the last training round
            phases = [Phase("train", rounds - 1), Phase("train+gpse", work=True)]
        else:
            every = self.participants == "all"
            gpse = Phase("gpse", cohort="available" if every else "sampled", train=False, work=True)
            phases = [Phase("train", rounds), gpse]
        if self.measure_coverage:
            phases.append(Phase("coverage", cohort="available", train=False, work=True, diagnostic=True))
        return [*phases, *self.feature_phases()]

    def notes(self, model: Model) -> list[str]:
        return LayerPolicy.notes(self, model) + self.inference_notes(model)

    def init_server(self, params: Tree, model: Model) -> Server:
        device = next(iter(params.values())).device
        basis = {layer.name: bases.empty(self.width(layer), device) for layer in self.projected(model)}
        empty = {**super().init_server(params, model), "basis": basis, "removed": {}}
        return self.begin_task(empty, 0, model)

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        return {**server, **removed_energy.for_new_task(server)}

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        sketched = info.phase.work and info.phase.name != PHASE
        if sketched and (self.project_at == "client" or info.phase.diagnostic):
            dtype = next(iter(down["params"].values())).dtype
            down["basis"] = {name: basis.to(dtype) for name, basis in server["basis"].items()}
        return down

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """GPSE at a client, the measurement of coverage, or the sums over features."""
        if info.phase.name == PHASE:
            return self.feature_sums(params, client, info), state
        layers = self.projected(info.model)
        nothing = {layer.name: params[layer.weight].new_zeros(self.width(layer), 0) for layer in layers}
        half = self.energies if info.phase.diagnostic else self.sketches
        return half(params, client, shared.get("basis", nothing), layers, info), state

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        new = dict(super().absorb(server, mean, info, lr))
        if info.phase.train:
            new |= self._fed_project(server, new["params"], info.model)
        if info.phase.name == PHASE:
            new |= self.with_core(server, mean["work"], info)
        elif info.phase.diagnostic:
            pairs = tree.part(mean["work"], "energy").items()
            new["coverage"] = {name: 1 - pair[1] / pair[0].clamp(min=1e-300) for name, pair in pairs}
        elif info.phase.work:
            new |= self._extend_bases(server["basis"], mean["work"], info)
        return new

    def _fed_project(self, server: Server, whole: Tree, model: Model) -> Server:
        """FedProject: project the server's step to the parameters `whole`, from any aggregation rule (eq. 5-7)."""
        old, layers = server["params"], self.projected(model)
        params = project_step(old, whole, server["basis"], layers, self.with_bias)
        steps = removed_energy.added(server["steps"], old, whole, params, layers, self.with_bias)
        return {"params": params, "steps": steps}

    def _extend_bases(self, known: Tree, sums: Tree, info: RoundInfo) -> Server:
        """GPSE at the server: extend the bases by leading directions of the summed sketches (eq. 10-12)."""
        found = {name: self.extended(name, basis, sums, info) for name, basis in known.items()}
        grown = any(found[name][0].shape[1] > basis.shape[1] for name, basis in known.items())
        if info.privacy and not grown:
            warn(f"the noise hides all directions ({info.place}): nothing more is protected")
        return {
            "basis": {name: basis for name, (basis, _) in found.items()},
            "coverage_estimate": {name: share for name, (_, share) in found.items()},
        }

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        use = {name: basis.shape[1] / basis.shape[0] for name, basis in server["basis"].items()}
        kinds = ("coverage", "coverage_estimate")
        covered = {kind: {name: float(share) for name, share in server.get(kind, {}).items()} for kind in kinds}
        removed = removed_energy.shares(server["steps"])
        removed_energy.warn_of_slow_layers(removed, server.get("removed", {}), self.threshold)
        return {"subspace_use": use, **covered, "removed": removed}
