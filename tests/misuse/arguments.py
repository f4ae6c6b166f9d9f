"""Bad and welcome arguments of `cfl.run`, `cfl.resolve` and registries: models, names, options and configurations."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import cfl
from cfl.assembly.resolve import dump, load
from cfl.core import ConfigError, HookError, options, plugins
from cfl.experiments.compare import seeds_of
from cfl.methods.regularizers import FedProx
from cfl.methods.strategies import FOT
from cfl.runtime.sinks import NullSink
from tests import toy

SMALL = ("tasks=1", "rounds=1", "cohort=1")


def run(config: Any = None, *, multi_head: bool = False, **arguments: Any) -> cfl.Result:
    """A run of one round with one client."""
    arguments.setdefault("stream", toy.stream(tasks=1, multi_head=multi_head))
    return cfl.run(toy.config(*SMALL, method="fedavg") if config is None else config, **arguments)


def resolve(**arguments: Any) -> cfl.RunConfig:
    return cfl.resolve("permuted-digits", **arguments)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class Works(cfl.Strategy):
    """A strategy whose clients do not train."""

    def plan(self, task: int, tasks: int, rounds: int) -> list[cfl.Phase]:
        return [cfl.Phase("gather", train=False, work=True)]


class Net(nn.Module):
    """A Linear layer, and a function of its outputs."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda logits: logits, dtype: Any = None) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 2, dtype=dtype), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x.to(self.linear.weight.dtype)))


class Fails(Net):
    def forward(self, x: Tensor) -> Any:
        return {}["aux"]


