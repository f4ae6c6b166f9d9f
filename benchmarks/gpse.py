"""Time and memory of GPSE: of a client against one epoch of its training, and each part against the plain way.

    python benchmarks/gpse.py [--parts layers precision client memory server] [--repeats 5] [--json FILE]

layers: a sketch of each convolution from its Gram matrix (what `cfl` does), against drawing all of G.
precision: what float32 products miss of a Gram matrix (norm of the error over the largest eigenvalue), beside what a
    rank rule that asks for everything (threshold 1) takes for zero; below a threshold of 0.999 `cfl` takes them.
client: the whole of `FOT.work` against a round of local training of that client, one epoch, on the papers' models; with
    the operations of either (products and Cholesky factors): what a sketch takes beyond sketch=gram is L Z, the product
    of a factor of the Gram matrix with its s columns of draws, and the factor.
memory: what `FOT.work` adds to the peak (MiB) of a pass that sketches nothing, against the number of samples.
server: leading singular vectors of a float32 sketch d x 5d by the eigenvectors of A A^T, against a full SVD.

Data are random. Two forms alternate, medians are compared, and one thread computes.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from host import store
from torch.utils.flop_counter import FlopCounterMode

import cfl
from cfl import models
from cfl.contract import Client, Phase, RoundInfo, RoundInputs, Share
from cfl.contract.composed import ComposedMethod
from cfl.core import machine, optim, rng
from cfl.engines.loop import LoopEngine
from cfl.methods.strategies.fot import FOT
from cfl.methods.subspace.basis import empty, residual_spectrum
from cfl.methods.subspace.input_sums import BATCH
from cfl.methods.subspace.layer_inputs import Patches, slides, stream
from cfl.methods.subspace.sketch import Direct, Gram
from cfl.models import Layer

MODELS: dict[str, dict[str, Any]] = {  # as in the presets, and FOT's network for Split Mini-ImageNet
    "mlp": {
        "shape": (1, 28, 28),
        "options": {"hidden": [400, 400, 400], "dropout": [0.2, 0.5, 0.5]},
        "samples": 480,
        "batch": 64,
    },
    "alexnet_cl": {"shape": (3, 32, 32), "options": {}, "samples": 100, "batch": 16},
    "resnet18": {
        "shape": (3, 84, 84),
        "options": {"width": 32, "stem_stride": 2, "norm": True},
        "samples": 100,
        "batch": 16,
    },
}
ALL: dict[str, dict[str, Any]] = {
    "s = 5 d": {"sketch": "gaussian"},
    "s = d": {"sketch": "gaussian", "s_mult": 1.0, "s_mult_conv": 1.0},
    "sketch=gram": {"sketch": "gram"},
}
AUTHORS = {"sketch": "gaussian", "criterion": "norm_ratio", "min_rank": 1, "bias": "free"}
OPTIONS = {
    "mlp": {**ALL, "preset": {**AUTHORS, "s_mult": 1.0, "distribution": "uniform"}},
    "alexnet_cl": {**ALL, "preset": {**AUTHORS, "s_mult_conv": 1.0}},
    "resnet18": {**ALL, "authors": {**AUTHORS, "s_mult_conv": 1.0}},
}
CONVOLUTIONS = ("alexnet_cl", "resnet18")
TRAIN, GPSE = Phase("train"), Phase("gpse", cohort="available", train=False, work=True)
MEMORY_SAMPLES, SERVER_WIDTHS = (100, 1600, 3200, 6400), (288, 576, 1024)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternate(repeats: int, **forms: Callable[[], Any]) -> dict[str, Any]:
    """All seconds of each form, their medians, and the ratio of the first form's to the second's."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, run in forms.items():
            times[name].append(seconds(run))
    medians = [statistics.median(samples) for samples in times.values()]
    return {**dict(zip(forms, medians, strict=True)), "ratio": medians[0] / medians[1], "seconds": times}


def client_of(name: str, samples: int = 0) -> tuple[cfl.Model, Client]:
    """A paper's model, and a client with as many samples as there, or as told."""
    given = MODELS[name]
    shape, count = given["shape"], samples or given["samples"]
    many = name != "mlp"
    module = models.build(name, shape, 10, given["options"])
    model = cfl.Model(module, shape, [10, 10], multi_head=many, norm_stats="batch")
    x, y = torch.randn(count, *shape, generator=rng.generator(0)), torch.arange(count) % 10
    task = cfl.from_tensors([(x, y, x[:1], y[:1])] * 2, multi_head=many).tasks[0].train
    return model, Client(0, {0: Share(task, torch.arange(count))}, 0, (0,))


