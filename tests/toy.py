"""A stream and a run of seconds, shared by tests: those of the conformance kit."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cfl
from cfl.contract import EMPTY, Batch, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import Tree, rng
from cfl.models import Model
from cfl.runtime.sinks import NullSink
from cfl.testing.toys import CLASSES, DIMENSIONS, toy_config
from cfl.testing.toys import toy_stream as stream

DATA = os.environ.get("CFL_DATA")  # as it was before tests change it

__all__ = ["CLASSES", "DIMENSIONS", "stream"]  # passed on; what is defined here is there anyway


def config(*overrides: str, method: str = "fot", **options: Any) -> cfl.RunConfig:
    """A small run: 4 clients, 3 a round, 2 rounds a task, an 8-6-6-2 MLP."""
    return toy_config(*overrides, method=method, **options)


def flat(leaves: Tree) -> Tensor:
    """All leaves of a tree end to end, (numbers,)."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()])


def on_heads_alone(method: str) -> Tensor:
    """All parameters, end to end, after a run of two tasks on a network that has nothing but a head a task."""
    result = cfl.run(config(method=method), stream=stream(2, multi_head=True), model=nn.Linear(DIMENSIONS, CLASSES))
    return flat(result.params)


def unstacked(stacked: Tree) -> list[Tree]:
    """The trees that `tree.stack` stacked."""
    return [dict(zip(stacked, leaves)) for leaves in zip(*stacked.values())]


def context(
    shared: TreesByOwner, state: Tree, batch: Batch, model: Model | None = None, task: int = 0, **more: Any
) -> Ctx:
    """What a hook sees, where a test calls it without an engine: no memory, step 0, key 0."""
    ctx = Ctx(shared, state, batch, EMPTY, None, model, task, step=0, lr=0.1, key=0)  # type: ignore[arg-type]
    return ctx._replace(**more)


def recording(base: type[Strategy]) -> type[Any]:
    """The strategy, with a list `rounds` of (info, what came down, server after) of each round."""

    @dataclass(frozen=True)
    class Recorder(base):  # type: ignore[valid-type, misc]
        rounds: list = field(default_factory=list)

        def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
            down = super().broadcast(server, info)
            self.rounds.append([info, down])
            return down

        def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
            new = super().absorb(server, mean, info, lr)
            self.rounds[-1].append(new)
            return new

    return Recorder


def assert_stacked_is_each_alone(loss: Callable[..., Tensor], *stacked: Tensor) -> None:
    """Value and gradient of a loss under vmap over the first dimension are those of each member."""
    both = torch.func.grad_and_value(loss)
    for number, together in enumerate(zip(*torch.func.vmap(both)(*stacked), strict=True)):
        for ours, theirs in zip(together, both(*(leaf[number] for leaf in stacked)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)


def consolidation(model: Model, task: int = 0, clients: Sequence[int] = (0,), key: int = 11) -> RoundInfo:
    """The round in which clients store what they need of a task; the model is in evaluation mode, as there."""
    model.module.eval()
    return RoundInfo(
        task=task,
        tasks=3,
        phase=Phase("consolidate", cohort="available", train=False, work=True),
        round=0,
        clients=tuple(clients),
        names=(*model.trainable(task), *model.buffers(task)),
        frozen=frozenset(),
        heads=(task,),
        population=len(clients),
        lr=0.1,
        model=model,
        key=key,
    )


# Methods of each kind of state and upload: of those with many repeats the others are marked slow.
STRATEGIES, RULES = ("fedavg", "er", "fot", "glfc"), ("moon", "scaffold", "feddf", "fedsol", "krum")


def quick(*kept: Any, of: Iterable[Any]) -> list[Any]:
    """Values of a parameter `of` a test, all but the kept ones marked slow; a tuple holds several parameters."""
    values = list(of)
    assert all(value in values for value in kept)
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=() if value in kept else pytest.mark.slow)
        for value in values
    ]


