"""Hostile clients, simulated: what they send in place of their uploads, to measure what it does to a run.

A hostile client computes its upload as the others do, and its state stays honest. When the sum of the round closes, the
uploads of all its hostile clients are at one place, and are replaced there, whatever engine computed them:

    sign_flip   -s u_i
    scale       noise from N(0, (s rms)^2), rms being the root mean square of each leaf of u_i
    alie        mean - z std                    (Baruch et al., NeurIPS 2019, Algorithm 3)
    ipm         -epsilon mean                   (Xie et al., UAI 2020)
    sketch      s times the leaves that `Strategy.poisoned` puts in place of uploads of `work`

u_i: the strategy's update. mean, std: over the hostile clients of the round, who know no other updates; of one client
std is 0, so that alie leaves its update as it is. Uploads of regularizers, and counters, stay as they are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfl.aggregation.plain import UploadSum
from cfl.config.schema import RunConfig
from cfl.contract import Gathers, RoundInfo, Strategy, TreesByOwner
from cfl.contract.combining import STRATEGY, WEIGHTS, WORK
from cfl.core import Tree, UpdateError, rng, tree

STRENGTHS = {"sign_flip": 1.0, "scale": 10.0, "ipm": 0.5, "sketch": 100.0}
"""Default of attack.strength; that of alie depends on the cohort."""


def hostile(config: RunConfig) -> frozenset[int]:
    """Ids of the hostile clients: drawn by the run's seed, without regard to who holds data."""
    if config.attack.name == "none":
        return frozenset()
    source = rng.numpy_generator(rng.key(config.seed, "attack"))
    return frozenset(source.choice(config.partition.clients, config.attack.clients, replace=False).tolist())


@dataclass(frozen=True)
class Attack:
    """The hostile clients of a run. plain: makes the sum of a round without them; strategy: of the run."""

    config: RunConfig
    strategy: Strategy
    plain: Callable[[RoundInfo, Mapping[str, Gathers]], UploadSum]

    def sum(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> UploadSum:
        """Return an empty sum for a round; hostile clients take no part in measurements."""
        uploads = self.config.attack.name not in ("none", "label_flip")
        return AttackedSum(self, info, gathers) if uploads and info.phase.protected else self.plain(info, gathers)


class AttackedSum(UploadSum):
    """Sum of uploads that replaces those of hostile clients when it closes."""

    _exported: ClassVar = [*UploadSum._exported, "_kept"]

    def __init__(self, attack: Attack, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        super().__init__(info, gathers)
        self._attack, self._options, self._ids = attack, attack.config.attack, hostile(attack.config)
        self._kept: dict[int, TreesByOwner] = {}

    def add(self, client: int, uploads: TreesByOwner, weight: float) -> bool:
        if client not in self._ids or not all(map(tree.all_finite, uploads.values())):
            return super().add(client, uploads, weight)
        self._kept[client] = {**uploads, WEIGHTS: {"": torch.tensor(weight, dtype=torch.float64)}}
        return True

    def merge(self, part: Mapping[str, Any]) -> None:
        super().merge(part)
        for client, uploads in part["_kept"].items():
            self._kept[client] = {owner: tree.clone(leaves) for owner, leaves in uploads.items()}

    def close(self) -> TreesByOwner:
        kept = {client: self._kept[client] for client in sorted(self._kept)}
        updates = {client: tree.floats(own[STRATEGY]) for client, own in kept.items() if STRATEGY in own}
        sent = self._updates(updates) if updates else {}
        for client, own in kept.items():
            uploads = {owner: leaves for owner, leaves in own.items() if owner != WEIGHTS}
            if client in sent:
                uploads[STRATEGY] = {**uploads[STRATEGY], **sent[client]}
            if self._options.name == "sketch" and WORK in uploads:
                poisoned = self._attack.strategy.poisoned(uploads[WORK], rng.key(self.info.key, "attack", client))
                changed = {name: leaf for name, leaf in poisoned.items() if leaf is not uploads[WORK][name]}
                uploads[WORK] = {**uploads[WORK], **tree.scale(changed, self._strength)}
            if not super().add(client, uploads, float(own[WEIGHTS][""])):
                raise UpdateError(f"the attack's upload is not finite ({self.info.place}); lower attack.strength")
        self._kept = {}
        return super().close()

    @property
    def _strength(self) -> float:
        return self._options.strength or STRENGTHS[self._options.name]

    def _updates(self, updates: dict[int, Tree]) -> dict[int, Tree]:
        """What the hostile clients send in place of their updates; floating-point leaves only."""
        name = self._options.name
        if name == "sign_flip":
            return {client: tree.scale(own, -self._strength) for client, own in updates.items()}
        if name == "scale":
            return {client: self._noise(own, client) for client, own in updates.items()}
        if name in ("alie", "ipm"):
            stacked = tree.stack(list(updates.values()))
            mean = tree.map(lambda leaf: leaf.mean(dim=0), stacked)
            if name == "ipm":
                return dict.fromkeys(updates, tree.scale(mean, -self._strength))
            std = tree.map(lambda leaf: leaf.std(dim=0, unbiased=False), stacked)
            z = self._options.strength or usual_z(len(self.info.uploading), len(updates))
            return dict.fromkeys(updates, tree.sub(mean, tree.scale(std, z)))
        return {}

    def _noise(self, update: Tree, client: int) -> Tree:
        source = rng.generator(rng.key(self.info.key, "attack", client))
        factors = tree.map(lambda leaf: self._strength * leaf.square().mean().sqrt(), update)
        drawn = tree.map(lambda leaf: torch.randn(leaf.shape, generator=source).to(leaf), update)
        return tree.map(torch.mul, drawn, factors)


def usual_z(clients: int, hostile: int) -> float:
    """The factor z of alie by its paper: a normal draw lies below z with probability (n - m - s) / (n - m).

    s = floor(n / 2 + 1) - m are the honest clients that a majority needs, of n clients with m hostile ones. At least 0.
    """
    honest = clients - hostile
    needed = math.floor(clients / 2 + 1) - hostile
    if honest <= 0 or needed <= 0:
        return 3.0  # the hostile clients are a majority; the paper's z is then infinite
    return max(0.0, torch.special.ndtri(torch.tensor((honest - needed) / honest, dtype=torch.float64)).item())