class Auxiliary(Net):
    """Like networks with auxiliary heads: further outputs in training mode."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class Silent(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class Holds(Net):
    """A Linear layer beside another parameter."""

    def __init__(self, other: Tensor, name: str = "other") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(other))


class Twins(nn.Module):
    """Two Linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Uncopied(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle a lock")


def built(builder: Any) -> cfl.Result:
    """A run with a registered model, which is forgotten afterwards."""
    plugins.models.register("misused")(builder)
    try:
        return run(resolve(overrides=[*SMALL, "model.name=misused", "local.batch_size=4", "partition.clients=4"]))
    finally:
        plugins.models._items.pop("misused")


def failing(shape: Any, outputs: int) -> nn.Module:
    raise KeyError("width")


@dataclass(frozen=True)
class Rule(cfl.Strategy):
    kind: Literal["a", "b"] | None = cfl.option(None, "kind")
    widths: tuple[int, ...] = cfl.option((1, 2), "widths", at_least=1)
    rates: list[float] = cfl.option([0.5], "rates", above=0.0, at_most=1.0)
    pair: tuple[str, int] = cfl.option(("a", 1), "pair")
    limit: tuple[int, ...] | None = cfl.option((3,), "limit, or none")
    parts: tuple[str, ...] = cfl.option((), "parts", choices=("head", "body"))


PLUGIN = "misused-rule", Rule
"""A method that is registered while the table is tested, see `tests.test_misuse`."""


def ruled(*overrides: str) -> dict[str, Any]:
    """The options of the rule, set as on a command line."""
    return resolve(method="misused-rule", overrides=[f"strategy.{text}" for text in overrides]).strategy


@dataclass(frozen=True)
class Needs(cfl.Strategy):
    size: int = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class Picky(cfl.Strategy):
    size: int = cfl.option(1, "size")

    def __post_init__(self) -> None:
        if self.size > 3:
            raise ValueError("size is too large")


@dataclass(frozen=True)
class Median(cfl.LocalRegularizer):
    gathers = "median"  # type: ignore[assignment]


@dataclass(frozen=True)
class Frozen(cfl.Strategy):
    def frozen(self, task: int, model: cfl.Model) -> frozenset[str]:
        return frozenset(["1.weigth"])


@dataclass(frozen=True)
class Heads(cfl.Strategy):
    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return (0, 7)


@dataclass(frozen=True)
class Plans(cfl.Strategy):
    phases: Any = ()

    def plan(self, task: int, tasks: int, rounds: int) -> Any:
        return list(self.phases)


def model(module: Any, **arguments: Any) -> cfl.Result:
    return run(model=module, **arguments)


def calling(name: Any) -> Callable[[], cfl.Result]:
    """A run with a regularizer of that name."""
    return lambda: run(regularizers={name: FedProx()})


LOGITS = r"it has to return the logits alone, a floating-point tensor of shape \(batch, classes\)"

MODELS = {
    "model: outputs a tuple": (lambda: model(Net(lambda y: (y, y))), ConfigError, f"returns a tuple .*; {LOGITS}"),
    "model: outputs a dict": (lambda: model(Net(lambda y: {"logits": y})), ConfigError, "returns a dict"),
    "model: outputs nothing": (lambda: model(Net(lambda y: None)), ConfigError, "returns a NoneType"),
    "model: outputs an array": (lambda: model(Net(lambda y: y.detach().numpy())), ConfigError, "returns a ndarray"),
    "model: predicts classes": (lambda: model(Net(lambda y: y.argmax(1))), ConfigError, r"shape \(2,\) for 2 samples"),
    "model: whole numbers": (lambda: model(Net(lambda y: y.long())), ConfigError, "a tensor of torch.int64"),
    "model: complex outputs": (lambda: model(Net(lambda y: y + 1j)), ConfigError, "a tensor of torch.complex64"),
    "model: three dimensions": (lambda: model(Net(lambda y: y[:, None])), ConfigError, r"shape \(2, 1, 2\)"),
    "model: three dimensions, heads": (
        lambda: model(Net(lambda y: y[:, None]), multi_head=True),
        ConfigError,
        r"shape \(2, 1, 2\)",
    ),
    "model: a number": (lambda: model(Net(lambda y: y.sum())), ConfigError, r"shape \(\) for 2 samples"),
    "model: lost the batch": (lambda: model(Net(lambda y: y.sum(0, keepdim=True))), ConfigError, r"shape \(1, 2\)"),
    "model: a tuple in training": (lambda: model(Auxiliary()), ConfigError, "returns a tuple .* in training mode"),
    "model: without gradient": (
        lambda: model(Silent()),
        ConfigError,
        r"no parameter, so nothing trains; .*no_grad\(\)",
    ),
    "model: detached": (lambda: model(Net(lambda y: y.detach())), ConfigError, r"nothing trains; .*detach\(\)"),
    "model: without parameters": (lambda: model(nn.Flatten()), ConfigError, "nothing trains; give it parameters"),
    "model: all frozen": (
        lambda: model(Net().requires_grad_(False)),
        ConfigError,
        "nothing trains; call requires_grad_",
    ),
    "model: too many outputs": (lambda: model(nn.Linear(8, 5)), ConfigError, "5 outputs, but the stream has 2 classes"),
    "model: other inputs": (
        lambda: model(nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2))),
        ConfigError,
        r"inputs of shape \(batch, \(8,\)\): .* \(in layer '1', Linear, with inputs of shape \(2, 4\)\)",
    ),
    "model: forward fails": (
        lambda: model(Fails()),
        ConfigError,
        r"inputs of shape \(batch, \(8,\)\): KeyError: 'aux'",
    ),
    "model: no forward": (lambda: model(nn.Module()), ConfigError, "missing the required .forward. function"),
    "model: embedding": (lambda: model(nn.Sequential(nn.Embedding(9, 2))), ConfigError, r"in layer '0', Embedding"),
    "model: float64": (
        lambda: model(nn.Linear(8, 2).double()),
        ConfigError,
        r"parameter 'weight' is torch.float64, and samples are torch.float32: call \.float\(\)",
    ),
    "model: float16": (lambda: model(nn.Linear(8, 2).half()), ConfigError, r"'weight' is torch.float16.*\.float\(\)"),
    "model: one layer in float64": (
        lambda: model(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2).double())),
        ConfigError,
        r"in layer '1', Linear.*parameter '1.weight' is torch.float64.*\.float\(\)",
    ),
    "model: a lambda": (
        lambda: model(lambda x: x),
        ConfigError,
        "model must be a Module .*, not an object of type func",
    ),
    "model: a class": (lambda: model(Net), ConfigError, "model must be .*, not the class Net; pass an object of it"),
    "model: a state dict": (lambda: model(Net().state_dict()), ConfigError, "model must be .*type OrderedDict"),
    "model: unknown name": (lambda: model("mpl"), ConfigError, "unknown model 'mpl'; did you mean 'mlp'"),
    "model: sparse": (lambda: model(Holds(torch.eye(2).to_sparse())), ConfigError, r"'other' .*sparse; .*to_dense\(\)"),
    "model: complex": (lambda: model(Holds(torch.ones(2) + 1j)), ConfigError, "'other' .*complex; keep its real"),
    "model: NaN": (lambda: model(Holds(torch.tensor([np.nan]))), ConfigError, "'other' .*has NaN or infinity; init"),
    "model: no device": (
        lambda: model(nn.Linear(8, 2, device="meta")),
        ConfigError,
        "'weight' .*device 'meta'.*; build the model on",
    ),
    "model: a task's name": (lambda: model(Holds(torch.ones(2), "w@1")), ConfigError, "'w@1' .*has an @ in its name"),
    "model: no copy": (
        lambda: model(Uncopied()),
        ConfigError,
        "the model, a Uncopied, cannot be copied: cannot pickle",
    ),
    "model: shared head": (
        lambda: model(Twins(), multi_head=True),
        ConfigError,
        r"'last', shares parameters .*first\.weight.*give it its own",
    ),
    "model: head inside": (
        lambda: model(Net(lambda y: y[:, :1]), multi_head=True),
        ConfigError,
        "1 outputs where this layer has 2; end the",
    ),
    "builder: fails": (lambda: built(failing), ConfigError, "model 'misused' cannot be built .*: KeyError: 'width'"),
    "builder: no arguments": (lambda: built(lambda: Net()), ConfigError, "model 'misused' cannot be built .*argument"),
    "builder: returns None": (
        lambda: built(lambda *_: None),
        ConfigError,
        "model 'misused' must return an nn.Module, not",
    ),
    "builder: returns a class": (lambda: built(lambda *_: Net), ConfigError, "must return an nn.Module, not <class"),
    "builder: outputs a tuple": (lambda: built(lambda *_: Net(lambda y: (y,))), ConfigError, "returns a tuple"),
    "builder: a default that YAML lacks": (
        lambda: built(lambda shape, outputs, act=nn.ReLU: Net()),
        ConfigError,
        r"model\.options\.act .*config\.yaml cannot",
    ),
}

