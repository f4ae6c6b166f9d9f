"""Run a configuration: build the session, then run one round of the schedule after another.

All randomness is keyed by (seed, task, phase, round, client, purpose). A resumed run therefore needs nothing but the
position in the schedule and the trees of the server and the clients.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cfl import streams
from cfl.assembly import arguments, methods, resolve
from cfl.config import presets
from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Strategy
from cfl.core import CflError, ConfigError, DataError, machine, warn
from cfl.core.errors import reason
from cfl.core.typed import typed
from cfl.engines.choose import Choice, undecided
from cfl.engines.compiled import obstacle
from cfl.engines.evaluate import Observer
from cfl.runtime.builder import HERE, Place, build_session
from cfl.runtime.callbacks import Callback
from cfl.runtime.fingerprint import decisive
from cfl.runtime.result import Result
from cfl.runtime.run_folder import RunFolder, read_config
from cfl.runtime.session import Session
from cfl.runtime.sinks import NullSink, Sink, usual_sink
from cfl.streams import Stream


@typed
def run(
    config: RunConfig | Mapping[str, Any],
    *,
    output: Path | str | None = None,
    resume: bool = False,
    sink: Sink | None = None,
    progress: bool | None = None,
    stream: Stream | str | None = None,
    strategy: Strategy | type[Strategy] | str | None = None,
    regularizers: Mapping[str, Any] | Sequence[str] | str | None = None,
    model: nn.Module | str | None = None,
    data_root: Path | str | None = None,
    download: bool = False,
    observe: Observer | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a configuration to the end, from the start or from the last checkpoint in `output`.

    config: from `cfl.resolve`, or the contents of a config.yaml as a dict: presets do not apply to it.
    stream, strategy, regularizers, model: your own objects, or registered names with their default options. They
    replace what the configuration names. regularizers: a dict from names to objects or to dicts of options, or a list
    of names. A class of a strategy or regularizer is called without arguments.
    output: folder for config.yaml, rounds.jsonl, metrics.json and checkpoints; None keeps everything in memory.
    sink: receives the progress, see `cfl.sinks`. Without one, `progress` decides whether progress is printed; None: in
    a terminal and in a notebook only.
    observe: called with the round, the client's id and the client's model after each local training.
    callbacks: called after rounds, tasks and the run, in order; see `cfl.Callback`.

    The option `tasks` also selects tasks of your own stream, unless it has the preset's value.
    Raises ConfigError, DataError, UpdateError, CheckpointError, CallbackError; completed rounds are in `output`.
    """
    if output == "" or (resume and output is None):
        raise ConfigError("output must name a folder" + ("; resume=True continues the run in it" if resume else ""))
    if sink is not None and progress is not None:
        raise ConfigError("progress is for runs without a sink; leave out one of the two")
    settings = arguments.configured(config, stream, strategy, regularizers, model)
    members = arguments.members(settings, strategy, regularizers)
    network = None if isinstance(model, str) else model
    root = Path(data_root) if data_root else None
    with machine.threads(settings.threads), contextlib.ExitStack() as at_end:
        if isinstance(stream, Stream):
            _warn_of_public(stream, settings, members)
            if settings.tasks == presets.tasks_of(settings.benchmark, settings.scale):
                settings = settings.model_copy(update={"tasks": None})  # is for the stream of the benchmark
            stream = streams.selected(stream, settings.tasks)
        else:
            stream = stream_of(settings, root, download, public=methods.need_public(members))
        if sink is None:  # not its truth value: a sink may be an empty list
            sink = at_end.enter_context(contextlib.closing(usual_sink(progress)))
        return carry_out(settings, stream, members, network, output, resume, sink, root, observe, callbacks=callbacks)


def _warn_of_public(stream: Stream, settings: RunConfig, members: Mapping[str, LocalRegularizer]) -> None:
    """Warn of a data set in `public.name` that a method would read if the user's stream had no public data."""
    name = settings.public.name
    if stream.public is not None and name not in (None, "stream") and methods.need_public(members):
        warn(
            f"public.name={name} has no effect: stream '{stream.name}' has public data of its own; set "
            "public.name=stream"
        )


