"""The AlexNet-like network of FOT's Split CIFAR-100, without biases or normalisation."""

import math
from collections.abc import Sequence

from torch import nn

from cfl.models.cnn import images, whole
from cfl.models.dropout import Dropout


def alexnet_cl(
    input_shape: Sequence[int], outputs: int, dropout: Sequence[float] = (0.2, 0.2, 0.5, 0.5), width: int = 64
) -> nn.Module:
    """AlexNet-like network (FOT, CIFAR-100): three convolutions, two hidden layers; 6,704,128 parameters with 10 heads.

    dropout: rates after each of the three convolutions, and one rate after both hidden layers;
    width: filters of the first convolution; the next two have 2 and 4 times as many, hidden layers 32 times as many
    units. Raises ValueError for images below 19 x 19 pixels.
    """
    whole(width=width)
    channels, *sides = images(input_shape, at_least=19)
    if len(dropout) != 4:
        raise ValueError(f"model.dropout must be a list of four rates, not {dropout}")
    for kernel in (4, 3, 2):
        sides = [(side - kernel + 1) // 2 for side in sides]

    def block(inputs: int, filters: int, kernel: int, rate: float) -> list[nn.Module]:
        return [nn.Conv2d(inputs, filters, kernel, bias=False), nn.ReLU(), Dropout(rate), nn.MaxPool2d(2)]

    def hidden(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 32 * width, bias=False), nn.ReLU(), Dropout(dropout[3])]

    return nn.Sequential(
        *block(channels, width, 4, dropout[0]),
        *block(width, 2 * width, 3, dropout[1]),
        *block(2 * width, 4 * width, 2, dropout[2]),
        nn.Flatten(),
        *hidden(4 * width * math.prod(sides)),
        *hidden(32 * width),
        nn.Linear(32 * width, outputs, bias=False),
    )
