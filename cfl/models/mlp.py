"""Multi-layer perceptron; with hidden (400, 400, 400) and dropout (.2, .5, .5) the Permuted MNIST model of FOT."""

import math
from collections.abc import Sequence

from torch import nn


def mlp(
    input_shape: Sequence[int], outputs: int, hidden: Sequence[int] = (128, 128), dropout: Sequence[float] = ()
) -> nn.Module:
    """Multi-layer perceptron with ReLU and biases (FOT: 784-400-400-400-10, 638,810 parameters).

    hidden: widths of the hidden layers; dropout: rate after each hidden layer, or empty for none.
    """
    if dropout and len(dropout) != len(hidden):
        raise ValueError(f"dropout must give a rate for each of the {len(hidden)} hidden layers, not {list(dropout)}")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for i, size in enumerate(hidden):
        layers += [nn.Linear(width, size), nn.ReLU()]
        layers += [nn.Dropout(dropout[i])] if dropout else []
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
