"""Random data, networks and options of the Python interface: an error of cfl, or a run, but no other error.

CFL_FUZZ is the number of cases; --hypothesis-show-statistics prints the share of those that run.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn

import cfl
from cfl.core import CflError
from tests import toy
from tests.test_fuzz import files

USUAL, SHAPES = (8,), [(3,), (0,), (), (1, 4, 4), (2, 2, 2), (1, 1, 8)]
KINDS: list[Callable[[Tensor], Any]] = [
    Tensor.double, Tensor.int, Tensor.bool, Tensor.cfloat, Tensor.byte, Tensor.numpy, Tensor.tolist,
    lambda x: x.to_sparse() if x.dim() else x, lambda x: np.array(x.tolist(), dtype=object), lambda x: None, str,
]  # fmt: skip
NETWORKS: list[Callable[[], Any]] = [
    lambda: nn.Sequential(),
    lambda: nn.Flatten(),
    lambda: nn.Linear(8, 2),
    lambda: nn.Linear(8, 1),
    lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(2)),
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)),
    lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2)),
    lambda: nn.Linear(8, 2).requires_grad_(False),
    lambda: nn.LSTM(8, 2),
    lambda: nn.Linear(8, 2).half(),
    lambda: nn.Linear(8, 2, device="meta"),
    lambda: "mlp",
]
OPTIONS = [
    "partition.clients=1", "partition.clients=9", "partition.name=shards", "partition.name=lda", "drop_rate=0.9",
    "cohort=1", "engine=vmapped", "local.batch_size=1", "local.epochs=3", "local.lr=1e30", "secagg=sum",
    "scenario=class", "strategy.threshold=1.0", "model.hidden=[0]", "model.hidden=[]", "dp.level=client",
    "on_bad_update=exclude", "validation=0.9", "precision=bf16", "model.adapter=lora", "attack.name=scale",
    "server.momentum=0.9",
]  # fmt: skip


def rarely(odd: list[Any], usual: Any, one_in: int = 80) -> st.SearchStrategy:
    """One of `odd` in one of so many draws: a case has some fifty draws, and one odd one is enough to refuse it."""
    return st.integers(1, one_in).flatmap(lambda n: st.sampled_from(odd) if n == one_in else st.just(usual))


@st.composite
def halves(draw: st.DrawFn, shape: tuple[int, ...], labels: int) -> tuple[Any, Any]:
    """Samples and labels of a part of a task."""
    size, shape = draw(rarely([0, 1, 2, 3], 24)), draw(rarely(SHAPES, shape))
    x = torch.rand(size, *shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if x.numel():
        x.view(-1)[0] = draw(rarely([torch.nan, torch.inf, -torch.inf, 3e38, 1e-45], 0.5))
    y = torch.arange(max(0, size + draw(rarely([-1, 1], 0)))) % labels + draw(rarely([-1, 1, 2**40], 0))
    return draw(rarely(KINDS, Tensor.float))(x), draw(rarely([*KINDS, Tensor.float], Tensor.long))(y)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    """The tasks of a stream, and other arguments of `from_tensors`."""
    shape, labels = draw(rarely(SHAPES, USUAL)), draw(rarely([1, 3, 4], 2, 8))
    part = halves(shape, labels)
    tasks: list[Any] = [(*draw(part), *draw(part)) for _ in range(draw(rarely([0], 2)))]
    tasks = draw(rarely([[*tasks, None], [task[:3] for task in tasks], tasks + tasks[:1]], tasks))
    public = draw(rarely([torch.rand(5, 3), "public", None], torch.rand(5, *shape)))
    name = draw(rarely(["", "../up", "x" * 300], "own"))
    return tasks, {"multi_head": draw(st.booleans()), "name": name, "public": public}


@files
@given(
    streams(),
    rarely(NETWORKS, None, 3),
    st.lists(st.sampled_from(OPTIONS), max_size=2),
    st.sampled_from(["fot", "fedavg", "er", "gpm", "ewc", "fedavg+feddf", "fot+scaffold", "fedavg+krum"]),
)
def test_random_data_and_networks_run_or_are_refused(
    data: tuple[list[Any], dict[str, Any]], network: Callable[[], Any] | None, options: list[str], method: str
) -> None:
    tasks, more = data
    try:
        stream = cfl.from_tensors(tasks, **more)
        config = toy.config("rounds=1", *options, method=method)
        with warnings.catch_warnings(action="ignore"):
            result = cfl.run(config, stream=stream, model=network and network(), progress=False)
    except CflError as error:
        assert str(error)
        event("refused")
    else:
        event("run")
        assert 0 <= result.metrics["acc"] <= 1
