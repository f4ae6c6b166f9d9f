"""GPSE under differential privacy (FOT, appendix H, with a calibration that holds; see docs/privacy.md).

Each sample's inputs to a layer are scaled to energy 1. What a client sends of L parts (the sketch of each layer and,
where the client projects, the energy that remains) is then scaled so that each part has norm clip / sqrt(L) at most:
Gram matrices and energies are bounded exactly; a Gaussian sketch A / sqrt(s) is on average, and the joint clip does the
rest.
"""

from __future__ import annotations

import math

from torch import Tensor

from cfl.contract.rounds import Privacy
from cfl.methods.subspace.sketch import Direct, Gram


def unit_energy(inputs: Tensor) -> Tensor:
    """Inputs (batch, positions, d) with |x|^2 = 1 for each sample, over all its positions."""
    return inputs / inputs.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-30)


def share(privacy: Privacy, parts: int) -> float:
    """The norm that each of so many parts of an upload may have."""
    return privacy.clip / math.sqrt(parts)


def scaled(sums: Gram | Direct, privacy: Privacy, samples: int, parts: int) -> tuple[Tensor, Tensor]:
    """What a client releases of unit-energy inputs: the sketch, or packed Gram matrix, and the energy that remains ().

    At the level of clients they are means over its samples, at that of samples sums.
    """
    released, whole = sums.release(), samples if privacy.level == "client" else 1
    # A Gram matrix is quadratic in the inputs; a sketch (d, s) is linear, with s draws of each.
    scale = whole if released.dim() == 1 else math.sqrt(whole * released.shape[1])
    return share(privacy, parts) * released / scale, share(privacy, parts) * sums.energies[1] / whole
