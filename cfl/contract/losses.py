"""Losses of a minibatch that ignore padding."""

import torch.nn.functional as F
from torch import Tensor

from cfl.contract.samples import Batch
from cfl.core.functorch import transforming


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of each sample: (batch,). logits: (batch, classes)."""
    if transforming():  # F.cross_entropy is slower there: its `ignore_index` adds a dozen operations
        return -logits.log_softmax(dim=1).gather(1, batch.y[:, None]).squeeze(1)
    return F.cross_entropy(logits, batch.y, reduction="none")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean () of the values (batch,) whose mask (batch,) is 1; 0 if the mask is 0 everywhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def soft_cross_entropy(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """H(softmax(targets / T), softmax(logits / T)) over the last dimension: (batch, ...) for (batch, ..., classes)."""
    return -((targets / temperature).softmax(-1) * (logits / temperature).log_softmax(-1)).sum(-1)


def divergence(targets: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KL(softmax(targets / T) || softmax(logits / T)) of each sample: (batch,). Both arguments are (batch, classes)."""
    log_p, log_q = ((leaf / temperature).log_softmax(dim=1) for leaf in (targets, logits))
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)
