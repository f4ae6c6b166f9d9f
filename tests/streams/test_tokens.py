"""Pools of tokens, and texts as tokens."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cfl.core import ConfigError, DataError
from cfl.streams.store import Pool, Stream, Task, TaskSamples
from cfl.streams.tokens import SPECIAL, TextOptions, Texts, encoder

SENTENCES = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"]
OPTIONS = TextOptions(vocabulary=60, max_length=16)


def tokens(*lengths: int, columns: int = 40) -> torch.Tensor:
    """A sample of each length: ids 1, 2, 3, ... and the mask."""
    sizes = torch.tensor(lengths)[:, None]
    mask = (torch.arange(columns) < sizes).int()
    return torch.stack([(torch.arange(columns).int() + 1) * mask, mask], dim=1)


def samples(*lengths: int, columns: int = 40) -> TaskSamples:
    rows = torch.arange(len(lengths))
    return TaskSamples(Pool(tokens(*lengths, columns=columns), vocabulary=41), rows, torch.zeros_like(rows))


# --- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns"),  # the longest text of the batch, rounded up to a multiple of 8
    [([0], 8), ([1], 8), ([0, 2], 16), ([2, 1, 3], 24), ([3, 4], 40)],
)
def test_a_batch_has_the_columns_of_its_longest_text(rows, columns):
    part = samples(3, 8, 9, 24, 33)
    x, y = part.gather(torch.tensor(rows))
    assert (x.shape, x.dtype, y.tolist()) == ((len(rows), 2, columns), torch.int64, [0] * len(rows))
    assert torch.equal(x, part.pool.images[rows][:, :, :columns].long())
    assert not part.pool.images[rows][:, 1, columns:].any()  # no token is lost


def test_no_batch_is_longer_than_the_stored_samples():
    x, _ = samples(3, 11, columns=12).gather(torch.tensor([0, 1]))
    assert x.shape == (2, 2, 12)
    assert samples(3, 11).gather(torch.tensor([], dtype=torch.int64))[0].shape == (0, 2, 8)


def test_the_mask_decides_what_is_padding():
    """Also behind a gap: a column with a 1 in the mask stays, whatever the id."""
    held = tokens(3)
    held[0, 1, 20] = 1
    part = TaskSamples(Pool(held, vocabulary=41), torch.tensor([0]), torch.tensor([0]))
    assert part.gather(torch.tensor([0]))[0].shape == (1, 2, 24)


def test_pools_of_tokens_refuse_what_is_for_images():
    with pytest.raises(DataError, match="token ids are no quantities"):
        Pool(tokens(3), torch.zeros(1), vocabulary=41)
    part = samples(3)
    with pytest.raises(DataError, match="cannot be permuted like pixels"):
        TaskSamples(part.pool, part.index, part.targets, torch.arange(80))
    with pytest.raises(ConfigError, match=r"augmentation \(flip\) needs images"):
        TaskSamples(part.pool, part.index, part.targets, augment=("flip",))


@pytest.mark.parametrize(
    ("held", "vocabulary", "fault"),
    [
        (tokens(3).long(), 41, r"must be int32 of shape \(N, 2, length\).*not torch.int64"),
        (tokens(3)[:, :1], 41, r"of shape \(1, 1, 40\)"),
        (tokens(3), 3, r"row 0 of a sample holds token ids in \[0, 3\), not in \[0, 3\]"),
        (tokens(3) * 2, 41, r"row 1 of a sample holds an attention mask in \[0, 2\), not in \[0, 2\]"),
        (-tokens(3), 41, r"not in \[-3, 0\]"),
    ],
)
def test_pools_of_other_tokens_are_refused(held, vocabulary, fault):
    with pytest.raises(DataError, match=fault):
        Pool(held, vocabulary=vocabulary)


def test_a_stream_has_one_vocabulary():
    one, other = samples(3, 4), TaskSamples(Pool(tokens(3, 4), vocabulary=50), torch.arange(2), torch.zeros(2).long())
    pair = [TaskSamples(part.pool, part.index[[row]], part.targets[[row]]) for part in (one, other) for row in (0, 1)]
    stream = Stream("s", (Task("a", *pair[:2], 1),), (2, 40), False)
    assert (stream.vocabulary, stream.to("cpu").vocabulary) == (41, 41)
    with pytest.raises(DataError, match="'b' of stream 's' has a vocabulary of 50 token ids, not 41"):
        Stream("s", (Task("a", *pair[:2], 1), Task("b", *pair[2:], 1)), (2, 40), False)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_text_becomes_its_tokens_between_special_ones():
    encode = encoder(OPTIONS, [Texts(SENTENCES, None, [0, 1, 0])])
    found = encode(["The cat sat on the mat", "the cat zzz"])
    assert (found.dtype, found.shape) == (torch.int32, (2, 2, 16))
    ids, mask = found[0]
    assert mask.tolist() == [1] * 8 + [0] * 8  # [CLS], six frequent words, [SEP]
    assert (ids[0], ids[7], ids[1]) == (2, 3, ids[5])  # "The" is "the"
    assert ids[8:].tolist() == [0] * 8 and ids[:8].min() > 1
    assert found[1, 0, 3] == 1  # no piece of z is known: [UNK]
    assert encode.text(found[0]) == SENTENCES[0]
    assert encode.vocabulary <= 60 and SPECIAL == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def test_a_pair_is_encoded_by_the_template_of_pairs_and_cut_to_the_length():
    encode = encoder(OPTIONS, [Texts(SENTENCES, None, [0, 1, 0])])
    pair, first, second = (
        encode(*given)[0] for given in ((["a cat"], ["the dog sat"]), (["a cat"],), (["the dog sat"],))
    )
    expected = [*first[0, :4].tolist(), *second[0, 1:5].tolist()]  # [CLS] a cat [SEP] the dog sat [SEP]
    assert pair[0, : len(expected)].tolist() == expected and int(pair[1].sum()) == len(expected)
    long = encode(["the cat " * 30], ["the dog " * 30])[0]
    assert int(long[1].sum()) == 16 and (long[0] == 3).sum() == 2  # both ends are there


@pytest.mark.slow
def test_training_is_the_same_in_every_process():
    """The package numbers characters by a hash table of its own, unless it is told their numbers."""
    code = f"""
    import json
    from cfl.streams.tokens import TextOptions, Texts, encoder
    texts = Texts({SENTENCES!r}, None, [0, 0, 0])
    encode = encoder(TextOptions(vocabulary=60, max_length=16), [texts])
    print(json.dumps([encode._tokenizer.get_vocab(), encode(texts.first).tolist()], sort_keys=True))
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    (only,) = found
    vocabulary, _ = json.loads(only)
    assert [vocabulary[name] for name in SPECIAL] == [0, 1, 2, 3, 4]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))