RUN = {
    "run: config None": (lambda: cfl.run(None), ConfigError, "run: config must be a RunConfig or a dict, not None"),
    "run: config a name": (lambda: cfl.run("permuted-digits"), ConfigError, "config must be a RunConfig or a dict"),
    "run: config a class": (lambda: cfl.run(cfl.RunConfig), ConfigError, "not the class RunConfig; pass an object"),
    "run: config incomplete": (lambda: cfl.run({"tasks": 1}), ConfigError, "no benchmark is given; .*list benchmarks"),
    "run: config with a typo": (lambda: cfl.run({"benchmark": "x", "task": 1}), ConfigError, "did you mean 'tasks'"),
    "run: config changed by hand": (
        lambda: run(toy.config().model_copy(update={"seed": -1})),
        ConfigError,
        r"seed must be .*not -1",
    ),
    "run: config with a new key": (
        lambda: run(toy.config().model_copy(update={"sede": 1})),
        ConfigError,
        "unknown option 'sede'; did you mean 'seed'",
    ),
    "run: stream unknown": (lambda: run(stream="permuted-digit"), ConfigError, "did you mean 'permuted-digits'"),
    "run: stream a class": (
        lambda: run(stream=cfl.Stream),
        ConfigError,
        "stream must be a Stream.*the class Stream; pass",
    ),
    "run: stream tensors": (lambda: run(stream=(torch.ones(2),)), ConfigError, "stream must be a Stream.*a tuple of 1"),
    "run: strategy unknown": (lambda: run(strategy="fott"), ConfigError, "unknown method 'fott'; did you mean 'fot'"),
    "run: strategy several": (lambda: run(strategy="fot+fedsol"), ConfigError, r"not one strategy; .* regularizers=\["),
    "run: strategy a regularizer's name": (
        lambda: run(strategy="fedprox"),
        ConfigError,
        "not one strategy; name local",
    ),
    "run: strategy a regularizer": (
        lambda: run(strategy=FedProx()),
        ConfigError,
        "strategy must be a Strategy.*FedProx",
    ),
    "run: strategy a regularizer's class": (
        lambda: run(strategy=FedProx),
        ConfigError,
        "strategy must be a cfl.Strategy, not the class FedProx; .*regularizers=",
    ),
    "run: strategy with arguments": (
        lambda: run(strategy=Needs),
        ConfigError,
        r"strategy\.size of Needs has no default; give it a value",
    ),
    "run: strategy 5": (lambda: run(strategy=5), ConfigError, "strategy must be a Strategy or .*, not 5"),
    "run: regularizers unknown": (lambda: run(regularizers=["fedprx"]), ConfigError, "did you mean 'fedprox'"),
    "run: regularizers a strategy's name": (
        lambda: run(regularizers=["fot"]),
        ConfigError,
        "'fot' is a strategy, not a local regularizer",
    ),
    "run: regularizers twice": (lambda: run(regularizers=["kl", "kl"]), ConfigError, "must differ from each other"),
    "run: regularizers an object": (lambda: run(regularizers=FedProx()), ConfigError, "regularizers must be a dict or"),
    "run: a regularizer under a strategy without local training": (
        lambda: run(strategy=Works(), regularizers=["norm_bound", "fedprox"]),  # norm_bound caps uploads of `work`, too
        ConfigError,
        "'Works' plans no phase with train=True, in which fedprox could act; leave it out",
    ),
    "run: a norm bound at clients that do not train": (  # each would scale its update; `work` is capped at the server
        lambda: run(strategy=Works(), regularizers={"norm_bound": {"at": "client", "bound": 1.0}}),
        ConfigError,
        "'Works' plans no phase with train=True, in which norm_bound could act; leave it out",
    ),
    "run: a strategy object that refuses": (
        lambda: run(strategy=type("Mine", (cfl.Strategy,), {"refuses": lambda self, run: "it is new"})()),
        ConfigError,
        "'Mine' cannot run like this: it is new",
    ),
    "run: a strategy object that sees each upload": (
        lambda: run(
            toy.config("tasks=1", "rounds=1", "cohort=2", "secagg=full", method="fedavg"),
            strategy=type("Mine", (cfl.Strategy,), {"gathers": "stack"})(),
        ),
        ConfigError,
        "'Mine' needs each client's own upload, which secagg=full hides",
    ),
    "run: regularizers of 5": (
        lambda: run(regularizers={"p": 5}),
        ConfigError,
        r"regularizer\.p must be a cfl\.LocalRegularizer, not 5",
    ),
    "run: regularizers with a typo": (
        lambda: run(regularizers={"fedprox": {"nu": 1}}),
        ConfigError,
        r"regularizer\.fedprox\.nu'; did you mean",
    ),
    "run: a strategy as a regularizer": (
        lambda: run(regularizers={"more": FOT()}),
        ConfigError,
        "regularizer.more is the strategy FOT; pass it as strategy=",
    ),
    **{
        f"run: a regularizer called {name!r}": (
            calling(name),
            ConfigError,
            "cannot be called .*; give it a plain name",
        )
        for name in ("", " ", "strategy", "work", "params", "server", "a/b", "a+b", 1)
    },
    "run: gathers unknown": (
        lambda: run(regularizers={"m": Median()}),
        ConfigError,
        r"Median\.gathers 'median'; did you mean 'mean'.*stack, sum",
    ),
    "run: frozen misspelt": (
        lambda: run(strategy=Frozen()),
        HookError,
        r"Frozen\.frozen .*'1\.weigth'; did you mean '1\.weight'",
    ),
    "run: heads beyond the tasks": (lambda: run(strategy=Heads()), HookError, r"Heads\.heads .*7.* 0 to 0"),
    "run: empty plan": (lambda: run(strategy=Plans()), ConfigError, "Plans plans no round for task 0; add a cfl.Phase"),
    "run: output 5": (lambda: run(output=5), ConfigError, "run: output must be a path or a string or None, not 5"),
    "run: output empty": (lambda: run(output=""), ConfigError, "output must name a folder"),
    "run: output a file": (
        lambda tmp_path: run(output=written(tmp_path / "file", "")),
        ConfigError,
        "file' cannot be written .*choose another",
    ),
    "run: resume nothing": (lambda: run(resume=True), ConfigError, "output must name a folder; resume=True continues"),
    "run: resume a text": (lambda: run(resume="no"), ConfigError, "resume must be True or False, not 'no'"),
    "run: sink a function": (
        lambda: run(sink=print),
        ConfigError,
        "sink must be a Sink or None, not an object of type",
    ),
    "run: sink a class": (
        lambda: run(sink=NullSink),
        ConfigError,
        "sink must be a Sink .*the class NullSink; pass an obj",
    ),
    "run: data_root 5": (lambda: run(data_root=5), ConfigError, "data_root must be a path or a string or None, not 5"),
    "run: observe 5": (lambda: run(observe=5), ConfigError, "observe must be a function or None, not 5"),
    "run: unknown argument": (lambda: run(sinks=NullSink()), ConfigError, "run: got an unexpected .* 'sinks'"),
}

