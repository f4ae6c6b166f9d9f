"""Reduced ResNet-18 (He et al., 2016) of FOT's 5-Datasets (width 20, no norm) and Mini-ImageNet (width 32, norm)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    """Basic residual block; written out of place so that gradient hooks see every tensor."""

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
    def __init__(self, input_shape: Sequence[int], outputs: int, width: int, stem_stride: int, norm: bool) -> None:
        super().__init__()
        channels, height, _ = input_shape
        self.stem = nn.Conv2d(channels, width, 3, stem_stride, padding=1, bias=False)
        self.norm = _norm(width, norm)
        blocks: list[nn.Module] = []
        inputs, side = width, -(-height // stem_stride)
        for stage in range(4):
            for first in (True, False):
                stride = 2 if first and stage else 1
                blocks.append(_Block(inputs, width * 2**stage, stride, norm))
                inputs, side = width * 2**stage, -(-side // stride)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs * (side // 2) ** 2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


def resnet18(
    input_shape: Sequence[int], outputs: int, width: int = 20, stem_stride: int = 1, norm: bool = False
) -> nn.Module:
    """Reduced ResNet-18 (FOT): 1,122,140 parameters for 5-Datasets, 3,025,440 for Mini-ImageNet (width 32, norm).

    width: filters of the first stage, doubled in each of the four; norm: batch normalisation after each convolution.
    """
    if len(input_shape) != 3:
        raise ValueError("it needs images (channels, height, width)")
    return _ResNet(input_shape, outputs, width, stem_stride, norm)


def _norm(filters: int, on: bool) -> nn.Module:
    return nn.BatchNorm2d(filters) if on else nn.Identity()
