"""Losses of a minibatch in which padding counts for nothing."""

import torch.nn.functional as F
from torch import Tensor

from cfl.contract.data import Batch


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of each sample: (batch,)."""
    # not F.cross_entropy: under vmap its index to ignore becomes a dozen operations more
    return -logits.log_softmax(dim=1).gather(1, batch.y[:, None]).squeeze(1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean () of values (batch,) where mask (batch,) is 1; 0 where it is 1 nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def divergence(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL(softmax(targets / T) || softmax(logits / T)) of each sample: (batch,). Both: (batch, classes) logits."""
    log_p, log_q = ((leaf / temperature).log_softmax(dim=1) for leaf in (targets, logits))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)
