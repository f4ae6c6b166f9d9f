"""How much of the server's steps a projection removes: a layer that loses most of their energy learns slowly.

The server keeps two trees. "steps" has the energy (2,) of each layer's steps in this task, before and after the
projection. "removed" has the largest share () of it that the projection removed in one earlier task.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cfl.contract import Server
from cfl.core import Tree, warn
from cfl.methods.subspace.projection import names
from cfl.models import Layer

HALF = 0.5  # share of the energy of a task's steps, above which `warn_of_slow_layers` warns


def for_new_task(server: Server) -> Server:
    """Return both trees at the start of a task. The server has a "basis", and after a task both trees."""
    shares = {name: _removed(pair) for name, pair in server.get("steps", {}).items()}
    before = server.get("removed", {})  # checkpoints of version 0.1 have none
    removed = {name: torch.maximum(share, before.get(name, share)) for name, share in shares.items()}
    return {"steps": {name: basis.new_zeros(2) for name, basis in server["basis"].items()}, "removed": removed}


def added(steps: Tree, old: Tree, whole: Tree, projected: Tree, layers: Sequence[Layer], augment: bool) -> Tree:
    """Add a step's energies to `steps`: from `old` to the parameters `whole` before, `projected` after projection."""
    before, after = (_energies(old, to, layers, augment) for to in (whole, projected))
    return {name: sums + torch.stack([before[name], after[name]]) for name, sums in steps.items()}


def shares(steps: Tree) -> dict[str, float]:
    """Share of the energy of this task's steps that the projection removed, by layer; none for a layer at rest."""
    return {name: float(_removed(pair)) for name, pair in steps.items() if pair[0] > 0}


def warn_of_slow_layers(removed: Mapping[str, float], before: Tree, threshold: float) -> None:
    """Warn, once a layer, if more than half of the energy of a task's steps was projected away."""
    new = [name for name, share in removed.items() if share > HALF >= before.get(name, 0)]
    if new:
        worst = max(new, key=removed.__getitem__)
        above = sum(share > HALF for share in removed.values())
        warn(
            f"the projection removed {removed[worst]:.0%} of the energy of this task's steps in layer {worst!r}, "
            f"and more than half in {above} of {len(removed)} layers: the task's inputs overlap with earlier "
            f"ones, so it is learned slowly; a lower strategy.threshold (now {threshold:g}) protects less"
        )


def _energies(old: Tree, new: Tree, layers: Sequence[Layer], augment: bool) -> Tree:
    """|W' - W|^2 by layer name, () in float64."""
    energies = {}
    for layer in layers:
        moved = (new[name][layer.rows] - old[name][layer.rows] for name in names(layer, augment))
        energies[layer.name] = torch.stack([part.square().sum() for part in moved]).sum().double()
    return energies


def _removed(steps: Tensor) -> Tensor:
    """Share () of the energy of a layer's steps that the projection removed; 0 without steps. steps: before, after."""
    before, after = steps
    return torch.where(before > 0, 1 - after / before, 0.0)
