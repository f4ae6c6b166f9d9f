"""Inference of a test sample's task from the features of each task (FedProTIP, Cha et al., arXiv 2509.21606).

Features f (d,) are the inputs of the classifier, the last Linear layer. After each task, the last one included, every
client with data of the task sends the sum of f f^T over its samples and their number. The server adds these sums. It
keeps the mean M_k (d, d) of each task and takes core directions from it: orthonormal columns B_k (d, c).

score=relevance, FedProTIP's rule. B_k: the leading directions of M_k outside of all earlier ones.
    score of a sample    s_k = |B_k^T f|,               k > 0: the code leaves out the columns of the first task
    reference of task j  r_jk = sqrt(tr(B_k^T M_j B_k)), the root mean square of s_k over the samples of task j
    inferred task        argmax_j cos(s, r_j); with a single score, that is after two tasks, argmin_j |s - r_j|
score=share, the subspace method of Watanabe et al. (1967). B_k: the leading directions of M_k.
    inferred task        argmax_k |B_k^T f|, the task whose directions hold most of the sample's energy

Features of old tasks have to stay as they were when M_k was measured, so the layers before the classifier need
protection. Where they do, "share" is right more often for single samples than "relevance".

Differences from the authors' code: its clients store the features of their old tasks and vote, and a batch of 64 images
of one task is scored as a whole. Here clients store nothing, since M_k gives the same references, and each sample is
scored alone. A task takes at most d / T directions, for T tasks, so that some are left for the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Client, Phase, RoundInfo, Server
from cfl.core import ConfigError, Tree, option
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.input_sums import drawn_batches
from cfl.methods.subspace.sketch import pack, unpack
from cfl.models import Model

PHASE = "features"
_SCORES = ("relevance", "share")


@dataclass(frozen=True)
class TaskInference:
    """Options of task inference, its client half (`feature_sums`), and its server half (`with_core`, `infer_task`).

    Tasks are inferred with scenario=class only: under the other scenarios no prediction depends on the result. The
    server's tree "core" has the leaves "moments/k", which is M_k, and "columns/k", which is B_k, of each task k.
    """

    core_columns: int = option(20, "core directions of the features of a task", source="code: about 20", at_least=1)
    score: str = option(
        "relevance", "FedProTIP's relevance vectors, or the share of energy in a task's own directions",
        source="FedProTIP", choices=_SCORES,
    )  # fmt: skip

    @property
    def infers(self) -> bool:
        """Whether the method infers tasks."""
        return True

    def init_server(self, params: Tree, model: Model) -> Server:
        """No trees before the first task. Raises ConfigError for a model with `no_features` whose head grows."""
        if self.infers and model.growing and model.no_features:
            raise ConfigError(f"tasks are inferred from the inputs of the last linear layer; {model.no_features}")
        return {}

    @property
    def not_extendable(self) -> str:
        """Reason why a finished run cannot go on with later tasks; empty if it can."""
        return "task inference divides the directions of the features among its tasks" if self.infers else ""

    def feature_phases(self) -> list[Phase]:
        """The round after a task's training in which clients send sums over their features."""
        return [Phase(PHASE, cohort="available", train=False, work=True)] if self.infers else []

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        """Reason why tasks cannot be inferred with these options, or None."""
        if not self.infers or run["dp"]["level"] == "none":
            return None
        return "the second moments of features, from which tasks are inferred, have no bound that noise could be set by"

    def feature_sums(self, params: Tree, client: Client, info: RoundInfo, samples: int = 0) -> Tree:
        """Client half: the packed sum of f f^T over its samples and their number; empty unless the head grows.

        samples: how many are drawn at random; 0 for all.
        """
        if not (self.infers and info.model.growing):
            return {}
        total, count = None, 0
        with torch.no_grad():
            for batch in drawn_batches(client, info, samples):
                f = info.model.features(params, batch.x, info.task)
                found, count = bases.outer(f.T), count + len(f)
                total = found if total is None else total + found
        assert total is not None  # clients of the phase have data
        return {"features/moments": pack(total).to(f), "features/count": f.new_tensor([count])}

    def with_core(self, server: Server, sums: Tree, info: RoundInfo) -> Server:
        """Server half: the tree "core" with the mean second moments and the core directions of this task."""
        if "features/moments" not in sums:
            return {}
        moments = unpack(sums["features/moments"]) / sums["features/count"]
        known, d = server.get("core", {}), len(moments)
        before = [known[f"columns/{task}"] for task in _tasks(known)] if self.score == "relevance" else []
        earlier = torch.cat([bases.empty(d, moments.device), *before], dim=1)
        vectors, squared, *_ = bases.residual_spectrum(moments, earlier, gram=True, terms=info.expected)
        rank = min(self.core_columns, max(1, d // info.tasks), int((squared > 0).sum()))
        new = bases.expand(earlier, vectors[:, :rank])[:, earlier.shape[1] :]
        return {"core": {**known, f"moments/{info.task}": moments.double(), f"columns/{info.task}": new}}

    def infer_task(self, server: Server, x: Tensor, task: int, model: Model) -> Tensor | None:
        core = server.get("core", {})
        if f"moments/{task}" not in core:  # before the end of the task, and without inference
            return None
        features, known = model.features(server["params"], x, task).double(), _tasks(core)
        scored = known[1:] if self.score == "relevance" else known
        columns = [core[f"columns/{other}"] for other in scored]
        if not columns:
            return torch.full((len(x),), known[0], device=x.device)
        scores = torch.stack([(features @ one).norm(dim=1) for one in columns], dim=1)  # s_k
        if self.score == "relevance":
            found = _nearest(scores, references([core[f"moments/{other}"] for other in known], columns))
        else:
            found = scores.argmax(dim=1)
        return torch.tensor(known, device=x.device)[found]


@dataclass(frozen=True)
class OptionalTaskInference(TaskInference):
    """Task inference that an option switches on."""

    class_incremental: ClassVar[str] = (
        "the part of the head with the classes of a task trains in that task alone, since no basis protects it; "
        "strategy.infer_tasks=true infers the task of a test sample"
    )

    infer_tasks: bool = option(False, "with scenario=class: infer the task of a test sample", source="FedProTIP")
    core_columns: int = option(10, "core directions of the features of a task, with infer_tasks", at_least=1)
    score: str = option(
        "share", "share of energy in a task's own directions, or FedProTIP's relevance vectors",
        source="FedProTIP: relevance", choices=_SCORES,
    )  # fmt: skip

    @property
    def infers(self) -> bool:
        return self.infer_tasks

    def inference_notes(self, model: Model) -> list[str]:
        """Lines for the user: an option without effect."""
        idle = self.infer_tasks and not model.growing
        return ["strategy.infer_tasks=true has no effect without scenario=class"] if idle else []


def references(moments: list[Tensor], columns: list[Tensor]) -> Tensor:
    """Reference scores r (tasks, columns): r_jk = sqrt(tr(B_k^T M_j B_k)). moments: M_j; columns: B_k."""
    rows = [torch.stack([(one * (mean @ one)).sum().clamp(min=0) for one in columns]) for mean in moments]
    return torch.stack(rows).sqrt()


def _nearest(scores: Tensor, reference: Tensor) -> Tensor:
    """Row of `reference` (tasks, m) with the largest cosine to each row of `scores` (n, m); if m is 1, the nearest."""
    if scores.shape[1] == 1:
        return (scores - reference.T).abs().argmin(dim=1)
    unit = reference / reference.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return (scores @ unit.T).argmax(dim=1)  # the length of a sample's scores does not change the order of its cosines


def _tasks(core: Tree) -> list[int]:
    """Tasks in the server's tree "core", ascending: a task whose round was aborted is absent."""
    return sorted(int(name.removeprefix("moments/")) for name in core if name.startswith("moments/"))
