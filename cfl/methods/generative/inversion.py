"""Synthetic samples from a trained model alone, as TARGET makes them (Zhang et al., ICCV 2023; official code).

A generator G is trained against the frozen model (the teacher), round after round. In each round a copy G' and fresh
latent vectors z minimise
    bn R_BN + label CE(teacher(x), y) + adversarial L_adv,    x = G'(z),
with labels y drawn among all classes so far. R_BN compares the batch statistics of each batch normalisation's inputs
with its running statistics. L_adv is high where teacher and student agree, so that the samples challenge the student.
The samples of the step with the lowest loss are kept. G then follows G' by a meta step: first-order MAML or Reptile.
From round `warmup` on, the student learns from all samples so far what the teacher predicts for them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.contract import Pixels, RoundInfo, Server
from cfl.contract.losses import divergence
from cfl.core import Tree, optim, option, options, rng, tree
from cfl.core.options import given
from cfl.methods.generative import generator as generators
from cfl.models import Model
from cfl.models.layers import on_input

PRESETS: dict[str, dict[str, Any]] = {
    "repaired": dict(rounds=40, warmup=10, g_steps=40, student_lr=0.005),
    "official": dict(rounds=10, warmup=20, g_steps=10, student_lr=0.2),
}
"""Values of the options that are None. With those of the official code the student never trains. A student without
batch normalisation diverges at the code's learning rate."""

_REPTILE, _COSINE, _LEAST = 67, 200, 1e-3  # factor of Reptile's step; period and end of the student's learning rate


class Target(NamedTuple):
    """What a round's samples shall be. own: (n,) task of each; y: (n,) class in the head that predicts for the task."""

    own: Tensor
    y: Tensor


