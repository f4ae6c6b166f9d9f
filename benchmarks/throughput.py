"""Time a round of each workload: client steps a second, GFLOP/s, the share of the machine's peak, and alternatives.

    python benchmarks/throughput.py [--workload NAME ...] [--against plain,pfl,jax] [--precision bf16] [--json FILE]

A round is local training of all clients and the average: no evaluation, no set-up. Inputs are random floats, so nothing
is downloaded. Ours and the alternatives take turns, and medians of their seconds are compared. --precision is that of
our engines; the peak and the alternatives are in float32, but for plain-bf16. Alternatives:

- plain: the papers' codes: a module, DataLoader and torch.optim.SGD for one client after another, with one thread;
- plain-bf16: the same with forward pass and loss under torch.autocast in bfloat16: what bf16 has to beat;
- hand: the same steps as the `loop` engine makes, to the sample, written by hand: what an engine costs beside them;
- products: the matrix products of the round alone, a process a core (MLPs only): what no engine can undercut;
- pool+vmapped: our engine of that name, beside `--engine flower`;
- float32: our engine in float32, with the same options, beside `--precision bf16`;
- pool-float32: our engine `pool` in float32, whose steps are not compiled;
- pfl: pfl-research with one process, and with two ("pfl-2", also alone); flower: its simulation, one core a client;
- jax: plain JAX on the CPU, jit, vmap and scan at their fastest, all cores (FedJAX is no longer maintained).

The last two lines need packages (benchmarks/requirements-throughput.txt), which may have environments of their own. All
but the products must move the weights as far as ours does, or the comparison stops: the work must be the same.
"""

import argparse
import contextlib
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from host import store
from throughput_nodes import NAME, known
from throughput_peak import peak
from throughput_peer import Peer
from throughput_products import Products
from throughput_work import WORKLOADS, Workload, epoch, moved
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from cfl import streams
from cfl.assembly import methods as members
from cfl.assembly import resolve as configuration
from cfl.core import machine, rng
from cfl.runtime.builder import build_session

ALONE = ("plain", "plain-bf16", "hand", "products", "pool+vmapped", "float32", "pool-float32", "pfl-2", "flower", "jax")
AGAINST = {name: (name,) for name in ALONE} | {"pfl": ("pfl", "pfl-2")}
PACKAGES = {"pfl": "pfl", "pfl-2": "pfl", "flower": "flwr", "jax": "jax"}
SAME = 0.1  # batches are drawn differently, so the weights move a little differently

Rounds = Callable[[int], float]
"""Seconds of one round, out of as many as are asked for."""


class Ours:
    """The first round of a run, through the engine."""

    def __init__(
        self,
        work: Workload,
        engine: str,
        device: str,
        block: int | None = None,
        precision: str = "float32",
        compile: bool | None = None,
    ) -> None:
        config = configuration.load(
            {
                "benchmark": NAME,
                "engine": engine,
                "block": block,
                "compile": compile,
                "device": device,
                "rounds": 1,
                "cohort": work.clients,
                "partition": {"name": "iid", "clients": work.clients},
                "local": {"batch_size": work.batch, "lr": work.lr},
                "model": {"name": NAME, "norm_stats": "batch"},
                "precision": precision,
            }
        )
        machine.keep_memory()  # as cfl-run does
        self.session = build_session(config, streams.build(NAME), members.build(config))
        self.prepared = self.session.prepare(0)

    def round(self) -> dict[str, Tensor]:
        """The mean update w_global - w_local."""
        with machine.threads(self.session.config.threads):
            return self.session.engine.round(self.prepared).mean["strategy"]

    @property
    def choice(self) -> dict[str, Any]:
        """What computes the round, as `auto` has chosen where it was asked for."""
        return self.session.config.model_dump(include={"engine", "block", "compile", "threads", "workers"})


class Plain:
    """A client after another, as the papers' codes do it: weights loaded, trained, kept, averaged at the end."""

    def __init__(self, work: Workload, device: str, bf16: bool = False) -> None:
        self.work, self.device, self.bf16, self.module = work, device, bf16, work.module().to(device)
        self.start = {name: leaf.clone() for name, leaf in self.module.state_dict().items()}
        self.data = TensorDataset(*work.data())

    def round(self) -> dict[str, Tensor]:
        work, uploads = self.work, []
        for first in range(0, len(self.data), work.samples):
            self.module.load_state_dict(self.start)
            epoch(self.module, Subset(self.data, range(first, first + work.samples)), work, self.device, self.bf16)
            uploads.append({name: leaf.clone() for name, leaf in self.module.state_dict().items()})
        weight = work.samples / len(self.data)
        mean = {name: sum(weight * upload[name] for upload in uploads) for name in self.start}
        return {name: self.start[name] - leaf for name, leaf in mean.items()}


