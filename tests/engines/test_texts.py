"""Texts of unequal length: engines agree, and padding has no influence on a run."""

import pytest
import torch
from torch import Tensor, nn

import cfl
from cfl import models
from cfl.core import rng
from cfl.streams import pool
from cfl.streams.store import Pool, Stream, Task, TaskSamples, unlabelled
from tests import toy
from tests.engines.test_vmapped import assert_near, assert_same_run, run

WORDS = 30
LONGEST = (7, 20, 30)  # of task 0, task 1, and the public texts: 8, 24 and 32 columns in a batch
ENGINES = ("vmapped, 2", "vmapped, 99", "pool, 2", "pool+vmapped, 2")


class Mean(nn.Module):
    """The mean of the tokens' vectors, and a linear layer on it; in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, 2)
        with rng.fork(2):
            self.vectors.reset_parameters()
            self.head.reset_parameters()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        ids, mask = x.long().unbind(1)
        tokens = self.vectors(ids) * mask[..., None]
        return self.head(tokens.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def samples(part: int, count: int, length: int) -> Tensor:
    """Tokens (count, 2, length) of 1 to LONGEST[part] tokens, with the id 0 and the mask 0 behind them."""
    draws = rng.generator(rng.key(0, "texts", part))
    ids = torch.randint(1, WORDS, (count, 32), generator=draws)
    sizes = torch.randint(1, LONGEST[part] + 1, (count, 1), generator=draws)
    mask = (torch.arange(32) < sizes).long()
    found = torch.zeros(count, 2, length, dtype=torch.int32)
    found[:, :, :32] = torch.stack([ids * mask, mask], dim=1)
    return found


def texts(length: int = 32, multi_head: bool = True) -> Stream:
    """Two tasks of 40 training and 20 test texts, of class 1 if their first id is even; 20 public texts."""
    tasks = []
    for number in range(2):
        tokens = samples(number, 60, length)
        labels, own = 1 - tokens[:, 0, 0].long() % 2, Pool(tokens, vocabulary=WORDS)
        parts = [TaskSamples(own, rows, labels[rows]) for rows in torch.arange(60).split([40, 20])]
        tasks.append(Task(f"task {number}", *parts, classes=2))
    public = unlabelled(Pool(samples(2, 20, length), vocabulary=WORDS))
    return Stream("texts", tuple(tasks), (2, length), multi_head, public=public)


@pytest.mark.parametrize("multi_head", toy.quick(True, of=[False, True]))
def test_engines_agree_on_clients_with_batches_of_unequal_length(multi_head):
    whole, _ = assert_same_run(Mean, lambda: texts(multi_head=multi_head), ("local.epochs=2",), ENGINES)
    first = Mean().vectors.weight.detach()
    assert float((whole.params["vectors.weight"] - first).abs().max()) > 1e-3  # they trained


def bert():
    sizes = {"layers": 1, "width": 8, "heads": 2, "intermediate": 16, "dropout": 0.0}
    with rng.fork(3):
        return models.build("bert_tiny", (2, 32), 2, {**sizes, "vocabulary": WORDS}).double()


def test_engines_agree_on_a_transformer():
    """Its attention gives padding no weight, and its positions count from the first token."""
    assert_same_run(bert, texts, ("local.lr=0.05",), ("vmapped, 99", "pool, 2"))


@pytest.mark.slow
def test_engines_agree_where_a_batch_has_samples_of_two_tasks():
    """Replayed texts of the first task are shorter than those of the second; `joint` draws batches of both."""
    assert_same_run(Mean, texts, ("strategy.memory=5", "tasks=2"), ENGINES, "er")
    assert_same_run(lambda: Mean().float(), texts, (), ENGINES, "joint")


@pytest.mark.parametrize("method", ["feddf", "fedet", "fedproj"])
def test_engines_agree_on_public_texts(method):
    options = ("public.name=stream", f"regularizer.{method}.server_batch=8", f"regularizer.{method}.server_lr=0.01")
    assert_same_run(Mean, texts, options, ("vmapped, 2", "pool, 2"), method)


def test_longer_padding_of_the_stored_samples_changes_no_byte():
    """Batches are cut to their longest text, so they are the same."""
    short, long = (run(Mean, lambda length=length: texts(length), ())[0] for length in (32, 64))
    assert all(torch.equal(long.params[name], leaf) for name, leaf in short.params.items())
    assert short.metrics["accuracy_matrix"] == long.metrics["accuracy_matrix"]


def test_padding_in_a_batch_changes_no_result(monkeypatch):
    cut, _ = run(Mean, texts, ())
    monkeypatch.setattr(pool, "_COLUMNS", 32)  # every batch is as long as the stored samples
    whole, _ = run(Mean, texts, ())
    assert_near(cut.params, whole.params)


def test_a_run_on_texts_resumes_to_the_same_bytes(tmp_path):
    stream, config = texts(), toy.config(method="er")

    class Stop(toy.Rows):
        def round(self, row):
            super().round(row)
            if len(self.rows) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cfl.run(config, stream=stream, model=Mean(), output=tmp_path / "a", sink=Stop())
    resumed = cfl.run(config, stream=stream, model=Mean(), output=tmp_path / "a", resume=True)
    whole = cfl.run(config, stream=stream, model=Mean())
    assert all(torch.equal(resumed.params[name], leaf) for name, leaf in whole.params.items())
