"""The configuration of a run: every option with its default and valid range, and the layers that fill it in.

Layers, later ones win: defaults, the benchmark's preset (`cfl/presets/<benchmark>.yaml`) or a resolved `config.yaml`,
`key=value` overrides, flags. A resolved configuration names every hyper-parameter, so it repeats its run to the byte.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cfl import members, options, plugins
from cfl.errors import ConfigError, unknown, wanted
from cfl.members import DEFAULT_METHOD
from cfl.overrides import check_shape, merged, parse, read_yaml, without
from cfl.privacy import rules

Positive = Annotated[int, Field(ge=1, le=2**31)]
# YAML knows lists only; the strict models want tuples.
Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Section(BaseModel):
    """A group of options: immutable, no key but the named ones, no silent conversion (`true` is not 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PartitionConfig(Section):
    """How a task's training samples are dealt to the clients."""

    name: Literal["iid", "shards", "dirichlet", "sharding", "lda", "classes"] = Field(
        "iid", description="how samples are dealt to clients"
    )
    clients: Positive = Field(20, description="number of clients in the population")
    alpha: float = Field(0.5, gt=0, description="concentration of `dirichlet` and `lda`; smaller is more uneven")
    task_share: float = Field(1.0, gt=0, le=1, description="share of the clients that hold a given task")
    shards: Positive = Field(2, description="label shards a client gets with `shards` and `sharding`")
    min_samples: Positive = Field(10, description="the fewest samples that `lda` leaves a client with")


class LocalConfig(Section):
    """Local training of a client."""

    epochs: Positive = Field(1, description="passes over the client's data a round")
    batch_size: Positive = Field(16, description="samples a step")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (L2 term of the gradient)")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after each round")
    lr_restart: bool = Field(True, description="whether the schedule restarts at each task")
    augment: Annotated[tuple[Literal["crop", "flip", "cutout"], ...], Tuple] = Field(
        (), description="random changes of training images: crop, flip, cutout"
    )


class PublicConfig(Section):
    """Inputs without labels that server and clients may see, for the methods that distil."""

    name: str | None = Field(None, description="data set; `stream` for the benchmark's own public part")
    samples: Positive | None = Field(None, description="how many, drawn by the seed; null for all")