@dataclass(frozen=True)
class Inversion:
    """Options of the inversion, and a round of it."""

    preset: str = option("repaired", "values of options that are none", source="ours", choices=tuple(PRESETS))
    rounds: int | None = option(None, "rounds of generation; repaired: 40, official: 10", at_least=1)
    warmup: int | None = option(None, "first round that trains the student; repaired: 10, official: 20", at_least=0)
    g_steps: int | None = option(None, "steps of the generator in a round; repaired: 40, official: 10", at_least=1)
    samples: int = option(256, "samples that a round makes", source="code", at_least=2)
    latent: int = option(256, "length of the latent vectors", source="code", at_least=1)
    width: int = option(64, "planes of the generator's last hidden layer", source="code", at_least=1)
    generator_lr: float = option(0.002, "learning rate of G'", source="code, CIFAR-100", above=0.0, steep="server")
    latent_lr: float = option(0.01, "learning rate of the latent vectors", source="code", above=0.0)
    meta: str = option("fomaml", "step of G after G'", source="code, CIFAR-100", choices=("fomaml", "reptile"))
    bn: float = option(10.0, "weight of R_BN", source="code, CIFAR-100", at_least=0.0)
    bn_momentum: float = option(
        0.9, "share of earlier rounds in the statistics", source="code", at_least=0.0, at_most=1.0
    )
    label: float = option(0.5, "weight of the labels' loss", source="code, CIFAR-100", at_least=0.0)
    adversarial: float = option(1.0, "weight of L_adv, from `warmup` on", source="code", at_least=0.0)
    crop: bool = option(False, "crop and flip batches at random in the inversion", source="code: yes")
    student_steps: int = option(400, "steps of the student in a round", source="code", at_least=0)
    student_lr: float | None = option(
        None, "its first learning rate; repaired: 0.005, official: 0.2", above=0.0, steep="server"
    )
    student_temperature: float = option(20.0, "T of its distillation", source="code, CIFAR-100", above=0.0)

    def __post_init__(self) -> None:
        options.fill(self, PRESETS[self.preset])

    def notes(self, model: Model) -> list[str]:
        """What has no effect in the inversion of this model."""
        found, rounds, warmup = list[str](), given(self.rounds), given(self.warmup)
        if warmup >= rounds:
            found.append(f"the student never trains, as strategy.warmup={warmup} and strategy.rounds={rounds}")
        norms = [layer for layer in model.module.modules() if isinstance(layer, _BatchNorm)]
        if all(layer.running_mean is None for layer in norms):
            found.append("strategy.bn has no effect, as the model has no running statistics of batch normalisation")
        return found

    def invert(self, server: Server, info: RoundInfo) -> Server:
        """Make a round's samples. Returns the server's trees, the first round of a phase with fresh ones.

        "synthetic" has all samples of the phase, "labels" their (n,) tasks and classes, "generator" and "student" the
        trees of both networks and their optimisers, "statistics" those of R_BN.
        """
        trees = server if info.round else {**server, **self._fresh(server["params"], info)}
        model, key = info.model, info.key
        device = next(iter(trees["params"].values())).device
        source = rng.generator(rng.key(key, "samples"))
        target = Target(*(leaf.to(device) for leaf in drawn(model, info.task, self.samples, source)))
        z = torch.randn(self.samples, self.latent, generator=source).to(device)
        with model.evaluation():
            found, generator, statistics = self._search(trees, target, z, info)
        kept = generators.stored(found, info.pixels)
        synthetic = {**trees["synthetic"], "x": torch.cat([trees["synthetic"]["x"], kept])}
        labels = {name: torch.cat([trees["labels"][name], leaf]) for name, leaf in target._asdict().items()}
        trees = {**trees, "synthetic": synthetic, "labels": labels, "generator": generator, "statistics": statistics}
        return {**trees, "student": self._taught(trees, info)} if info.round >= given(self.warmup) else trees

    def _fresh(self, params: Tree, info: RoundInfo) -> Server:
        """The trees before the first round of a phase."""
        model, key = info.model, info.key
        device = next(iter(params.values())).device
        first = generators.initial(rng.key(key, "generator"), self.latent, self.width, model.input_shape, device)
        empty = torch.empty(0, *model.input_shape, device=device)
        scale = {} if info.pixels is None else {k: v for k, v in info.pixels._asdict().items() if v is not None}
        none = torch.empty(0, dtype=torch.int64, device=device)
        heads = [frozenset(model.new_head(task)) for task in range(model.tasks)]
        later = frozenset().union(*heads) - frozenset().union(*heads[: info.task + 1])
        known = {name: leaf for name, leaf in params.items() if name not in later}
        weights = redrawn(known, model, rng.generator(rng.key(key, "student")))
        momentum = {name: torch.zeros_like(leaf) for name, leaf in weights.items() if model.is_parameter(name)}
        return {
            "synthetic": {"x": generators.stored(empty, info.pixels), **scale},
            "labels": {"own": none, "y": none},
            "generator": {**first, **tree.under("adam", _ADAM.init(first))},
            "student": {**weights, **tree.under("sgd", momentum)},
            "statistics": {},
        }

    def _search(self, trees: Server, target: Target, z: Tensor, info: RoundInfo) -> tuple[Tensor, Tree, Tree]:
        """The samples of the lowest loss, the generator's tree after the meta step, and the statistics of R_BN."""
        steps, model, source = given(self.g_steps), info.model, rng.generator(rng.key(info.key, "crop"))
        slow, moments = _split(trees["generator"], "adam")
        fast, latent = tree.clone(slow), {"z": z}
        states, total = [_ADAM.init(fast), _ADAM.init(latent)], tree.map(torch.zeros_like, slow)
        lowest, best, seen = math.inf, z, Tree()
        for step in range(steps):
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in {**fast, **latent}.items()}
            made = {name: leaf for name, leaf in leaves.items() if name != "z"}
            x = generators.generate(made, leaves["z"], self.width, model.input_shape, info.pixels)
            loss, seen = self._loss(self._cropped(x, source), trees, target, info)
            if not step or loss.item() < lowest:
                lowest, best = loss.item(), x.detach()
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            own = {"z": grads.pop("z")}
            total = tree.add(total, grads)
            _ADAM.update(grads, states[0], fast, self.generator_lr, step)
            _ADAM.update(own, states[1], latent, self.latent_lr, step)
        if self.meta == "reptile":
            total = tree.scale(tree.sub(slow, fast), _REPTILE)
        slow, moments = tree.clone(slow), tree.clone(moments)
        _ADAM.update(total, moments, slow, self.generator_lr * steps, info.round)
        return best, {**slow, **tree.under("adam", moments)}, seen

    def _loss(self, x: Tensor, trees: Server, target: Target, info: RoundInfo) -> tuple[Tensor, Tree]:
        """The loss () of samples x, as `generate` makes them, and the statistics of R_BN with those of x.

        These are (1 - m) of the batch and m of the rounds before, and in the first round of the batch alone.
        """
        model, task, scale = info.model, info.task, info.pixels or Pixels(None, None)
        before, m = trees["statistics"], self.bn_momentum
        entered = generators.inputs(x, *scale)
        with watched(model) as statistics:
            teacher = model.own_logits(_teacher(trees), entered, task, target.own)
        loss = self.label * F.cross_entropy(teacher, target.y)
        blended = {
            name: (1 - m) * batch + m * before[name] if name in before else batch
            for name, (batch, _) in statistics.items()
        }
        apart = [(running - blended[name]).norm() for name, (_, running) in statistics.items()]
        loss = loss + self.bn * torch.stack(apart).sum() if apart else loss
        if self.adversarial and info.round >= given(self.warmup):
            student = model.own_logits(_split(trees["student"], "sgd")[0], entered, task, target.own)
            agree = (student.argmax(1) == teacher.argmax(1)).to(x.dtype)
            loss = loss - self.adversarial * (agree * divergence(teacher, student, 1.0)).mean()
        return loss, {name: leaf.detach() for name, leaf in blended.items()}

    def _cropped(self, x: Tensor, source: torch.Generator) -> Tensor:
        """The batch moved by up to 4 pixels with black at the border, and flipped with probability 1/2."""
        if not self.crop or x.dim() < 4:
            return x
        top, left, flip = (int(torch.randint(most, (), generator=source)) for most in (9, 9, 2))
        x = F.pad(x, (4, 4, 4, 4))[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        return x.flip(3) if flip else x

    def _taught(self, trees: Server, info: RoundInfo) -> Tree:
        """The student after a round of distillation on all samples so far: T^2 KL(teacher || student)."""
        model, task, temperature = info.model, info.task, self.student_temperature
        whole, momentum = _split(trees["student"], "sgd")
        whole, momentum = tree.clone(whole), tree.clone(momentum)
        samples, own = trees["synthetic"], trees["labels"]["own"]
        source = rng.generator(rng.key(info.key, "student batches"))
        turn = (info.round - given(self.warmup)) / _COSINE
        lr = given(self.student_lr) * (_LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * turn)) / 2)
        for _ in range(self.student_steps):
            rows = torch.randint(len(own), (min(self.samples, len(own)),), generator=source).to(own.device)
            x = generators.inputs(samples["x"][rows], samples.get("mean"), samples.get("std"))
            with model.evaluation(), torch.no_grad():
                wanted = model.own_logits(_teacher(trees), x, task, own[rows])
            leaves = {name: whole[name].detach().requires_grad_() for name in momentum}
            model.module.train()
            with model.without_dropout():
                said = model.own_logits({**whole, **leaves}, x, task, own[rows])
            loss = temperature**2 * divergence(wanted, said, temperature).mean()
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            _SGD.update(dict(zip(leaves, grads, strict=True)), momentum, whole, lr, 1)
        return {**whole, **tree.under("sgd", momentum)}