def need_data(*names: str) -> None:
    """Skip the test where CFL_DATA names no folder with these data sets as npz files."""
    if not DATA or not all(Path(DATA, f"{name}.npz").exists() for name in names):
        pytest.skip(f"set CFL_DATA to a folder with {' and '.join(f'{name}.npz' for name in names)}")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal draws in float64 that float32, in which streams keep their samples, holds exactly."""
    return torch.randn(*shape, generator=rng.generator(seed)).double()


def texts(count: int, length: int = 8, words: int = 20, seed: int = 0) -> Tensor:
    """Random token ids from 1 to `words` - 1 and their mask, (count, 2, length), of random lengths."""
    draw = rng.generator(seed)
    ids = torch.randint(1, words, (count, length), generator=draw)
    longest = torch.randint(length // 2, length + 2, (count, 1), generator=draw)
    mask = (torch.arange(length) < longest).long()
    return torch.stack([ids * mask, mask], dim=1)


def text_stream(tasks: int = 2, train: int = 24, length: int = 8, words: int = 20) -> cfl.Stream:
    """A head for each task, which has to tell whether the first token is one of the upper half of the words."""
    parts = []
    for task in range(tasks):
        x = texts(2 * train, length, words, seed=task)
        y = (x[:, 0, 0] >= words // 2).long()
        parts.append((x[:train], y[:train], x[train:], y[train:]))
    return cfl.from_tensors(parts, multi_head=True)


def by_client(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a round, as JSON has it, with ids of clients as numbers."""
    ids = (name for name in ("dropped", "missing") if name in row)
    return {**row, **{name: {int(id): own for id, own in row[name].items()} for name in ids}}


class Rows(NullSink):
    """Keeps the rows that a run reports."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def round(self, row: dict[str, Any]) -> None:
        self.rows.append(by_client(row))


class Point(nn.Module):
    """Two weights, at 0, that are the outputs, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


@dataclass(frozen=True)
class Bowl(Strategy):
    """The loss ((u - 2)^2 + delta (v - 1)^2) / 2, with (1, delta) as the first sample."""

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        return (ctx.batch.x[0] * (logits[0] - torch.tensor([2.0, 1.0])) ** 2).sum() / 2


class Net(nn.Sequential):
    """A sequence that takes samples in the precision of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


class ByKeyword(nn.Sequential):
    """A sequence that names the input of each module."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(input=x)
        return x


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and deviation 1 (Qiao et al., 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / deviation, self.bias)


class TwoNames(nn.Module):
    """Two layers, each an attribute and a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layers = nn.Sequential(self.first, nn.ReLU(), self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ManyRows(nn.Module):
    """A Linear layer as the last one, to which positions are the first dimension, or samples and positions are one."""

    def __init__(self, features: int, outputs: int, *, folded: bool) -> None:
        super().__init__()
        self.head, self.folded, self.positions = nn.Linear(1, outputs), folded, features

    def forward(self, x: Tensor) -> Tensor:
        rows = x[..., None].flatten(0, 1) if self.folded else x.T[..., None]
        out = self.head(rows)
        return out.unflatten(0, (-1, self.positions)).mean(1) if self.folded else out.mean(0)


def net(*parts: nn.Module) -> Net:
    """The modules in float64, with weights that do not depend on the tests before."""
    made = Net(*parts)
    with rng.fork(1):
        for part in made:
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    return made.double()


def mlp(*widths: int) -> Net:
    """Linear layers with ReLU between them, in float64."""
    pairs = zip(widths[:-1], widths[1:], strict=True)
    return net(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())][:-1])


class Paints(Strategy):
    """FedAvg that shows images after each task but the first: a row for each task, made from the parameters."""

    channels = 3

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        return {**server, "painted": {"rows": torch.tensor(task + 1)}}

    def images(self, server: Server, model: Model) -> Tensor | None:
        if "painted" not in server:
            return None
        rows = int(server["painted"]["rows"])
        places = torch.arange(rows * 4 * self.channels * 8 * 8).reshape(rows, 4, self.channels, 8, 8)
        return (places * 3 + int(flat(server["params"]).abs().sum() * 10)).to(torch.uint8)