class ModelConfig(Section):
    """The network; `model.<x>` for any other x is an option of the model's builder."""

    name: str = Field("mlp", description="name of the model; see `cfl-run list models`")
    norm_stats: Literal["per_task", "batch", "running"] = Field(
        "per_task", description="statistics that normalisation layers use at test time"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the model's builder")


class ServerConfig(Section):
    """The server's step."""

    lr: float = Field(1.0, gt=0, description="server learning rate; 1 is plain averaging")


class AggConfig(Section):
    """How uploads are averaged."""

    weights: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the mean")


class SecureConfig(Section):
    """The sum of uploads as integers, with `secagg=full` (masked) and `secagg=sum` (the same without the masks)."""

    bits: Literal[16, 32, 64] = Field(64, description="uploads are summed as integers modulo 2^bits")
    fraction_bits: int = Field(24, ge=0, le=52, description="how many of the bits stand behind the point")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that must stay for its sum to be opened")
    neighbours: Positive | None = Field(
        None,
        description="clients with which each one shares masks; null for the fewest that are safe, about log(cohort)",
    )


class PrivacyConfig(Section):
    """Differential privacy of what clients send: (epsilon, delta) over all rounds, phases and tasks."""

    level: Literal["none", "client", "example"] = Field(
        "none", description="what is protected: a client's whole data, or one sample; client where a budget is given"
    )
    clip: float = Field(1.0, gt=0, description="largest L2 norm of a client's upload, or of a sample's gradient")
    noise_multiplier: float | None = Field(None, gt=0, description="standard deviation of the noise over dp.clip")
    target_epsilon: float | None = Field(None, gt=0, description="epsilon of the whole run, to solve for the noise")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is stated")
    protect: Literal["all", "work"] = Field(
        "all", description="protected uploads: all, or only those beside the updates, such as sketches"
    )
    amplify: bool = Field(True, description="whether the adversary does not know which clients a round has drawn")
    accountant: Literal["prv", "rdp"] = Field("prv", description="accountant: prv is tight, rdp an upper bound")

    @model_validator(mode="before")
    @classmethod
    def _of_a_client(cls, data: Any) -> Any:
        """A budget without a level is one of client-level privacy."""
        budget = isinstance(data, Mapping) and (data.get("target_epsilon") or data.get("noise_multiplier"))
        return {"level": "client", **data} if budget else data


class RunConfig(Section):
    """All that decides the result of a run; `dump` makes plain data of it, `resolve` and `load` make one."""

    benchmark: str = Field(description="name of the benchmark; see `cfl-run list benchmarks`")
    scale: Literal["paper", "small", "smoke"] = Field(
        "paper", description="length of the run: the paper's, minutes on two cores, or seconds"
    )
    method: str = Field(DEFAULT_METHOD, description="strategy of the run; see `cfl-run list methods`")
    regularizers: Annotated[tuple[str, ...], Tuple] = Field((), description="local regularizers, in order")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="seed of every draw")  # the most that numpy takes
    tasks: Annotated[Positive | tuple[str, ...] | None, Tuple] = Field(
        None, description="number of tasks, or their names where they have some; null for all of the benchmark"
    )
    rounds: Annotated[Positive | tuple[Positive, ...] | dict[str, Positive], Tuple] = Field(
        20, description="rounds a task: one number, a list, or by the names of the tasks"
    )
    cohort: Positive = Field(10, description="clients a round; all owners of the task where there are fewer")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="cohorts of the same size, or each client drawn independently with the same mean"
    )
    drop_rate: float = Field(0.0, ge=0, lt=1, description="probability that a client of a cohort drops out of a round")
    class_order: Literal["random", "natural"] = Field("random", description="order in which classes join tasks")
    engine: Literal["loop", "vmapped", "pool", "pool+vmapped", "auto"] = Field(
        "loop",
        description="clients one by one, in blocks at once, in processes, both, or what is fastest in the first steps",
    )
    block: Positive | None = Field(
        None, description="clients trained at once, or handed to a process; null: measured, or a 16th of the cohort"
    )
    workers: int | None = Field(None, ge=1, le=1024, description="processes of a pool; null: one for each core")
    device: str = Field("cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    partition: PartitionConfig = PartitionConfig()
    local: LocalConfig = LocalConfig()
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    agg: AggConfig = AggConfig()
    public: PublicConfig = PublicConfig()
    strategy: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters of the method")
    regularizer: dict[str, dict[str, Any]] = Field(default_factory=dict, description="those of each local regularizer")
    eval_every: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the current task; 0: at its end only"
    )
    eval_local: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the cohort's local models; 0: never"
    )
    eval_batch_size: Positive = Field(1024, description="samples a batch in evaluations")
    checkpoint_every: Positive = Field(1, description="rounds between checkpoints; the end of a task always has one")
    threads: int = Field(1, ge=1, le=256, description="threads inside an operation; `auto` may take one a core")
    on_bad_update: Literal["raise", "exclude"] = Field("raise", description="what NaN in a client's update does")
    secagg: Literal["none", "sum", "full"] = Field(
        "none", description="secure aggregation: none, the same sums and bytes without masks, or in full"
    )
    secure: SecureConfig = SecureConfig()
    dp: PrivacyConfig = PrivacyConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tasks = len(self.tasks) if isinstance(self.tasks, tuple) else self.tasks
        if isinstance(self.rounds, tuple) and tasks not in (None, len(self.rounds)):
            raise ConfigError(f"rounds lists {len(self.rounds)} numbers for {tasks} tasks; give one a task")
        if self.public.samples and self.public.name == "stream":
            raise ConfigError("public.samples draws from a data set, not from the stream's own; set it to null")
        if len(set(self.regularizers)) < len(self.regularizers):
            raise ConfigError(f"local regularizers must differ from each other, not {', '.join(self.regularizers)}")
        for name in self.regularizer:
            if name not in self.regularizers:
                raise ConfigError(f"regularizer.{name} is set, but '{name}' is not used; add --local {name}")
        return self

    @property
    def label(self) -> str:
        """The name under which `--method` takes this combination: "fot+fedsol", or "fedsol" for it alone."""
        alone = self.method == DEFAULT_METHOD and self.regularizers
        return "+".join(self.regularizers if alone else (self.method, *self.regularizers))


