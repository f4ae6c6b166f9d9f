"""Checks of one local step and `finish`: hidden state, padding, and many clients under vmap."""

from collections.abc import Callable, Mapping, Sequence

import torch

from cfl.contract import MEMORY, Batch, LocalRegularizer, RoundInputs, Strategy
from cfl.contract.checked import with_hooks
from cfl.contract.composed import STRATEGY, ComposedMethod
from cfl.core import RAW, HookError, Tree, optim, tree
from cfl.engines.loop import recalled
from cfl.engines.step import LocalStep, StepInputs
from cfl.runtime.session import Session
from cfl.testing.hooks import Faults
from cfl.testing.runs import TOLERANCE

Hooks = Mapping[str, LocalRegularizer]
Result = dict[str, Tree]
CLIENT_HOOKS = ("init_client", "augment", "penalty", "around", "adjust", "finish", "send", "loss")
WARM_UP = 2  # steps before the checked step: in the first step, the client still has the weights of the global model


def check_steps(session: Session, faults: Faults) -> None:
    """Check the cohort's steps in the first round of each task."""
    for position, (_, phase, number) in enumerate(session.schedule):
        if phase.train and number == 0:
            steps = _Steps(session, session.prepare(position))
            for fails in (steps.hidden, steps.padding, steps.vmap):
                if text := fails(session.composed.members):
                    faults.add(steps.culprit(fails), text)
        session.round(position)


