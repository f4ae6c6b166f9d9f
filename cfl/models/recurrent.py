"""Initial states of recurrent layers under `torch.func.vmap`."""

from typing import Any

from torch import Tensor, nn

from cfl.core.functorch import transforming

_KINDS = (nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.GRUCell, nn.LSTMCell)


def prepare(module: nn.Module) -> None:
    """Let recurrent layers and cells run under vmap over the samples alone, with shared weights.

    The zeros with which such a layer starts are then the same for all samples, and torch adds the inputs to their
    product in place, which vmap refuses. So they are made from the inputs. Subclasses may take other arguments, and
    stay as they are.
    """
    for layer in module.modules():
        if type(layer) in _KINDS:
            layer.register_forward_pre_hook(_with_state, with_kwargs=True)


def _with_state(layer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
    """Add the initial state to a call that gives the inputs alone; a packed sequence is no tensor."""
    if len(args) != 1 or named or not isinstance(args[0], Tensor) or not transforming():
        return None
    x, size = args[0], layer.hidden_size
    if isinstance(layer, nn.RNNCellBase):
        lead = [*x.shape[:-1]]
    else:
        rows = [x.shape[0 if layer.batch_first else 1]] if x.dim() == 3 else []
        lead = [layer.num_layers * (1 + layer.bidirectional), *rows]
    states = [x.new_zeros(*lead, width) for width in (getattr(layer, "proj_size", 0) or size, size)]
    return (x, tuple(states) if isinstance(layer, (nn.LSTM, nn.LSTMCell)) else states[0]), named
