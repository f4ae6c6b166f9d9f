"""BERT (Devlin et al., NAACL 2019), from the size of TinyBERT's 4 x 312 (Jiao et al., 2020) down to 2 x 128.

The parameters have the names of the usual files of BERT models. Every weight matrix but those of the embeddings belongs
to a Linear layer, so subspace methods can project it: in each block the queries, keys and values (three layers with the
same inputs), the output of attention, and both layers of the perceptron; then the pooler and the head.

Padding has no influence: attention gives it a weight of 0, and all Linear layers have rows of zeros there, so the
statistics of their inputs are those of tokens. Only the constant 1 that stands for a bias counts padding, too.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.models.cnn import whole
from cfl.models.dropout import Dropout

EPS = 1e-12  # of normalisation
WORDS = 30522  # token ids of the tokenizer of the English BERT models in lower case
_PAIR = 2  # types of tokens: those of the first text, and those of the second
_STD = 0.02  # of initial weights (section A.2)


def bert_tiny(
    input_shape: Sequence[int],
    outputs: int,
    layers: int = 2,
    width: int = 128,
    heads: int = 2,
    intermediate: int = 512,
    vocabulary: int | None = None,
    pooling: str = "cls",
    separator: int | None = None,
    dropout: float = 0.1,
) -> nn.Module:
    """BERT for inputs (batch, 2, length) of token ids and their mask, 1 for a token and 0 for padding.

    input_shape: (2, longest length); layers: number of blocks; width: numbers in a token; heads: attention heads;
    intermediate: width of the perceptrons; vocabulary: number of token ids, null for the 30,522 of BERT; pooling: the
    head sees the first token through the pooler (cls), or the mean of all tokens (mean); separator: id of [SEP], to
    tell the two texts of a pair apart, null for inputs of one text; dropout: rate after the embeddings, the attention
    weights, both halves of a block, and before the head. 4,386,178 parameters for two classes and 512 tokens.
    Raises ValueError for another shape or pooling, or if `heads` does not divide `width`.
    """
    if len(input_shape) != 2 or input_shape[0] != 2:
        raise ValueError(f"a BERT needs token ids and their mask, of shape (2, length), not {tuple(input_shape)}")
    vocabulary = WORDS if vocabulary is None else vocabulary
    whole(layers=layers, width=width, heads=heads, intermediate=intermediate, vocabulary=vocabulary)
    if width % heads:
        raise ValueError(f"model.width must be a multiple of model.heads, but {width} is not a multiple of {heads}")
    if pooling not in ("cls", "mean"):
        raise ValueError(f"model.pooling must be cls or mean, not {pooling}")
    embeddings = _Embeddings(vocabulary, input_shape[1], width, separator)
    blocks = [_Block(width, heads, intermediate, dropout) for _ in range(layers)]
    return _Bert(embeddings, blocks, width, outputs, pooling, dropout)


class _Bert(nn.Module):
    """Embeddings, blocks, and a head on one vector of each text."""

    def __init__(
        self,
        embeddings: "_Embeddings",
        blocks: Sequence["_Block"],
        width: int,
        outputs: int,
        pooling: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(blocks)})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)}) if pooling == "cls" else None
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(width, outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=_STD)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        ids, mask = x.long().unbind(1)  # the samples that trace a model are of float32
        hidden = self.embeddings(ids)
        tokens = mask[..., None].to(hidden.dtype)
        hidden = self.dropout(hidden * tokens)
        for block in self.encoder["layer"].children():
            hidden = block(hidden, tokens)
        return self.classifier(self.dropout(self._pooled(hidden, tokens)))

    def _pooled(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """One vector (batch, width) for each text."""
        if self.pooler is not None:
            return self.pooler["dense"](hidden[:, 0]).tanh()
        return hidden.sum(1) / tokens.sum(1).clamp(min=1)


class _Embeddings(nn.Module):
    """Sums of the vectors of a token, of its position, and of its type, normalised."""

    def __init__(self, vocabulary: int, length: int, width: int, separator: int | None) -> None:
        super().__init__()
        self.separator = separator
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(length, width)
        self.token_type_embeddings = nn.Embedding(_PAIR, width)
        self.LayerNorm = nn.LayerNorm(width, EPS)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: ids.shape[1]]
        return self.LayerNorm(self.word_embeddings(ids) + positions + self.token_type_embeddings(self._types(ids)))

    def _types(self, ids: Tensor) -> Tensor:
        """0 up to the first separator, 1 after it; without a separator 0."""
        if self.separator is None:
            return torch.zeros_like(ids)
        ends = (ids == self.separator).long()
        return (ends.cumsum(1) - ends).clamp(max=1)


class _Block(nn.Module):
    """Self-attention, then a perceptron; the sum of each with its input is normalised."""

    def __init__(self, width: int, heads: int, intermediate: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        inputs = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": inputs, "output": _Output(width, width, dropout)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, intermediate)})
        self.output = _Output(intermediate, width, dropout)
        self.dropout = Dropout(dropout)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden: (batch, length, width), with zeros at padding; tokens: (batch, length, 1), 0.0 for padding."""
        hidden = self.attention["output"](self._attend(hidden, tokens), hidden) * tokens
        inner = F.gelu(self.intermediate["dense"](hidden)) * tokens
        return self.output(inner, hidden) * tokens

    def _attend(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Attention (batch, length, width), with zeros at padding."""
        q, k, v = (self._split(layer(hidden)) for layer in self.attention["self"].children())
        # F.scaled_dot_product_attention has no rule for vmap and no second derivative on a CPU
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        padding = tokens[:, None, None, :, 0] == 0
        scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)  # finite: a text may be all padding
        return (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2) * tokens

    def _split(self, x: Tensor) -> Tensor:
        """(batch, heads, length, width of a head) of (batch, length, width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Output(nn.Module):
    """A layer whose outputs are added to the inputs of its half of a block and normalised."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, EPS)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + hidden)
