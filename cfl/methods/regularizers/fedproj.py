"""FedProj (2025): local gradients that do not conflict with a memory of the ensemble's knowledge.

Client: g is the gradient of its loss, and g_m that of KL(softmax(Z / T) || softmax(f / T)) on a batch of public inputs,
where Z are the ensemble's logits of the last round and f the client's. The optimiser gets the nearest gradient to g
with <g, g_m> >= 0 (eq. 9-13; eq. 14 prints the projection without this condition). Server: the averaged model is
distilled from the mean logits as in FedDF, with the penalty alpha |theta - theta_anchor|^2 (eq. 7 and 8).

The gradient is projected, not the step: with momentum, weight decay or Adam the step differs, and the memory's loss may
rise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, RoundInfo
from cfl.contract.losses import divergence
from cfl.core import ConfigError, Tree, option, plugins, rng
from cfl.methods.regularizers.distillation import Loss, public_batch
from cfl.methods.regularizers.feddf import FedDF
from cfl.methods.regularizers.prox_projection import without_conflict
from cfl.models import Model

_SMALLEST = 1e-3  # of |g_m|; FedProj's code has 1e-6 for its square


@plugins.local.register("fedproj")
@dataclass(frozen=True)
class FedProj(FedDF):
    """Local gradients projected against the ensemble's memory, and ensemble distillation (FedProj, 2025)."""

    source: ClassVar[str] = "FedProj (2025), Algorithm 1, eq. 5 to 13"
    per_sample: ClassVar[bool] = True

    memory: int | None = option(None, "public samples in a round's memory; none: all", source="ours", at_least=2)
    memory_batch: int = option(256, "memory samples per local step", source="official code", at_least=1)
    start: int = option(1, "index of the task's first round that projects", source="code: 10 of 100", at_least=1)
    stop: int | None = option(None, "index of the first later round without it", source="code: 90 of 100", at_least=1)
    drop: float = option(
        0.0, "probability that a client does not project in a round", source="Figure 3a", at_least=0.0, at_most=1.0
    )
    project: str = option(
        "conflict", "steps that project: those in conflict, or all", source="eq. 9-13", choices=("conflict", "always")
    )
    clamp: float | None = option(None, "bound of the projection's coefficient", source="code: 10", above=0.0)
    alpha: float = option(0.0, "weight of the squared distance from the anchor", source="Table 3b", at_least=0.0)
    anchor: str = option(
        "average", "averaged model, or global model before", source="Algorithm 1", choices=("average", "global")
    )
    kl: str = option(
        "forward", "KL(teacher || student), or reverse (eq. 7)", source="official code", choices=("forward", "reverse")
    )

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if self.stop is not None and self.stop <= self.start:
            return f"with start={self.start} and stop={self.stop} it never projects; raise stop, or use feddf"
        return super().refuses(run)

    def init_shared(self, params: Tree, model: Model) -> Tree:
        if self.memory_batch == 1 and not model.takes_one:
            raise ConfigError(
                "regularizer.fedproj.memory_batch=1, but the model fails on a batch of one sample in training; raise it"
            )
        return {}

    def provide(self, own: Tree, info: RoundInfo) -> Tree:
        """The round's memory.

        "rows": (m,) of the public data; "logits": (m, classes) of the ensemble; "projects": (population,) 1.0 for a
        client that projects, left out if all clients do.
        """
        if not own or info.trained < self.start or (self.stop is not None and info.trained >= self.stop):
            return {}
        logits = own["logits"]
        draws = rng.generator(rng.key(info.key, "memory"))
        rows = torch.randperm(len(logits), generator=draws)[: self.memory].to(logits.device)
        sent = {"rows": rows, "logits": logits[rows]}
        if self.drop:
            draws = rng.generator(rng.key(info.key, "drop"))
            sent["projects"] = (torch.rand(info.population, generator=draws) >= self.drop).to(logits)
        return sent

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        if not ctx.sent:
            return grads
        rows, targets = ctx.sent["rows"], ctx.sent["logits"]
        size = min(self.memory_batch, len(rows))
        part = (ctx.step * size + torch.arange(size, device=rows.device)) % len(rows)  # `rows` are in random order
        assert ctx.public is not None
        batch = public_batch(ctx.public, rows[part])

        def forgetting(at: Tree) -> Tensor:
            return divergence(targets[part], ctx.forward(at, batch), self.temperature).mean()

        memory_grads, always = torch.func.grad(forgetting)(params), self.project == "always"
        projected = without_conflict(grads, memory_grads, _SMALLEST, always=always, most=self.clamp)  # eq. 9-13
        if "projects" not in ctx.sent:
            return projected
        projects = ctx.sent["projects"][ctx.client] > 0
        return {name: torch.where(projects, projected[name], grad) for name, grad in grads.items()}

    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        teacher = gathered["logits"] / gathered["clients"]
        center = average if self.anchor == "average" else params

        def loss(rows: Tensor, logits: Tensor, at: Tree) -> Tensor:
            apart = [(leaf - center[name]).square().sum() for name, leaf in at.items()]
            return self.knowledge(teacher[rows], logits) + self.alpha * torch.stack(apart).sum()

        return loss, {"logits": teacher}

    def knowledge(self, teacher: Tensor, logits: Tensor) -> Tensor:
        """The distillation loss of FedDF, in the direction `kl`."""
        return super().knowledge(*((teacher, logits) if self.kl == "forward" else (logits, teacher)))
