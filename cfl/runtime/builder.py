"""From a configuration and a stream to a session: the objects of a run, built and checked against each other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from cfl import engines, models
from cfl.aggregation.attacks import Attack
from cfl.aggregation.protected import UploadProtection
from cfl.assembly import methods, network, privacy_rules, without_effect
from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Strategy
from cfl.contract.composed import STRATEGY, ComposedMethod, prefix
from cfl.core import ConfigError, Tree, machine, optim, options, plugins
from cfl.engines import Engine
from cfl.engines.choose import choose, undecided
from cfl.runtime import model_file
from cfl.runtime.callback_set import CallbackSet
from cfl.runtime.callbacks import Callback
from cfl.runtime.fingerprint import CHECKPOINTS, Fingerprint
from cfl.runtime.population import Population
from cfl.runtime.privacy_budget import Budget
from cfl.runtime.recorder import Recorder
from cfl.runtime.rounds import Rounds
from cfl.runtime.run_folder import RunFolder
from cfl.runtime.session import Session
from cfl.runtime.sinks import NullSink, Sink
from cfl.runtime.state import RunState
from cfl.runtime.warm_start import pretrained_weights, started
from cfl.streams import Stream, held_out, with_scenario
from cfl.streams.store import TaskSamples


class EngineParts(NamedTuple):
    """What an engine outside of `cfl.engines` is made from.

    inner: the engine that computes clients there; multiplier: standard deviation of the noise over dp.clip;
    data_root: folder of the data sets; checkpoints: folder of the run's checkpoints, None for a run in memory.
    """

    inner: Engine
    rounds: Rounds
    fingerprint: Fingerprint
    multiplier: float
    data_root: Path | None
    checkpoints: Path | None


class Place(NamedTuple):
    """Where the clients of a run are: by default in this process, or where the configured engine has them.

    engine: None for the configured one; states: where the states of the clients are kept, for messages.
    """

    rounds: type[Rounds] = Rounds
    population: Callable[[Stream, RunConfig], Population] = Population
    engine: Callable[[EngineParts], Engine] | None = None
    states: str = CHECKPOINTS


HERE = Place()


def build_session(
    config: RunConfig,
    stream: Stream,
    members: Mapping[str, LocalRegularizer],
    own: nn.Module | None = None,
    folder: RunFolder | None = None,
    sink: Sink = NullSink(),
    data_root: Path | None = None,
    place: Place = HERE,
    callbacks: Sequence[Callback] = (),
) -> Session:
    """Build a run that has not begun.

    members: "strategy" and regularizers by name; own: a network of your own, None for the configured model;
    data_root: folder of the data sets, for engines that build the stream elsewhere; callbacks: see `cfl.run`.
    Measures which engine is fastest if the configuration leaves that open. Raises ConfigError if the configuration, the
    methods, the model and the stream do not fit together, or a package is missing.
    """
    built = methods.build(config)
    label = config.label if members == built else "+".join(_names(config, members, built))
    stream, validation = _prepared(stream, config)
    public = _checked_public(config, stream, members, label)
    shape, outputs = stream.input_shape, stream.tasks[0].classes
    module = network.build(config, shape, outputs, stream.vocabulary) if own is None else own
    device = machine.device(config.device)
    model = network.handle(config, module, stream.input_shape, stream.heads, stream.scenario, device)
    notes, start = _start(config, model, own)
    methods.check_model(model.module, config)
    composed = ComposedMethod(members)
    _check_fit(composed.strategy, stream, label)
    notes += _on_scenario(config, model, stream, composed.strategy, label)
    population = place.population(stream, config)
    rounds = place.rounds(composed, label, model, stream, population, config, public)
    _check_batches(model, population, rounds, config.local.batch_size)
    budget = Budget(rounds)
    protection = UploadProtection(config, budget.multiplier)
    first = composed.strategy.init_server(model.params, model)
    composed.check(STRATEGY, "init_server", first, {}, "before the first round")
    state = RunState({"params": model.params, **first}, len(stream))
    lenient = config.model_copy(update={"on_bad_update": "exclude"})  # a measurement judges no update
    config = _with_measured_engine(config, rounds, state, partial(_engine, lenient, rounds, protection))
    fingerprint = Fingerprint(
        config, composed, module, stream, public is not None, own is not None, place.states, start
    )
    called = CallbackSet(callbacks, config, stream)  # refuses callbacks before an engine opens anything
    engine = _engine(config, rounds, protection, config.engine, config.block, bool(config.compile))
    make = place.engine or (None if config.engine in engines.ENGINES else plugins.engines.get(config.engine))
    if make is not None:
        checkpoints = folder.checkpoints if folder else None
        parts = EngineParts(engine, rounds, fingerprint, budget.multiplier, data_root, checkpoints)
        engine = make(parts)
    recorder = Recorder(folder, sink, state, rounds, budget, fingerprint, called)
    notes += [*without_effect.notes(config, stream.scenario), *model.notes(), *composed.strategy.notes(model),
              *population.notes(), *budget.notes(), *_on_evaluations(config, rounds, label)]  # fmt: skip
    given = {name: each for name, each in members.items() if each != built.get(name)}
    about = model_file.contents(stream, own, given, model)
    return Session(
        config, stream, composed, model, population, rounds, budget, state, engine, recorder, notes, about,
        validation,
    )  # fmt: skip


def _names(config: RunConfig, members: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of each member: that of its option, and of an object of the user's own that of its class."""
    for owner, member in members.items():
        known = config.method if owner == STRATEGY else owner
        yield known if built.get(owner) == member else type(member).__name__


