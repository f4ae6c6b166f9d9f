"""The strategy and the regularizers of a run as one method."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor

from cfl.contract.checked import Checked
from cfl.contract.client import MEMORY
from cfl.contract.combining import STRATEGY, WEIGHTS, WORK, capped, caps, combined, gathers, rule_of
from cfl.contract.context import Ctx
from cfl.contract.finite import any_of, check_finite
from cfl.contract.regularizer import Gathers, GradFn, LocalRegularizer
from cfl.contract.rounds import RoundInfo, Server, TreesByOwner
from cfl.contract.samples import Batch
from cfl.contract.strategy import Strategy
from cfl.core import Tree, options, tree
from cfl.models import Model


@dataclass(frozen=True)
class ComposedMethod:
    """The hooks of the strategy and the regularizers as one: engines and sessions call it instead of each member.

    members: owner ("strategy", then the regularizers' names in the user's order) to the object with the hooks.
    Order: as in `members`. Exceptions: members with a `hard_constraint` adjust last, `server_step` goes by `turn`, and
    the strategy's `absorb` is the last call of a round.
    Client state: one tree for all members, with leaves named "owner/name". A hook sees the leaves of its own member.
    Server: a regularizer's tree, and its part of the broadcast, are named "local/owner". Its hooks get these, as
    `own` and `ctx.sent`.
    Checks: hooks are called through `checked`. Hooks of a local step are checked at their first call, see `afresh`.
    """

    members: Mapping[str, LocalRegularizer]

    @cached_property
    def checked(self) -> dict[str, LocalRegularizer]:
        """The members, with hooks that raise HookError, see `Checked`."""
        return {owner: cast("LocalRegularizer", Checked(member)) for owner, member in self.members.items()}

    @property
    def strategy(self) -> Strategy:
        """The run's strategy, checked."""
        return cast("Strategy", self.checked[STRATEGY])

    @cached_property
    def regularizers(self) -> dict[str, LocalRegularizer]:
        """The members other than the strategy, checked."""
        return {owner: member for owner, member in self.checked.items() if owner != STRATEGY}

    @cached_property
    def gathers(self) -> dict[str, Gathers]:
        """How the uploads of the strategy, of each regularizer and of `work` are aggregated."""
        return gathers(self.members)

    @cached_property
    def borrowed(self) -> frozenset[str]:
        """Owners whose terms another member borrows, see `LocalRegularizer.borrows`."""
        return frozenset(member.borrows for member in self.members.values() if member.borrows)

    @cached_property
    def acting(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """Hooks of a local step, each by the owners that override it; of a borrowed member only `augment` acts."""
        last = sorted(self.members, key=lambda owner: self.members[owner].hard_constraint)
        return {
            hook: {
                owner: self._first(hook, owner)
                for owner in (last if hook == "adjust" else self.members)
                if getattr(type(self.members[owner]), hook) is not getattr(LocalRegularizer, hook)
                and (hook == "augment" or owner not in self.borrowed)
            }
            for hook in ("augment", "around", "penalty", "adjust")
        } | {"loss": {STRATEGY: self._first("loss", STRATEGY)}}

    def afresh(self) -> Self:
        """A copy that checks the next call of each hook of a local step, but no later call."""
        other = copy.copy(self)
        vars(other).pop("acting", None)
        return other

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        """The strategy's broadcast and, in a round of training, the trees that the regularizers `provide`.

        Raises UpdateError if one of them is not finite.
        """
        parts = self.strategy.broadcast(server, info)
        self.check(STRATEGY, "broadcast", parts, server, info.place)
        for owner, member in self.regularizers.items() if info.phase.train else ():
            own = self._server_tree(server, owner, parts["params"], info)
            if sent := member.provide(own, info):
                self.check(owner, "provide", {"sent": sent}, {"sent": own}, info.place)
                parts = {**parts, _server_name(owner): sent}
        return parts

    def client_state(self, stored: Tree | None, params: Tree, model: Model) -> Tree:
        """A client's state in its first round of a task: the strategy's as stored, the regularizers' initial ones."""
        state: Tree = {}
        for owner in self.members:
            if owner == STRATEGY and stored is not None:
                own = tree.part(stored, owner)
            else:
                own = self.checked[owner].init_client(params, model)
            state |= tree.under(owner, own)
        return state

    def step_state(self, state: Tree) -> Tree:
        """The part of a client's state that the hooks of a step see: without `MEMORY`, which they get as ctx.memory."""
        hidden = tuple(f"{owner}/" for owner, member in self.members.items() if not member.steps_see_state)
        kept = (name for name in state if name != f"{STRATEGY}/{MEMORY}" and not name.startswith(hidden))
        return tree.select(state, kept)

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        """The batch after all `augment` hooks."""
        for owner, augment in self.acting["augment"].items():
            batch = augment(batch, _ctx_of(ctx, owner)._replace(batch=batch))
        return batch

    def around(self, grad_fn: GradFn) -> GradFn:
        """The gradient function after all `around` hooks; that of the last member is the outermost."""
        for owner in self.acting["around"]:
            grad_fn = self._around_of(owner, grad_fn)
        return grad_fn

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        """The strategy's loss ()."""
        return self.acting["loss"][STRATEGY](logits, _ctx_of(ctx, STRATEGY))

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        """The sum () of all penalties."""
        terms = self.acting["penalty"].items()
        return sum(penalty(params, logits, _ctx_of(ctx, owner)) for owner, penalty in terms)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        """The gradient after all `adjust` hooks."""
        for owner, adjust in self.acting["adjust"].items():
            grads = adjust(grads, params, _ctx_of(ctx, owner))
        return grads

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[TreesByOwner, Tree]:
        """All uploads, the strategy's as `send` leaves it, and the client's new state."""
        uploads: TreesByOwner = {}
        states: Tree = {}
        for owner, member in self.checked.items():
            upload, state = member.finish(params, _ctx_of(ctx, owner)._replace(lent=owner in self.borrowed), steps)
            states |= tree.under(owner, state)
            if upload:
                uploads[owner] = upload
        for owner, member in self.regularizers.items() if STRATEGY in uploads else ():
            uploads[STRATEGY] = member.send(uploads[STRATEGY], _ctx_of(ctx, owner), steps)
        return uploads, states

    def absorb(self, server: Server, parts: TreesByOwner, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """The server's trees after the round: `cap`, `aggregate`, every `server_step`, then the strategy's `absorb`.

        parts: the broadcast; mean: the aggregated uploads by owner; lr: server.lr.
        Raises UpdateError if a hook returns NaN or infinity; `server` is then as it was.
        """
        mean, trees = self._combined(mean, info), dict[str, Tree]()
        by_turn = sorted(self.regularizers.items(), key=lambda item: item[1].turn)
        for owner, member in by_turn if STRATEGY in mean else ():
            own = self._server_tree(server, owner, parts["params"], info)
            known = {"step": mean[STRATEGY], "own": own}
            step, own = member.server_step(mean[STRATEGY], own, mean.get(owner, {}), parts["params"], info)
            self.check(owner, "server_step", {"step": step, "own": own}, known, info.place, mean, lr)
            mean = {**mean, STRATEGY: step}
            trees[_server_name(owner)] = own
        after = self.strategy.absorb(server, mean, info, lr)
        self.check(STRATEGY, "absorb", after, server, info.place, mean, lr)
        kept = {name: leaves for name, leaves in server.items() if name.startswith("local/")}
        return {**after, **kept, **trees}

    def _combined(self, trees: TreesByOwner, info: RoundInfo) -> TreesByOwner:
        """The aggregated uploads, with stacks joined by the regularizer that combines them, if there is one."""
        if (rule := rule_of(self.members)) is None:
            return trees
        member, found = self.checked[rule], {owner: own for owner, own in trees.items() if owner != WEIGHTS}
        if WORK in trees and caps(self.members[rule]):
            found[WORK] = capped(trees, member, self.strategy, info)
            self.check(rule, "cap", {"work": found[WORK]}, trees, info.place)
        if STRATEGY in trees:
            found[STRATEGY] = combined(trees, member, info)
            self.check(rule, "aggregate", {"update": found[STRATEGY]}, trees, info.place)
        return found

    def end_task(self, server: Server, clients: Mapping[int, Tree]) -> tuple[Server, dict[int, Tree]]:
        """The trees of server and clients without those of the regularizers, which last for one task."""
        kept = {
            id: {name: leaf for name, leaf in state.items() if name.startswith(f"{STRATEGY}/")}
            for id, state in clients.items()
        }
        return {name: leaves for name, leaves in server.items() if not name.startswith("local/")}, kept

    def check(
        self,
        owner: str,
        hook: str,
        found: TreesByOwner,
        known: TreesByOwner,
        place: str,
        given: TreesByOwner | None = None,
        lr: float | None = None,
    ) -> None:
        """Raise UpdateError if a hook of the server returns NaN or infinity; parameters as in `check_finite`.

        place: of the run; lr: server.lr in a hook that makes the server's step.
        """
        member, cure = self.members[owner], f"check what {hook} computes"
        if lr is not None:
            own = options.steep(member, prefix(owner), "server")
            cure = f"lower {any_of([f'server.lr (now {lr:g})', *own, 'local.lr'])}"
        what = f"{hook} of {prefix(owner)} ({type(member).__name__})"
        check_finite(what, found, known, given or {}, f"({place}); {cure}")

    def steep_options(self) -> list[str]:
        """Options that can make local steps too long, local.lr first, for messages."""
        own = (options.steep(member, prefix(owner), "local") for owner, member in self.members.items())
        return ["local.lr", *itertools.chain.from_iterable(own)]

    def _server_tree(self, server: Server, owner: str, params: Tree, info: RoundInfo) -> Tree:
        """The server's tree of a regularizer, initialised if the server has none."""
        name = _server_name(owner)
        if name in server:
            return server[name]
        own = self.checked[owner].init_shared(params, info.model)
        self.check(owner, "init_shared", {"own": own}, {}, info.place)
        return own

    def _first(self, hook: str, owner: str) -> Callable[..., Any]:
        """A hook of a local step. Its first call is checked, and replaces this function by the hook itself."""

        def first(*args: Any) -> Any:
            result = getattr(self.checked[owner], hook)(*args)
            self.acting[hook][owner] = getattr(self.members[owner], hook)
            return result

        return first

    def _around_of(self, owner: str, inner: GradFn) -> GradFn:
        """A member's `around`: its hook sees its own state, the inner gradient function sees all states."""

        def outer(params: Tree, ctx: Ctx) -> Tree:
            hook = self.acting["around"][owner](
                lambda at, seen: inner(at, seen._replace(state=ctx.state, sent=ctx.sent, correction=ctx.correction))
            )
            own = _ctx_of(ctx, owner)
            if lender := self.members[owner].borrows:
                own = own._replace(correction=self._correction(lender, ctx))
            return hook(params, own)

        return outer

    def _correction(self, lender: str, ctx: Ctx) -> Callable[[Tree], Tree]:
        """The gradient by params of the lender's penalty, after the lender's `adjust`."""
        member, own = self.members[lender], _ctx_of(ctx, lender)

        def penalty(params: Tree) -> Tensor:
            with ctx.model.watched_features() as seen:
                logits = ctx.forward(params, ctx.batch)
            return torch.as_tensor(member.penalty(params, logits, own._replace(features=seen[-1] if seen else None)))

        return lambda params: member.adjust(torch.func.grad(penalty)(params), params, own)


def prefix(owner: str) -> str:
    """Prefix of a member's options."""
    return owner if owner == STRATEGY else f"regularizer.{owner}"


def _server_name(owner: str) -> str:
    """Name of a regularizer's tree in the server's trees and in the broadcast."""
    return f"local/{owner}"


def _ctx_of(ctx: Ctx, owner: str) -> Ctx:
    """The context with one owner's state and its part of the broadcast."""
    return ctx._replace(state=tree.part(ctx.state, owner), sent=ctx.shared.get(_server_name(owner), {}))
