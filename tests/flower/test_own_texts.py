"""A node's own texts: tokens in npz files, or a benchmark of texts."""

import numpy as np
import pytest
import torch

import cfl
from cfl import streams
from cfl.core import DataError
from cfl.flower import own_data
from cfl.streams import TextOptions

SHORT = TextOptions(vocabulary=600, max_length=24)


def described(run):
    """What nodes know of a stream of a run with seed 0."""
    return own_data.described(run, cfl.resolve("split-topics", overrides=[f"tasks={len(run)}"]))


def test_tokens_of_files_are_texts_of_the_run(tmp_path):
    run = streams.build("split-topics", tasks=2, text=SHORT)
    x = run.encoder(["the chef stirs the soup today", "the banker counts a coin at night"])
    np.savez(tmp_path / "task1.npz", x=x.numpy(), y=np.array([0, 1]))
    own = own_data.read(str(tmp_path), described(run), None)
    assert [len(task.train) for task in own.tasks] == [0, 2] and own.vocabulary == run.vocabulary
    found, labels = own.tasks[1].train.gather(torch.tensor([1]))
    assert (found.dtype, labels.tolist()) == (torch.int64, [1])
    assert torch.equal(found[0], x[1, :, : found.shape[2]].long())


def test_a_benchmark_of_texts_gets_the_options_of_the_run():
    run = streams.build("split-topics", text=SHORT)
    own = own_data.read("split-topics", described(run), None)
    assert torch.equal(own.tasks[4].train.pool.images, run.tasks[4].train.pool.images)


def test_texts_of_another_tokenizer_are_refused(tmp_path):
    run = streams.build("split-topics", text=SHORT)
    np.savez(tmp_path / "task0.npz", x=np.full((1, 2, 24), 1000), y=np.array([0]))
    with pytest.raises(DataError, match="row 0 of a sample holds token ids in"):
        own_data.read(str(tmp_path), described(run), None)
