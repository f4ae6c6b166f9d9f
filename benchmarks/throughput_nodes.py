"""A workload of throughput.py as the benchmark and the model `throughput`, which are built by name.

The processes of the nodes of `--engine flower` find both by entry points, as those of an installed package.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from throughput_work import Workload
from torch import nn

from cfl import streams
from cfl.core import plugins
from cfl.streams import Benchmark, Stream

NAME, VARIABLE = "throughput", "CFL_THROUGHPUT_WORKLOAD"
ENTRY_POINTS = f"""\
[cfl.benchmarks]
{NAME} = throughput_nodes:BENCHMARK
[cfl.models]
{NAME} = throughput_nodes:model
"""


def build(*_: Any) -> Stream:
    """The stream of the workload: one task, tested on its first sample."""
    x, y = _workload().data()
    return streams.from_tensors([(x, y, x[:1], y[:1])], name=NAME)


def model(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The network of the workload, with its first weights."""
    return _workload().module()


BENCHMARK = Benchmark(build, "a workload of throughput.py", "random numbers")


@contextlib.contextmanager
def known(work: Workload) -> Iterator[None]:
    """Let this process, and processes that it starts, build a workload by name."""
    plugins.benchmarks.register(NAME)(BENCHMARK)
    plugins.models.register(NAME)(model)
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, f"{NAME}-1.0.dist-info")
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(ENTRY_POINTS)
        paths = [folder, str(Path(__file__).parent), *filter(None, [before["PYTHONPATH"]])]
        os.environ |= {VARIABLE: work.dump(), "PYTHONPATH": os.pathsep.join(paths)}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _workload() -> Workload:
    return Workload.load(os.environ[VARIABLE])
