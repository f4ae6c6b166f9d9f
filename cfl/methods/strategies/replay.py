"""Memory of replay methods: each client stores some of its own samples of finished tasks and trains on them again.

The memory is a list of places in the client's own data (`cfl.MEMORY`). The engine draws at most one batch of it for
each step. A replayed sample goes through the head of its own task, so the server broadcasts earlier heads, too.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import MEMORY, Batch, Client, Ctx, Phase, RoundInfo, Strategy, TreesByOwner, with_consolidation
from cfl.contract.samples import joined
from cfl.core import Tree, option, rng
from cfl.methods.balanced import balanced
from cfl.models import Model


@dataclass(frozen=True)
class Replay(Strategy):
    """Stored samples of earlier tasks join every batch."""

    sends: ClassVar[str] = Strategy.sends
    task_incremental: ClassVar[str] = (
        "stored samples go through the heads of their tasks; these stay, or train with train_old_heads"
    )
    class_incremental: ClassVar[str] = "stored samples join every batch, and the whole head trains"

    memory: int = option(1, "samples that a client stores", source="FOT, F.2: 1 a task", at_least=0)
    budget: str = option("per_task", "`memory` per task, or in total", source="FOT, F.2", choices=("per_task", "total"))
    select: str = option(
        "balanced", "store equally many of each task and class, or a uniform sample", choices=("balanced", "reservoir")
    )
    train_old_heads: bool = option(False, "let replayed samples (and weight decay) train the heads of their tasks")

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset() if self.train_old_heads else super().frozen(task, model)

    def notes(self, model: Model) -> list[str]:
        text = "replayed samples enter the running statistics of the current task; see model.norm_stats"
        return [text] if model.buffers_per_task else []

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        memory = ctx.memory
        if memory.task is None or not len(memory.y):  # decided by the shape, not by a value
            return batch
        x, y, mask, ids = (joined([one, other]) for one, other in zip(batch[:4], memory[:4], strict=True))
        return Batch(x, y, mask, ids, torch.cat([torch.full_like(batch.y, ctx.task), memory.task]))

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Choose the samples to keep, from this task and from the memory. Upload nothing."""
        rows = torch.arange(len(client), device=client.device)
        new = torch.stack([torch.full_like(rows, info.task), rows], dim=1)
        old = state.get(MEMORY, new[:0])
        order = torch.randperm(len(new), generator=rng.generator(rng.key(info.key, "store", client.id))).to(new.device)
        if self.budget == "per_task":
            chosen = balanced(client.targets, order) if self.select == "balanced" else order
            return {}, {MEMORY: torch.cat([old, new[chosen[: self.memory]]])}
        if self.select == "reservoir":
            return {}, self._reservoir(old, new[order], state, rng.key(info.key, "reservoir", client.id))
        return {}, {MEMORY: self._balanced(old, new, order, client, info)}

    def _balanced(self, old: Tensor, new: Tensor, order: Tensor, client: Client, info: RoundInfo) -> Tensor:
        """Places (m, 2) from the memory and from this task: as many of each task, and in it as many of each class.

        order: random order of `new`. If the memory has fewer places than tasks, a client keeps the tasks of lowest
        priority number, drawn once per run and client, so that each task is kept by about as many clients.
        """
        both, labels = torch.cat([old, new]), torch.cat([client.recall(old).y, client.targets])
        among = torch.cat([torch.arange(len(old), device=new.device), len(old) + order])
        among = balanced(labels + 2**32 * both[:, 0], among)  # the classes of each task
        priority = [rng.key(info.model.seed, "luck", client.id, task) for task in range(info.task + 1)]
        among = among[torch.tensor(priority, device=new.device)[both[among, 0]].argsort(stable=True)]
        return both[balanced(both[:, 0], among)[: self.memory]]

    def _reservoir(self, old: Tensor, new: Tensor, state: Tree, key: int) -> Tree:
        """State with a uniform subset of all samples seen (as by Vitter's algorithm R); new: in random order."""
        source, seen = rng.generator(key), int(state.get("seen", 0))
        from_old = int((torch.randperm(seen + len(new), generator=source)[: self.memory] < seen).sum())
        stay = torch.randperm(len(old), generator=source)[:from_old].to(old.device)
        kept = torch.cat([old[stay], new[: self.memory - from_old]])
        return {MEMORY: kept, "seen": torch.tensor(seen + len(new))}