def test_a_tokenizer_comes_from_a_file(tmp_path):
    trained = encoder(OPTIONS, [Texts(SENTENCES, None, [0, 1, 0])])
    trained._tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = TextOptions(tokenizer=str(tmp_path / "tokenizer.json"), max_length=12)
    read = encoder(options, [Texts(["something else"], None, [0])])
    assert torch.equal(read(SENTENCES), trained(SENTENCES)[:, :, :12]) and read.vocabulary == trained.vocabulary
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match="broken.json' holds no tokenizer"):
        encoder(TextOptions(tokenizer=str(tmp_path / "broken.json")), [])
    with pytest.raises(DataError, match="no such file; give the tokenizer.json of a network, or null"):
        encoder(TextOptions(tokenizer=str(tmp_path / "none.json")), [])


@pytest.mark.parametrize(("options", "fault"), [({"max_length": 4}, "at least 8"), ({"vocabulary": 5}, "above 5")])
def test_options_out_of_range_are_refused(options, fault):
    with pytest.raises(ConfigError, match=fault):
        TextOptions(**options)


def test_encoding_keeps_the_environment(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    encoder(OPTIONS, [Texts(SENTENCES, None, [0, 1, 0])])
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    encoder(OPTIONS, [Texts(SENTENCES, None, [0, 1, 0])])
    assert "TOKENIZERS_PARALLELISM" not in os.environ
