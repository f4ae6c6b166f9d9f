"""The `loop` engine: the clients of a round one after another, in the order given."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cfl.aggregation.gaussian import SampleNoise
from cfl.aggregation.plain import UploadSum
from cfl.contract import MEMORY, Batch, Client, Gathers, RoundInfo, RoundInputs, TreesByOwner
from cfl.contract.composed import STRATEGY, ComposedMethod
from cfl.contract.finite import any_of
from cfl.core import RAW, HookError, Tree, UpdateError, rng, tree
from cfl.core.errors import MOST_NAMES, few
from cfl.core.optim import Optimizer
from cfl.engines.base import Collected, Engine, Observe, Sums
from cfl.engines.examine import NotFinite, Watched
from cfl.engines.step import LocalStep, StepInputs
from cfl.models import Model

NOWHERE = torch.empty(0, 2, dtype=torch.int64)  # the places of an empty memory


class Trained(NamedTuple):
    """A client after local training. params: trained leaves and buffers; loss: mean () over the last local epoch."""

    client: Client
    params: Tree
    steps: int
    loss: Tensor


class Finished(NamedTuple):
    """A client after `finish`. params: its whole model; loss: as in `Trained`, None in a phase without training."""

    client: Client
    params: Tree
    uploads: TreesByOwner
    state: Tree
    loss: Tensor | None


@dataclass(frozen=True)
class LoopEngine(Engine):
    """One client at a time.

    weights: a client's weight in the mean, its number of samples or 1; on_bad_update: "raise" UpdateError or "exclude"
    the client; sums: creates the sum of a round's uploads; noise: see `LocalStep`.
    """

    model: Model
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
        return self.composed.gathers

    def collect(self, total: UploadSum, inputs: RoundInputs, observe: Observe | None) -> Collected:
        info, shared, _, states = inputs
        found, before, uploading = Collected(), count_writes(shared, states), set(info.uploading)
        for client, params, uploads, state, loss in self._finished(inputs):
            if info.phase.work:
                uploads["work"], state = self._work(info, shared, params, state, client)
            _check_memory(client, states[client.id], state, info)
            if not total.add(client.id, uploads, float(len(client)) if self.weights == "samples" else 1.0):
                if self.on_bad_update == "raise":
                    raise UpdateError(
                        f"client {client.id} sent an update with NaN or infinity ({info.place}): "
                        f"{self.fault(inputs, client)}, or leave such clients out with on_bad_update=exclude"
                    )
                found.excluded.append(client.id)
            elif client.id in total.zeroed:
                found.states[client.id] = states[client.id]
            elif client.id in uploading:
                if observe is not None and loss is not None:
                    with self.model.evaluation():
                        observe(client.id, params)
                found.states[client.id] = _without_views(state, states[client.id])
                if loss is not None:
                    found.losses[client.id] = loss
        check_writes(before, count_writes(shared, states), info)
        return found

    def fault(self, inputs: RoundInputs, client: Client) -> str:
        watched = replace(self, composed=Watched(self.composed))
        why, steep = "its upload is not finite; ", self.composed.steep_options()
        try:
            for again, params, _, state, _ in watched._finished(inputs._replace(clients=[client])):
                if inputs.info.phase.work:
                    watched._work(inputs.info, inputs.shared, params, state, again)
        except NotFinite as error:
            why, steep = f"{error}; ", [*steep, "server.lr"] if error.early else steep
            why += "check what it computes, or " if error.early else ""
        return f"{why}lower {any_of(steep)}"

    def step(self, info: RoundInfo) -> LocalStep:
        """Return the local step of a round's clients."""
        return LocalStep(
            self.model,
            info.task,
            info.frozen,
            self.composed.afresh(),
            self.optimizer,
            heads=info.heads,
            public=info.public,
            noise=self.noise,
            masked=info.masked,
        )

    def trained(self, step: LocalStep, inputs: RoundInputs) -> Iterator[Trained]:
        """Train the clients locally and yield them in any order."""
        for client in inputs.clients:
            with named("local training", [client], inputs.info):
                yield self._train(step, inputs, client)

    def _finished(self, inputs: RoundInputs) -> Iterator[Finished]:
        """Train and finish each client; a phase without training yields the clients as they are."""
        info, shared, clients, states = inputs
        if not info.phase.train:
            for client in clients:
                yield Finished(client, shared["params"], {}, states[client.id], None)
            return
        step = self.step(info)
        self.model.module.train()
        for client, params, steps, loss in self.trained(step, inputs):
            key = rng.key(info.key, "finish", client.id)
            last = StepInputs(
                shared, state=states[client.id], lr=info.lr, step=steps, key=key, client=torch.tensor(client.id)
            )
            with named("finish", [client], info), rng.fork(key, client.device):
                uploads, state = self.composed.finish(params, step.context(last), steps)
            yield Finished(client, {**shared["params"], **params}, uploads, state, loss)

    def _work(
        self, info: RoundInfo, shared: TreesByOwner, params: Tree, state: Tree, client: Client
    ) -> tuple[Tree, Tree]:
        """Run the strategy's `work` for a client: its upload and the client's new state."""
        own, key = tree.part(state, STRATEGY), rng.key(info.key, "work", client.id)
        with (
            named(f"work of phase {info.phase.name}", [client], info),
            self.model.evaluation(),
            rng.fork(key, client.device),
        ):
            upload, own = self.composed.strategy.work(params, client, shared, own, info)
        if info.phase.stores and upload:
            raise UpdateError(
                f"work uploads {list(upload)} in a phase with stores=True ({info.place}), whose results stay on the "
                "client; return them in the state, or set stores=False in plan"
            )
        others = {name: leaf for name, leaf in state.items() if not name.startswith(f"{STRATEGY}/")}
        return upload, {**{f"{STRATEGY}/{name}": leaf for name, leaf in own.items()}, **others}

    def _train(self, step: LocalStep, inputs: RoundInputs, client: Client) -> Trained:
        """Train a client for its local epochs."""
        info, shared, state = inputs.info, inputs.shared, inputs.states[client.id]
        copied = self.model.layout.copy_of if self._fast_layout else torch.clone
        local, index, id = step.start(shared["params"], copied), 0, torch.tensor(client.id)
        seen = self.composed.step_state(state)
        memories = self.memories(info, state, client)
        with self.model.lowered(), rng.fork(rng.key(info.key, "local", client.id), client.device):
            for epoch in range(self.epochs):
                losses = []
                for batch in client.gathered(*self.plan(info, client, epoch)):
                    key = rng.key(info.key, "step", client.id, index)
                    given = StepInputs(shared, batch, next(memories), seen, info.lr, index, key, id)
                    local, loss = step(local, given)
                    losses.append(loss)
                    index += 1
        params = tree.map(torch.Tensor.contiguous, local.params)
        return Trained(client, {**params, **local.buffers}, index, torch.stack(losses).mean())

    @property
    def _fast_layout(self) -> bool:
        """Whether weights may have another memory layout in local steps: hooks that see them could call `view`."""
        acting = self.composed.acting
        return self.noise is None and not (acting["around"] or acting["penalty"] or acting["adjust"])

    def plan(self, info: RoundInfo, client: Client, epoch: int) -> tuple[list[Tensor], int]:
        """Return the positions of each batch of an epoch in the client's data, and the key of random augmentation."""
        place = info.key, "order", client.id, epoch
        changes = rng.key(info.key, "augment", client.id, epoch)
        if self.noise is None:
            parts = client.shuffled(self.batch_size, rng.generator(rng.key(*place)))
            if len(parts) > self.steps(client):
                parts[-2:] = [torch.cat(parts[-2:])]
            return parts, changes
        source = rng.private_generator(self.noise.seed, *place)
        return client.draws(self.batch_size, client.steps(self.batch_size), source), changes

    def steps(self, client: Client) -> int:
        """Number of local steps in an epoch. A last single sample joins the batch before it if no step takes one."""
        single = not self.model.takes_one and len(client) % self.batch_size == 1
        return max(1, client.steps(self.batch_size) - single)

    def memories(self, info: RoundInfo, state: Tree, client: Client) -> Iterator[Batch]:
        """Draw samples from a client's memory, once a step. Raises ValueError if they need a head that is absent."""
        places = recorded(state, client)
        strays = {task for task in places[:, 0].tolist() if task not in (info.task, *info.heads)}
        if strays and self.model.multi_head and not self.model.growing:
            raise ValueError(
                f"its memory holds samples of tasks {strays}, whose heads are not broadcast; see Strategy.heads"
            )
        return recalled(client, places, self.batch_size, rng.key(info.key, "memory", client.id))


