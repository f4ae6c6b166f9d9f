"""ResNets of basic blocks (He et al., CVPR 2016): FOT's reduced ResNet-18, ResNet-18 for CIFAR, and ResNet-8."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from cfl.models.cnn import he_normal, images, whole


class _Block(nn.Module):
    """Basic residual block without in-place operations, so that gradient hooks see every tensor."""

    def __init__(self, inputs: int, filters: int, stride: int, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(filters, norm)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm2 = _norm(filters, norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, filters, 1, stride, bias=False), _norm(filters, norm))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class _ResNet(nn.Module):
    """Stem, four stages of `depth` blocks, pooling, linear head; stage i (from 0) has width * 2**i filters.

    enter: pooling after the stem, None for no pooling; leave: pooling before the head, None for a global average;
    pixels: pixels that `leave` returns.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        width: int,
        norm: bool,
        *,
        depth: int = 2,
        stem_stride: int = 1,
        enter: nn.Module | None = None,
        leave: nn.Module | None = None,
        pixels: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stem_stride, padding=1, bias=False)
        self.norm = _norm(width, norm)
        self.enter = enter or nn.Identity()
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            for place in range(depth):
                blocks.append(_Block(inputs, width * 2**stage, 2 if stage and not place else 1, norm))
                inputs = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.leave = leave or nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs * pixels, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(F.relu(self.norm(self.stem(x))))
        return self.head(self.leave(self.blocks(x)).flatten(1))


def resnet18(
    input_shape: Sequence[int], outputs: int, width: int = 20, stem_stride: int = 1, norm: bool = False
) -> nn.Module:
    """Reduced ResNet-18 (FOT): 1,122,140 parameters for 5-Datasets, 3,025,440 for Mini-ImageNet (width 32, norm).

    width: filters of the first stage, each later stage has twice as many; stem_stride: of the first convolution;
    norm: batch normalisation after each convolution.
    Raises ValueError for images that leave less than 2 x 2 pixels to average (below 9 x 9, at stride 1).
    """
    whole(width=width, stem_stride=stem_stride)
    channels, *sides = images(input_shape, at_least=8 * stem_stride + 1)
    high, wide = (-(-side // (8 * stem_stride)) // 2 for side in sides)  # strides round up, the last pooling down
    return _ResNet(
        channels,
        outputs,
        width,
        norm,
        stem_stride=stem_stride,
        leave=nn.AvgPool2d(2),
        pixels=high * wide,
        bias=False,
    )


def resnet18_cifar(input_shape: Sequence[int], outputs: int, width: int = 64, norm: bool = True) -> nn.Module:
    """ResNet-18 as usual for CIFAR: 3 x 3 stem, no pooling after it; 11,173,962 parameters for 10 classes.

    width: filters of the first stage, each later stage has twice as many; norm: batch normalisation after each
    convolution.
    """
    channels, *_ = images(input_shape)
    whole(width=width)
    return _ResNet(channels, outputs, width, norm)


def resnet8(input_shape: Sequence[int], outputs: int, width: int = 64, norm: bool = True) -> nn.Module:
    """ResNet-8 (FedProj, 2025): one block a stage, pooling after the stem; 4,903,242 parameters for 10 classes.

    width: filters of the first stage, each later stage has twice as many; norm: batch normalisation after each
    convolution. Convolutions are initialised as in He et al. (2015), as in the authors' code.
    """
    channels, *_ = images(input_shape)
    whole(width=width)
    module = _ResNet(channels, outputs, width, norm, depth=1, enter=nn.MaxPool2d(3, 2, padding=1))
    he_normal(module)
    return module


def _norm(filters: int, on: bool) -> nn.Module:
    return nn.BatchNorm2d(filters) if on else nn.Identity()
