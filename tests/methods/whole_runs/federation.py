"""A network, local training and the server in plain torch. `Part` has what a method may change of them."""

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.core import rng

D, HIDDEN, CLASSES, RANK, TASKS, CLIENTS = 12, 10, 3, 5, 3, 6
BATCH, EPOCHS, LR, LR_DECAY, MOMENTUM, WEIGHT_DECAY, SERVER_LR = 5, 2, 0.1, 0.8, 0.6, 0.02, 0.7


class Batch(NamedTuple):
    """x: (n, D) inputs; y: (n,) labels; task: (n,) the task of each sample, whose head it goes through."""

    x: Tensor
    y: Tensor
    task: Tensor


class Local(NamedTuple):
    """A client in a round. w: the global model at the start of the round; own: the client's samples."""

    id: int
    task: int
    lr: float
    key: int
    w: dict[str, Tensor]
    own: Batch


class Round(NamedTuple):
    """A round on the server.

    p: each client's weight in the mean; owners: number of clients with data of the task; share: the part of the owners'
    total weight that the clients of p hold, where a client weighs its samples, or 1.
    """

    p: dict[int, float]
    owners: int
    share: float


# --- a network of two layers: relu(W x + b), then one head, which may grow, or a head for each task ------------------


def head(w, task):
    """Names of weight and bias of a task's head."""
    return ("2.weight", "2.bias") if "2.weight" in w else (f"2.weight@{task}", f"2.bias@{task}")


def features(w, x):
    return (x @ w["0.weight"].T + w["0.bias"]).relu()


def outputs(w, batch):
    """Logits (n, classes), each sample through the head of its task."""
    z, (tasks, place) = features(w, batch.x), batch.task.unique(return_inverse=True)
    of_heads = [F.linear(z, *(w[name] for name in head(w, task))) for task in tasks.tolist()]
    return torch.stack(of_heads)[place, torch.arange(len(z))]


def layers(w):
    """Weight and bias of the layers that all tasks share: these are what projections protect."""
    return [("0.weight", "0.bias"), *([("2.weight", "2.bias")] if "2.weight" in w else [])]


def inputs_of(layer, w, x):
    """X (d, n): the inputs of a layer, one column for each sample."""
    return (x if layer == "0.weight" else features(w, x)).T


def errors(w, batch):
    """Cross-entropy of each sample: (n,)."""
    return F.cross_entropy(outputs(w, batch), batch.y, reduction="none")


def gradient(loss, at):
    """Gradient of loss(weights) at the weights `at`; 0 for weights that the loss does not depend on."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in at.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads))


def length(leaves):
    return torch.cat([leaf.flatten() for leaf in leaves.values()]).norm()


def shuffled(n, *path):
    return torch.randperm(n, generator=rng.generator(rng.key(*path)))


# --- the federation --------------------------------------------------------------------------------------------------


class Part:
    """What a strategy or a regularizer adds to a run; nothing here. A regularizer's state lasts for one task."""

    options: tuple[str, ...] = ()

    def __init__(self):
        self.own = defaultdict(dict)  # what each client keeps

    def begin(self, task, w):
        """A task starts with the global model w."""

    def sees(self, task):
        """The tasks on whose data clients train."""
        return [task]

    def trains(self, w, task):
        """Names of the weights that train: the body and the task's head."""
        return ["0.weight", "0.bias", *head(w, task)]

    def batch(self, batch, me, step):
        return batch

    def loss(self, w, batch, me):
        return errors(w, batch).mean()

    def term(self, w, batch, me):
        """A summand of the local loss."""
        return 0.0

    def around(self, grad, batch, me):
        """The function weights -> gradient that takes the place of `grad`."""
        return grad

    def adjust(self, grads, me):
        return grads

    def finish(self, w, me, steps):
        """The client's model is w after training."""

    def upload(self, delta, me, steps):
        return delta

    def server(self, step, info):
        return step

    def consolidate(self, clients, cohort):
        """The end of a task. clients: those that answered, with the new model; cohort: ids of all that were asked."""


def trained(rules, me):
    """Local training of a client: its update delta = w_global - w_i, as uploaded."""
    strategy, step = rules[0], 0
    w = {name: me.w[name].clone().requires_grad_() for name in strategy.trains(me.w, me.task)}
    sgd = torch.optim.SGD(w.values(), me.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    for epoch in range(EPOCHS):
        for part in shuffled(len(me.own.y), me.key, "order", me.id, epoch).split(BATCH):
            batch = strategy.batch(Batch(*(leaf[part] for leaf in me.own)), me, step)

            def local_loss(at, batch=batch):
                at = {**me.w, **at}
                return strategy.loss(at, batch, me) + sum(rule.term(at, batch, me) for rule in rules)

            def grad(at, local_loss=local_loss):
                return gradient(local_loss, at)

            for rule in rules[1:]:
                grad = rule.around(grad, batch, me)
            grads = grad({name: leaf.detach() for name, leaf in w.items()})
            for rule in (*rules[1:], strategy):  # a strategy's transform of the gradient is the last one
                grads = rule.adjust(grads, me)
            for name, leaf in w.items():
                leaf.grad = grads[name]
            sgd.step()
            step += 1
    end = {name: leaf.detach() for name, leaf in w.items()}
    for rule in rules:
        rule.finish({**me.w, **end}, me, step)
    delta = {name: me.w[name] - leaf for name, leaf in end.items()}
    for rule in rules:
        delta = rule.upload(delta, me, step)
    return delta


def served(rules, w, deltas, info):
    """The global model after a round: the mean update, the rules of the regularizers, at last that of the strategy."""
    step = {name: sum(info.p[id] * delta[name] for id, delta in deltas.items()) for name in next(iter(deltas.values()))}
    for rule in (*rules[1:], rules[0]):
        step = rule.server(step, info)
    return {**w, **{name: w[name] - SERVER_LR * leaf for name, leaf in step.items()}}
