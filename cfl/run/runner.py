"""Runs a configuration: gathers what takes part, then one round of the schedule after the other.

Nothing here knows a method's name. All randomness is keyed by (seed, task, phase, round, client, purpose), so the
position in the schedule is all that a resumed run needs beside the server's and the clients' trees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cfl import streams
from cfl.assembly import methods
from cfl.assembly import resolve as configuration
from cfl.config.schema import RunConfig
from cfl.contract.composed import STRATEGY
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.strategy import Strategy
from cfl.core import machine
from cfl.core.errors import ConfigError
from cfl.engines.choose import Choice, undecided
from cfl.engines.evaluate import Observer
from cfl.run.run_folder import RunFolder
from cfl.run.session import Result, Session
from cfl.run.sinks import NullSink, Sink
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
    """Run a configuration from start to end, or from where a killed run in `output` stopped.

    stream, strategy, regularizers, model: objects of your own in place of what the configuration names.
    output: folder for config.yaml, rounds.jsonl, metrics.json and checkpoints; None keeps all in memory.
    observe: called with round, client id and the client's model after each local training, to look at it.
    Raises ConfigError, DataError, UpdateError, CheckpointError; what was computed before is in `output`.
    """
    with machine.threads(config.threads):
        members = methods.build(config)
        if regularizers is not None:
            if STRATEGY in regularizers:
                raise ConfigError(f"a regularizer cannot be called '{STRATEGY}'; pass a strategy as strategy=...")
            members = {STRATEGY: members[STRATEGY], **regularizers}
        if strategy is not None:
            members[STRATEGY] = strategy
        if stream is None:
            root = Path(data_root) if data_root else None
            stream = _stream(config, root, download, public=methods.need_public(members))
        with contextlib.ExitStack() as at_end:
            folder = RunFolder(output, resume=resume) if output is not None else None
            if folder is not None:
                at_end.callback(folder.close)
                if resume and undecided(config.engine, config.block):
                    config = _settled(config, folder.read_config())
            session = Session(config, stream, members, model, folder, sink or NullSink())
            torch.set_num_threads(session.config.threads)  # which may have been measured
            at_end.enter_context(contextlib.closing(session))
            at_end.enter_context(session.writer)
            interrupted = at_end.enter_context(machine.interrupts())
            session.start(resume)
            for position in range(session.state.position, len(session.schedule)):
                session.round(position, observe)
                if interrupted():
                    session.save(wait=True)
                    raise KeyboardInterrupt
            return session.finish()


def _settled(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """The configuration with what the run began with in place of what it leaves to a measurement."""
    chosen = {name: before.get(name) for name in Choice._fields}
    named = (config.engine, config.threads) == (chosen["engine"], chosen["threads"])
    wanted = (config.engine == "auto" or named) and config.block in (None, chosen["block"])
    same = before == {**configuration.dump(config), **chosen, "workers": before.get("workers")}
    return config.model_copy(update=chosen) if wanted and same else config


def _stream(config: RunConfig, data_root: Path | None, download: bool, public: bool) -> Stream:
    """The benchmark's stream, with the public data that the configuration names where they are needed."""
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
