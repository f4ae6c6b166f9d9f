"""Auxiliary-classifier GAN whose discriminator is the classifier of a run (Odena et al., ICML 2017; FedCIL, 2023).

Discriminator: the model's logits are the class head D_c. A critic, one Linear output on the inputs of the model's last
Linear layer, says real or fake: D_r. Generator: G(z), where the first entries of z ~ N(0, I) are overwritten by the
one-hot class. With BCE the binary cross-entropy and NLL the cross-entropy of the classes, a step minimises

    L_D = mean over real batches (a, b) of [BCE(D_r(a), 1) + NLL(D_c(a), b)] + BCE(D_r(x_f), 0) + NLL(D_c(x_f), y_f)
    L_G = BCE(D_r(x_f'), 1) + NLL(D_c(x_f'), y_f')

with one step of Adam for L_D and then, on new fakes x_f' = G(z | y_f'), one for L_G.

Classes are numbered over the whole stream, task after task, so that two tasks with one head have classes of their own.
All weights are leaves of one tree: those of the model under their names, "critic/..." and "generator/...".
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cfl.contract import Pixels
from cfl.contract.losses import divergence
from cfl.core import ConfigError, Tree, optim, rng, tree
from cfl.methods.generative.generator import of_tasks
from cfl.models import Model


class Labelled(NamedTuple):
    """A batch of inputs x (batch, *input_shape) and their classes (batch,) int64."""

    x: Tensor
    classes: Tensor


class _Crop(nn.Module):
    """The upper left corner of images: (batch, channels, height, width)."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : self.height, : self.width]


def generator_network(shape: Sequence[int], latent: int, width: int, key: int) -> nn.Module:
    """Network from (batch, latent) to (batch, *shape): convolutions for images, an MLP for vectors.

    Images start at a quarter of their height and width, rounded up, are doubled twice, and cropped. width: filters
    before the last convolution; key: of the initial weights, N(0, 0.02^2). Batch normalisation always uses the
    statistics of the batch, so the network has no buffers.
    """
    with rng.fork(key):
        network = _convolutions(shape, latent, width) if len(shape) == 3 else _mlp(shape, latent, 8 * width)
        for layer in network.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    return network


def _convolutions(shape: Sequence[int], latent: int, width: int) -> nn.Module:
    channels, height, across = shape
    start = (4 * width, math.ceil(height / 4), math.ceil(across / 4))
    return nn.Sequential(
        nn.Linear(latent, math.prod(start), bias=False),
        nn.Unflatten(1, start),
        *_normed(4 * width),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),
        *_normed(2 * width),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        *_normed(width),
        nn.Conv2d(width, channels, 3, padding=1),
        _Crop(height, across),
    )


def _normed(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels, track_running_stats=False), nn.ReLU()


def _mlp(shape: Sequence[int], latent: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(latent, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, math.prod(shape)),
        nn.Unflatten(1, tuple(shape)),
    )


def initial_critic(model: Model, key: int) -> Tree:
    """Initial weight (1, d) and bias (1,) of the critic. Raises ConfigError for a model with `no_features`."""
    if model.no_features:
        raise ConfigError(f"the critic reads the inputs of the model's last Linear layer; {model.no_features}")
    like = model.params[model.head(0)[0]]
    with model.evaluation(), torch.no_grad():
        features = model.features(model.params, like.new_zeros(2, *model.input_shape), 0)
    with rng.fork(key):
        critic = nn.Linear(features.shape[1], 1)  # of all positions, if the last layer is applied to several
    return {name: leaf.detach().to(like) for name, leaf in critic.named_parameters()}


def device_of(model: Model) -> torch.device:
    """Where the model's weights are."""
    return next(iter(model.params.values())).device


