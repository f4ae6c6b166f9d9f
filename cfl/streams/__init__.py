"""Streams of tasks: built-in benchmarks, streams from tensors or Avalanche benchmarks, and partitions over clients.

Importing this package registers the built-in benchmarks. Avalanche and torchvision are imported only to read
their streams and data sets.
"""

from cfl.streams import builtin as _builtin  # noqa: F401
from cfl.streams import text as _text  # noqa: F401
from cfl.streams.benchmark import Benchmark, build, selected
from cfl.streams.own_texts import from_texts
from cfl.streams.partition import Deal, deal
from cfl.streams.public import with_public
from cfl.streams.scenario import with_scenario
from cfl.streams.store import Pool, Stream, Task, TaskSamples
from cfl.streams.tensors import from_tensors
from cfl.streams.tokens import TextOptions
from cfl.streams.validation import held_out

__all__ = [
    "Benchmark", "Deal", "TaskSamples", "TextOptions", "Pool", "Stream", "Task", "build", "deal", "from_tensors",
    "from_texts", "held_out", "selected", "with_public", "with_scenario",
]  # fmt: skip