_ADAM, _SGD = optim.adam(beta1=0.5), optim.sgd(momentum=0.9, weight_decay=1e-4)


def drawn(model: Model, task: int, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tasks and classes (count,): a task so far and a class of its head, or a class of the common head."""
    if model.growing or not model.multi_head:
        classes = sum(model.sizes[: task + 1]) if model.growing else model.sizes[task]
        y = torch.randint(classes, (count,), generator=source)
        return torch.full_like(y, task), y
    own = torch.randint(task + 1, (count,), generator=source)
    return own, (torch.rand(count, generator=source) * torch.tensor(model.sizes)[own]).long()


@contextmanager
def watched(model: Model) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Collect the batch statistics of the inputs of each batch normalisation, with its running statistics."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(path: str, layer: _BatchNorm, x: Tensor) -> None:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        if layer.running_mean is not None and layer.running_var is not None:
            found[f"{path}.mean"] = x.mean(dims), layer.running_mean
            found[f"{path}.var"] = x.var(dims, unbiased=False), layer.running_var

    hooks = [
        on_input(layer, partial(watch, path, layer))
        for path, layer in model.module.named_modules()
        if isinstance(layer, _BatchNorm)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def redrawn(params: Tree, model: Model, source: torch.Generator) -> Tree:
    """A student's initial weights: as the teacher's tree, but drawn anew (official code).

    Weights of layers are Xavier normal, biases N(0, 1), weights of normalisations N(1, 0.02) and their biases 0.
    """
    new: Tree = {}
    for name, leaf in params.items():
        if not model.is_parameter(name):
            new[name] = torch.ones_like(leaf) if "running_var" in name else torch.zeros_like(leaf)
        elif leaf.dim() > 1:
            fan = leaf[0].numel() + len(leaf) * leaf[0, 0].numel()
            new[name] = torch.randn(leaf.shape, generator=source).to(leaf) * (2 / fan) ** 0.5
        elif name in model.norms and name.partition("@")[0].endswith("bias"):
            new[name] = torch.zeros_like(leaf)
        else:
            values = torch.randn(leaf.shape, generator=source).to(leaf)
            new[name] = 1 + 0.02 * values if name in model.norms else values
    return new


def _teacher(trees: Server) -> Tree:
    """The model without the heads of later tasks, which the student lacks; the logits of both are then as wide."""
    return tree.select(trees["params"], _split(trees["student"], "sgd")[0])


def _split(whole: Tree, group: str) -> tuple[Tree, Tree]:
    """The leaves of a network, and those of its optimiser under their own names."""
    state = tree.part(whole, group)
    return {name: leaf for name, leaf in whole.items() if not name.startswith(f"{group}/")}, state
