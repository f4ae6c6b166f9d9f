"""Run a module once to see which layers it calls and how many outputs it has."""

from collections.abc import Sequence

import torch
from torch import nn

from cfl.core import ConfigError
from cfl.models.layers import NORMS


def trace(
    module: nn.Module, input_shape: Sequence[int], device: torch.device | str
) -> tuple[dict[str, nn.Module], int]:
    """Linear, Conv2d and normalisation layers by path, in the order of their first call, and the number of outputs.

    The module runs in evaluation mode on two samples of zeros; afterwards it has its former mode, and no hook is left.
    Raises ConfigError if it does not take samples of shape `input_shape`.
    """
    called: dict[str, nn.Module] = {}  # in the order of the first insertion
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _, path=path: called.update({path: layer}))
        for path, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d, *NORMS))
    ]
    was_training = module.training
    dtype = next((param.dtype for param in module.parameters()), torch.float32)
    try:
        with torch.no_grad():
            outputs = module.eval()(torch.zeros(2, *input_shape, device=device, dtype=dtype)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the model does not take inputs of shape (batch, {tuple(input_shape)}): {error}") from error
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return called, outputs
