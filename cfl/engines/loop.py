"""The `loop` engine: the clients of a round one after another, in the order of their ids."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cfl.aggregation.gaussian import SampleNoise
from cfl.aggregation.plain import UploadSum
from cfl.contract.composed import STRATEGY, ComposedMethod, own_state
from cfl.contract.data import MEMORY, Batch, Client
from cfl.contract.regularizer import Gathers
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.contract.strategy import Strategy
from cfl.core import rng
from cfl.core.errors import MOST_NAMES, UpdateError
from cfl.core.optim import Optimizer
from cfl.core.tree import Tree
from cfl.engines.base import Collected, Engine, Observe, Sums
from cfl.engines.step import LocalStep
from cfl.models.handle import Model


class Trained(NamedTuple):
    """A client after local training. params: trained leaves and buffers; loss: mean () of the last local epoch."""

    client: Client
    params: Tree
    steps: int
    loss: Tensor


@dataclass(frozen=True)
class LoopEngine(Engine):
    """Clients one by one.

    weights: of a client in the mean, its samples or 1; on_bad_update: "raise" UpdateError or "exclude" the client.
    sums: makes the sum of a round's uploads; noise: of the gradients, where single samples are protected.
    """

    model: Model
    strategy: Strategy
    composed: ComposedMethod
    optimizer: Optimizer
    epochs: int
    batch_size: int
    weights: Literal["samples", "uniform"]
    on_bad_update: Literal["raise", "exclude"]
    sums: Sums = UploadSum
    noise: SampleNoise | None = None

    @property
    def gathers(self) -> Mapping[str, Gathers]:
        return {owner: member.gathers for owner, member in self.composed.regularizers.items()}

    def collect(
        self,
        total: UploadSum,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
        observe: Observe | None,
    ) -> Collected:
        found = Collected()
        step, uploading = self.step(info), set(info.uploading)
        before = _writes(shared, states)
        for client, trained in self._after_training(step, info, shared, states, clients):
            drawn, state = client.id in uploading, states[client.id]
            uploads, state = self._uploads(step, info, shared, state, client, trained, observe if drawn else None)
            if not total.add(client.id, uploads, float(len(client)) if self.weights == "samples" else 1.0):
                self._reject(client.id, info)
                found.excluded.append(client.id)
            elif drawn:
                found.states[client.id] = _own(state, states[client.id])
                if trained is not None:
                    found.losses[client.id] = trained.loss
        written = [what for what, writes in _writes(shared, states).items() if writes != before[what]]
        if written:  # in another process it would be lost
            places = ", ".join(written[:MOST_NAMES]) + ", ..." * (len(written) > MOST_NAMES)
            raise UpdateError(
                f"a hook writes in place to {places} ({info.place}); "
                "hooks leave what they are given as it is and return new tensors"
            )
        return found

    def step(self, info: RoundInfo) -> LocalStep:
        """The local step of a round's clients."""
        return LocalStep(
            self.model,
            info.task,
            info.frozen,
            self.composed,
            self.optimizer,
            heads=info.heads,
            public=info.public,
            noise=self.noise,
        )

    def trained(
        self,
        step: LocalStep,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
    ) -> Iterator[Trained]:
        """Local training of each client, in any order."""
        for client in clients:
            with named("local training", [client], info):
                yield self._train(step, info, shared, states[client.id], client)

    def _after_training(
        self,
        step: LocalStep,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
    ) -> Iterator[tuple[Client, Trained | None]]:
        if not info.phase.train:
            yield from ((client, None) for client in clients)
            return
        for trained in self.trained(step, info, shared, states, clients):
            yield trained.client, trained

    def _uploads(
        self,
        step: LocalStep,
        info: RoundInfo,
        shared: TreesByOwner,
        state: Tree,
        client: Client,
        trained: Trained | None,
        observe: Observe | None,
    ) -> tuple[TreesByOwner, Tree]:
        """A client's uploads and new state, after local training where there was some."""
        uploads: TreesByOwner = {}
        params, places = shared["params"], recorded(state, client)
        if trained is not None:
            key = rng.key(info.key, "finish", client.id)
            with named("finish", [client], info), rng.fork(key, client.device):
                ctx = step.context(shared, state, trained.steps, key, lr=info.lr, client=torch.tensor(client.id))
                uploads, state = self.composed.finish(trained.params, ctx, trained.steps)
            params = {**params, **trained.params}
            if observe is not None:
                with self.model.evaluation():
                    observe(client.id, params)
        if info.phase.work:
            own = own_state(state, STRATEGY)
            key = rng.key(info.key, "work", client.id)
            with (
                named(f"work of phase {info.phase.name}", [client], info),
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
        return uploads, state

    def _train(self, step: LocalStep, info: RoundInfo, shared: TreesByOwner, state: Tree, client: Client) -> Trained:
        """A client's local epochs."""
        local, index, id = step.start(shared["params"]), 0, torch.tensor(client.id)
        seen = self.composed.step_state(state)
        memories = self.memories(info, state, client)
        self.model.module.train()
        with rng.fork(rng.key(info.key, "local", client.id), client.device):
            for epoch in range(self.epochs):
                losses = []
                for batch in client.gathered(*self.plan(info, client, epoch)):
                    key = rng.key(info.key, "step", client.id, index)
                    local, loss = step(local, batch, shared, seen, info.lr, index, key, next(memories), id)
                    losses.append(loss)
                    index += 1
        return Trained(client, {**local.params, **local.buffers}, index, torch.stack(losses).mean())

    def plan(self, info: RoundInfo, client: Client, epoch: int) -> tuple[list[Tensor], int]:
        """The positions in a client's data that each batch of an epoch holds, and the key of random changes to them."""
        source = rng.generator(rng.key(info.key, "order", client.id, epoch))
        changes = rng.key(info.key, "augment", client.id, epoch)
        if self.noise is None:
            return client.shuffled(self.batch_size, source), changes
        return client.draws(self.batch_size, client.steps(self.batch_size), source), changes

    def memories(self, info: RoundInfo, state: Tree, client: Client) -> Iterator[Batch]:
        """What a client draws from its memory, for each step."""
        places = recorded(state, client)
        strays = {task for task in places[:, 0].tolist() if task not in (info.task, *info.heads)}
        if strays and self.model.multi_head:
            raise ValueError(
                f"its memory holds samples of tasks {strays}, whose heads do not travel; see Strategy.heads"
            )
        return recalled(client, places, self.batch_size, rng.key(info.key, "memory", client.id))

    def _reject(self, client: int, info: RoundInfo) -> None:
        if self.on_bad_update == "raise":
            raise UpdateError(
                f"client {client} sent an update with NaN or infinity ({info.place}); "
                "lower local.lr, or leave such clients out with on_bad_update=exclude"
            )


@contextlib.contextmanager
def named(what: str, clients: Sequence[Client], info: RoundInfo) -> Iterator[None]:
    """Errors inside become an UpdateError that names the place."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        ids = ", ".join(str(client.id) for client in clients)
        place = f"client{'s' * (len(clients) > 1)} {ids} ({info.place})"
        raise UpdateError(f"{what} failed at {place}: {error}") from error


def _own(state: Tree, before: Tree) -> Tree:
    """A client's new state without views of anything larger, such as a block of clients, which they would keep."""
    return {
        name: leaf.clone() if leaf._is_view() and leaf is not before.get(name) else leaf for name, leaf in state.items()
    }


def _writes(shared: TreesByOwner, states: Mapping[int, Tree]) -> dict[str, int]:
    """How often the broadcast and each client's state were written to; what lies in one arena counts together."""
    given = {"the broadcast": list(shared.values())}
    given |= {f"the state of client {id}": [state] for id, state in states.items()}
    return {what: sum(leaf._version for leaves in trees for leaf in leaves.values()) for what, trees in given.items()}


def recorded(state: Tree, client: Client) -> Tensor:
    """The places (m, 2) of the samples in a client's memory."""
    return own_state(state, STRATEGY).get(MEMORY, torch.empty(0, 2, dtype=torch.int64)).to(client.device)


def recalled(client: Client, places: Tensor, most: int, key: int) -> Iterator[Batch]:
    """For each step, at most `most` samples of a client's memory (m, 2), drawn without replacement."""
    whole = client.recall(places) if len(places) <= most else None
    for step in itertools.count():
        if whole is None:
            drawn = torch.randperm(len(places), generator=rng.generator(rng.key(key, step)))[:most]
            yield client.recall(places[drawn.to(places.device)])
        else:
            yield whole
