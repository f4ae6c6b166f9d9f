"""The parts of `fidelity.py` on FedSOL and FedProj."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from fidelity_tables import SEEDS, Table, measured, run
from torch import Tensor, nn

import cfl
from cfl import models
from cfl.contract.losses import divergence
from cfl.core import optim, rng, tree
from cfl.methods.regularizers import FedSAM, FedSOL
from cfl.methods.regularizers import fedproj as fedproj_module
from cfl.streams import datasets

SKEWED = ("tasks=1", "partition.name=lda", "partition.alpha=0.1", "local.epochs=5")  # few classes a client
NARROW = (
    *("partition.name=sharding", "partition.shards=2", "model.width=8", "model.hidden=64"),
    *("model.repeat_grey=false", "local.augment=[]", "local.epochs=1", "eval_every=0"),
)


def scale(seeds: Sequence[int] = (0, 1), rounds: int = 15, benchmark: str = "mnist", *narrow: str) -> list[Table]:
    layers = []
    for name, weight in models.build("cnn", (3, 32, 32), 10, {}).named_parameters():
        source = rng.generator(rng.key(0, "moved", name))
        moved, drawn = ({name: torch.randn(weight.shape, generator=source)} for _ in range(2))
        ones, center = tree.map(torch.ones_like, moved), tree.map(torch.zeros_like, moved)
        forms = [FedSOL(rho=1.0, scale=how) for how in ("output_axis", "layer")]
        lengths = [form.perturbation(ones, moved, center)[name].norm() for form in forms]  # as those of Lambda
        epsilons = [float(form.perturbation(drawn, moved, center)[name].norm()) for form in forms]
        if weight.dim() > 1:
            shape = " x ".join(map(str, weight.shape))
            layers.append([f"`{name}`", shape, float(lengths[0] / lengths[1]), *epsilons])
    methods: dict[str, tuple[str, ...]] = {
        "FedAvg": ("fedavg",),
        "FedSOL, output axis": ("fedsol",),
        "FedSOL, layer": ("fedsol", "regularizer.fedsol.scale=layer"),
    }
    found: dict[str, list[list[cfl.Result]]] = {  # after one round, and after all
        name: [
            [run(benchmark, method, seed, *(narrow or NARROW), f"rounds={count}", *more) for seed in seeds]
            for count in (1, rounds)
        ]
        for name, (method, *more) in methods.items()
    }
    scores = []
    for name, (early, late) in found.items():
        away = [
            apart(one.params, plain.params) / apart(plain.params, plain.model.params)
            for one, plain in zip(early, found["FedAvg"][0], strict=True)
        ]
        scores.append([name, *measured(late, "acc"), away])
    columns = {
        "weight": "",
        "shape": "",
        "output axis / layer": ".1f",
        "norm, output axis": ".3f",
        "norm, layer": ".4f",
    }
    heads = {"method": "", "ACC": "%.1f", "distance from FedAvg after a round": ".3f"}
    return [
        Table("FedSOL's perturbation at rho 1", columns, layers),
        Table("FedSOL's scale on MNIST", heads, scores),
    ]


def apart(one: tree.Tree, other: tree.Tree) -> float:
    """Distance of two models."""
    return math.sqrt(sum(float((leaf - other[name]).square().sum()) for name, leaf in one.items()))


def sharpness(seeds: Sequence[int] = (0, 1), steps: int = 400, last: int = 50, **narrow: int) -> list[Table]:
    train = datasets.load("mnist")
    columns = {"rho": "", "loss": ".2f", "last bias's share of the squared gradient, percent": "%.0f"}
    rows = []
    for rho in (0.0, 0.05, 0.1, 0.2, 0.5):
        ends = [descent(FedSAM(rho=rho), train, seed, steps, **narrow)[-last:] for seed in seeds]
        means = [[fmean(values) for values in zip(*end, strict=True)] for end in ends]
        rows.append([f"{rho:g}", *map(list, zip(*means, strict=True))])
    return [Table("FedSAM's rho on MNIST", columns, rows)]


def descent(method: FedSAM, train: datasets.Arrays, seed: int, steps: int, **narrow: int) -> list[list[float]]:
    """Train on random batches of all images, with the network, batch size and optimizer of the preset `mnist`.

    Returns for each step the loss before it, and the share of the last bias in the squared norm of its gradient.
    """
    preset = cfl.resolve("mnist", method="fedsam")
    local, options = preset.local, {**preset.model.options, **narrow}
    torch.manual_seed(seed)
    module = models.build(preset.model.name, (1, 28, 28), 10, options)
    weights = {name: leaf.detach() for name, leaf in module.named_parameters()}
    *_, last = weights
    sgd = optim.sgd(local.momentum, local.weight_decay)
    state, found = sgd.init(weights), []

    def gradient(at: tree.Tree, batch: Any) -> tree.Tree:
        x, y = batch
        grads, loss = torch.func.grad_and_value(
            lambda leaves: nn.functional.cross_entropy(torch.func.functional_call(module, leaves, x), y)
        )(at)
        found.append([float(loss), float(grads[last].square().sum() / tree.dot(grads, grads))])
        return grads

    sharp = method.around(gradient)
    for step in range(steps):
        rows = torch.randint(len(train.x_train), (local.batch_size,))
        batch = (train.x_train[rows] / 255 - 0.1307) / 0.3081, train.y_train[rows]
        sgd.update(sharp(weights, batch), state, weights, local.lr, step)
    return found[::2]  # at the weights; the others are at the perturbed ones


# -- FedProj


def alias(steps: int = 20, rounds: int = 10, images: int = 10_000) -> list[Table]:
    found = {form: penalised(form, steps) for form in ("none", "alias", "clone")}
    penalties = [[form, *own, apart(params, found["none"][2])] for form, (*own, params) in found.items()]
    local: list[tree.Tree] = []
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=[*SKEWED, f"rounds={rounds}"])
    result = cfl.run(config, observe=lambda info, client, params: local.append(params))
    x = datasets.digits().x_train

    def lesson(at: tree.Tree, x: Tensor, logits: Tensor) -> Tensor:
        return divergence(logits, result.model.logits(at, x, 0), 3.0).mean()

    with result.model.evaluation():
        logits = result.model.logits(result.params, x, 0)
        right = torch.func.grad(lesson)(local[-1], x, logits)
        forms = {"inputs": (cut(x), logits), "logits": (x, cut(logits)), "both": (cut(x), cut(logits))}
        cosines = [[form, cosine(right, torch.func.grad(lesson)(local[-1], *into))] for form, into in forms.items()]
    mean, std = (torch.tensor(c).view(-1, 1, 1) for c in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))  # FedZoo's
    given = {"pixels of CIFAR-100": (datasets.load("cifar100").x_train[:images] / 255 - mean) / std}
    given |= {"pixels of the digits": x, "logits on the digits": logits}
    casts = [[name, *cast(values)] for name, values in given.items()]
    columns = {"reference": "", "penalty": ".4f", "its gradient": ".4f", "distance from training without it": ".4f"}
    return [
        Table("A proximal term and its reference", columns, penalties),
        Table("Cast to integers", {"what": "", "values": "d", "after the cast": "d", "error, percent": "%.0f"}, casts),
        Table("Distillation gradient, cast and not", {"cast": "", "cosine": ".2f"}, cosines),
    ]


def cosine(one: tree.Tree, other: tree.Tree) -> float:
    return float(tree.dot(one, other) / (tree.dot(one, one) * tree.dot(other, other)).sqrt())


def penalised(form: str, steps: int) -> tuple[float, float, tree.Tree]:
    """|w - reference|^2 / 2 after so many steps of SGD with it (or "none"), the norm of its gradient, and w."""
    torch.manual_seed(0)
    module, samples = models.build("mlp", (64,), 10, {"hidden": [64]}), datasets.digits()
    weights = list(module.parameters())
    reference = weights if form == "alias" else [leaf.detach().clone() for leaf in weights]
    optimizer = torch.optim.SGD(weights, lr=0.05)

    def penalty() -> Tensor:
        return torch.stack([(own - its).square().sum() for own, its in zip(weights, reference, strict=True)]).sum() / 2

    for step in range(steps):
        batch = slice(16 * step, 16 * step + 16)
        loss = nn.functional.cross_entropy(module(samples.x_train[batch]), samples.y_train[batch])
        optimizer.zero_grad()
        (loss if form == "none" else loss + penalty()).backward()
        optimizer.step()
    value = penalty()
    slope = torch.stack([leaf.square().sum() for leaf in torch.autograd.grad(value, weights)]).sum().sqrt()
    return float(value.detach()), float(slope), {name: leaf.detach() for name, leaf in module.named_parameters()}


def cut(values: Tensor) -> Tensor:
    """Cast to integers and back; fractions are cut off."""
    return values.long().float()


def cast(values: Tensor) -> tuple[int, int, float]:
    """Distinct values before and after, and the root mean square of the change over the standard deviation."""
    after = cut(values)
    return len(values.unique()), len(after.unique()), float((after - values).square().mean().sqrt() / values.std())


def projection(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    digits = datasets.digits()
    own = (digits.x_train[:1000], digits.y_train[:1000], digits.x_test, digits.y_test)
    data = {
        "Iris": ("iris", (), None),
        "digits, 20 clients": (
            "permuted-digits",
            (*SKEWED, "rounds=10", "public.name=stream"),
            cfl.from_tensors([own], public=digits.x_train[1000:]),
        ),
    }
    rows = []
    for name, (benchmark, settings, stream) in data.items():
        for project in ("conflict", "always"):
            cosines: list[float] = []
            scores = []
            for seed in seeds:
                overrides = [*settings, *shorter, "eval_local=1", f"regularizer.fedproj.project={project}"]
                config = cfl.resolve(benchmark, method="fedproj", seed=seed, overrides=overrides)
                with patch.object(fedproj_module, "without_conflict", watched(cosines)):
                    metrics = cfl.run(config, stream=stream).metrics
                scores.append((metrics["acc"], fmean(metrics["local_accuracy"])))
            conflicts = [value for value in cosines if value < 0]
            others = [value for value in cosines if value >= 0] or [0.0]
            shares = [len(conflicts) / len(cosines), -fmean(conflicts or [0.0]), fmean(others)]
            rule = {"conflict": "in conflict (`cfl`)", "always": "always (eq. 14)"}[project]
            rows.append([name, rule, *shares, *map(list, zip(*scores, strict=True))])
    columns = {"data": "", "projected": "", "conflicts": "%.0f", "cosine there": ".2f", "cosine elsewhere": ".2f"}
    return [Table("FedProj's condition", {**columns, "global model": "%.1f", "local models": "%.1f"}, rows)]


def watched(cosines: list[float]) -> Callable[..., tree.Tree]:
    """`without_conflict` that notes the cosine of its two gradients."""
    original = fedproj_module.without_conflict

    def noted(grads: tree.Tree, reference: tree.Tree, smallest: float, **options: Any) -> tree.Tree:
        if tree.dot(reference, reference) > smallest**2:
            cosines.append(cosine(grads, reference))
        return original(grads, reference, smallest, **options)

    return noted