def _check_fit(strategy: Strategy, stream: Stream, label: str) -> None:
    """Raise ConfigError for a strategy that cannot run on a stream of this kind."""
    if stream.growing and (why := strategy.not_class_incremental):
        raise ConfigError(f"{label} cannot run with scenario=class: {why}")
    if stream.vocabulary is not None and (why := strategy.not_for_texts):
        raise ConfigError(f"{label} cannot run on texts: {why}")


def _on_scenario(config: RunConfig, model: models.Model, stream: Stream, strategy: Strategy, label: str) -> list[str]:
    """Notes on the heads and on `eval_later`. Raises ConfigError as `_on_later_tasks`."""
    return [*_on_heads(config, stream, model, strategy), *_on_later_tasks(config, model, stream, strategy, label)]


def _on_heads(config: RunConfig, stream: Stream, model: models.Model, strategy: Strategy) -> list[str]:
    """Notes on tasks whose accuracy says nothing, and on outputs that weight decay alone changes."""
    alone = [task.name for task in stream.tasks if task.classes == 1 and not stream.growing]
    why = "has a head of a single class, so its accuracy is 100 % whatever the model learns"
    found = [f"task '{name}' {why}" for name in alone]
    if stream.growing and len(stream) > 1 and config.class_loss == "current" and config.local.weight_decay:
        if model.old_head(1) - strategy.frozen(1, model):
            found.append(
                f"with class_loss=current, local.weight_decay={config.local.weight_decay:g} shrinks the head's weights "
                f"for the classes of earlier tasks, unless '{config.method}' or a regularizer trains them"
            )
    return found


def _on_later_tasks(
    config: RunConfig, model: models.Model, stream: Stream, strategy: Strategy, label: str
) -> list[str]:
    """Notes on `eval_later`. Raises ConfigError if the model cannot predict for a task before it trains on the task."""
    if not config.eval_later:
        return []
    if stream.scenario != "domain":
        raise ConfigError(
            f"eval_later=true evaluates tasks before they are learned, and with scenario={stream.scenario} the model "
            "has no trained outputs for them then; set scenario=domain, or leave eval_later out"
        )
    if model.moving and model.buffers_per_task:
        raise ConfigError(
            "eval_later=true evaluates tasks before they are learned, and the model has no statistics of them then; "
            "set model.norm_stats=running or model.norm_stats=batch, or leave eval_later out"
        )
    if not strategy.sequential:
        return [f"eval_later=true has no effect: {label} does not train one model on the tasks in sequence"]
    return []


def _on_evaluations(config: RunConfig, rounds: Rounds, label: str) -> list[str]:
    """Notes on evaluations after rounds of local steps, if the run has no such rounds."""
    if any(phase.train for _, phase, _ in rounds.schedule):
        return []
    given = {name: every for name in ("eval_every", "eval_local") if (every := getattr(config, name))}
    return [f"{name}={every} has no effect: '{label}' trains clients in `work` alone" for name, every in given.items()]


