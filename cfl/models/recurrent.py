"""Forward passes of modules under `torch.func.vmap`, with the states of recurrent layers and cells."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cfl.core.functorch import transforming

# Called with inputs, state and weights. Calls with packed sequences have other arguments; torch.func cannot run them.
_KINDS = frozenset(
    (
        torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh,
        torch.gru_cell, torch.lstm_cell, torch.rnn_relu_cell, torch.rnn_tanh_cell,
    )
)  # fmt: skip


def has_layers(module: nn.Module) -> bool:
    """Whether a module has a recurrent layer or cell."""
    return any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in module.modules())


def call(module: nn.Module, x: Tensor, recurrent: bool) -> Any:
    """Return module(x), also under vmap over the samples alone, where recurrent layers share their weights.

    recurrent: what `has_layers` returned once, since this runs in each local step.
    Raises RuntimeError for a forward that vmap does not run, with what to write in it.
    """
    if not transforming():
        return module(x)
    try:
        with _States() if recurrent else contextlib.nullcontext():
            return module(x)
    except RuntimeError as error:
        if not str(error).startswith("vmap: "):
            raise
        advice = "in forward, make tensors of the inputs, as by x.new_zeros(...), and neither draw nor branch on values"
        raise RuntimeError(f"vmap does not run the network: {advice} ({error})") from error


class _States(TorchFunctionMode):
    """Make the states of recurrent layers from their inputs.

    Zeros with which a layer, or a network, starts are the same for all samples, and torch adds the inputs to their
    product with the weights in place, which vmap refuses.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _KINDS and not kwargs:
            x, state, *rest = args
            return func(x, _own(state, x) if isinstance(state, Tensor) else [_own(one, x) for one in state], *rest)
        return func(*args, **(kwargs or {}))


def _own(state: Tensor, x: Tensor) -> Tensor:
    """The same numbers, for each sample of x."""
    return state + x.new_zeros(state.shape, dtype=state.dtype)
