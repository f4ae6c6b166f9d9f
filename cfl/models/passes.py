"""Forward passes in evaluation mode: how many samples each of them takes."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_FEW = 128  # samples at most; benchmarks/passes.py compares sizes, stored in results/passes there


def by_batch(module: nn.Module) -> bool:
    """True if a module normalises by the statistics of each batch, so that an output depends on the other samples."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in module.modules())


def passes(module: nn.Module, samples: Tensor, most: int) -> Sequence[Tensor]:
    """Split samples, or their rows, (n, ...) into those of each forward pass of a module.

    On a CPU a pass has few, since the activations of many leave its caches. most: samples of a pass on a GPU, and where
    outputs depend on the batch.
    """
    if samples.device.type != "cpu" or by_batch(module):
        return samples.split(most)
    return samples.tensor_split(max(1, -(-len(samples) // _FEW)))  # even parts, so none of a single sample
