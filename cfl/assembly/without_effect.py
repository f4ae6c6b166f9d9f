"""Options that have no effect in a run, since another option switches off what they belong to."""

from typing import Any, NamedTuple

from cfl.config.overrides import assignment, flat
from cfl.config.presets import layered, normal, preset
from cfl.config.schema import RunConfig


class _Rule(NamedTuple):
    """Options that have no effect where the option `switch` has one of the values `off`."""

    switch: str
    off: tuple[Any, ...]
    options: tuple[str, ...]


_RULES = (
    _Rule("dp.level", ("none",), ("dp.clip", "dp.delta", "dp.protect", "dp.amplify", "dp.accountant")),
    _Rule("secagg", ("none",), ("secure.bits", "secure.fraction_bits", "secure.quorum", "secure.neighbours")),
    _Rule("model.adapter", ("none",), ("model.adapter_rank", "model.adapter_alpha", "model.adapter_targets")),
    _Rule("attack.name", ("none",), ("attack.clients", "attack.strength")),
    _Rule("partition.name", ("iid", "shards", "sharding", "classes", "stream"), ("partition.alpha",)),
    _Rule("partition.name", ("iid", "dirichlet", "lda", "classes", "stream"), ("partition.shards",)),
    _Rule(
        "partition.name", ("iid", "shards", "dirichlet", "sharding", "classes", "stream"), ("partition.min_samples",)
    ),
    _Rule("local.optimizer", ("adam",), ("local.momentum",)),
    _Rule("local.lr_decay", (1.0,), ("local.lr_restart",)),
    _Rule("public.name", (None,), ("public.samples",)),
    _Rule("scenario", ("task", "domain"), ("class_loss",)),
    _Rule("engine", ("loop",), ("block",)),
    _Rule("engine", ("loop", "vmapped"), ("workers",)),
)


def notes(config: RunConfig, scenario: str) -> list[str]:
    """Return a line for each option without effect that differs from its default and from the benchmark's preset.

    scenario: of the stream, which the configuration may leave open.
    """
    values = flat(config.model_dump(mode="json")) | {"scenario": scenario}
    default = flat(RunConfig(benchmark=config.benchmark).model_dump(mode="json"))
    usual = default | flat(_preset(config))
    return [
        f"{assignment(name, values[name])} has no effect {_state(rule.switch, values[rule.switch])}"
        for rule in _RULES
        if values[rule.switch] in rule.off
        for name in rule.options
        if values[name] not in (default[name], usual[name])
    ]


def _preset(config: RunConfig) -> dict[str, Any]:
    """The options of the benchmark's preset, in its variant for this run, under all options but those of `_RULES`."""
    top = config.model_dump(mode="json")
    for dotted in (name for rule in _RULES for name in rule.options):
        group, _, name = dotted.rpartition(".")
        del (top[group] if group else top)[name]
    return layered(normal(preset(config.benchmark), {"benchmark": config.benchmark}), top)


def _state(switch: str, value: Any) -> str:
    return f"without {switch}" if value in ("none", None) else f"with {assignment(switch, value)}"