def choose(classes: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Draw `count` of the classes (k,) uniformly, with replacement: (count,)."""
    return classes[torch.randint(len(classes), (count,), generator=source).to(classes.device)]


@contextlib.contextmanager
def training(model: Model, key: int) -> Iterator[None]:
    """Put the module in training mode, with the draws of dropout from `key`."""
    was_training = model.module.training
    model.module.train()
    try:
        with rng.fork(key, device_of(model)):
            yield
    finally:
        model.module.train(was_training)


@dataclass(frozen=True)
class ACGAN:
    """Discriminator and generator as functions of their weights.

    network: of the generator; latent: length of z; task: the task whose running statistics are used, and up to which a
    growing head goes; pixels_of: how pictures of each task so far become inputs. Without them the network's outputs are
    the inputs; with them (tanh + 1) / 2 of the outputs are pictures in [0, 1].
    """

    model: Model
    network: nn.Module
    latent: int
    task: int
    pixels_of: Sequence[Pixels | None]

    @property
    def initial(self) -> Tree:
        """The generator's first weights, under its own names."""
        return tree.clone(dict(self.network.named_parameters()))

    @property
    def known(self) -> Tensor:
        """All classes of the stream so far: (k,)."""
        return torch.arange(self.model.classes_of(self.task).stop, device=device_of(self.model))

    def latents(self, classes: Tensor, source: torch.Generator) -> Tensor:
        """z (batch, latent): normal draws, with the one-hot class in the first entries (section 2.1)."""
        z = torch.randn(len(classes), self.latent, generator=source).to(classes.device)
        count = sum(self.model.sizes)
        return torch.cat([F.one_hot(classes, count).to(z), z[:, count:]], dim=1)

    def draw(self, generator: Tree, classes: Tensor, source: torch.Generator) -> Tensor:
        """Inputs (batch, *input_shape) of these classes (batch,). generator: its weights, under its own names."""
        outputs = functional_call(self.network, generator, (self.latents(classes, source),))
        return of_tasks(outputs, self.tasks_and_labels(classes)[0], self.pixels_of)

    def fakes(self, generator: Tree, classes: Tensor, source: torch.Generator) -> Labelled:
        """What `draw` returns, without gradient, and the classes."""
        with torch.no_grad():
            return Labelled(self.draw(generator, classes, source), classes)

    def judge(self, leaves: Tree, x: Tensor, classes: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
        """D_r(x) (batch,) before the sigmoid, and the logits (batch, widest head) of the head of each class's task.

        keep: let the pass change the running statistics in `leaves`.
        """
        if not keep:
            leaves = {**leaves, **{name: leaves[name].clone() for name in self.model.buffers(self.task)}}
        with self.model.watched_features() as seen:
            logits = self.model.own_logits(leaves, x, self.task, self.tasks_and_labels(classes)[0])
        return F.linear(seen[-1], leaves["critic/weight"], leaves["critic/bias"])[:, 0], logits

    def loss(self, leaves: Tree, batch: Labelled, real: float, *, keep: bool = False) -> Tensor:
        """BCE(D_r(x), real) + NLL(D_c(x), classes): a tensor (). keep: as in `judge`."""
        realness, logits = self.judge(leaves, *batch, keep=keep)
        nll = F.cross_entropy(logits, self.tasks_and_labels(batch.classes)[1])
        return F.binary_cross_entropy_with_logits(realness, torch.full_like(realness, real)) + nll

    def tasks_and_labels(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Task (batch,) of each class (batch,) of the stream, and its label (batch,) in the head of the task."""
        ends = torch.tensor(self.model.sizes, device=classes.device).cumsum(0)
        tasks = torch.searchsorted(ends, classes, right=True)
        starts = torch.cat([ends.new_zeros(1), ends])[tasks]
        return tasks, classes if self.model.growing else classes - starts

    def classes_of(self, labels: Tensor) -> Tensor:
        """Classes (batch,) of the stream with these labels (batch,) in the head of the task."""
        return labels if self.model.growing else labels + self.model.classes_of(self.task).start


@dataclass
class Game:
    """An AC-GAN in training. `leaves` and `moments` change in each step, so they must be copies.

    trained: names in `leaves` of the parameters of the discriminator that train; moments: Adam's; steps: steps made;
    source: of all draws.
    """

    gan: ACGAN
    leaves: Tree
    trained: Sequence[str]
    adam: optim.Optimizer
    lr: float
    source: torch.Generator
    moments: Tree = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        new = [name for name in (*self.trained, *self._generator) if f"mean/{name}" not in self.moments]
        self.moments = {**self.adam.init(tree.select(self.leaves, new)), **self.moments}

    @property
    def generator(self) -> Tree:
        """The weights of the generator, under its own names."""
        return tree.part(self.leaves, "generator")

    @property
    def _generator(self) -> list[str]:
        return [name for name in self.leaves if name.startswith("generator/")]

    def step(
        self,
        reals: Sequence[Labelled],
        known: Tensor,
        extra: Callable[[Tree], Tensor] | None = None,
        *,
        keep: bool = True,
    ) -> None:
        """One step of Adam on L_D, then one on L_G.

        reals: batches that count as real; known: (k,) classes of the fakes, drawn uniformly; extra: a term of L_D, from
        the leaves; keep: let the real batches change the running statistics.
        """
        gan, count = self.gan, len(reals[0].classes)
        fakes = gan.fakes(self.generator, choose(known, count, self.source), self.source)

        def loss_d(at: Tree) -> Tensor:
            real = torch.stack([gan.loss(at, batch, 1.0, keep=keep) for batch in reals]).mean()
            return real + gan.loss(at, fakes, 0.0) + (0.0 if extra is None else extra(at))

        def loss_g(at: Tree) -> Tensor:
            return gan.loss(at, Labelled(gan.draw(tree.part(at, "generator"), classes, self.source), classes), 1.0)

        self._descend(loss_d, self.trained)
        classes = choose(known, count, self.source)
        self._descend(loss_g, self._generator)
        self.steps += 1

    def consistency(
        self, teacher: Tree, real: Labelled, known: Tensor, weights: tuple[float, float, float]
    ) -> Callable[[Tree], Tensor] | None:
        """FedCIL's consistency enforcement, a term of L_D; None if its weights (alpha, beta, gamma) are 0.

        teacher: the global generator G_s, under its own names; real: batch (x, y); known: (k,) the classes so far.
        With c drawn uniformly from `known`, and targets as constants, the term is
        alpha KL(D_c(G_s(z | y)) || D_c(x)) + beta KL(D_c(G_s(z | c)) || D_c(G(z' | c))) + gamma NLL(D_c(G_s(z | c)), c)
        """
        if not any(weights):
            return None
        gan, (x, y) = self.gan, real
        with torch.no_grad():
            alike, c = gan.draw(teacher, y, self.source), choose(known, len(y), self.source)
            theirs, own = gan.draw(teacher, c, self.source), gan.draw(self.generator, c, self.source)

        def term(at: Tree) -> Tensor:
            of_alike, of_x = gan.judge(at, alike, y)[1], gan.judge(at, x, y)[1]
            of_theirs, of_own = gan.judge(at, theirs, c)[1], gan.judge(at, own, c)[1]
            kd_d = divergence(of_alike.detach(), of_x, 1.0).mean()
            kd_g1 = divergence(of_theirs.detach(), of_own, 1.0).mean()
            kd_g2 = F.cross_entropy(of_theirs, gan.tasks_and_labels(c)[1])
            return weights[0] * kd_d + weights[1] * kd_g1 + weights[2] * kd_g2

        return term

    def _descend(self, loss: Callable[[Tree], Tensor], names: Sequence[str]) -> None:
        """One step of Adam on a loss, for the leaves of these names that it depends on."""
        with torch.enable_grad():
            at = {name: self.leaves[name].detach().requires_grad_() for name in names}
            grads = torch.autograd.grad(loss({**self.leaves, **at}), list(at.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(at, grads, strict=True) if grad is not None}
        self.adam.update(found, self.moments, self.leaves, self.lr, self.steps)
