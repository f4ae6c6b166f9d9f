"""Sketches and energies scaled for differential privacy (FOT, appendix H, recalibrated; see docs/privacy.md).

A sample's inputs to a layer are scaled to energy 1. A client's upload has L parts: the sketch of each layer and, if the
client projects, the energy of each layer's residual. Each part is scaled to a norm of at most clip / sqrt(L).
For Gram matrices and energies the bound is exact. For a Gaussian sketch A / sqrt(s) it holds on average, and the clip
of the whole upload enforces it.
"""

import math

import torch
from torch import Tensor

from cfl.contract import Privacy
from cfl.methods.subspace.sketch import Direct, Gram


def unit_energy(inputs: Tensor) -> Tensor:
    """Scale inputs (batch, positions, d) so that each sample has |x|^2 = 1 summed over its positions.

    A sample of zeros stays zero, and a sample that is not finite becomes zero.
    """
    largest = inputs.abs().amax((1, 2), keepdim=True)  # its square, and so the norm, may underflow or overflow
    scaled = inputs.double() / torch.where(largest > 0, largest, 1.0)
    unit = scaled.div_(torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True).clamp(min=1.0))
    return torch.where(largest.isfinite(), unit, 0.0).to(inputs)


def share(privacy: Privacy, parts: int) -> float:
    """Maximum norm of each part of an upload of `parts` parts."""
    return privacy.clip / math.sqrt(parts)


def scaled(sums: Gram | Direct, privacy: Privacy, rows: int, parts: int) -> tuple[Tensor, Tensor]:
    """Upload of a client for unit-energy inputs: the sketch or packed Gram matrix, and the residual's energy ().

    rows: inputs of unit energy in the sums, of which a layer that runs twice per pass has two for each sample.
    Both are means over these inputs if dp.level is "client", and sums if it is "example".
    """
    released, whole = sums.release(), max(rows, 1) if privacy.level == "client" else 1
    # A Gram matrix is quadratic in the inputs. A sketch (d, s) is linear in them, with s draws for each.
    scale = whole if released.dim() == 1 else math.sqrt(whole * released.shape[1])
    return share(privacy, parts) * released / scale, share(privacy, parts) * sums.energies[1] / whole