RESOLVE = {
    "resolve: benchmark 5": (lambda: cfl.resolve(5), ConfigError, "benchmark must be a string or None, not 5"),
    "resolve: no benchmark": (lambda: cfl.resolve(""), ConfigError, "no benchmark is given; name one"),
    "resolve: strategy last": (
        lambda: resolve(method="fedprox+fot"),
        ConfigError,
        r"names the strategy after a regularizer; write fot\+fedprox",
    ),
    "resolve: two strategies": (lambda: resolve(method="fot+ewc"), ConfigError, "names two strategies; name one"),
    "resolve: method a class": (lambda: resolve(method=FOT), ConfigError, "a string or None, not the class FOT$"),
    "resolve: regularizers a class": (
        lambda: resolve(regularizers=FedProx),
        ConfigError,
        "regularizers must be .*, not the class FedProx$",
    ),
    "resolve: a strategy as regularizer": (
        lambda: resolve(regularizers=["fot"]),
        ConfigError,
        "'fot' is a strategy, not a local regularizer; name it as the",
    ),
    "resolve: regularizers a dict": (
        lambda: resolve(regularizers={"fedprox": {"mu": 1}}),
        ConfigError,
        "regularizers must be a string or a list",
    ),
    "resolve: overrides a dict": (
        lambda: resolve(overrides={"tasks": 2}),
        ConfigError,
        "overrides must be a string or a",
    ),
    "resolve: overrides 5": (
        lambda: resolve(overrides=[5]),
        ConfigError,
        r"a list \(each a string\), not a list of 1 int",
    ),
    "resolve: overrides in one text": (
        lambda: resolve(overrides="tasks=2 rounds=3"),
        ConfigError,
        "tasks must be .*, not '2 rounds=3'",
    ),
    "run: a dotted key in a dict": (
        lambda: run({"benchmark": "mine", "local.lr": 0.1}),
        ConfigError,
        r"'local\.lr' must be nested in a mapping, as \{'local': \{'lr': ",
    ),
    "resolve: overrides without value": (
        lambda: resolve(overrides="tasks"),
        ConfigError,
        "an override is key=value.*not 'tasks'",
    ),
    "resolve: seed -1": (lambda: resolve(seed=-1), ConfigError, r"seed must be a whole number in \[0, .*, not -1"),
    "resolve: seed 1.5": (lambda: resolve(seed=1.5), ConfigError, "seed must be a whole number or None, not 1.5"),
    "resolve: seeds": (lambda: resolve(seed=[0, 1]), ConfigError, "seed must be .*, not a list of 2 int"),
    "resolve: file 5": (lambda: cfl.resolve(file=5), ConfigError, "file must be a path or a string or None, not 5"),
    "resolve: file missing": (
        lambda: cfl.resolve(file="absent.yaml"),
        ConfigError,
        "cannot read .*'absent.yaml': No such",
    ),
    "resolve: file with a name that no file can have": (
        lambda: cfl.resolve(file="x" * 300),
        ConfigError,
        "cannot read .*: File name too long",
    ),
    "resolve: file with a date": (
        lambda tmp_path: cfl.resolve(file=written(tmp_path / "a.yaml", "seed: 2020-99-01\n")),
        ConfigError,
        "a.yaml' is not valid YAML",
    ),
    "resolve: a long name": (lambda: resolve(method="x" * 999), ConfigError, "unknown method"),
    "resolve: one kind of augmentation": (
        lambda: resolve(overrides="local.augment=crop"),
        ConfigError,
        r"must be a list \(each one of crop, flip, cutout\)",
    ),
    "resolve: a number as an option's name": (
        lambda: resolve(overrides="strategy={1: 2}"),
        ConfigError,
        "names of options in strategy must be texts, not 1",
    ),
    "load: None": (lambda: load(None), ConfigError, "load: data must be a dict, not None"),
    "load: empty": (lambda: load({}), ConfigError, "no benchmark is given"),
    "RunConfig: seed -1": (lambda: cfl.RunConfig(benchmark="x", seed=-1), ConfigError, "seed must be .*, not -1"),
    "RunConfig: group": (lambda: cfl.RunConfig(benchmark="x", local=5), ConfigError, "local must be a group, not 5"),
    "RunConfig: typo": (lambda: cfl.RunConfig(benchmark="x", sede=1), ConfigError, "'sede'; did you mean 'seed'"),
    "seeds: backwards": (
        lambda: seeds_of("2..0"),
        ConfigError,
        r"--seeds 2\.\.0 has the larger seed first; write 0\.\.2",
    ),
    "seeds: too many": (lambda: seeds_of("0..99999999999"), ConfigError, "names 100000000000 seeds; name at most"),
    "seeds: negative": (lambda: seeds_of("-1"), ConfigError, r"--seeds takes 0\.\.2 or 0,3,5, not '-1'"),
}

