"""Multi-layer perceptron; with hidden (400, 400, 400) and dropout (.2, .5, .5) FOT's model for Permuted MNIST."""

import math
from collections.abc import Sequence

from torch import nn

from cfl.models.dropout import Dropout


def mlp(
    input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128), dropout: Sequence[float] = ()
) -> nn.Module:
    """Multi-layer perceptron with ReLU and biases (FOT: 784-400-400-400-10, 638,810 parameters).

    hidden: widths of the hidden layers; dropout: rate after each hidden layer, or empty for no dropout.
    Raises ValueError for other values.
    """
    if min(hidden, default=1) < 1:
        raise ValueError(
            f"model.hidden must be a list of whole numbers of at least 1, such as [128, 128], not {hidden}"
        )
    if not all(0 <= rate <= 1 for rate in dropout):
        raise ValueError(f"model.dropout must be a list of rates in [0, 1], such as [0.2, 0.5], not {dropout}")
    if dropout and len(dropout) != len(hidden):
        raise ValueError(
            f"model.dropout must give a rate for each of the {len(hidden)} hidden layers, not {list(dropout)}"
        )
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for i, size in enumerate(hidden):
        layers += [nn.Linear(width, size), nn.ReLU()]
        layers += [Dropout(dropout[i])] if dropout else []
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