def info_of(model: cfl.Model, phase: Phase) -> RoundInfo:
    names = (*model.trainable(0), *model.buffers(0))
    return RoundInfo(0, 2, phase, 0, (0,), names, frozenset(), (0,), 1, 0.01, model, key=3)


def gflop(run: Callable[[], Any]) -> float:
    """Operations of a call's products and convolutions and of its Cholesky factors (d^3 / 3), in 10^9."""
    cholesky = {torch.ops.aten.linalg_cholesky_ex: lambda shape, *_, **__: shape[0] ** 3 // 3}
    with FlopCounterMode(display=False, custom_mapping=cholesky) as counter:
        run()
    return counter.get_total_flops() / 1e9


def work(strategy: FOT, model: cfl.Model, client: Client) -> None:
    strategy.work(model.params, client, {"params": model.params}, {}, info_of(model, GPSE))


def entering(name: str) -> list[tuple[Layer, torch.Tensor]]:
    """Convolutions of a model, of those that cost the same one, and what enters (samples, channels, height, width)."""
    model, own = client_of(name)
    entered: dict[str, torch.Tensor] = {}
    every = [layer for layer in model.layers if isinstance(layer.module, torch.nn.Conv2d)]

    def keep(layer: Layer, x: torch.Tensor, batch: cfl.Batch) -> None:
        entered[layer.name] = x

    stream(model, model.params, 0, own.batches(len(own)), every, keep, patches=False)
    alike = {(layer.size, layer.module.stride, entered[layer.name].shape): layer for layer in reversed(every)}
    return [(layer, entered[layer.name]) for layer in reversed(alike.values())]


def patches(layer: Layer, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    sums = Patches(layer, parts[0].shape[2:], dtype)
    for part in parts:
        sums.add(part)
    return sums.gram()


def layers(repeats: int) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'model':>10} {'layer':>24} {'d':>5} {'vectors':>8} {'direct (s)':>11} {'gram (s)':>9} {'direct / gram':>14}"
    )
    for name in CONVOLUTIONS:
        for layer, x in entering(name):
            parts, d = x.split(BATCH), layer.size  # as a client takes them
            vectors = sum(len(layer.inputs(part).flatten(0, 1)) for part in parts)

            def sketch(sums: Gram | Direct, fast: bool, layer: Layer = layer, parts: tuple = parts) -> torch.Tensor:
                if fast and slides(layer):
                    sums.add_gram(patches(layer, parts, torch.float32))
                else:
                    for part in parts:
                        sums.add(layer.inputs(part), torch.arange(len(part)))
                return sums.release()

            row = {"model": name, "layer": layer.name, "d": d, "vectors": vectors} | alternate(
                repeats,
                direct=lambda d=d: sketch(Direct(empty(d).float(), 5 * d, 0, by_sample=False), False),
                gram=lambda d=d: sketch(Gram(empty(d).float(), 5 * d, 0, torch.float32), True),
            )
            rows.append(row)
            print(
                f"{name:>10} {layer.name:>24} {d:>5} {vectors:>8} {row['direct']:>11.3f} {row['gram']:>9.3f} "
                f"{row['ratio']:>14.2f}",
                flush=True,
            )
    return rows


def precision(repeats: int) -> list[dict[str, Any]]:
    rows, eps = [], torch.finfo(torch.float32).eps
    print(f"\n{'model':>10} {'layer':>24} {'d':>5} {'error':>9} {'zero, s = d':>12} {'s = 5d':>9} {'gram':>9}")
    for name in CONVOLUTIONS:
        for layer, x in entering(name):
            if not slides(layer):
                continue
            exact, rounded = (patches(layer, x.split(BATCH), dtype) for dtype in (torch.float64, torch.float32))
            first, d = largest(exact), layer.size
            error, norm = largest(rounded - exact) / first, float(torch.linalg.matrix_norm(exact))
            zero = [(d * eps) ** 2, (5 * d * eps) ** 2, eps * norm / first]  # as in `residual_spectrum`
            rows.append({"model": name, "layer": layer.name, "d": d, "error": error, "zero": zero})
            print(
                f"{name:>10} {layer.name:>24} {d:>5} {error:>9.1e} {zero[0]:>12.1e} {zero[1]:>9.1e} {zero[2]:>9.1e}",
                flush=True,
            )
    return rows


