"""The `loop` engine: the clients of a round one after another, in the order of their ids."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cfl import rng, tree
from cfl.engines.step import LocalStep
from cfl.errors import RoundAborted, UpdateError
from cfl.local.base import Gathers
from cfl.local.chain import STRATEGY, Chain, own_state
from cfl.models.handle import Model
from cfl.optim import Optimizer
from cfl.privacy.gaussian import SampleNoise
from cfl.strategies.base import Strategy
from cfl.sums import Sum
from cfl.tree import Tree
from cfl.types import MEMORY, Batch, Client, Parts, RoundInfo

Observe = Callable[[int, Tree], None]


@dataclass
class Outcome:
    """What a round's clients give: their uploads put together, states, and figures.

    mean: weighted means; plain sums of "work"; what regularizers send as their `gathers` says.
    states: client id to new state; excluded: clients whose upload was not finite; aborted: why there is no sum.
    bytes_up, bytes_down: of all clients, the second without what was broadcast; noise: see `Privacy`; clipped: entries
    beyond the range of integers; shortened: clients whose upload was scaled down to dp.clip.
    loss: mean training loss of the clients' last local epochs, None where nobody trained.
    """

    mean: Parts = field(default_factory=dict)
    states: dict[int, Tree] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)
    aborted: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    noise: float = 0.0
    clipped: int = 0
    shortened: int = 0
    loss: float | None = None

    def figures(self) -> dict[str, Any]:
        """What a run records of it."""
        names = ("excluded", "aborted", "clipped", "shortened", "loss")
        return {"clients": len(self.states), **{name: getattr(self, name) for name in names}}

    def traffic(self, info: RoundInfo, shared: Parts) -> dict[str, int]:
        """Bytes of a round of all clients, with the broadcast `shared` to each; none for what is only a measurement."""
        broadcast = len(info.clients) * sum(map(tree.nbytes, shared.values()))
        counts = {"bytes_up": self.bytes_up, "bytes_down": broadcast + self.bytes_down}
        return dict.fromkeys(counts, 0) if info.phase.diagnostic else counts

    def faults(self, info: RoundInfo) -> Iterator[str]:
        """What went wrong that a run can go on with."""
        for client in self.excluded:
            yield f"client {client} left out: NaN or infinity in its update ({info.place})"
        if self.aborted is not None:
            yield f"round aborted, nothing is changed ({info.place}): {self.aborted}"
        if self.clipped:
            yield (
                f"{self.clipped} entries of uploads were beyond the range of integers and clipped ({info.place}); "
                "raise secure.bits or lower secure.fraction_bits"
            )


@dataclass(frozen=True)
class LoopEngine:
    """Clients one by one.

    weights: of a client in the mean, its samples or 1; on_bad_update: "raise" UpdateError or "exclude" the client.
    sums: makes the sum of a round's uploads; noise: of the gradients, where single samples are protected.
    """

    model: Model
    strategy: Strategy
    chain: Chain
    optimizer: Optimizer
    epochs: int
    batch_size: int
    weights: Literal["samples", "uniform"]
    on_bad_update: Literal["raise", "exclude"]
    sums: Callable[[RoundInfo, Mapping[str, Gathers]], Sum] = Sum
    noise: SampleNoise | None = None

    def round(
        self,
        info: RoundInfo,
        shared: Parts,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
        observe: Observe | None = None,
    ) -> Outcome:
        """One round over the cohort's clients, in ascending id. Raises UpdateError for an upload that is not finite.

        clients: of `info.uploading`, all or some; or, where those are none, one that shows what an upload looks like.
        observe: called with each client's id and model after its local training.
        """
        step = LocalStep(
            self.model,
            info.task,
            info.frozen,
            self.chain,
            self.optimizer,
            heads=info.heads,
            public=info.public,
            noise=self.noise,
        )
        gathers = {owner: member.gathers for owner, member in self.chain.regularizers.items()}
        total, outcome, losses = self.sums(info, gathers), Outcome(), []
        try:
            total.open()
            for client in clients:
                drawn = client.id in info.uploading
                look = observe if drawn else None
                uploads, state, loss = self._client(step, info, shared, states[client.id], client, look)
                if not total.add(client.id, uploads, float(len(client)) if self.weights == "samples" else 1.0):
                    self._reject(client.id, info)
                    outcome.excluded.append(client.id)
                elif drawn:
                    outcome.states[client.id] = state
                    losses.append(loss)
            if outcome.excluded and not outcome.states:
                raise UpdateError(f"no client's update was finite ({info.place}); lower local.lr")
            outcome.mean = total.close()
        except RoundAborted as error:
            outcome.aborted, outcome.states = str(error), {}
        outcome.bytes_up, outcome.bytes_down = total.traffic()
        outcome.noise, outcome.clipped, outcome.shortened = total.noise, total.clipped, total.shortened
        outcome.loss = sum(losses) / len(losses) if info.phase.train and losses else None
        return outcome

    def _client(
        self,
        step: LocalStep,
        info: RoundInfo,
        shared: Parts,
        state: Tree,
        client: Client,
        observe: Observe | None,
    ) -> tuple[Parts, Tree, float]:
        """One client's uploads, new state and mean loss of its last local epoch."""
        uploads: Parts = {}
        params, loss = shared["params"], 0.0
        places = own_state(state, STRATEGY).get(MEMORY, torch.empty(0, 2, dtype=torch.int64)).to(client.device)
        if info.phase.train:
            with _named("local training", client, info):
                trained, steps, loss = self._train(step, info, shared, state, client, places)
            key = rng.key(info.key, "finish", client.id)
            with _named("finish", client, info), rng.fork(key, client.device):
                ctx = step.context(shared, state, steps, key, lr=info.lr, client=torch.tensor(client.id))
                uploads, state = self.chain.finish(trained, ctx, steps)
            params = {**params, **trained}
            if observe is not None:
                with self.model.evaluation():
                    observe(client.id, params)
        if info.phase.work:
            own = own_state(state, STRATEGY)
            key = rng.key(info.key, "work", client.id)
            with (
                _named(f"work of phase {info.phase.name}", client, info),
                self.model.evaluation(),
                rng.fork(key, client.device),
            ):
                uploads["work"], own = self.strategy.work(params, client, shared, own, info)
            others = {name: leaf for name, leaf in state.items() if not name.startswith(f"{STRATEGY}/")}
            state = {**{f"{STRATEGY}/{name}": leaf for name, leaf in own.items()}, **others}
            if info.phase.stores and uploads["work"]:
                raise UpdateError(f"a phase that only stores sends {list(uploads['work'])} ({info.place})")
        stored = own_state(state, STRATEGY).get(MEMORY, places)
        if stored is not places and not client.may_store(stored, places):
            raise UpdateError(
                f"client {client.id} stores samples that it does not hold ({info.place}); "
                "a memory grows by places (task, position in the client's share) of the current data"
            )
        return uploads, state, loss

    def _train(
        self, step: LocalStep, info: RoundInfo, shared: Parts, state: Tree, client: Client, places: Tensor
    ) -> tuple[Tree, int, float]:
        """A client's local epochs: trained leaves and buffers, steps made, mean loss of the last epoch."""
        strays = {task for task in places[:, 0].tolist() if task not in (info.task, *info.heads)}
        if strays and self.model.multi_head:
            raise ValueError(
                f"its memory holds samples of tasks {strays}, whose heads do not travel; see Strategy.heads"
            )
        local, index, id = step.start(shared["params"]), 0, torch.tensor(client.id)
        memories = recalled(client, places, self.batch_size, rng.key(info.key, "memory", client.id))
        self.model.module.train()
        with rng.fork(rng.key(info.key, "local", client.id), client.device):
            for epoch in range(self.epochs):
                source = rng.generator(rng.key(info.key, "order", client.id, epoch))
                changes = rng.key(info.key, "augment", client.id, epoch)
                if self.noise is None:
                    order = torch.randperm(len(client), generator=source).to(client.device)
                    batches = client.batches(self.batch_size, order, changes)
                else:
                    batches = client.draws(self.batch_size, client.steps(self.batch_size), source, changes)
                losses = []
                for batch in batches:
                    key = rng.key(info.key, "step", client.id, index)
                    local, loss = step(local, batch, shared, state, info.lr, index, key, next(memories), id)
                    losses.append(loss)
                    index += 1
        return {**local.params, **local.buffers}, index, float(torch.stack(losses).mean())

    def _reject(self, client: int, info: RoundInfo) -> None:
        if self.on_bad_update == "raise":
            raise UpdateError(
                f"client {client} sent an update with NaN or infinity ({info.place}); "
                "lower local.lr, or leave such clients out with on_bad_update=exclude"
            )


@contextlib.contextmanager
def _named(what: str, client: Client, info: RoundInfo) -> Iterator[None]:
    """Errors inside become an UpdateError that names the place."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        place = f"client {client.id} ({info.place})"
        raise UpdateError(f"{what} failed at {place}: {error}") from error


def recalled(client: Client, places: Tensor, most: int, key: int) -> Iterator[Batch]:
    """For each step, at most `most` samples of a client's memory (m, 2), drawn without replacement."""
    whole = client.recall(places) if len(places) <= most else None
    for step in itertools.count():
        if whole is None:
            drawn = torch.randperm(len(places), generator=rng.generator(rng.key(key, step)))[:most]
            yield client.recall(places[drawn.to(places.device)])
        else:
            yield whole