OPTIONS = {
    "option: not a literal": (
        lambda: ruled("kind=c"),
        ConfigError,
        r"unknown value of strategy\.kind 'c'; known: a, b",
    ),
    "option: literal of an object": (
        lambda: run(strategy=Rule(kind="c")),
        ConfigError,
        r"unknown value of strategy\.kind 'c'; known: a, b",
    ),
    "option: text in a list": (
        lambda: ruled("widths=[1,a]"),
        ConfigError,
        r"widths must be a list \(each a whole number in \[1, inf\)\)",
    ),
    "option: out of range in a list": (lambda: ruled("rates=[0.5,2]"), ConfigError, r"each a number in \(0, 1\]"),
    "option: true in a list": (lambda: ruled("widths=[true]"), ConfigError, r"widths must be a list .*not \[True\]"),
    "option: no list": (lambda: ruled("widths=3"), ConfigError, "widths must be a list .*, not 3"),
    "option: half a pair": (lambda: ruled("pair=[a]"), ConfigError, "pair must be a list of a name and a whole number"),
    "option: no choice": (
        lambda: ruled("parts=[hed]"),
        ConfigError,
        r"value of strategy\.parts 'hed'; did you mean 'head'",
    ),
    "option: its own check": (
        lambda: options.build(Picky, {"size": 5}, "strategy"),
        ConfigError,
        "Picky refuses .*: size is too large",
    ),
    "option: annotation": (
        lambda: options.build(
            dataclasses.make_dataclass("Odd", [("a", "Nope", cfl.option(1, "a"))], frozen=True), {}, "strategy"
        ),
        ConfigError,
        "annotations of Odd cannot be read: NameError",
    ),
    "register: a built-in": (
        lambda: plugins.strategies.register("fot")(Rule),
        ConfigError,
        "'fot' is registered already, by .*FOT.*Rule.*; choose",
    ),
    "register: another plugin's": (
        lambda: plugins.strategies.register("misused-rule")(Picky),
        ConfigError,
        "by .*Rule.*, and now by .*Picky.*; choose",
    ),
    "register: no name": (
        lambda: plugins.strategies.register("")(Rule),
        ConfigError,
        "name of a method must be .*, not ''",
    ),
    "register: two names": (
        lambda: plugins.local.register("a+b")(FedProx),
        ConfigError,
        "must be a plain word.*'a\\+b'",
    ),
    "register: without name": (lambda: plugins.strategies.register(Rule), ConfigError, "the name of a method must be"),
    "register: a number": (
        lambda: plugins.strategies.register("five")(5),
        ConfigError,
        "'five' must be a class that extends",
    ),
    "register: a regularizer": (
        lambda: plugins.strategies.register("near")(FedProx),
        ConfigError,
        "'near' must be a class that extends Strategy",
    ),
    "register: a strategy as a regularizer": (
        lambda: plugins.local.register("far")(Rule),
        ConfigError,
        "'far' must be a class that extends LocalRegularizer and not Strategy",
    ),
    "register: a function": (
        lambda: plugins.benchmarks.register("mine")(print),
        ConfigError,
        "benchmark 'mine' must be a Benchmark",
    ),
    "phase: no name": (lambda: cfl.Phase(""), ConfigError, "a phase has a name and a whole number of rounds"),
    "phase: half a round": (
        lambda: cfl.Phase("a", 0.5),
        ConfigError,
        "a phase has .* whole number of rounds, not 'a' and 0.5",
    ),
}