def largest(matrix: torch.Tensor) -> float:
    """The largest eigenvalue in size of a symmetric matrix (d, d), by 30 steps of the power method."""
    vector = torch.randn(len(matrix), dtype=matrix.dtype, generator=rng.generator(0))
    for _ in range(30):
        vector = matrix @ (vector / vector.norm())
    return float(vector.norm())


def client(repeats: int) -> list[dict[str, Any]]:
    rows = []
    print(
        f"\n{'model':>10} {'options':>22} {'GPSE (s)':>9} {'epoch (s)':>10} {'GPSE / epoch':>13} "
        f"{'GFLOP':>7} {'epoch':>7}"
    )
    for name, choices in OPTIONS.items():
        model, own = client_of(name)
        for title, options in choices.items():
            strategy = FOT(**options)
            engine = LoopEngine(
                model,
                ComposedMethod({"strategy": strategy}),
                optim.sgd(),
                epochs=1,
                batch_size=MODELS[name]["batch"],
                weights="uniform",
                on_bad_update="raise",
            )

            def epoch(engine: LoopEngine = engine, model: cfl.Model = model, own: Client = own) -> None:
                engine.round(RoundInputs(info_of(model, TRAIN), {"params": model.params}, [own], {0: {}}))

            def gpse(strategy: FOT = strategy, model: cfl.Model = model, own: Client = own) -> None:
                work(strategy, model, own)

            epoch()
            row = {"model": name, "options": title} | alternate(repeats, gpse=gpse, epoch=epoch)
            row |= {"gflop": gflop(gpse), "epoch_gflop": gflop(epoch)}
            rows.append(row)
            print(
                f"{name:>10} {title:>22} {row['gpse']:>9.3f} {row['epoch']:>10.3f} {row['ratio']:>13.2f} "
                f"{row['gflop']:>7.1f} {row['epoch_gflop']:>7.1f}",
                flush=True,
            )
    return rows


def added_memory(samples: int) -> float:
    """MiB that a client's GPSE on alexnet_cl adds to the peak of this process, after a pass that sketches nothing."""
    model, own = client_of("alexnet_cl", samples)
    with torch.no_grad(), model.evaluation():
        for batch in own.batches(BATCH):
            model.logits(model.params, batch.x, 0)
    before = machine.peak_bytes()
    work(FOT(), model, own)
    return (machine.peak_bytes() - before) / 2**20


def memory(repeats: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{'samples':>8} {'memory of GPSE (MiB)':>21}")
    for samples in MEMORY_SAMPLES:
        command = [sys.executable, __file__, "--memory-of", str(samples)]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
        rows.append({"samples": samples, "mebibytes": [float(added) for added in runs]})
        print(f"{samples:>8} {statistics.median(rows[-1]['mebibytes']):>21.0f}", flush=True)
    return rows


def server(repeats: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{'d':>5} {'svd (s)':>8} {'eigh (s)':>9} {'svd / eigh':>11}")
    for d in SERVER_WIDTHS:
        a = torch.randn(d, 5 * d, generator=rng.generator(d))
        row = {"d": d} | alternate(
            repeats,
            svd=lambda a=a: torch.linalg.svd(a.double(), full_matrices=False),
            eigh=lambda a=a, d=d: residual_spectrum(a, empty(d)),
        )
        rows.append(row)
        print(f"{d:>5} {row['svd']:>8.3f} {row['eigh']:>9.3f} {row['ratio']:>11.2f}", flush=True)
    return rows


def main() -> None:
    parts = {"layers": layers, "precision": precision, "client": client, "memory": memory, "server": server}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="what to measure")
    parser.add_argument("--repeats", type=int, default=5, help="alternating runs of each form")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine.keep_memory()  # as cfl-run does
    if options.memory_of:
        print(added_memory(options.memory_of))
        return
    found: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    for part in options.parts:
        found[part] = parts[part](options.repeats)
        store(options.json, found, "torch")  # after each part, so that what is measured is kept


if __name__ == "__main__":
    main()