def resolve(
    benchmark: str | None = None,
    *,
    method: str | None = None,
    regularizers: Sequence[str] = (),
    overrides: Sequence[str] = (),
    seed: int | None = None,
    file: Path | None = None,
    engine: str | None = None,
    scale: str | None = None,
) -> RunConfig:
    """The full configuration of a run, from the layers that the module names.

    method: a strategy, a local regularizer (then under FedAvg), or several joined by "+", such as "fot+fedsol";
    regularizers: more of them; overrides: "key=value" with dotted keys and YAML values; file: a resolved `config.yaml`,
    which replaces the preset; scale: which variant of the preset, "paper" (as written), "small" or "smoke".
    Raises ConfigError in one line for unknown names, wrong values and a file that cannot be read.
    """
    flags = dict(benchmark=benchmark, method=method, seed=seed, engine=engine, scale=scale)
    given = {name: value for name, value in flags.items() if value is not None}
    top = _named(merged(_routed(_shaped(parse(overrides))), given))
    base = _named(_routed(_shaped(read_yaml(file)))) if file else {}
    name = top.get("benchmark", base.get("benchmark"))
    if base.get("benchmark", name) != name:
        raise ConfigError(f"'{file}' is for benchmark '{base['benchmark']}', not '{name}'; name that one or none")
    if name is None:
        raise ConfigError("no benchmark is given; name one (see 'cfl-run list benchmarks') or pass --config FILE")
    if not file:
        base = _named(_routed(merged(preset(name), {"benchmark": name})))
    _check_scale(base, top.get("scale"), f"'{file or name}'")
    if regularizers:  # further ones, whatever layer names the first
        members.roles("+".join([DEFAULT_METHOD, *regularizers]))
        top["regularizers"] = [*top.get("regularizers", base.get("regularizers", ())), *regularizers]
    return load(_layered(base, top))


