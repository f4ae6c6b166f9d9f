"""The convolutional network of McMahan et al. (AISTATS 2017), and helpers of all builders of image models."""

from collections.abc import Sequence

from torch import nn


def cnn(input_shape: Sequence[int], outputs: int, width: int = 32, hidden: int = 512) -> nn.Module:
    """Two 5 x 5 convolutions with pooling, one hidden layer (McMahan et al., 2017): 1,663,370 parameters for MNIST.

    FedSOL (CVPR 2024) repeats the grey channel of MNIST for it; here the first convolution has the images' channels.
    width: filters of the first convolution, the second has twice as many; hidden: units of the hidden layer, whose
    outputs are the features. All layers have biases. Raises ValueError for images below 4 x 4 pixels.
    """
    channels, height, width_in = images(input_shape, at_least=4)
    whole(width=width, hidden=hidden)
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (width_in // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def images(input_shape: Sequence[int], at_least: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of an image shape; raises ValueError for other shapes and sides below `at_least`."""
    if len(input_shape) != 3:
        raise ValueError("it needs images (channels, height, width)")
    channels, height, width = input_shape
    if min(height, width) < at_least:
        raise ValueError(
            f"images must have at least {at_least} x {at_least} pixels, not {height} x {width}; channels come first"
        )
    return channels, height, width


def whole(**options: int) -> None:
    """Raise ValueError for a model option below 1."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"model.{name} must be a whole number of at least 1, not {value}")


def he_normal(module: nn.Module) -> None:
    """Initialise convolutions with weights from N(0, 2 / (filters x kernel size)) (He et al., 2015) and biases of 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
