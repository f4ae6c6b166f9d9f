"""Streams from texts of one's own."""

import numpy as np
import pytest
import torch

import cfl
from cfl.core import DataError
from cfl.streams import TextOptions, from_texts, with_scenario
from tests import toy

pytest.importorskip("tokenizers")
SHORT = TextOptions(max_length=8)
ANIMALS, PLANTS = ["a cat runs", "the cat sleeps"], ["a rose grows", "the rose wilts"]
TASKS = [
    (ANIMALS * 8 + PLANTS * 8, [0] * 16 + [1] * 16, ["the cat runs", "the rose grows"], [0, 1]),
    (["a bus stops", "a song ends"] * 16, [3, 2] * 16, ["the bus stops", "the song ends"], [3, 2]),
]


def test_samples_are_the_tokens_of_the_texts():
    stream = from_texts(TASKS, "mine", multi_head=True, text=SHORT)
    assert stream.input_shape == (2, 8) and stream.heads == (2, 2) and stream.vocabulary == stream.encoder.vocabulary
    for task, (train, y, test, y_test) in zip(stream.tasks, TASKS, strict=True):
        for part, texts, labels in ((task.train, train, y), (task.test, test, y_test)):
            x, found = part.gather(torch.arange(len(part)))
            assert [stream.encoder.text(sample) for sample in x] == texts
            assert found.tolist() == [sorted(set(y)).index(label) for label in labels]


def test_the_tokenizer_knows_the_words_of_training_texts_alone():
    stream = from_texts([(["red green"] * 4, [0, 1] * 2, ["blue"], [0])], text=SHORT)
    x, _ = stream.tasks[0].test.gather(torch.arange(1))
    assert stream.encoder.text(x[0]) == ""  # [UNK] is a special token
    assert stream.encoder.text(stream.encoder(["green red"])[0]) == "green red"


def test_pairs_are_separated():
    stream = from_texts([([("red", "green"), ["green", "red"]], [0, 1], [("red", "red")], [1])], text=SHORT)
    cls, sep = 2, 3  # ids of the special tokens
    (x, _), ids = stream.tasks[0].train.gather(torch.arange(2)), stream.encoder(["red"])[0, 0]
    red, green = int(ids[1]), int(x[0, 0, 3])
    assert x[:, 0].tolist() == [[cls, red, sep, green, sep, 0, 0, 0], [cls, green, sep, red, sep, 0, 0, 0]]


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_a_run_on_own_texts_learns_them(scenario):
    stream = from_texts(TASKS, "mine", multi_head=True, text=SHORT)
    options = ["model.name=bert_tiny", "model.layers=1", "model.width=16", "model.heads=2", "model.intermediate=32"]
    options += ["rounds=6", "partition.clients=2", "cohort=2", "local.batch_size=8", "local.optimizer=adam"]
    config = cfl.resolve("mine", method="joint", overrides=[*options, "local.lr=0.01", f"scenario={scenario}"])
    assert cfl.run(config, stream=stream).accuracy_matrix[-1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        ("abc", "train samples of task 0 are 'abc'; give a list of texts, or of pairs of texts"),
        (7, "train samples of task 0 are 7; give a list of texts"),
        ([], "train samples of task 0 are a list of 0; give a list of texts"),
        ([1, 2], "train samples of task 0 have 1 at position 0, where a text is needed"),
        (["a", ("b", "c")], "have a tuple of 2 str at position 1, where a text is needed"),
        ([("a", "b"), "cd"], "have 'cd' at position 1, where a pair of texts is needed"),
        ([("a", "b", "c"), "d"], "have a tuple of 3 str at position 0, where a pair of texts is needed"),
    ],
    ids=str,
)
def test_other_inputs_are_named(x, fault):
    with pytest.raises(DataError) as caught:
        from_texts([(x, [0, 1], ["a", "b"], [0, 1])])
    assert fault in str(caught.value)


def test_texts_may_be_an_array():
    plain, array = (
        from_texts([(kind(ANIMALS + PLANTS), [0, 0, 1, 1], kind(PLANTS), [1, 1])]) for kind in (list, np.array)
    )
    assert plain.digests(public=False) == array.digests(public=False)


def test_methods_that_make_samples_refuse_own_texts():
    stream = with_scenario(from_texts(TASKS, "mine", multi_head=True, text=SHORT), "class")
    with pytest.raises(cfl.errors.ConfigError, match="target cannot run on texts"):
        cfl.run(toy.config("tasks=2", "model.name=bert_tiny", "scenario=class", method="target"), stream=stream)