def load(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain data (the inverse of `dump`), checked against the methods' and models' own options.

    Raises ConfigError in one line that names the option, the value and what is valid.
    """
    data = _named(_routed(_shaped(data)))
    _check_keys(data, RunConfig, "", data.get("method", DEFAULT_METHOD), data.get("regularizers", ()))
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise _one_line(error) from None
    config = config.model_copy(update=_filled(config))
    _check_layers(config)
    built = members.build(config)
    members.check(built, config)
    rules.check(built, config)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain data (lists, dicts, numbers, strings) of a configuration, hyper-parameters at their defaults included."""
    return config.model_copy(update=_filled(config)).model_dump(mode="json")


def json_schema() -> dict[str, Any]:
    """The JSON schema of `config.yaml`."""
    return RunConfig.model_json_schema()


def preset(benchmark: str) -> dict[str, Any]:
    """The preset of a benchmark as written, `methods` and `variants` included; empty where there is none."""
    path = files("cfl") / "presets" / f"{benchmark}.yaml"
    return read_yaml(path) if path.is_file() else {}


def _check_scale(base: Mapping[str, Any], scale: Any, where: str) -> None:
    """Raise ConfigError for a scale that neither the preset nor the `config.yaml` has."""
    known = [base.get("scale", "paper"), *base.get("variants", {}).get("scale", {})]
    if scale is not None and scale not in known:
        raise ConfigError(f"{where} has no scale '{scale}'; it has {', '.join(known)}")


def _layered(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, whose `methods` and `variants` are resolved by what the two say together."""
    both = merged(base, top)
    for dotted, cases in base.get("variants", {}).items():
        section, _, name = str(dotted).rpartition(".")
        group = both.get(section) if section else both
        value = group.get(name) if isinstance(group, Mapping) else None
        base = _over(base, _routed(cases.get(value, {}) if isinstance(value, Hashable) else {}))
    method = both.get("method", DEFAULT_METHOD)
    if "method" in base and base["method"] != method:
        base = without(base, "strategy")  # the other method's hyper-parameters mean nothing here
    if isinstance(top.get("regularizers"), list) and "regularizer" in base:
        kept = {name: own for name, own in base["regularizer"].items() if name in top["regularizers"]}
        base = {**base, "regularizer": kept}
    own = base.get("methods", {})
    used = both.get("regularizers")
    others = {name: own[name] for name in (used if isinstance(used, (list, tuple)) else ()) if name in own}
    base = merged(base, {"strategy": own.get(method, {}), **({"regularizer": others} if others else {})})
    return _over(without(base, "methods", "variants"), top)


def _over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` merged over `base`, whose options of a model go if `top` names another one."""
    model = base.get("model", {})
    if top.get("model", {}).get("name", _model_name(base)) != _model_name(base):
        base = {**base, "model": without(model, "options")}
    return merged(base, top)


def _named(data: dict[str, Any]) -> dict[str, Any]:
    """The same data with a method such as "fot+fedsol" as one strategy and its regularizers."""
    label = data.get("method")
    if not isinstance(label, str):
        return data
    method, first = members.roles(label)
    more = data.get("regularizers", ())
    return {**data, "method": method, "regularizers": [*first, *more] if isinstance(more, (list, tuple)) else more}


def _shaped(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same data; raises ConfigError where layering would read a name or a group and finds something else."""
    sections = {name: getattr(field.annotation, "model_fields", None) for name, field in RunConfig.model_fields.items()}
    check_shape(data, {name: list(inner) for name, inner in sections.items() if inner})
    return data


def _model_name(data: Mapping[str, Any]) -> Any:
    return data.get("model", {}).get("name", "mlp")


def _routed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data with the keys of `model` that are no field of it moved to `model.options`."""
    model = data.get("model")
    if model is None:
        return dict(data)
    own = {name: value for name, value in model.items() if name in ModelConfig.model_fields}
    extra = {name: value for name, value in model.items() if name not in own}
    return {**data, "model": merged(own, {"options": extra}) if extra else own}


def _check_keys(data: Mapping[str, Any], section: type[BaseModel], prefix: str, method: str, regularizers: Any) -> None:
    """Raise ConfigError for the first key that no option has."""
    for name, value in data.items():
        field = section.model_fields.get(name)
        if field is None:
            dotted = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and not prefix:  # `fedsol.rho` is meant to be found too
                dotted += f".{next(iter(value))}"
            raise _unknown_option(dotted, method, regularizers)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            _check_keys(value, kind, f"{prefix}{name}.", method, regularizers)
        elif isinstance(value, Mapping) and "dict" not in str(kind):
            raise _unknown_option(f"{prefix}{name}.{next(iter(value), '')}", method, regularizers)


def _unknown_option(dotted: str, method: str, regularizers: Any) -> ConfigError:
    names = list(_option_names(method, regularizers))
    if f"regularizer.{dotted}" in names:
        return ConfigError(f"unknown option '{dotted}'; did you mean 'regularizer.{dotted}'?")
    # The group is what users forget most: "threshold" is meant to find strategy.threshold.
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = [] if "." in dotted else get_close_matches(dotted, by_leaf, n=1, cutoff=0.7)
    if near:
        return ConfigError(f"unknown option '{dotted}'; did you mean '{by_leaf[near[0]]}'?")
    return unknown("option", dotted, names)


def _option_names(method: str, regularizers: Any = ()) -> Iterable[str]:
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (f"{name}.{inner}" for inner in kind.model_fields)
        else:
            yield name
    if method in plugins.strategies.names():
        yield from (f"strategy.{row['name']}" for row in options.describe(plugins.strategies.get(method)))
    known = plugins.local.names()
    for owner in regularizers if isinstance(regularizers, (list, tuple)) else ():
        if owner in known:
            yield from (f"regularizer.{owner}.{row['name']}" for row in options.describe(plugins.local.get(owner)))


def _check_layers(config: RunConfig) -> None:
    from cfl.models import sample

    if config.dp.level != "none" and (module := sample(config.model.name, config.model.options)) is not None:
        rules.check_model(module, config)


def _filled(config: RunConfig) -> dict[str, Any]:
    """The options of the model, of the method and of every regularizer, checked, with defaults."""
    from cfl import models  # brings torch, which reading a preset does not need

    options = models.filled(config.model.name, config.model.options)
    own = _hyper(plugins.strategies.get(config.method), config.strategy, "strategy")
    others = {
        name: _hyper(plugins.local.get(name), config.regularizer.get(name, {}), f"regularizer.{name}")
        for name in config.regularizers
    }
    return {"model": config.model.model_copy(update={"options": options}), "strategy": own, "regularizer": others}


def _hyper(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = get_type_hints(cls)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint) and str not in get_args(hint)}
    # YAML spells it null, but the messages and most users say none.
    values = {name: None if value == "none" and name in optional else value for name, value in values.items()}
    built: Any = options.build(cls, values, prefix)
    return {field.name: getattr(built, field.name) for field in fields(built) if field.init}


def _one_line(error: ValidationError) -> ConfigError:
    """The first fault of a pydantic error as `option must be ..., not ...`."""
    fault = error.errors()[0]
    dotted, schema, value = "", RunConfig.model_json_schema(), fault["input"]
    definitions = schema["$defs"]
    for part in fault["loc"]:
        if part not in schema.get("properties", {}):
            break
        dotted, schema = f"{dotted}.{part}".lstrip("."), schema["properties"][part]
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    choices = schema.get("enum") or schema.get("items", {}).get("enum")
    if choices:
        return unknown(f"value of {dotted}", str(value), choices)
    return ConfigError(f"{dotted} must be {wanted(schema)}, not {value!r}")
