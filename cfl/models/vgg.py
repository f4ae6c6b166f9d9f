"""VGG-11 (Simonyan & Zisserman, ICLR 2015, configuration A) for small images.

torchvision's VGG takes three channels only, uses in-place operations, and has a classifier of nearly 500 MB.
"""

from collections.abc import Sequence

from torch import nn

from cfl.models.cnn import he_normal, images, whole

_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # filters of each convolution over `width`; a pooling after each stage


def vgg11(
    input_shape: Sequence[int], outputs: int, width: int = 64, hidden: Sequence[int] = (), norm: bool = False
) -> nn.Module:
    """Eight 3 x 3 convolutions, five poolings, one linear layer: 9,225,610 parameters for 3 x 32 x 32 and 10 classes.

    width: filters of the first convolution, the last has eight times as many; hidden: widths of hidden layers with ReLU
    before the classifier, (512, 512) in the code of FedSOL (CVPR 2024, Table 3); norm: batch normalisation after each
    convolution. Convolutions are initialised as in He et al. (2015), as in FedSOL's code: with PyTorch's defaults the
    signal vanishes. Pooling rounds sizes up, so images of up to 32 x 32 pixels end as one pixel; FedSOL's code enlarges
    images of 28 x 28 pixels instead.
    """
    channels, height, width_in = images(input_shape)
    whole(width=width, **{f"hidden[{place}]": size for place, size in enumerate(hidden)})
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for factor in stage:
            layers.append(nn.Conv2d(channels, factor * width, 3, padding=1))
            layers += [nn.BatchNorm2d(factor * width)] if norm else []
            layers.append(nn.ReLU())
            channels = factor * width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    features = channels * -(-height // 32) * -(-width_in // 32)
    layers.append(nn.Flatten())
    for size in hidden:
        layers += [nn.Linear(features, size), nn.ReLU()]
        features = size
    module = nn.Sequential(*layers, nn.Linear(features, outputs))
    he_normal(module)
    return module
