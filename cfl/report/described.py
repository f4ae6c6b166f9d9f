"""What `cfl-run describe` shows of a benchmark, a method, a model or a regularizer."""

import inspect
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from cfl.assembly.resolve import resolve
from cfl.core import options
from cfl.core.errors import ConfigError
from cfl.report import tables

PROTECTIONS: dict[str, list[str]] = {
    "secagg=full": [],
    "dp.level=client": ["dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"],
    "dp.level=example": ["dp.noise_multiplier=1", "agg.weights=uniform"],
}
"""What can protect a run's uploads, with what else it takes."""


def summary(item: Any) -> str:
    """A line on what a registry holds."""
    return getattr(item, "summary", None) or (item.__doc__ or "").strip().partition("\n")[0]


def blocks(kind: str, name: str, item: Any, source: str) -> list[Any]:
    """Texts and tables, to be printed one after another. kind: of the registry, such as "methods"."""
    title = f"{name} ({kind.removesuffix('s')}): {summary(item)}" + (f"\nSource: {source}" if source else "")
    if kind == "benchmarks":
        return [title, _preset(name)]
    if kind == "models":
        return [title, tables.hyper_parameters(_parameters(item), "model.")]
    rows, prefix = options.describe(item), "strategy." if kind == "methods" else f"regularizer.{name}."
    own = tables.hyper_parameters(rows, prefix) if rows else "No hyper-parameters."
    return [title, own, tables.answers(_privacy(name, item), "privacy")]


def _privacy(name: str, item: Any) -> list[tuple[str, str]]:
    """What a client sends for a method, what the server learns, and which options can protect it."""
    learns = "what each client sends" + ("" if item.gathers == "stack" else "; under secure aggregation only the sum")
    rows = [("a client sends", item.sends or "nothing beside the update"), ("the server learns", learns)]
    for option, further in PROTECTIONS.items():
        reason = refused(name, [option, *further])
        rows.append((option, f"no: {reason}" if reason else "can protect it"))
    return rows


def _parameters(builder: Callable[..., Any]) -> list[dict[str, Any]]:
    """Rows of a model builder's own parameters: those after input shape and number of outputs."""
    own = list(inspect.signature(builder, eval_str=True).parameters.values())[2:]
    return [
        {
            "name": one.name,
            "default": one.default,
            "range": inspect.formatannotation(one.annotation).replace("collections.abc.", ""),
            "help": "",
            "source": "",
        }
        for one in own
    ]


def _preset(name: str) -> str:
    path = files("cfl") / "presets" / f"{name}.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else "No preset: the options' own defaults hold."


def refused(method: str, settings: list[str]) -> str | None:
    """Why a method or regularizer, at its defaults, cannot run under one of `PROTECTIONS`; None where it can.

    settings: overrides as for `cfl-run --set`.
    """
    try:
        resolve("permuted-digits", method=method, overrides=[*settings, "public.name=mnist"])
    except ConfigError as error:
        return str(error)
    return None