@contextlib.contextmanager
def named(what: str, clients: Sequence[Client], info: RoundInfo) -> Iterator[None]:
    """Turn errors inside into an UpdateError that names clients, task, phase and round."""
    try:
        yield
    except (*RAW, HookError) as error:
        ids = ", ".join(str(client.id) for client in clients)
        place = f"client{'s' * (len(clients) > 1)} {ids} ({info.place})"
        kind = "" if isinstance(error, RuntimeError | ValueError | HookError) else f"{type(error).__name__}: "
        raise UpdateError(f"{what} failed at {place}: {kind}{error}") from error


def _check_memory(client: Client, before: Tree, after: Tree, info: RoundInfo) -> None:
    """Raise UpdateError if the new state's memory points to samples that the client may not store."""
    places = recorded(before, client)
    stored = tree.part(after, STRATEGY).get(MEMORY, places)
    if stored is not places and not client.may_store(stored, places):
        raise UpdateError(
            f"client {client.id} stores samples that it does not hold ({info.place}); a memory may contain only "
            "places (task, position in the client's share) of the current data and places that it contained before"
        )


def check_writes(before: Mapping[str, int], after: Mapping[str, int], info: RoundInfo) -> None:
    """Raise UpdateError for in-place writes of hooks: those of a worker process would be lost."""
    written = [what for what, writes in after.items() if writes != before[what]]
    if written:
        raise UpdateError(
            f"a hook writes in place to {few(written, MOST_NAMES)} ({info.place}); "
            "hooks must not change their inputs; return new tensors instead"
        )


