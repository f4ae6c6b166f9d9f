"""FedSOL's example in two dimensions (its slides): where local training goes, as the local loss gets narrower.

Local loss (u - 2)^2 / 2 + delta (v - 1)^2 / 2, proximal loss (u^2 + v^2) / 2, the global model at (0, 0). The local
optimum is the same for every delta, the "distribution" of the client. FedProx ends off the line to it, unless delta is
1; FedSOL ends at (1 - rho / |w_local|) w_local for all of them; direct projection (eq. 3) stalls near the start.

    python benchmarks/fedsol_toy.py [--output docs/images/fedsol-toy.png]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cfl import Batch, Ctx, LocalRegularizer, Model, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core.optim import sgd
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedProx, FedSOL, ProxProjection

OPTIMUM, RHO, DELTAS = (2.0, 1.0), 0.5, (0.1, 1.0, 5.0)
METHODS: dict[str, LocalRegularizer] = {
    "FedAvg": LocalRegularizer(),
    "FedProx": FedProx(mu=1.0),
    "projection": ProxProjection(proximal="l2"),
    "FedSOL": FedSOL(rho=RHO, scope="full", scale="none", proximal="l2"),
}


class Point(nn.Module):
    """A model that is a point (u, v), and says so of every input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


@dataclass(frozen=True)
class Bowl(Strategy):
    """The local loss, as narrow in v as delta is large."""

    delta: float = 1.0

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        u, v = logits[0]
        return (u - OPTIMUM[0]) ** 2 / 2 + self.delta * (v - OPTIMUM[1]) ** 2 / 2


def path(method: LocalRegularizer, delta: float, lr: float = 0.02, steps: int = 5000) -> Tensor:
    """Local training from the global model (0, 0): (steps + 1, 2) float64."""
    model = Model(Point(), (1,), [2], multi_head=False)
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Bowl(delta), "method": method}), sgd())
    shared, one = {"params": model.params}, torch.ones(1, dtype=torch.float64)
    batch = Batch(one[:, None], torch.zeros(1, dtype=torch.int64), one, torch.zeros(1, dtype=torch.int64))
    local, points = step.start(model.params), [model.params["w"]]
    for index in range(steps):
        local, _ = step(local, StepInputs(shared, batch, lr=lr, step=index))
        points.append(local.params["w"])
    return torch.stack(points)


def draw(paths: dict[str, list[Tensor]], output: Path) -> None:
    """A panel for each delta: contours of the local loss, and the methods' paths."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(DELTAS), figsize=(11, 3.6), sharey=True, layout="constrained")
    colours = dict(zip(METHODS, ("#777777", "#d95f02", "#7570b3", "#1b9e77"), strict=True))
    u, v = torch.meshgrid(torch.linspace(-0.2, 2.4, 80), torch.linspace(-0.2, 1.4, 60), indexing="xy")
    for number, (axis, delta) in enumerate(zip(axes, DELTAS, strict=True)):
        loss = (u - OPTIMUM[0]) ** 2 / 2 + delta * (v - OPTIMUM[1]) ** 2 / 2
        axis.contour(u, v, loss, levels=torch.linspace(0.05, 2.5, 9), colors="#dddddd", linewidths=0.8)
        axis.plot([0, OPTIMUM[0]], [0, OPTIMUM[1]], color="black", linewidth=0.8, linestyle=":")
        for name, points in ((name, found[number]) for name, found in paths.items()):
            axis.plot(*points.T, color=colours[name], linewidth=1.6, label=name)
            axis.plot(*points[-1], marker="o", markersize=6, color=colours[name])
        axis.plot(0, 0, marker="s", color="black")
        axis.annotate("global", (0, 0), (0.08, -0.14))
        axis.annotate("local optimum", OPTIMUM, (1.45, 1.12))
        axis.set(title=f"delta = {delta:g}", xlabel="u", xlim=(-0.2, 2.4), ylim=(-0.2, 1.4))
    axes[0].set_ylabel("v")
    axes[-1].legend(loc="lower right", frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/fedsol-toy.png"))
    output = parser.parse_args().output
    paths = {name: [path(method, delta) for delta in DELTAS] for name, method in METHODS.items()}
    for name, found in paths.items():
        print(f"{name:11s}" + "  ".join("({:.6f}, {:.6f})".format(*points[-1].tolist()) for points in found))
    draw(paths, output)
    print(f"drawn to {output}")


if __name__ == "__main__":
    main()
