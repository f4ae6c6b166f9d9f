"""Texts as token ids and masks, by tokenizers of the package `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfl.core import ConfigError, DataError, packages
from cfl.core.errors import reason
from cfl.core.typed import typed_fields

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of a trained tokenizer, with the ids 0 to 4."""

_CHUNK = 8192  # texts encoded at a time, because the objects of a text are larger than its tokens
_SHORTEST = 8  # tokens: room for [CLS], both [SEP] and some words


class Texts(NamedTuple):
    """Labelled texts, or pairs of texts.

    first: n texts; second: None, or n texts that form pairs with them; labels: n class numbers from 0.
    """

    first: Sequence[str]
    second: Sequence[str] | None
    labels: Sequence[int]

    def __repr__(self) -> str:
        return f"Texts({len(self.first)} {'texts' if self.second is None else 'pairs'})"

    def taken(self, rows: Sequence[int]) -> Texts:
        """The texts at some positions."""
        second = None if self.second is None else [self.second[row] for row in rows]
        return Texts([self.first[row] for row in rows], second, [self.labels[row] for row in rows])


@dataclass(frozen=True)
class TextOptions:
    """How texts become samples.

    tokenizer: file `tokenizer.json` of the package `tokenizers`; None: a WordPiece tokenizer, trained on the training
    texts of the stream; vocabulary: largest number of token ids of a trained tokenizer, but all characters get one;
    max_length: tokens of a sample, longer texts are cut off. Raises ConfigError for fields of another type and numbers
    that are too small.
    """

    tokenizer: str | None = None
    vocabulary: int = 8192
    max_length: int = 64

    def __post_init__(self) -> None:
        typed_fields(self)
        if self.max_length < _SHORTEST:
            raise ConfigError(f"text.max_length must be at least {_SHORTEST}, not {self.max_length}")
        if self.vocabulary <= len(SPECIAL):
            raise ConfigError(
                f"text.vocabulary must be above {len(SPECIAL)}, the number of special tokens, not {self.vocabulary}"
            )


class Encoder:
    """Makes samples of texts by a tokenizer, which adds its special tokens.

    options: those that made it; vocabulary: number of token ids.
    """

    def __init__(self, tokenizer: Any, options: TextOptions) -> None:
        self.options, self._tokenizer = options, tokenizer
        known = tokenizer.get_vocab()
        self.vocabulary = 1 + max(known.values())
        given = tokenizer.padding or {}
        pad = given.get("pad_id", known.get("[PAD]", known.get("<pad>", 0)))
        tokenizer.enable_padding(pad_id=pad, length=options.max_length)
        tokenizer.enable_truncation(options.max_length)

    def __repr__(self) -> str:
        return f"Encoder(vocabulary={self.vocabulary}, max_length={self.options.max_length})"

    def __call__(self, first: Sequence[str], second: Sequence[str] | None = None) -> Tensor:
        """Samples (n, 2, max_length) int32 of n texts, or pairs of texts, as a pool of tokens has them."""
        pairs = first if second is None else list(zip(first, second, strict=True))
        found = np.zeros((len(pairs), 2, self.options.max_length), np.int32)
        with _one_thread():
            for begin in range(0, len(pairs), _CHUNK):
                for row, one in enumerate(self._tokenizer.encode_batch(pairs[begin : begin + _CHUNK]), begin):
                    found[row] = one.ids, one.attention_mask
        return torch.from_numpy(found)

    def text(self, sample: Tensor) -> str:
        """The words of a sample (2, length), without special tokens."""
        return self._tokenizer.decode(sample[0].tolist())


def encoder(options: TextOptions, texts: Sequence[Texts]) -> Encoder:
    """The encoder of a stream with these training texts.

    Raises ConfigError if the package is missing, DataError for a file that holds no tokenizer.
    """
    packages.need("text", "a stream of texts")
    return Encoder(_trained(options, texts) if options.tokenizer is None else _from_file(options.tokenizer), options)


def _from_file(place: str) -> Any:
    from tokenizers import Tokenizer

    if not Path(place).is_file():
        raise DataError(
            f"text.tokenizer is '{place}', and there is no such file; give the tokenizer.json of a network, or null "
            "to train a tokenizer on the training texts"
        )
    try:
        return Tokenizer.from_file(place)
    except Exception as error:  # the package raises plain Exceptions
        raise DataError(f"'{place}' holds no tokenizer of the package tokenizers: {reason(error)}") from error


def _trained(options: TextOptions, texts: Sequence[Texts]) -> Any:
    """A WordPiece tokenizer in lower case with BERT's rules for words and its templates for a text and a pair."""
    from tokenizers import trainers

    lines = [text for part in texts for side in (part.first, part.second or ()) for text in side]
    learner = _words({})
    trainer = trainers.WordPieceTrainer(
        vocab_size=options.vocabulary, show_progress=False, special_tokens=[*SPECIAL, *_characters(learner, lines)]
    )
    with _one_thread():
        learner.train_from_iterator(lines, trainer)
    # a new one, in which the characters are no special tokens
    return _words(learner.get_vocab())


def _characters(tokenizer: Any, lines: Sequence[str]) -> list[str]:
    """The characters of all words, at the beginning of a word and behind it, in a fixed order.

    The trainer numbers the latter in the order of a hash table, which differs from process to process. The numbers
    decide between equally frequent pieces, so they are given to the trainer as tokens that it knows.
    """
    inside, first = set[str](), set[str]()
    for line in lines:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(line)):
            first.update(word)
            inside.update(word[1:])
    return [*sorted(first), *(f"##{letter}" for letter in sorted(inside))]


def _words(vocabulary: Mapping[str, int]) -> Any:
    """A tokenizer of these pieces, or one without pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece(dict(vocabulary), unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    if vocabulary:
        made.add_special_tokens([*SPECIAL])
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
        )
    return made


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let the package use one thread: after it used several, it prints a warning in every process that is forked."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
