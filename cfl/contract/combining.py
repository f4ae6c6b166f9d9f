"""Uploads of a round that a regularizer combines in place of the mean: how they are gathered and joined."""

from collections.abc import Mapping

from cfl.contract.regularizer import Gathers, LocalRegularizer
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.contract.strategy import Strategy
from cfl.core import Tree, tree

STRATEGY = "strategy"
"""The strategy's name among the owners of hooks, client states and uploads."""
WORK = "work"
"""Owner of the uploads of the strategy's `work`."""
WEIGHTS = "weights"
"""Owner of the clients' weights, where the strategy's uploads are stacked: one leaf "" of shape (clients,) float64."""


def gathers(members: Mapping[str, LocalRegularizer]) -> dict[str, Gathers]:
    """How the uploads of each owner are aggregated. members: as in `ComposedMethod`."""
    rule = rule_of(members)
    return {
        STRATEGY: "mean" if rule is None else "stack",
        **{owner: member.gathers for owner, member in members.items() if owner != STRATEGY},
        WORK: members[STRATEGY].gathers if rule is None or not caps(members[rule]) else "stack",
    }


def rule_of(members: Mapping[str, LocalRegularizer]) -> str | None:
    """Owner of the regularizer that combines the updates, or None for their weighted mean."""
    return next((owner for owner, member in members.items() if owner != STRATEGY and member.sees_each), None)


def caps(member: LocalRegularizer) -> bool:
    """Whether a rule has a `cap` of its own."""
    return type(member).cap is not LocalRegularizer.cap


def capped(trees: TreesByOwner, rule: LocalRegularizer, strategy: Strategy, info: RoundInfo) -> Tree:
    """The `work` uploads as the strategy gets them; measurements have no cap.

    trees: the aggregated uploads, with the clients' weights; those of `work` are leaves (clients, ...).
    """
    uploads, weights = trees[WORK], trees[WEIGHTS][""].tolist()
    floats = tree.floats(uploads)
    if info.phase.protected:
        floats = rule.cap(floats, strategy.sizes(floats, info), info)
    if strategy.gathers == "stack":
        return {name: floats.get(name, leaf) for name, leaf in uploads.items()}
    if strategy.gathers == "mean":
        return with_counters(tree.weighted_mean(floats, weights), uploads)
    return with_counters(tree.weighted_sum(floats, [1.0] * len(weights)), uploads)


def combined(trees: TreesByOwner, rule: LocalRegularizer, info: RoundInfo) -> Tree:
    """The strategy's uploads as the rule combines them. trees: the aggregated uploads, with the clients' weights."""
    updates = trees[STRATEGY]
    return with_counters(rule.aggregate(tree.floats(updates), trees[WEIGHTS][""], info), updates)


def with_counters(joined: Tree, stacked: Tree) -> Tree:
    """Add the integer leaves of the lowest id, in the order of the stacked tree."""
    return {name: joined[name] if name in joined else leaf[0] for name, leaf in stacked.items()}