def carry_out(
    settings: RunConfig,
    stream: Stream,
    members: Mapping[str, LocalRegularizer],
    network: nn.Module | None = None,
    output: Path | str | None = None,
    resume: bool = False,
    sink: Sink = NullSink(),
    data_root: Path | None = None,
    observe: Observer | None = None,
    place: Place = HERE,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a configuration with these objects, as `run` does. place: where the clients are."""
    with contextlib.ExitStack() as at_end:
        settings = compiling(settings, sink)
        folder = RunFolder(output, resume=resume) if output is not None else None
        if folder is not None:
            at_end.callback(folder.close)
            if resume and undecided(settings.engine, settings.block):
                settings = _settled(settings, read_config(folder.path))
        session = build_session(settings, stream, members, network, folder, sink, data_root, place, callbacks)
        torch.set_num_threads(session.config.threads)  # may have been measured
        at_end.enter_context(contextlib.closing(session))
        at_end.enter_context(session.recorder.writer)
        interrupted = at_end.enter_context(machine.interrupts())
        return _finished(session, resume, interrupted, observe)


def _finished(session: Session, resume: bool, interrupted: Callable[[], bool], observe: Observer | None) -> Result:
    """Start the run, and run the rounds that are left. An error that ends the run is kept in its folder."""
    session.start(resume)
    position = session.state.position if session.state.position < len(session.schedule) else None
    try:
        session.conclude_pending()
        while (position := session.state.position) < len(session.schedule):
            session.round(position, observe)
            if interrupted():
                session.recorder.save(wait=True)
                raise KeyboardInterrupt
        position = None
        return session.finish()
    except Exception as error:
        session.recorder.failed(error, position)
        raise


def compiling(config: RunConfig, sink: Sink) -> RunConfig:
    """The configuration without `compile` where that is impossible or has no effect, as config.yaml then says, too."""
    if config.compile and config.engine in ("loop", "pool"):
        sink.warn(f"compile=true has no effect with engine={config.engine}; set engine=vmapped or pool+vmapped")
        return config.model_copy(update={"compile": False})
    if not config.compile or not (why := obstacle(machine.device(config.device))):
        return config
    sink.warn(f"compile=true: {why}; the steps are traced instead, as with compile=false")
    return config.model_copy(update={"compile": False})


def _settled(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """The configuration with the engine, block, threads and `compile` that were measured when the run began.

    Raises ConfigError if the run compiled its steps, and this machine cannot.
    """
    chosen = {name: before.get(name) for name in Choice._fields}
    named = (config.engine, config.threads) == (chosen["engine"], chosen["threads"])
    wanted = (config.engine == "auto" or named) and config.block in (None, chosen["block"])
    wanted = wanted and config.compile in (None, chosen["compile"])
    tasks = {name: before[name] for name in ("tasks", "rounds") if name in before}  # may be more by now
    same = decisive(before) == decisive({**resolve.dump(config), **chosen, **tasks})
    if not (wanted and same):
        return config
    if chosen["compile"] and (why := obstacle(machine.device(config.device))):
        raise ConfigError(
            f"the run to resume compiled its steps (engine=auto), but {why}; install what it needs, or start a new run"
        )
    return config.model_copy(update=chosen)


def stream_of(config: RunConfig, data_root: Path | None, download: bool, public: bool) -> Stream:
    """The stream of the benchmark, with the configured public data if a method needs them."""
    try:
        stream = streams.build(
            config.benchmark,
            tasks=config.tasks,
            seed=config.seed,
            data_root=data_root,
            download=download,
            class_order=config.class_order,
            text=streams.TextOptions(**dict(config.text)),
        )
    except CflError:
        raise
    except Exception as error:  # of another package's benchmark
        raise DataError(f"benchmark '{config.benchmark}' cannot be built: {reason(error)}") from error
    if not public or config.public.name in (None, "stream"):
        return stream
    return streams.with_public(
        stream,
        config.public.name,
        samples=config.public.samples,
        seed=config.seed,
        data_root=data_root,
        download=download,
    )