class Hand:
    """The steps of the `loop` engine written by hand: the same batches, by index from the same stream."""

    def __init__(self, work: Workload, ours: Ours) -> None:
        self.work, self.prepared = work, ours.prepared
        self.module = work.module().to(machine.device(ours.session.config.device))
        self.start = [leaf.detach().clone() for leaf in self.module.parameters()]

    def round(self) -> dict[str, Tensor]:
        leaves, info = list(self.module.parameters()), self.prepared.info
        names = [name for name, _ in self.module.named_parameters()]
        mean = [torch.zeros_like(leaf) for leaf in leaves]
        for client in self.prepared.clients:
            (part, rows), key = client.shares[0], rng.key(info.key, "order", client.id, 0)
            with torch.no_grad():
                for leaf, first in zip(leaves, self.start):
                    leaf.copy_(first)
            optimizer = torch.optim.SGD(leaves, lr=self.work.lr)
            order = torch.randperm(len(rows), generator=rng.generator(key)).to(rows.device)
            for batch in order.split(self.work.batch):
                x, y = part.gather(rows[batch])
                optimizer.zero_grad()
                F.cross_entropy(self.module(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for total, leaf, first in zip(mean, leaves, self.start):
                    total.add_(first - leaf, alpha=1 / self.work.clients)
        return dict(zip(names, mean))


def timed(round: Callable[[], Any], device: str) -> Rounds:
    """Seconds of a round, with all that the device was told to do."""

    def run(rounds: int) -> float:
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(rounds):
            round()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / rounds

    return run


def warm(run: Rounds, most: int = 10, seconds: float = 3.0) -> None:
    """A few rounds, in which shapes are traced, workers start and caches fill."""
    began = time.perf_counter()
    for _ in range(most):
        run(1)
        if time.perf_counter() - began > seconds:
            break


def size(step: Mapping[str, Tensor]) -> float:
    """How far a round moves the weights."""
    leaves = list(step.values())
    return moved([torch.zeros_like(leaf) for leaf in leaves], leaves)


def measure(
    work: Workload,
    engine: str,
    against: Sequence[str],
    *,
    runs: int,
    best: float,
    device: str = "cpu",
    pythons: Mapping[str, str] | None = None,
    burst: float = 0.5,
    block: int | None = None,
    precision: str = "float32",
    compile: bool | None = None,
) -> dict[str, Any]:
    """A row of the table. best: the machine's peak in GFLOP/s; pythons: interpreter of a package, if not this one.

    burst: least seconds of a sample, so that short rounds are timed several at once;
    precision: of our engines. Raises RuntimeError where an alternative does other work than ours.
    """
    notes: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(known(work))
        ours = Ours(work, engine, device, block, precision, compile)
        stack.callback(ours.session.close)
        distance = size(ours.round())
        contenders: dict[str, Rounds] = {"ours": timed(ours.round, device)}
        for name in against:
            if name == "products":
                if work.model != "mlp":
                    notes[name] = "MLPs only"
                    continue
                contenders[name] = bound = Products(work)
                stack.callback(bound.close)
                continue
            if name == "jax" and (device != "cpu" or any(work.options.get("dropout", ()))):
                notes[name] = "CPU only, and without dropout"
                continue
            if name in PACKAGES:
                python = (pythons or {}).get(PACKAGES[name], sys.executable)
                if not installed(PACKAGES[name], python):
                    notes[name] = "not installed"
                    continue
                peer = beside(name, work, device, python)
                stack.callback(peer.close)
                contenders[name] = lambda rounds, peer=peer: peer.ask(str(rounds))["seconds"]
                setting = f", {peer.first['setting']}" if "setting" in peer.first else ""
                other, notes[name] = peer.first["moved"], f"version {peer.first['version']}{setting}"
            else:
                own: Ours | Plain | Hand
                if name == "pool+vmapped":
                    own = Ours(work, name, device, block, precision, compile)
                    stack.callback(own.session.close)
                elif name == "float32":
                    own = Ours(work, engine, device, block, name, compile)
                    stack.callback(own.session.close)
                elif name == "pool-float32":
                    own = Ours(work, "pool", device)
                    stack.callback(own.session.close)
                elif name == "hand":
                    own = Hand(work, ours)
                else:
                    own = Plain(work, device, bf16=name == "plain-bf16")
                contenders[name], other = timed(own.round, device), size(own.round())
            if not abs(other - distance) <= SAME * distance:
                raise RuntimeError(f"{work.name}: {name} moves the weights by {other}, ours by {distance}")
        for run in contenders.values():
            warm(run)
        rounds = {name: max(1, math.ceil(burst / run(1))) for name, run in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, run in contenders.items():
                seconds[name].append(run(rounds[name]))
        choice = ours.choice
    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    gflops = work.flops() / 1e9 / median["ours"]
    ratios = {ratio(name): median[name] / median["ours"] if name in median else None for name in against}
    return {
        "workload": work.name,
        "precision": precision,
        **choice,
        "steps_per_second": work.steps / median["ours"],
        "gflops": gflops,
        "share_of_peak": gflops / best,
        **ratios,
        "notes": notes,
        "rounds_per_sample": rounds,
        "seconds": seconds,
    }


def ratio(name: str) -> str:
    """The field of an alternative's seconds over ours."""
    return f"ratio_vs_{re.sub('[-+]', '_', name)}"


def installed(package: str, python: str) -> bool:
    """Whether that interpreter finds the package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def beside(name: str, work: Workload, device: str, python: str) -> Peer:
    """The process of an alternative that has a package of its own; it has done a first round."""
    if name in ("flower", "jax"):
        return Peer(python, f"throughput_{name}.py", [work.dump()])
    return Peer(python, "throughput_pfl.py", [work.dump(), device, "2" if name == "pfl-2" else "1"])


def table(rows: Sequence[Mapping[str, Any]], against: Sequence[str]) -> Iterator[str]:
    """Lines of the table; ratios are the alternative's seconds over ours."""
    titles = ["workload", "engine", "steps/s", "GFLOP/s", "of peak", "ms/round", *(f"{name}/ours" for name in against)]
    widths = [max(12, len(title) + 2) for title in titles[2:]]
    yield f"{titles[0]:<16}{titles[1]:>22}" + "".join(f"{title:>{n}}" for title, n in zip(titles[2:], widths))
    for row in rows:
        extra = [f"{short}{row[name]}" for short, name in (("x", "workers"), ("/", "block")) if row.get(name)]
        extra += [" bf16"] if row["precision"] == "bf16" else []
        found = [row[ratio(name)] for name in against]
        cells = [
            f"{row['steps_per_second']:.0f}",
            f"{row['gflops']:.1f}",
            f"{row['share_of_peak']:.0%}",
            f"{1000 * statistics.median(row['seconds']['ours']):.1f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in found),
        ]
        line = "".join(f"{cell:>{n}}" for cell, n in zip(cells, widths, strict=True))
        yield f"{row['workload']:<16}{row['engine'] + ''.join(extra):>22}{line}"
        for name, note in row["notes"].items():
            yield f"  {name}: {note}"
        if row.get("ratio_vs_hand"):
            yield f"  the engine's own cost: {1 / row['ratio_vs_hand'] - 1:+.1%} of the hand-written loop"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--against", default="plain", help=f"alternatives, of {', '.join(AGAINST)}, joined by commas")
    parser.add_argument("--engine", default="auto", help="engine of ours, as in the configuration")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="of our engines")
    parser.add_argument("--block", type=int, help="clients in a block of ours (default: timed)")
    parser.add_argument("--compile", action="store_true", default=None, help="compile the steps of our blocks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs")
    parser.add_argument("--python-pfl", default=sys.executable, help="interpreter that has pfl")
    parser.add_argument("--python-flower", default=sys.executable, help="interpreter that has flwr")
    parser.add_argument("--python-jax", default=sys.executable, help="interpreter that has jax")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    asked = [name for name in options.against.split(",") if name]
    if unknown := set(asked) - set(AGAINST):
        parser.error(f"--against knows {', '.join(AGAINST)}, not {', '.join(sorted(unknown))}")
    against = list(dict.fromkeys(each for name in asked for each in AGAINST[name]))
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "gpu": None if options.device == "cpu" else torch.cuda.get_device_name(options.device),
        "workloads": [],
    }
    for name in options.workload:
        best = peak(options.device)  # anew, for a machine that others share may be slower in a minute
        way = f"({best['processes']} x {best['threads']} threads, size {best['size']})"
        print(f"peak: {best['gflops']:.1f} GFLOP/s {way}")
        row = measure(
            WORKLOADS[name],
            options.engine,
            against,
            runs=options.runs,
            best=best["gflops"],
            device=options.device,
            block=options.block,
            precision=options.precision,
            compile=options.compile,
            pythons={"pfl": options.python_pfl, "flwr": options.python_flower, "jax": options.python_jax},
        )
        found["workloads"].append({**row, "peak": best})
        print("\n".join(list(table([row], against))[bool(found["workloads"][1:]) :]), flush=True)
        store(options.json, found, "torch")


if __name__ == "__main__":
    main()
