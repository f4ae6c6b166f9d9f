"""The matrix products of a round of an MLP, and nothing else of it: the bound of what an engine can reach.

As a script, one of the processes that share the clients: `throughput_products.py WORKLOAD CLIENTS` repeats as often as
a line asks. Each step has the products of a block's clients in the order of training, on weights and gradients of
their own: activations, updates, data, and all that stands between are left out.
"""

import os
import sys
import time

import torch
from throughput_peer import Line, Peer
from throughput_work import Workload
from torch import Tensor, nn

BLOCK = 8  # clients


class Products:
    """A process a core, each with its part of the clients."""

    def __init__(self, work: Workload) -> None:
        cores = os.cpu_count() or 1
        parts = [len(range(work.clients)[core::cores]) for core in range(cores)]
        self.workers = [Peer(sys.executable, "throughput_products.py", [work.dump(), str(part)]) for part in parts]

    def __call__(self, rounds: int) -> float:
        """Seconds of a round: those of the slowest process."""
        for worker in self.workers:
            worker.tell(str(rounds))
        return max(worker.hear()["seconds"] for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def step(x: Tensor, weights: list[Tensor], upper: list[Tensor]) -> list[Tensor]:
    """The gradients by the weights (clients, out, in), of inputs x and output gradients (clients, batch, units)."""
    inputs = [x]
    for weight in weights[:-1]:
        inputs.append(inputs[-1] @ weight.mT)
    inputs[-1] @ weights[-1].mT
    for weight, above in zip(weights[:0:-1], upper[::-1]):
        above @ weight
    return [above.mT @ below for above, below in zip(upper, inputs)]


def main(dumped: str, clients: str) -> None:
    """Answer each line, a number of rounds, with their mean seconds."""
    torch.set_num_threads(1)
    line, work = Line(), Workload.load(dumped)
    layers = [layer for layer in work.module().modules() if isinstance(layer, nn.Linear)]
    blocks = [part.numel() for part in torch.arange(int(clients)).split(BLOCK)]
    weights = [[layer.weight.detach().repeat(count, 1, 1) / 30 for layer in layers] for count in blocks]
    sizes = [part.numel() for part in torch.arange(work.samples).split(work.batch)]
    line.say(ready=True)
    for rounds in map(int, line.asks()):
        began = time.perf_counter()
        with torch.no_grad():
            for _ in range(rounds):
                for count, own in zip(blocks, weights):
                    for size in sizes:
                        upper = [torch.ones(count, size, layer.out_features) for layer in layers]
                        step(torch.ones(count, size, layers[0].in_features), own, upper)
        line.say(seconds=(time.perf_counter() - began) / rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])
