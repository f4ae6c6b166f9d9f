"""Accuracy of the global model."""

import torch

from cfl.models.handle import Model
from cfl.tree import Tree
from cfl.types import Samples


def accuracy(model: Model, params: Tree, samples: Samples, task: int, batch_size: int) -> float:
    """Fraction of correct predictions on samples of a task, with the task's head, in evaluation mode.

    batch_size: samples at a time; it decides the result only where normalisation uses batch statistics.
    """
    correct = torch.zeros((), dtype=torch.int64, device=samples.targets.device)
    model.module.eval()
    with torch.no_grad():
        for rows in torch.arange(len(samples), device=samples.targets.device).split(batch_size):
            x, y = samples.gather(rows)
            correct += (model.logits(params, x, task).argmax(dim=1) == y).sum()
    return int(correct) / len(samples)