CASES = {**MODELS, **RUN, **RESOLVE, **OPTIONS}


def lazy() -> bool:
    result = run(model=nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)))
    return [*result.params["0.weight"].shape] == [4, 8]


def as_dict() -> bool:
    config = toy.config(*SMALL, method="fot")
    ours, theirs = (run(each) for each in (config, dump(config)))
    return all(leaf.equal(theirs.params[name]) for name, leaf in ours.params.items())


def named(tmp_path: Path) -> bool:
    """Names change the configuration, so that config.yaml repeats the run."""
    config = toy.config(*SMALL, method="fedavg")
    metrics = run(config, strategy="fot", regularizers={"fedprox": {"mu": 0.3}}, output=tmp_path / "a").metrics
    again = cfl.resolve(file=tmp_path / "a" / "config.yaml")
    return (metrics["method"], again.method, again.regularizer) == ("fot+fedprox", "fot", {"fedprox": {"mu": 0.3}})


def no_regularizers() -> bool:
    """Those of the configuration are replaced by none."""
    result = run(toy.config(*SMALL, method="fedprox"), regularizers=[])
    return result.config.label == result.metrics["method"] == "fedavg"


def mixed() -> bool:
    """A name and an object side by side, in the user's order."""
    return run(regularizers={"mine": FedProx(), "kl": {}}).metrics["method"] == "fedavg+FedProx+kl"