def _check_batches(model: models.Model, population: Population, rounds: Rounds, size: int) -> None:
    """Raise ConfigError if a client or the server would train on a batch of one sample that the model cannot take."""
    if model.takes_one:
        return
    why = "the model fails on a batch of one sample in training, as with batch normalisation"
    if rounds.public is not None and len(rounds.public) == 1:
        raise ConfigError(f"the public data are one sample, but {why}; give more public data")
    if type(population) is not Population:  # nodes may have data of their own
        return
    if size == 1:
        raise ConfigError(f"local.batch_size=1, but {why}; raise it")
    for task in range(len(population.deals)):
        held = np.sum([population.deals[each].sizes for each in rounds.sees(task)], axis=0)
        if (held == 1).any():
            raise ConfigError(f"client {np.flatnonzero(held == 1)[0]} has one sample to train on in task {task}, but "
                              f"{why}; choose another partition or model")  # fmt: skip


def _prepared(stream: Stream, config: RunConfig) -> tuple[Stream, tuple[TaskSamples, ...]]:
    """Return the stream as clients get it, on the run's device, and the held-out samples of each task."""
    stream = with_scenario(stream, config.scenario)
    stream = stream.to(machine.device(config.device)).with_augment(config.local.augment)
    return held_out(stream, config.validation, config.seed)


def _start(config: RunConfig, model: models.Model, own: nn.Module | None) -> tuple[list[str], Tree]:
    """Let the model start from another run's, else from pretrained weights. Returns notes, and the parameters taken."""
    if own is not None and config.model.weights is not None:
        raise ConfigError(
            "model.weights is for a network by name; load the weights into your own, and set model.weights=null"
        )
    if config.start is not None:
        params, note = started(model, config.start, config.model)
    elif config.model.weights is not None:
        params, note = pretrained_weights(model, config.model)
    else:
        return [], {}
    model.start_from(params)
    return [note], model.params


def _checked_public(
    config: RunConfig, stream: Stream, members: Mapping[str, LocalRegularizer], label: str
) -> TaskSamples | None:
    """Check the methods, and return the public data if a method reads them."""
    for owner, member in members.items():
        options.check(member, prefix(owner))
    methods.check(members, config, public=stream.public is not None)
    privacy_rules.check(members, config)
    privacy_rules.check_packages(config)
    if not methods.need_public(members):
        return None
    if stream.public is None:
        raise ConfigError(
            f"{label} needs public data, and stream '{stream.name}' has none; add some with cfl.streams.with_public "
            "or from_tensors(public=...)"
        )
    return stream.public


def _engine(
    config: RunConfig,
    rounds: Rounds,
    protection: UploadProtection,
    name: str,
    block: int | None,
    compile: bool,
) -> Engine:
    return engines.build(
        name,
        block=block,
        cohort=rounds.usual_cohort,
        workers=config.workers or machine.cores(),
        compile=compile,
        known=[rounds.model, rounds.public or (), *rounds.population.train, *rounds.population.reversed.values()],
        model=rounds.model,
        composed=rounds.composed,
        optimizer=optim.build(config.local.optimizer, config.local.momentum, config.local.weight_decay),
        epochs=config.local.epochs,
        batch_size=config.local.batch_size,
        weights=config.agg.weights,
        on_bad_update=config.on_bad_update,
        sums=Attack(config, rounds.strategy, protection.sum).sum,
        noise=protection.samples,
    )


def _with_measured_engine(
    config: RunConfig, rounds: Rounds, state: RunState, make: Callable[[str, int | None, bool], Engine]
) -> RunConfig:
    """The configuration with the measured engine, block and threads if it leaves them open."""
    if not undecided(config.engine, config.block):
        return config
    training = [position for position, (_, phase, _) in enumerate(rounds.schedule) if phase.train]
    inputs = (rounds.inputs(position, state) for position in training)
    first = next((each for each in inputs if each.clients), None)
    if first is None:  # no client ever trains, so that nothing can be measured
        return config.model_copy(update={"engine": "loop"} if config.engine == "auto" else {})
    choice = choose(config, machine.device(config.device), make, first, len(training))
    return config.model_copy(update=choice._asdict())
