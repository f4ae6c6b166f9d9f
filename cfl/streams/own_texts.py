"""Streams from texts of one's own."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cfl.core import DataError
from cfl.core.typed import described, typed
from cfl.streams.store import Stream
from cfl.streams.tensors import assemble, parts_of
from cfl.streams.tokens import TextOptions, Texts, encoder


@typed
def from_texts(
    tasks: Iterable[Sequence[Any]], name: str = "custom", multi_head: bool = False, text: TextOptions | None = None
) -> Stream:
    """Make a stream from your own texts.

    tasks: (x_train, y_train, x_test, y_test) of each task: x a sequence of n strings, or of n pairs of strings; y (n,)
    labels 0, 1, 2, ...
    multi_head: one head a task, whose labels become 0, 1, ...; otherwise one head for all labels of all tasks.
    text: tokenizer and length of the samples (2, text.max_length) int32; without a file, the tokenizer is trained on
    the training texts of all tasks.
    Raises ConfigError for arguments of another type, and if the extra `cfl[text]` is not installed. Raises DataError
    for inputs that are not strings or pairs, and for labels as `from_tensors`.
    """
    read, samples = parts_of(tasks, _read)
    texts = {what: _texts(own) for what, own in read.items()}
    encode = encoder(text or TextOptions(), [own for what, own in texts.items() if what.startswith("train")])
    tokens = {what: encode(own.first, own.second) for what, own in texts.items()}
    return replace(assemble(name, tokens, samples, multi_head, encode.vocabulary), encoder=encode)


def _read(x: Any, what: str) -> list[str] | list[tuple[str, str]]:
    """Strings, or pairs of them. what: their name, for errors."""
    found = [] if isinstance(x, str) or not isinstance(x, Iterable) else list(x)
    if not found:
        raise DataError(f"{what} are {described(x)}; give a list of texts, or of pairs of texts")
    pairs = isinstance(found[0], list | tuple)
    for place, one in enumerate(found):
        sides = one if isinstance(one, list | tuple) and pairs else [one]
        if len(sides) != 1 + pairs or not all(isinstance(side, str) for side in sides):
            wanted = "a pair of texts" if pairs else "a text"
            raise DataError(f"{what} have {described(one)} at position {place}, where {wanted} is needed")
    return [(first, second) for first, second in found] if pairs else found


def _texts(read: Sequence[Any]) -> Texts:
    if isinstance(read[0], str):
        return Texts(read, None, ())
    return Texts([first for first, _ in read], [second for _, second in read], ())
