"""The memory of replay methods: each client stores some of its own samples of finished tasks, and trains on them again.

The memory is a list of places in the client's own data (`cfl.MEMORY`); the engine draws at most a batch of it for
each step. A replayed sample goes through the head of its own task; so the heads of earlier tasks travel, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.data import MEMORY, Batch, Client
from cfl.contract.rounds import Phase, RoundInfo, TreesByOwner
from cfl.contract.strategy import Strategy, with_consolidation
from cfl.core import rng
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.models.handle import Model


@dataclass(frozen=True)
class Replay(Strategy):
    """Stored samples of earlier tasks join every batch."""

    memory: int = option(1, "samples that a client stores", source="FOT, F.2: 1 a task", at_least=0)
    budget: str = option(
        "per_task",
        "whether `memory` is for each task or in total",
        source="FOT, F.2",
        choices=("per_task", "total"),
    )
    select: str = option(
        "balanced", "what is stored: as many of each task and class, or every sample with the same chance",
        choices=("balanced", "reservoir"),
    )  # fmt: skip
    train_old_heads: bool = option(False, "let replayed samples (and weight decay) train the heads of their tasks")

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset() if self.train_old_heads else super().frozen(task, model)

    def notes(self, model: Model) -> list[str]:
        text = "replayed samples enter the running statistics of the task at hand; see model.norm_stats"
        return [text] if model.buffers_per_task else []

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        memory = ctx.memory
        if memory.task is None or not len(memory.y):  # the shape decides, not a value
            return batch
        x, y, mask, ids = (torch.cat([one, other]) for one, other in zip(batch[:4], memory[:4], strict=True))
        return Batch(x, y, mask, ids, torch.cat([torch.full_like(batch.y, ctx.task), memory.task]))

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Choose what to keep of this task and of the memory so far. Nothing goes up."""
        targets, new = client.targets, torch.arange(len(client), device=client.device)
        new = torch.stack([torch.full_like(new, info.task), new], dim=1)
        old = state.get(MEMORY, new[:0])
        order = torch.randperm(len(new), generator=rng.generator(rng.key(info.key, "store", client.id))).to(new.device)
        if self.budget == "per_task":
            chosen = balanced(targets, order) if self.select == "balanced" else order
            return {}, {MEMORY: torch.cat([old, new[chosen[: self.memory]]])}
        if self.select == "reservoir":
            return {}, self._reservoir(old, new[order], state, rng.key(info.key, "reservoir", client.id))
        both, labels = torch.cat([old, new]), torch.cat([client.recall(old).y, targets])
        among = torch.cat([torch.arange(len(old), device=new.device), len(old) + order])
        among = balanced(labels + 2**32 * both[:, 0], among)  # classes in each task
        # A task's luck is for the whole run: where places do not suffice, each task is held by as many clients.
        luck = [rng.key(info.model.seed, "luck", client.id, task) for task in range(info.task + 1)]
        among = among[torch.tensor(luck, device=new.device)[both[among, 0]].argsort(stable=True)]
        turns = balanced(both[:, 0], among)
        return {}, {MEMORY: both[turns[: self.memory]]}

    def _reservoir(self, old: Tensor, new: Tensor, state: Tree, key: int) -> Tree:
        """A uniform subset of all samples seen, as Vitter's algorithm R keeps it. new: in random order."""
        source, seen = rng.generator(key), int(state.get("seen", 0))
        from_old = int((torch.randperm(seen + len(new), generator=source)[: self.memory] < seen).sum())
        stay = torch.randperm(len(old), generator=source)[:from_old].to(old.device)
        kept = torch.cat([old[stay], new[: self.memory - from_old]])
        return {MEMORY: kept, "seen": torch.tensor(seen + len(new))}


def balanced(groups: Tensor, order: Tensor) -> Tensor:
    """`order` (n,), rearranged so that every group in turn gives its next member: each prefix is balanced.

    groups: (n,) int64 group of each member; order: a permutation of the members, kept within each group.
    """
    mine, turn = groups[order], torch.empty_like(order)
    together = mine.argsort(stable=True)
    sizes = mine[together].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turn[together] = torch.arange(len(order), device=order.device) - starts  # earlier members of the group
    return order[turn.argsort(stable=True)]
