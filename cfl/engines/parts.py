"""The result of some of a round's clients, computed elsewhere: how it is made, and how it joins the round."""

import builtins
import warnings
from collections.abc import Mapping
from typing import Any

from cfl.aggregation.plain import UploadSum
from cfl.contract import RoundInputs
from cfl.core import Tree, tree, warn
from cfl.engines.base import Collected, Engine, Observe
from cfl.engines.loop import LoopEngine


def compute(engine: Engine, inputs: RoundInputs, observed: bool) -> dict[str, Any]:
    """Return the result of the clients of `inputs`: plain data and tensors. observed: include the local models.

    In the new states, None stands for a leaf that has not changed.
    """
    total, models = engine.sums(inputs.info, engine.gathers), dict[int, Tree]()
    keep = (lambda id, params: models.update({id: tree.clone(params)})) if observed else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = engine.collect(total, inputs, keep)
    states = {
        id: {name: None if leaf is inputs.states[id].get(name) else leaf for name, leaf in state.items()}
        for id, state in found.states.items()
    }
    warned = dict.fromkeys((each.category.__name__, str(each.message)) for each in said)
    return {"part": total.part(), **vars(found), "states": states, "models": models, "warnings": list(warned)}


def merge(
    result: Mapping[str, Any],
    states: Mapping[int, Tree],
    total: UploadSum,
    found: Collected,
    engine: LoopEngine,
    observe: Observe | None,
) -> None:
    """Add a result of `compute` to `total` and `found`. Keeps no reference to its tensors. states: before the round."""
    total.merge(result["part"])
    for id, state in result["states"].items():
        found.states[id] = {name: states[id][name] if leaf is None else leaf.clone() for name, leaf in state.items()}
    found.losses.update((id, loss.clone()) for id, loss in result["losses"].items())
    found.excluded += result["excluded"]
    for category, text in result["warnings"]:
        warn(text, getattr(builtins, category, UserWarning))
    if observe is not None:
        with engine.model.evaluation():
            for id, params in result["models"].items():
                observe(id, tree.clone(params))
