"""Run a configuration: build the session, then run one round of the schedule after another.

All randomness is keyed by (seed, task, phase, round, client, purpose). A resumed run therefore needs nothing but the
position in the schedule and the trees of the server and the clients.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cfl import streams
from cfl.assembly import methods, resolve
from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Strategy
from cfl.contract.composed import STRATEGY
from cfl.core import ConfigError, machine
from cfl.engines.choose import Choice, undecided
from cfl.engines.evaluate import Observer
from cfl.runtime.builder import build_session
from cfl.runtime.run_folder import RunFolder
from cfl.runtime.session import Result
from cfl.runtime.sinks import Sink
from cfl.streams import Stream


def run(
    config: RunConfig,
    *,
    output: Path | str | None = None,
    resume: bool = False,
    sink: Sink | None = None,
    stream: Stream | None = None,
    strategy: Strategy | None = None,
    regularizers: Mapping[str, LocalRegularizer] | None = None,
    model: nn.Module | None = None,
    data_root: Path | str | None = None,
    download: bool = False,
    observe: Observer | None = None,
) -> Result:
    """Run a configuration to the end, from the start or from the last checkpoint in `output`.

    stream, strategy, regularizers, model: your own objects in place of those that the configuration names.
    output: folder for config.yaml, rounds.jsonl, metrics.json and checkpoints; None keeps everything in memory.
    observe: called with the round, the client's id and the client's model after each local training.
    Raises ConfigError, DataError, UpdateError, CheckpointError; completed rounds are in `output`.
    """
    with machine.threads(config.threads), contextlib.ExitStack() as at_end:
        members = _members(config, strategy, regularizers)
        if stream is None:
            root = Path(data_root) if data_root else None
            stream = _stream(config, root, download, public=methods.need_public(members))
        folder = RunFolder(output, resume=resume) if output is not None else None
        if folder is not None:
            at_end.callback(folder.close)
            if resume and undecided(config.engine, config.block):
                config = _settled(config, folder.read_config())
        session = build_session(config, stream, members, model, folder, sink)
        torch.set_num_threads(session.config.threads)  # may have been measured
        at_end.enter_context(contextlib.closing(session))
        at_end.enter_context(session.recorder.writer)
        interrupted = at_end.enter_context(machine.interrupts())
        session.start(resume)
        for position in range(session.state.position, len(session.schedule)):
            session.round(position, observe)
            if interrupted():
                session.recorder.save(wait=True)
                raise KeyboardInterrupt
        return session.finish()


def _members(
    config: RunConfig, strategy: Strategy | None, regularizers: Mapping[str, LocalRegularizer] | None
) -> dict[str, LocalRegularizer]:
    """The strategy and the regularizers of a run by name; given objects replace the configured ones."""
    members = methods.build(config)
    if regularizers is not None:
        if STRATEGY in regularizers:
            raise ConfigError(f"a regularizer cannot be called '{STRATEGY}'; pass a strategy as strategy=...")
        members = {STRATEGY: members[STRATEGY], **regularizers}
    return members if strategy is None else {**members, STRATEGY: strategy}


def _settled(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """The configuration with the engine, block and threads that were measured when the run began."""
    chosen = {name: before.get(name) for name in Choice._fields}
    named = (config.engine, config.threads) == (chosen["engine"], chosen["threads"])
    wanted = (config.engine == "auto" or named) and config.block in (None, chosen["block"])
    same = before == {**resolve.dump(config), **chosen, "workers": before.get("workers")}
    return config.model_copy(update=chosen) if wanted and same else config


def _stream(config: RunConfig, data_root: Path | None, download: bool, public: bool) -> Stream:
    """The stream of the benchmark, with the configured public data if a method needs them."""
    stream = streams.build(
        config.benchmark,
        tasks=config.tasks,
        seed=config.seed,
        data_root=data_root,
        download=download,
        class_order=config.class_order,
    )
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