def _without_views(state: Tree, before: Tree) -> Tree:
    """Return the new state with views copied: a view keeps its base in memory, such as the leaves of a whole block."""
    return {
        name: leaf.clone() if leaf._is_view() and leaf is not before.get(name) else leaf for name, leaf in state.items()
    }


def count_writes(shared: TreesByOwner, states: Mapping[int, Tree]) -> dict[str, int]:
    """Count in-place writes to the broadcast and to each client's state. Leaves of one arena share a counter."""
    given = {"the broadcast": list(shared.values())}
    given |= {f"the state of client {id}": [state] for id, state in states.items()}
    return {what: sum(leaf._version for leaves in trees for leaf in leaves.values()) for what, trees in given.items()}


def recorded(state: Tree, client: Client) -> Tensor:
    """Return the places (m, 2) of the samples in a client's memory, see `MEMORY`."""
    return state.get(f"{STRATEGY}/{MEMORY}", NOWHERE).to(client.device)


def recalled(client: Client, places: Tensor, most: int, key: int) -> Iterator[Batch]:
    """Yield for each step up to `most` samples of the memory `places` (m, 2), drawn without replacement."""
    whole = client.recall(places) if len(places) <= most else None
    for step in itertools.count():
        if whole is None:
            drawn = torch.randperm(len(places), generator=rng.generator(rng.key(key, step)))[:most]
            yield client.recall(places[drawn.to(places.device)])
        else:
            yield whole
