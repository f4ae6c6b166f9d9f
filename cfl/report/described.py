"""Output of `cfl-run describe` for a benchmark, method, model or regularizer, and for options of a run."""

import inspect
from dataclasses import MISSING
from importlib.resources import files
from typing import Any

from cfl import models
from cfl.assembly import privacy_rules
from cfl.assembly.resolve import resolve
from cfl.config.option_names import GROUPS, option_names, strategy_options
from cfl.config.overrides import assignment
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, options, plugins
from cfl.core.errors import wanted
from cfl.report import tables

PROTECTIONS: dict[str, list[str]] = {
    "secagg=full": [],
    "dp.level=client": ["dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"],
    "dp.level=example": ["dp.noise_multiplier=1", "agg.weights=uniform"],
}
"""Options that protect the uploads of a run, each with the further options that it needs."""


def summary(item: Any) -> str:
    """One line about a registered object."""
    return getattr(item, "summary", None) or (item.__doc__ or "").strip().partition("\n")[0]


def blocks(kind: str, name: str, item: Any, source: str) -> list[Any]:
    """Texts and tables to print in order. kind: name of the registry, such as "methods"; source: paper and section."""
    title = f"{name} ({kind.removesuffix('s')}): {summary(item)}" + (f"\nSource: {source}" if source else "")
    if kind == "benchmarks":
        return [title, _preset(name)]
    if kind == "models":
        details = inspect.cleandoc(item.__doc__ or "").partition("\n")[2].strip()
        return [title, tables.hyper_parameters(_parameters(name), "model."), *([details] if details else [])]
    rows, prefix = options.describe(item), "strategy." if kind == "methods" else f"regularizer.{name}."
    own = tables.hyper_parameters(rows, prefix) if rows else "No hyper-parameters."
    shown = [title, own]
    if kind == "methods":
        reason = item.not_class_incremental
        answer = f"not supported: {reason}" if reason else item.class_incremental
        answers = [("scenario=task", item.task_incremental), ("scenario=class", answer)]
        shown.append(tables.answers(answers, "scenario"))
    return [*shown, tables.answers(_privacy(name, item), "privacy")]


def any_option(name: str) -> list[Any]:
    """A table of the option of this dotted name, or under a title of all in the group; empty for another name.

    An option of methods has a row for each method.
    """
    found = [_run_option(dotted) for dotted in option_names() if name in (dotted, dotted.partition(".")[0])]
    found += _method_options(name)
    title = [f"{name} (options of a run): {summary(RunConfig.model_fields[name].annotation)}"] if name in GROUPS else []
    return [*title, tables.hyper_parameters(found, "")] if found else []


def _method_options(name: str) -> list[dict[str, Any]]:
    """Rows on an option of strategies, one for each that has it, or on one of a regularizer; none for another name."""
    group, _, rest = name.partition(".")
    owners: dict[str, Any] = {}
    if group == "strategy":
        owners = {f"{name} ({own})": plugins.strategies.get(own) for own in strategy_options().get(name, ())}
    elif group == "regularizer" and (owner := rest.partition(".")[0]) in plugins.local.names():
        owners, rest = {name: plugins.local.get(owner)}, rest.partition(".")[2]
    rows = [(title, row) for title, own in owners.items() for row in options.describe(own)]
    return [{**row, "name": title} for title, row in rows if row["name"] == rest]


def _run_option(dotted: str) -> dict[str, Any]:
    """A row on an option of a run, with default and valid values as in `--set`."""
    group, _, name = dotted.rpartition(".")
    section: Any = RunConfig.model_fields[group].annotation if group else RunConfig
    field, valid = section.model_fields[name], wanted(section.model_json_schema()["properties"][name])
    default = field.get_default(call_default_factory=True)
    return {
        "name": dotted,
        "default": MISSING if field.is_required() else assignment(dotted, default).partition("=")[2],
        "range": f"{valid.removesuffix(' or none')} or null" if valid.endswith(" or none") else valid,
        "help": field.description,
        "source": "",
    }


def _privacy(name: str, item: Any) -> list[tuple[str, str]]:
    """Rows on the uploads of a client, on what the server learns from them, and on each of the `PROTECTIONS`."""
    rows = [("a client sends", _sends(item))]
    if needed := options.required(item):  # without their values nothing can be tried
        return [*rows, ("all else", f"depends on the values of {', '.join(needed)}")]
    sums = "" if privacy_rules.shows_each(item()) else "; only the sum with secure aggregation"
    rows.append(("the server learns", f"each client's upload{sums}"))
    for option, further in PROTECTIONS.items():
        reason = refused(name, [option, *further])
        rows.append((option, f"not supported: {reason}" if reason else "supported"))
    return rows


def _sends(item: Any) -> str:
    """What a client sends for a method. A `sends` that is inherited does not cover uploads of a class's own."""
    for kind in item.__mro__:
        if "sends" in vars(kind):
            break
        if {"finish", "work"} & vars(kind).keys():
            return f"not stated: {kind.__name__} has uploads of its own; give it a class attribute sends"
    return item.sends or "nothing besides the update"


def _parameters(name: str) -> list[dict[str, Any]]:
    """Rows on the options of a model."""
    return [
        {
            "name": one.name,
            "default": MISSING if one.default is one.empty else one.default,
            "range": _text(one.annotation),
            "help": "",
            "source": "",
        }
        for one in models.builder_options(name).values()
    ]


def _text(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("collections.abc.", "")


def _preset(name: str) -> str:
    path = files("cfl") / "presets" / f"{name}.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else "No preset: all options have their defaults."


def refused(method: str, settings: list[str]) -> str | None:
    """Return why a method or regularizer cannot run at its defaults with these settings; None if it can.

    settings: overrides as for `cfl-run --set`, such as an entry of `PROTECTIONS`.
    """
    try:
        resolve("permuted-digits", method=method, overrides=[*settings, "public.name=mnist"])
    except ConfigError as error:
        return str(error)
    return None
