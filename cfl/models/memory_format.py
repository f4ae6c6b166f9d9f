"""Memory layout of convolutional networks on a CPU: channels last, with which pooling and bfloat16 are faster."""

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from cfl.core import Tree, rng


class Layout:
    """The memory layout of leaves with which a module computes faster: as they are, or with channels last.

    module, input_shape, device: as in `allows_channels_last`; precision: of products, as in the configuration.
    gains: whether local steps that are not compiled are faster with channels last, and the module allows it.
    """

    def __init__(
        self, module: nn.Module, input_shape: Sequence[int], device: torch.device | str, precision: str
    ) -> None:
        self._known = module, input_shape, device
        # Max pooling is far faster. Without it, and in float32, the gain is less than it takes to convert the weights.
        pools = any(isinstance(layer, nn.MaxPool2d) for layer in module.modules())
        self.gains = (pools or precision != "float32") and self.allowed

    @cached_property
    def allowed(self) -> bool:
        """Whether the module allows channels last. Compiled steps gain by them wherever it does."""
        return allows_channels_last(*self._known)

    def laid_out(self, params: Tree) -> Tree:
        """Return leaves in the layout with which the module is faster; copies where they have another."""
        return channels_last(params) if self.gains else params

    def copy_of(self, leaf: Tensor, compiled: bool = False) -> Tensor:
        """Copy a leaf to the layout with which a local step is faster. compiled: for compiled steps."""
        # With one channel in or out, torch's results have another layout than its fake tensors promise to a trace.
        last = leaf.dim() == 4 and (self.allowed and min(leaf.shape[:2]) > 1 if compiled else self.gains)
        return leaf.clone(memory_format=torch.channels_last if last else torch.preserve_format)


def allows_channels_last(module: nn.Module, input_shape: Sequence[int], device: torch.device | str) -> bool:
    """Whether a module with convolutions in float32, on a CPU, gives the same outputs with channels last, and trains.

    A module may fail, for example where its forward calls `view` instead of `flatten`.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    single = all(layer.weight.dtype == torch.float32 for layer in convolutions)
    if not convolutions or not single or torch.device(device).type != "cpu" or len(input_shape) != 3:
        return False
    x = torch.linspace(-1, 1, 2 * torch.Size(input_shape).numel()).reshape(2, *input_shape)
    try:
        plain = copy.deepcopy(module).eval()
        with torch.enable_grad(), rng.fork(0):
            expected = plain(x)
            plain.load_state_dict(channels_last(plain.state_dict()), assign=True)
            x = x.contiguous(memory_format=torch.channels_last)
            found = plain(x)
            plain.train()(x).sum().backward()
    except Exception:  # whatever a user's module raises
        return False
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def channels_last(leaves: Tree) -> Tree:
    """Give leaves (out, in, height, width) channels last, by a copy; the others are those given."""
    return {
        name: leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
        for name, leaf in leaves.items()
    }


def is_channels_last(leaf: Tensor) -> bool:
    """True for a leaf that has channels last and no other layout."""
    return leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
