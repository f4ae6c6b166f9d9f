"""Time a client's sketch of each layer: from the Gram matrix (what `cfl` does), against drawing all of G.

    python benchmarks/gpse.py [--samples 100] [--repeats 5]

One client's random images go through FOT's CIFAR-100 network. Each form takes in the same layer inputs and releases a
sketch d x 5d; the two alternate, and medians are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from cfl import models, rng
from cfl.models import Layer, Model
from cfl.subspace.basis import empty
from cfl.subspace.layer_inputs import stream
from cfl.subspace.sketch import Direct, Gram
from cfl.types import Batch

SHAPE, CLASSES, MULTIPLE = (3, 32, 32), 10, 5


def layer_inputs(model: Model, samples: int) -> dict[str, torch.Tensor]:
    """Inputs (samples, positions, d) of every layer, for random images."""
    x = torch.randn(samples, *SHAPE, generator=rng.generator(0))
    batch = Batch(x, torch.zeros(samples), torch.ones(samples), torch.arange(samples))
    seen: dict[str, torch.Tensor] = {}

    def keep(layer: Layer, inputs: torch.Tensor, batch: Batch) -> None:
        seen[layer.name] = inputs

    stream(model, model.params, 0, iter([batch]), model.layers, keep)
    return seen


def seconds(make: Callable[[], Gram | Direct], inputs: torch.Tensor) -> float:
    """Seconds to take in the inputs, 16 samples at a time, and release the sketch."""
    began = time.perf_counter()
    sketch = make()
    for part in inputs.split(16):
        sketch.add(part, torch.arange(len(part)))
    sketch.release()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100, help="images of the client")
    parser.add_argument("--repeats", type=int, default=5, help="alternating runs of each form")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(models.build("alexnet_cl", SHAPE, CLASSES, {}), SHAPE, [CLASSES], multi_head=True)
    print(f"{'layer':>6} {'d':>5} {'vectors':>8} {'direct (s)':>11} {'gram (s)':>9} {'direct / gram':>14}")
    for layer, inputs in zip(model.layers, layer_inputs(model, options.samples).values(), strict=True):
        d, columns = layer.size, MULTIPLE * layer.size
        times: dict[str, list[float]] = {"direct": [], "gram": []}
        for _ in range(options.repeats):
            times["direct"].append(seconds(lambda d=d, s=columns: Direct(empty(d), s, 0, by_sample=False), inputs))
            times["gram"].append(seconds(lambda d=d, s=columns: Gram(empty(d), s, 0), inputs))
        direct, gram = (statistics.median(times[form]) for form in ("direct", "gram"))
        vectors = inputs.shape[0] * inputs.shape[1]
        print(f"{layer.name:>6} {d:>5} {vectors:>8} {direct:>11.3f} {gram:>9.3f} {direct / gram:>14.2f}")


if __name__ == "__main__":
    main()
