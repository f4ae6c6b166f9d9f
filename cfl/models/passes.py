"""Forward passes: whether a sample's outputs depend on the others of its batch, and how many samples a pass takes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from cfl.core import rng

_FEW = 128  # samples at most; benchmarks/passes.py compares sizes, stored in results/passes there


def draws(
    count: int, input_shape: Sequence[int], device: torch.device | str, dtype: torch.dtype | None, module: nn.Module
) -> Tensor:
    """Samples (count, *input_shape) in [0, 2) to try a module; as integers, such as tokens, they are 0 or 1.

    dtype: of the samples; None: of the module's parameters.
    """
    own = (leaf.dtype for leaf in module.parameters() if leaf.is_floating_point())
    x = torch.rand(count, *input_shape, generator=rng.generator(0)) * 2
    return x.to(device, dtype or next(own, torch.float32))


def couples(
    module: nn.Module, input_shape: Sequence[int], device: torch.device | str, dtype: torch.dtype | None = None
) -> bool:
    """Whether outputs or running statistics of a sample in training mode depend on the others of its batch.

    Found by the types of layers, and by the outputs of two samples with and without a third one; dropout is off. A
    module that does not take three samples counts as one.
    module: a copy, which changes; dtype: of the samples; None: of its parameters.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    if any(isinstance(layer, _BatchNorm) or layer.track_running_stats for layer in norms):
        return True
    module.train()
    for layer in module.modules():
        if isinstance(layer, _DropoutNd):
            layer.eval()
    x = draws(3, input_shape, device, dtype, module)
    try:
        with torch.no_grad():
            for leaf in module.parameters():
                if leaf.is_floating_point() and not leaf.any():
                    leaf.fill_(0.1)  # outputs of a layer of zeros would not depend on anything
            with rng.fork(0, device):
                among = module(x)[:2]
            with rng.fork(0, device):
                alone = module(x[:2])
    except Exception:  # whatever a user's forward raises
        return True
    return not torch.allclose(alone, among, rtol=1e-3, atol=1e-4)


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
