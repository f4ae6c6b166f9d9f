"""A small vision transformer (Dosovitskiy et al., ICLR 2021), about as large as the SL-ViT of FedSOL's Table 3.

It is the plain transformer. SL-ViT (Lee et al., 2021) adds, for small data sets, shifted patches, a learned
temperature, and a mask of each token's attention to itself.

Every weight matrix belongs to a Linear or Conv2d layer, so subspace methods can project all of them: `patches`
(d = channels x patch x patch), and in each block `qkv` (queries, keys and values have the same inputs, hence one
basis), `out`, `mlp.0` and `mlp.3`. They do not project class token, positions and normalisation.

torchvision's VisionTransformer has no layers for the four projections of attention and takes square images of three
channels only. Under `torch.func.vmap` its attention runs one model at a time, and it has no second derivative on a CPU.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cfl.models.cnn import images, whole
from cfl.models.dropout import Dropout


class _Block(nn.Module):
    """Self-attention, then a perceptron of four times the width; each takes normalised tokens and has a residual."""

    def __init__(self, width: int, heads: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), Dropout(dropout), nn.Linear(4 * width, width))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)))))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Attention (batch, tokens, width) of queries, keys and values side by side (batch, tokens, 3 width)."""
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        # F.scaled_dot_product_attention has no rule for vmap and no second derivative on a CPU
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class _ViT(nn.Module):
    def __init__(
        self,
        channels: int,
        patches: int,
        outputs: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.dropout = Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout, eps) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps)
        self.head = nn.Linear(width, outputs)
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(self.dropout(x)))[:, 0])


def vit_small(
    input_shape: Sequence[int],
    outputs: int,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
    eps: float = 1e-5,
) -> nn.Module:
    """Vision transformer with a class token: 2,693,578 parameters for 10 classes of 3 x 32 x 32.

    patch: side of a patch, in pixels; width: numbers in a token; depth: number of blocks; heads: attention heads;
    dropout: rate after the positions, the attention, and both layers of the perceptron;
    eps: added to the variances of normalisation, 1e-6 in the usual pretrained weights.
    Raises ValueError if `patch` does not divide both sides of the image, or `heads` does not divide `width`.
    """
    channels, height, width_in = images(input_shape)
    whole(patch=patch, width=width, depth=depth, heads=heads)
    if height % patch or width_in % patch:
        raise ValueError(
            f"images of {height} x {width_in} pixels cannot be cut into patches of {patch} x {patch}; "
            "set model.patch to a divisor of both sides"
        )
    if width % heads:
        raise ValueError(f"model.width must be a multiple of model.heads, but {width} is not a multiple of {heads}")
    patches = (height // patch) * (width_in // patch)
    return _ViT(channels, patches, outputs, patch, width, depth, heads, dropout, eps)
