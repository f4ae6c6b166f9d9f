"""The convolutional network of McMahan et al. (AISTATS 2017), and helpers of all builders of image models."""

from collections.abc import Sequence

from torch import Tensor, nn


class RepeatGrey(nn.Module):
    """Repeats the channel of grey images: (batch, 1, height, width) to (batch, 3, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


def cnn(
    input_shape: Sequence[int], outputs: int, width: int = 32, hidden: int = 512, repeat_grey: bool = False
) -> nn.Module:
    """Two 5 x 5 convolutions with pooling, one hidden layer (McMahan et al., 2017): 1,663,370 parameters for MNIST.

    width: filters of the first convolution, the second has twice as many; hidden: units of the hidden layer, whose
    outputs are the features; repeat_grey: repeat the channel of grey images to three, as FedSOL's code does (CVPR
    2024). All layers have biases. Raises ValueError for images below 4 x 4 pixels, and for colour images to repeat.
    """
    channels, height, width_in = images(input_shape, at_least=4)
    whole(width=width, hidden=hidden)
    if repeat_grey and channels != 1:
        raise ValueError(f"model.repeat_grey=true is for grey images, not {channels} channels; set it to false")
    return nn.Sequential(
        *([RepeatGrey()] if repeat_grey else []),
        nn.Conv2d(3 if repeat_grey else channels, width, 5, padding=2),
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
