"""Time a local SGD step through `Model.logits` and through `torch.func.functional_call`, which does the same.

    python benchmarks/functional_call.py [--repeats 20] [--json FILE]

Both call the module with the leaves of a tree in place of its parameters; `Model.logits` knows where the module keeps
each of them, `functional_call` searches at every call. A step is forward, backward and SGD update of the MLP of a
workload of throughput.py, on one thread. Repeats of the two alternate; seconds are processor time. The ratio is the
median over the repeats of seconds with `functional_call` over seconds with `Model.logits`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from host import store
from throughput_work import WORKLOADS, Workload
from torch import Tensor

from cfl.core import Tree, optim, tree
from cfl.models import Model

STEPS = {"permuted-digits": 500, "pmnist-round": 60}  # workload -> steps of a repeat, about 0.2 s


def train(forward: Callable[[Tree], Tensor], params: Tree, y: Tensor, lr: float, steps: int) -> float:
    """Train `params` in place for `steps` steps on one batch with labels y (batch,); processor seconds of a step."""
    optimizer, began = optim.sgd(), time.process_time()
    for step in range(steps):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        grads = torch.autograd.grad(F.cross_entropy(forward(leaves), y), tuple(leaves.values()))
        optimizer.update(dict(zip(params, grads, strict=True)), {}, params, lr, step)
    return (time.process_time() - began) / steps


def measure(work: Workload, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds of a step of both ways, one number a repeat, and the median of their ratios.

    Raises RuntimeError if the two do not train to the same weights, to the bit.
    """
    model = Model(work.module(), work.shape, [work.classes], multi_head=False)
    x, y = replace(work, clients=1, samples=work.batch).data()
    ways = {
        "logits": lambda leaves: model.logits(leaves, x, 0),
        "functional_call": lambda leaves: torch.func.functional_call(model.module, model.bind(leaves, 0), (x,)),
    }
    params = {name: tree.clone(model.params) for name in ways}
    for name, forward in ways.items():
        train(forward, params[name], y, work.lr, steps)  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, forward in ways.items():
            seconds[name].append(train(forward, params[name], y, work.lr, steps))
    if not all(torch.equal(leaf, params["functional_call"][name]) for name, leaf in params["logits"].items()):
        raise RuntimeError(f"the two ways train to different weights on {work.name}")
    ratios = [b / a for a, b in zip(seconds["logits"], seconds["functional_call"], strict=True)]
    return {"batch": work.batch, "steps": steps, "ratio": statistics.median(ratios), "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="timed repeats of each way")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for name, steps in STEPS.items():
        row = found[name] = measure(WORKLOADS[name], steps, options.repeats)
        first, second = (1e6 * statistics.median(seconds) for seconds in row["seconds"].values())
        print(
            f"{name}: {first:.0f} us a step with Model.logits, {second:.0f} us with functional_call, "
            f"ratio {row['ratio']:.3f}",
            flush=True,
        )
    store(options.json, {"workloads": found}, "torch")


if __name__ == "__main__":
    main()