class _Steps:
    """Local steps of a round's clients. Each check returns the fault of the hooks, or an empty text."""

    def __init__(self, session: Session, prepared: RoundInputs) -> None:
        self.session, self.info, self.shared = session, prepared.info, prepared.shared
        self.clients: list[tuple[Batch, Batch, Tree]] = []
        for client in prepared.clients:
            state, size = prepared.states[client.id], session.config.local.batch_size
            places = tree.part(state, STRATEGY).get(MEMORY, torch.empty(0, 2, dtype=torch.int64))
            memory = next(recalled(client, places, size, self.info.key))
            self.clients.append((next(client.batches(size)), memory, state))
        session.model.module.train()

    def step(
        self,
        hooks: Hooks,
        batch: Batch,
        memory: Batch,
        state: Tree,
        last: Batch,
        key: int = 0,
        seen: Tree | None = None,
    ) -> Result:
        """Return a client's weights, optimiser state, uploads and state after some steps.

        last: batch of the last step; seen: state that steps see, by default the same part as in the engines.
        """
        info, lr = self.info, self.info.lr
        composed, options = ComposedMethod(hooks), self.session.config.local
        model, public = self.session.model, info.public
        optimizer = optim.build(options.optimizer, options.momentum, options.weight_decay)
        step = LocalStep(model, info.task, info.frozen, composed, optimizer, info.heads, public)
        zero = torch.zeros_like(batch.mask[0])  # batched under vmap, so the leaves that a step writes to are batched
        local = step.start(tree.map(lambda leaf: leaf + zero.to(leaf), self.shared["params"]))
        batches, seen = [batch] * WARM_UP + [last], composed.step_state(state) if seen is None else seen
        with model.lowered():
            for index, each in enumerate(batches):
                local, _ = step(local, StepInputs(self.shared, each, memory, state=seen, lr=lr, step=index, key=key))
        ctx = step.context(StepInputs(self.shared, state=state, lr=lr, step=len(batches), key=key))
        uploads, after = composed.finish({**local.params, **local.buffers}, ctx, len(batches))
        return {"params": local.params, "optimizer": local.optimizer, **uploads, "state": after}

    def hidden(self, hooks: Hooks) -> str:
        for batch, memory, state in self.clients:
            part, whole = (self.step(hooks, batch, memory, state, batch, seen=seen) for seen in (None, state))
            if far := self._far(part, whole):
                text = f"a hook of a step reads a state that steps do not see, which changes {far}"
                return f"{text}; see `steps_see_state` and `ctx.memory`"
        return ""

    def padding(self, hooks: Hooks) -> str:
        for batch, memory, state in self.clients:
            whole, padded = (self.step(hooks, batch, memory, state, last) for last in (batch, _padded(batch)))
            if far := self._far(whole, padded):
                return f"padding in a batch changes {far}; multiply by ctx.batch.mask, and divide by its sum"
        return ""

    def vmap(self, hooks: Hooks) -> str:
        groups: dict[str, list[tuple[Batch, Batch, Tree]]] = {}
        for batch, memory, state in self.clients:
            kinds = {name: (leaf.shape, leaf.dtype) for name, leaf in state.items()}
            groups.setdefault(f"{kinds} {batch.x.shape} {memory.x.shape}", []).append((batch, memory, state))
        return next(filter(None, (self._together(hooks, members) for members in groups.values())), "")

    def _together(self, hooks: Hooks, members: Sequence[tuple[Batch, Batch, Tree]]) -> str:
        """Compare single clients with the same clients under vmap. members: clients with states of equal shapes."""
        alone = [self.step(hooks, *member, last=member[0]) for member in members]
        redrawn = [self.step(hooks, *member, last=member[0], key=1) for member in members]
        if any(self._far(a, b, 0.0) for a, b in zip(alone, redrawn, strict=True)):  # however small the effect
            return ""  # engines train clients whose hooks read ctx.key one at a time
        batches, memories, states = zip(*members, strict=True)
        parts = [_stacked(batches), _stacked(memories), tree.stack(states)]

        def one(batch: Tree, memory: Tree, state: Tree) -> Result:
            return self.step(hooks, Batch(**batch), Batch(**memory), state, Batch(**batch))

        try:
            together = torch.func.vmap(one, randomness="different")(*parts)
        except (*RAW, HookError) as error:
            first = str(error).splitlines()[0]
            return (
                f"cannot run under vmap for many clients ({first}); use torch.where for branches, torch.func.grad for "
                "gradients, and no .item()"
            )
        for number, expected in enumerate(alone):
            found = {name: {key: leaf[number] for key, leaf in leaves.items()} for name, leaves in together.items()}
            if far := self._far(expected, found):
                return f"under vmap with other clients, {far} of a client differs from that of its step alone"
        return ""

    def _far(self, a: Result, b: Result, tolerance: float | None = None) -> str:
        """The first leaf that differs between two results, such as "params/1.weight"; empty if all are close.

        tolerance: absolute and relative; None: that of the run's precision.
        """
        tolerance = TOLERANCE[self.session.config.precision] if tolerance is None else tolerance
        for part, leaves in a.items():
            for name, leaf in leaves.items():
                if not torch.allclose(leaf.float(), b[part][name].float(), atol=tolerance, rtol=tolerance):
                    return f"'{part}/{name}'"
        return ""

    def culprit(self, fails: Callable[[Hooks], str]) -> str:
        """Return the hook without which the check passes."""
        members = self.session.composed.members
        owner = list(members)[-1]
        base = Strategy if isinstance(members[owner], Strategy) else LocalRegularizer
        for hook in CLIENT_HOOKS:
            if getattr(type(members[owner]), hook, None) is getattr(base, hook, None):
                continue
            if not fails({**members, owner: with_hooks(members[owner], {hook: getattr(base, hook)})}):
                return hook
        return "local step"


def _stacked(batches: Sequence[Batch]) -> Tree:
    """Stack the leaves of batches of equal shapes, by field, without fields that are None."""
    fields = [name for name, leaf in batches[0]._asdict().items() if leaf is not None]
    return {name: torch.stack([getattr(batch, name) for batch in batches]) for name in fields}


def _padded(batch: Batch) -> Batch:
    """Return the batch with as many padding samples appended."""
    x = torch.cat([batch.x, torch.full_like(batch.x, 3.0)])
    y, ids = torch.cat([batch.y, torch.zeros_like(batch.y)]), torch.cat([batch.ids, -torch.ones_like(batch.ids)])
    task = None if batch.task is None else torch.cat([batch.task, batch.task])
    return Batch(x, y, torch.cat([batch.mask, torch.zeros_like(batch.mask)]), ids, task)
