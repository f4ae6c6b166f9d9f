"""The workloads of throughput.py, and the plain local training that the papers' codes do."""

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an environment of its own need not have cfl installed

from cfl import models  # noqa: E402
from cfl.core import rng


@dataclass(frozen=True)
class Workload:
    """A round of FedAvg: each client makes one local epoch of SGD from the same weights; the server averages.

    samples: of each client; shape: of one sample; options: of the model's builder; norm_stats: "batch" for batch
    normalisation without running statistics, as in FOT's code.
    """

    name: str
    clients: int
    samples: int
    batch: int
    shape: tuple[int, ...]
    classes: int
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.01

    @property
    def steps(self) -> int:
        """Local steps of all clients in a round."""
        return self.clients * math.ceil(self.samples / self.batch)

    def data(self) -> tuple[Tensor, Tensor]:
        """x (clients x samples, *shape) standard normal, y (clients x samples,); a client's samples are consecutive.

        Low labels are frequent, so that there is something to learn, and all orders of the samples move the weights by
        nearly the same.
        """
        count, draws = self.clients * self.samples, rng.generator(rng.key(0, "throughput", self.name))
        x = torch.randn(count, *self.shape, generator=draws)
        return x, (torch.rand(count, generator=draws) ** 3 * self.classes).long()

    def module(self) -> nn.Module:
        """The model with its first weights; always the same."""
        with rng.fork(rng.key(0, "throughput", "model")):
            module = models.build(self.model, self.shape, self.classes, self.options)
        return models.Model(module, self.shape, [self.classes], multi_head=False, norm_stats="batch").module

    def flops(self) -> int:
        """Floating-point operations of the matrix products and convolutions of a round, forward and backward.

        Counted on one batch; the gradient by the first layer's input is not computed and not counted.
        """
        module, (x, y) = self.module(), replace(self, clients=1, samples=self.batch).data()
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(module(x), y).backward()
        return counter.get_total_flops() * self.clients * self.samples // self.batch

    def dump(self) -> str:
        """As an argument of a command; `load` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        """What `dump` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "shape": tuple(fields["shape"])})


MLP = {"hidden": [400, 400, 400]}  # FOT's network for Permuted MNIST, which has dropout
MINI = {"width": 32, "stem_stride": 2, "norm": True}  # FOT's network for Split Mini-ImageNet
WORKLOADS = {
    work.name: work
    for work in (
        Workload("permuted-digits", 10, 70, 16, (64,), 10, "mlp", {"hidden": [128, 128]}, lr=0.05),
        Workload("pmnist-round", 64, 480, 64, (1, 28, 28), 10, "mlp", MLP),
        Workload("pmnist-dropout", 64, 480, 64, (1, 28, 28), 10, "mlp", {**MLP, "dropout": [0.2, 0.5, 0.5]}),
        Workload("cifar100-round", 25, 100, 16, (3, 32, 32), 10, "alexnet_cl", {"dropout": [0.0, 0.0, 0.0, 0.0]}),
        Workload("resnet-round", 10, 100, 16, (3, 32, 32), 5, "resnet18", MINI),
    )
}


def epoch(
    module: nn.Module, samples: Dataset, work: Workload, device: torch.device | str = "cpu", bf16: bool = False
) -> None:
    """One local epoch as the papers' codes make it: a DataLoader that shuffles, torch.optim.SGD, cross-entropy.

    bf16: forward pass and loss under autocast, where weights and optimiser stay in float32; it needs no scaled loss,
    for bfloat16 has float32's range.
    """
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=work.lr)
    for x, y in DataLoader(samples, batch_size=work.batch, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = F.cross_entropy(module(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


def moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """How far a round moved the weights: the norm of all differences."""
    pairs = zip(after, before, strict=True)
    return math.sqrt(sum(float((a.cpu() - b.cpu()).double().square().sum()) for a, b in pairs))