def kept(tmp_path: Path) -> bool:
    """The name that the configuration has already keeps the options of the configuration."""
    run(toy.config(*SMALL, "strategy.threshold=0.5", method="fot"), strategy="fot", output=tmp_path / "a")
    return cfl.resolve(file=tmp_path / "a" / "config.yaml").strategy["threshold"] == 0.5


class Careful(nn.Module):
    """Builds no graph in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self.inner(x)


WELCOME = {
    "model: converts to float64": lambda: run(model=Net(dtype=torch.float64)),
    "model: converts to bfloat16": lambda: run(model=Net(dtype=torch.bfloat16)),
    "model: lazy": lazy,
    "model: shared parameters": lambda: run(model=nn.Sequential(Twins(), nn.Linear(8, 2))),
    "model: gradients in training alone": lambda: run(model=Careful()),
    "model: a name": lambda: run(model="mlp").metrics["method"] == "fedavg",
    "run: config a dict": as_dict,
    "run: stream a name": lambda: run(stream="permuted-digits").metrics["benchmark"] == "permuted-digits",
    "run: strategy a name": lambda: run(strategy="fot").metrics["method"] == "fot",
    "run: strategy of the configuration": kept,
    "run: strategy a class": lambda: run(strategy=FOT).metrics["method"] == "FOT",
    "run: regularizers by name": lambda: run(regularizers=["fedprox", "kl"]).metrics["method"] == "fedprox+kl",
    "run: one regularizer": lambda: run(regularizers="fedprox").metrics["method"] == "fedprox",
    "run: no regularizers": no_regularizers,
    "run: regularizers a class": lambda: run(regularizers={"near": FedProx}).metrics["method"] == "fedavg+FedProx",
    "run: names in config.yaml": named,
    "run: names and objects": mixed,
    "resolve: one override": lambda: resolve(overrides="tasks=2").tasks == 2,
    "resolve: one regularizer": lambda: resolve(regularizers="fedprox").regularizers == ("fedprox",),
    "resolve: a NumPy seed": lambda: resolve(seed=np.int64(3)).seed == 3,
    "resolve: file a text": lambda tmp_path: cfl.resolve(file=str(written(tmp_path / "a.yaml", "benchmark: iris\n"))),
    "seeds: one": lambda: seeds_of("0..0") == [0],
    "option: a list": lambda: ruled("widths=[3,4]")["widths"] == (3, 4),
    "option: a list of numbers": lambda: ruled("rates=[1,0.5]")["rates"] == [1.0, 0.5],
    "option: a pair": lambda: ruled("pair=[b,2]")["pair"] == ("b", 2),
    "option: a literal": lambda: ruled("kind=b")["kind"] == "b",
    "option: none": lambda: ruled("limit=none")["limit"] is None and ruled("limit=[4]")["limit"] == (4,),
    "option: choices": lambda: ruled("parts=[head]")["parts"] == ("head",),
    "option: back from plain data": lambda: (
        load(dump(resolve(method="misused-rule", overrides="strategy.widths=[5]"))).strategy["widths"] == (5,)
    ),
    "option: its own list": lambda: Rule().rates == [0.5] and Rule().rates is not Rule().rates,
    "register: the same again": lambda: plugins.strategies.register("fot")(FOT) is FOT,
}
