"""Whole runs of three tasks, recomputed in plain torch: local training, server, and what each method adds to them.

The recomputation shares no code with the methods. It takes from the run what is drawn at random (who takes part, whose
upload arrives, and the keys of the draws), and follows the equations of the papers. The order in which a strategy and
regularizers act is written once, in `trained` and `served`. After every round the global model of the run has to be the
recomputed one to 1e-10.

Clients hold unlike numbers of samples, and some hold none of a task. Three of six are in a cohort, and some of them
drop out; the first task has four rounds, in which clients come back with their states. They train for two epochs by SGD
with momentum, weight decay and a falling learning rate; the server's rate is not 1. The network has one head, a head
for each task, or a head that grows with the tasks.
"""

from collections import defaultdict
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cfl
from cfl.assembly import methods
from cfl.core import rng
from cfl.runtime.builder import build_session
from tests import toy

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

    p: weight of each client in the mean; owners: number of clients with data of the task; share: the clients of p as a
    share of these owners, by number or by samples, as p.
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
    """A strategy or a regularizer: it changes what its equations change. A regularizer's state lasts for one task."""

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
        """The end of a task: `clients` have the global model; `cohort`: ids of all that were asked."""


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


# --- strategies ------------------------------------------------------------------------------------------------------


class FedAvg(Part):
    """McMahan et al., 2017, Algorithm 1."""


class EWC(FedAvg):
    """Kirkpatrick et al., 2017, eq. 3: CE + lambda / 2 sum_s F_s (w - w_s)^2 over earlier tasks s, without a limit."""

    strength = 3.0
    options = (f"strategy.strength={strength}", "strategy.max_fisher=null")

    def term(self, w, batch, me):
        total = 0.0
        for fisher, old in self.own[me.id].values():
            for name, f in fisher.items():  # of a head that has grown, the rows that it had
                total = total + self.strength / 2 * (f * (w[name][: len(f)] - old[name]).square()).sum()
        return total

    def consolidate(self, clients, cohort):
        for me in clients:
            names = self.trains(me.w, me.task)
            fisher = {name: torch.zeros_like(me.w[name]) for name in names}
            for sample in range(len(me.own.y)):
                one = Batch(*(leaf[sample : sample + 1] for leaf in me.own))

                def log_p(at, me=me, one=one):
                    return -errors({**me.w, **at}, one).sum()

                grads = gradient(log_p, {name: me.w[name] for name in names})
                fisher = {name: fisher[name] + grads[name].square() / len(me.own.y) for name in names}
            self.own[me.id][me.task] = fisher, me.w


class LimitedEWC(EWC):
    """EWC as it is by default: lambda / 2 min(F, 1 / (lr lambda)) (w - anchor)^2, where F = sum_s F_s, and anchor is
    the mean of the w_s with weights F_s. Without the limit, this strength makes weights infinite.
    """

    strength = 200.0
    options = (f"strategy.strength={strength}", "strategy.max_fisher=auto")

    def term(self, w, batch, me):
        total = 0.0
        for name in w if self.own[me.id] else ():
            pairs = [(f[name], old[name]) for f, old in self.own[me.id].values() if name in f]
            if pairs:
                fisher = sum(f for f, _ in pairs)
                anchor = sum(f * old for f, old in pairs) / fisher.clamp(min=1e-300)
                limited = fisher.clamp(max=1 / (me.lr * self.strength))
                total = total + self.strength / 2 * (limited * (w[name] - anchor).square()).sum()
        return total


class ER(FedAvg):
    """CE(batch) / 2 + CE(batch of the memory) / 2, each sample through its own head (FOT, appendix F.2)."""

    memory = 3
    options = (f"strategy.memory={memory}",)

    def batch(self, batch, me, step):
        stored = [Batch(*leaves) for leaves in self.own[me.id].get("memory", ())]
        if not stored:
            return batch
        if len(stored) > BATCH:
            key = rng.key(me.key, "memory", me.id)
            stored = [stored[place] for place in shuffled(len(stored), key, step)[:BATCH]]
        return Batch(*(torch.cat([leaf, torch.stack(others)]) for leaf, others in zip(batch, zip(*stored))))

    def loss(self, w, batch, me):
        losses, old = errors(w, batch), batch.task != me.task
        return (losses[~old].mean() + losses[old].mean()) / 2 if old.any() else losses.mean()

    def consolidate(self, clients, cohort):
        """Store samples in random order, in which the classes take turns."""
        for me in clients:
            order = shuffled(len(me.own.y), me.key, "store", me.id).tolist()
            seen, turns = defaultdict(int), []
            for place, sample in enumerate(order):
                label = int(me.own.y[sample])
                turns.append((seen[label], place, sample))
                seen[label] += 1
            kept = [tuple(leaf[sample] for leaf in me.own) for _, _, sample in sorted(turns)[: self.memory]]
            self.own[me.id]["memory"] = [*self.own[me.id].get("memory", ()), *kept]


class GLFC(ER):
    """mean(w CE), w = g / (mean of g over new, or over replayed, samples), g = 1 - p_y; w = 1 without memory."""

    def loss(self, w, batch, me):
        losses, old = errors(w, batch), batch.task != me.task
        if not old.any():
            return losses.mean()
        g = (1 - torch.exp(-losses)).detach()  # p_y = exp(-CE)
        return torch.cat([g[group] / g[group].mean() * losses[group] for group in (~old, old)]).mean()


class PublishedGLFC(ER):
    """Dong et al., 2022, over a growing head: L_GC / 2 + L_RD / 2, and plain binary cross-entropies in the first task.

    L_GC: mean of w BCE, where BCE is the mean over all classes, and w as in `GLFC` with g = 1 - sigmoid(z_y).
    L_RD: mean of BCE, with the sigmoids of the model at the end of the task before as labels of the old classes.
    """

    def begin(self, task, w):
        self.teacher = dict(w)

    def loss(self, w, batch, me):
        z, labels, old = outputs(w, batch), F.one_hot(batch.y, len(w["2.bias"])).double(), batch.task != me.task
        losses = F.binary_cross_entropy_with_logits(z, labels, reduction="none").mean(1)
        if me.task == 0:
            return losses.mean()
        g = 1 - (z * labels).sum(1).sigmoid().detach()
        compensated = [g[group] / g[group].mean() * losses[group] for group in (~old, old) if group.any()]
        seen = CLASSES * me.task
        targets = torch.cat([outputs(self.teacher, batch)[:, :seen].sigmoid(), labels[:, seen:]], dim=1)
        return torch.cat(compensated).mean() / 2 + F.binary_cross_entropy_with_logits(z, targets) / 2


class LwF(FedAvg):
    """Li and Hoiem, 2016, eq. 2: CE + lambda sum_{s < t} H(softmax(z*_s / T), softmax(z_s / T)), T = 2, on new data; z*
    is of the global model at the end of the task before. With one head the sum has one term, over its earlier classes.
    """

    strength, temperature = 0.8, 2.0
    options = (f"strategy.strength={strength}",)

    def begin(self, task, w):
        self.teacher = dict(w)

    def term(self, w, batch, me):
        total = 0.0
        for task in range(me.task if "2.weight@0" in w else min(me.task, 1)):
            old = batch._replace(task=torch.full_like(batch.task, task))
            seen = slice(CLASSES * me.task)  # the classes that a growing head had
            theirs, ours = (outputs(at, old)[:, seen] / self.temperature for at in (self.teacher, w))
            total = total + self.strength * F.cross_entropy(ours, theirs.softmax(1).detach())
        return total


class Joint(FedAvg):
    """The mean over the tasks in the batch of the mean CE of their samples; every head trains."""

    def sees(self, task):
        return range(TASKS)

    def trains(self, w, task):
        return list(w)

    def loss(self, w, batch, me):
        losses = errors(w, batch)
        return torch.stack([losses[batch.task == task].mean() for task in batch.task.unique()]).mean()


def projected(leaves, bases):
    """P([W b]) = [W b] - [W b] O O^T for the layers with a basis O (FOT, eq. 6)."""
    result = dict(leaves)
    for (weight, bias), basis in bases.items():
        if weight in leaves:
            joint = torch.cat([leaves[weight], leaves[bias][:, None]], dim=1)
            joint = joint - joint @ basis @ basis.T
            result |= {weight: joint[:, :-1], bias: joint[:, -1]}
    return result


def extended(basis, x, threshold):
    """O with the fewest left singular vectors of X* = X - O O^T X for which it covers the threshold of |X|^2."""
    rest = x - basis @ basis.T @ x
    u, s, _ = torch.linalg.svd(rest, full_matrices=False)
    covered = [1 - (rest.square().sum() - s[:rank].square().sum()) / x.square().sum() for rank in range(len(s) + 1)]
    rank = next(rank for rank, share in enumerate(covered) if share >= threshold)
    assert basis.shape[1] + rank < len(basis)  # there is room left to learn
    return torch.cat([basis, u[:, :rank]], dim=1)


def of_ones(x):
    """The inputs (d, n) with the bias' input, 1."""
    return torch.cat([x, torch.ones_like(x[:1])])


class FOT(FedAvg):
    """FOT, eq. 6 to 11: the server projects its step off the inputs of earlier tasks of all clients, bias included."""

    threshold = 0.8
    options = (f"strategy.threshold={threshold}", "strategy.sketch=gram", "strategy.measure_coverage=false")

    def __init__(self):
        super().__init__()
        self.bases = {}

    def server(self, step, info):
        return projected(step, self.bases)

    def consolidate(self, clients, cohort):
        for weight, bias in layers(clients[0].w):
            x = torch.cat([of_ones(inputs_of(weight, me.w, me.own.x)) for me in clients], dim=1)
            known = self.bases.get((weight, bias), x[:, :0])
            self.bases[weight, bias] = extended(known, x, self.threshold)
            assert self.bases[weight, bias].shape[1] > known.shape[1]


class GPM(FedAvg):
    """Each client projects its update off its own earlier inputs (Saha et al., 2021, eq. 8 and 9; FOT, F.2)."""

    threshold = 0.7
    options = (f"strategy.threshold={threshold}",)

    def upload(self, delta, me, steps):
        return projected(delta, self.own[me.id])

    def consolidate(self, clients, cohort):
        for me in clients:
            for weight, bias in layers(me.w):
                x = of_ones(inputs_of(weight, me.w, me.own.x))
                self.own[me.id][weight, bias] = extended(
                    self.own[me.id].get((weight, bias), x[:, :0]), x, self.threshold
                )


class GradientGPM(GPM):
    """GPM that projects each gradient, as for a single client; weight decay acts after the projection."""

    options = (*GPM.options, "strategy.apply=gradient")

    def adjust(self, grads, me):
        return projected(grads, self.own[me.id])

    def upload(self, delta, me, steps):
        return delta


class RGO(FedAvg):
    """Liu and Liu, 2022: g_W <- d / tr P  g_W P, with P = (I + sum v v^T / alpha)^-1, v = mean over output units of
    dq/dW, q = sum_b z_y sqrt(a_y - a_y^2), the root a constant. Only some clients, drawn for each task, update P.
    """

    alpha, size = 0.5, 4
    options = (f"strategy.alpha={alpha}", f"strategy.batch_size={size}")

    def adjust(self, grads, me):
        new = dict(grads)
        for name, inverse in self.own[me.id].items():
            p = torch.linalg.inv(inverse)
            new[name] = len(p) / p.trace() * grads[name] @ p
        return new

    def consolidate(self, clients, cohort):
        draw = rng.numpy_generator(rng.key(clients[0].key, "update"))
        drawn = draw.choice(cohort, round(0.4 * len(cohort)), replace=False)
        names = [name for layer in layers(clients[0].w) for name in layer]
        for me in (me for me in clients if me.id in drawn):
            for part in shuffled(len(me.own.y), me.key, "order", me.id).split(self.size):
                batch = Batch(*(leaf[part] for leaf in me.own))

                def q(at, batch=batch, me=me):
                    a = torch.exp(-errors({**me.w, **at}, batch)).detach()
                    z = outputs({**me.w, **at}, batch).gather(1, batch.y[:, None])[:, 0]
                    return (z * (a - a.square()).sqrt()).sum()

                for name, grad in gradient(q, {name: me.w[name] for name in names}).items():
                    v = grad.mean(0) if grad.dim() == 2 else grad  # a bias is a single row
                    inverse = self.own[me.id].get(name, torch.eye(len(v)).double())
                    self.own[me.id][name] = inverse + torch.outer(v, v) / self.alpha


class FedProTIP(FedAvg):
    """Cha et al., 2025: gradients lose their component in the basis U of earlier inputs; biases of shared layers stay
    after the first task. A client sends V S^2 V^T, with the fewest V that hold the threshold of its |X|^2; U gets the
    fewest directions of the sum's rest with which it holds the threshold of all |X|^2.
    """

    threshold, step = 0.775, 0.001

    def __init__(self):
        super().__init__()
        self.bases = {}

    def trains(self, w, task):
        stay = {bias for _, bias in layers(w)} if task else set()
        return [name for name in super().trains(w, task) if name not in stay]

    def adjust(self, grads, me):
        return {**grads, **{name: grads[name] - grads[name] @ u @ u.T for name, u in self.bases.items()}}

    def consolidate(self, clients, cohort):
        threshold = self.threshold + clients[0].task * self.step
        for name, _ in layers(clients[0].w):
            core, energy = 0.0, 0.0
            for me in clients:
                v, s, _ = torch.linalg.svd(inputs_of(name, me.w, me.own.x), full_matrices=False)
                shares = s.square().cumsum(0) / s.square().sum()
                rank = int((shares < threshold).sum()) + 1
                core, energy = core + v[:, :rank] * s[:rank].square() @ v[:, :rank].T, energy + s.square().sum()
            u = self.bases.get(name, core[:, :0])
            off = torch.eye(len(core)).double() - u @ u.T
            values, vectors = torch.linalg.eigh(off @ core @ off)
            values, vectors = values.flip(0), vectors.flip(1)
            held = (core.trace() - values.sum() + torch.cat([values[:0].sum()[None], values.cumsum(0)])) / energy
            self.bases[name] = torch.cat([u, vectors[:, : int((held < threshold).sum())]], dim=1)
            assert u.shape[1] < self.bases[name].shape[1] < len(u)


# --- regularizers ----------------------------------------------------------------------------------------------------


class FedProx(Part):
    """Li et al., 2020, eq. 2: + mu / 2 |w - w_global|^2."""

    mu = 0.3
    options = (f"regularizer.fedprox.mu={mu}",)

    def term(self, w, batch, me):
        return self.mu / 2 * sum((leaf - me.w[name]).square().sum() for name, leaf in w.items())


class FedNTD(Part):
    """Lee et al., 2022: + beta tau^2 KL(global || local) over the classes other than the sample's own."""

    beta, tau = 0.7, 1.5
    options = (f"regularizer.fedntd.beta={beta}", f"regularizer.fedntd.tau={tau}")

    def term(self, w, batch, me):
        theirs, ours = (outputs(at, batch) for at in (me.w, w))
        wrong = torch.tensor([[c for c in range(ours.shape[1]) if c != y] for y in batch.y.tolist()])
        log_p, log_q = ((z.gather(1, wrong) / self.tau).log_softmax(1) for z in (theirs, ours))
        return self.beta * self.tau**2 * (log_p.exp() * (log_p - log_q)).sum(1).mean()


class MOON(Part):
    """Li et al., 2021, eq. 3: + mu CE([cos(z, z_global), cos(z, z_previous)] / tau, first); z: features. The previous
    local model is at first the global one.
    """

    mu, tau = 0.8, 0.5
    options = (f"regularizer.moon.mu={mu}", f"regularizer.moon.tau={tau}")

    def begin(self, task, w):
        self.own.clear()

    def term(self, w, batch, me):
        z, near, far = (features(at, batch.x) for at in (w, me.w, self.own[me.id] or me.w))
        logits = torch.stack([F.cosine_similarity(z, other) / self.tau for other in (near, far)], dim=1)
        return self.mu * F.cross_entropy(logits, torch.zeros(len(z)).long())

    def finish(self, w, me, steps):
        self.own[me.id] = w


class FedSAM(Part):
    """The gradient at w + rho g / |g|, with g the gradient at w (Foret et al., 2021, eq. 2)."""

    rho = 0.2
    options = (f"regularizer.fedsam.rho={rho}",)

    def around(self, grad, batch, me):
        def sharp(at):
            g = grad(at)
            return grad({name: leaf + self.rho * g[name] / length(g) for name, leaf in at.items()})

        return sharp


class FedSOL(Part):
    """Lee et al., 2024, eq. 5 to 7: the gradient at w + rho Lambda g_p / |g_p|, with g_p the gradient of
    KL(softmax(z_global / T) || softmax(z / T)), and Lambda = |w - w_global| over its norm across a layer's outputs.
    Only the head is perturbed.
    """

    rho, scope, temperature = 1.2, "head", 1.0
    options = (f"regularizer.fedsol.rho={rho}", f"regularizer.fedsol.temperature={temperature}")

    def direction(self, at, batch, me):
        """g_p by all weights that train."""

        def divergence(at):
            logits = (outputs({**me.w, **leaves}, batch) for leaves in ({}, at))
            log_p, log_q = ((z / self.temperature).log_softmax(1) for z in logits)
            return (log_p.exp() * (log_p - log_q)).sum(1).mean()

        return gradient(divergence, at)

    def around(self, grad, batch, me):
        def perturbed(at):
            g = self.direction(at, batch, me)
            if self.scope == "head":
                g = {name: g[name] for name in head(me.w, me.task) if name in g}
            if length(g) < 1e-6:  # the first step, at the global model
                return grad(at)
            moved = {name: (at[name] - me.w[name]).abs() for name in g}
            scale = {name: leaf / leaf.norm(dim=0).clamp(min=1e-12) for name, leaf in moved.items()}
            shift = {name: self.rho * scale[name] * g[name] / length(g) for name in g}
            return grad({name: leaf + shift.get(name, 0.0) for name, leaf in at.items()})

        return perturbed


class FullFedSOL(FedSOL):
    """FedSOL that perturbs all layers."""

    scope = "full"
    options = (*FedSOL.options, "regularizer.fedsol.scope=full")


def effective(steps):
    """a_i: how far equal gradients g move a model under heavy-ball momentum, in units of lr g."""
    return sum(sum(MOMENTUM**age for age in range(step)) for step in range(1, steps + 1))


class Scaffold(Part):
    """Karimireddy et al., 2020, Algorithm 1, option II: g - c_i + c; c_i <- c_i - c + (w_global - w_i) / (a_i lr), and
    c <- c + 1 / N sum of the changes of c_i.
    """

    def begin(self, task, w):
        self.own, self.c, self.changes = {}, {name: torch.zeros_like(leaf) for name, leaf in w.items()}, []

    def adjust(self, grads, me):
        own = self.own.get(me.id)
        return {name: grad + self.c[name] - (own[name] if own else 0.0) for name, grad in grads.items()}

    def finish(self, w, me, steps):
        own = self.own.get(me.id) or {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        mean = {name: (me.w[name] - leaf) / (effective(steps) * me.lr) for name, leaf in w.items()}
        change = {name: leaf + self.correction(name, own[name]) for name, leaf in mean.items()}
        self.own[me.id] = {name: own[name] + change[name] for name in w}
        self.changes.append(change)

    def correction(self, name, own):
        """The change of a client's c_i without its mean gradient."""
        return -self.c[name]

    def server(self, step, info):
        self.c = {name: c + sum(one[name] for one in self.changes) / info.owners for name, c in self.c.items()}
        self.changes = []
        return step


class FedDyn(Part):
    """Acar et al., 2021, Algorithm 1: CE - <h_i, w> + alpha / 2 |w - w_global|^2, h_i <- h_i - alpha (w_i - w_global);
    server: h <- h + alpha (share of all clients) (mean update), step <- mean update + h / alpha.
    """

    alpha = 0.4
    options = (f"regularizer.feddyn.alpha={alpha}",)

    def begin(self, task, w):
        self.own, self.h = defaultdict(dict), {name: torch.zeros_like(leaf) for name, leaf in w.items()}

    def term(self, w, batch, me):
        linear = sum((h * w[name]).sum() for name, h in self.own[me.id].items())
        return self.alpha / 2 * sum((leaf - me.w[name]).square().sum() for name, leaf in w.items()) - linear

    def finish(self, w, me, steps):
        own = self.own[me.id]
        self.own[me.id] = {name: own.get(name, 0.0) - self.alpha * (leaf - me.w[name]) for name, leaf in w.items()}

    def server(self, step, info):
        self.h = {**self.h, **{name: self.h[name] + self.alpha * info.share * leaf for name, leaf in step.items()}}
        return {name: leaf + self.h[name] / self.alpha for name, leaf in step.items()}


class ScaffoldInFedSOL(FullFedSOL, Scaffold):
    """FedSOL with g_p = c - c_i (FedSOL, Table 4), which is not added to the gradient. So a client's mean gradient, its
    new c_i, is (w_global - w_i) / (a_i lr).
    """

    options = (*FullFedSOL.options, "regularizer.fedsol.proximal=scaffold")

    def direction(self, at, batch, me):
        own = self.own.get(me.id)
        return {name: self.c[name] - (own[name] if own else 0.0) for name in at}

    def adjust(self, grads, me):
        return grads

    def correction(self, name, own):
        return -own


class FedDynInFedSOL(FullFedSOL, FedDyn):
    """FedSOL with g_p = alpha (w - w_global) - h_i (FedSOL, Table 4), which is not in the loss."""

    options = (*FullFedSOL.options, *FedDyn.options, "regularizer.fedsol.proximal=feddyn")

    def direction(self, at, batch, me):
        return {name: self.alpha * (leaf - me.w[name]) - self.own[me.id].get(name, 0.0) for name, leaf in at.items()}

    def term(self, w, batch, me):
        return 0.0


class FedNova(Part):
    """Wang et al., 2020, section 4: w <- w - (sum p_i a_i) sum p_i (w - w_i) / a_i."""

    def upload(self, delta, me, steps):
        self.own[me.id] = effective(steps)
        return {name: leaf / effective(steps) for name, leaf in delta.items()}

    def server(self, step, info):
        effective = sum(p * self.own[id] for id, p in info.p.items())
        return {name: effective * leaf for name, leaf in step.items()}


class FedAvgM(Part):
    """Hsu et al., 2019: v <- 0.9 v + step; the step is v. A task starts with v = 0."""

    def begin(self, task, w):
        self.v = {}

    def server(self, step, info):
        self.v = {name: 0.9 * self.v.get(name, 0.0) + leaf for name, leaf in step.items()}
        return self.v


# --- the run and its recomputation -----------------------------------------------------------------------------------

CASES = [
    (FedAvg,),
    (EWC,),
    (LimitedEWC,),
    (ER,),
    (GLFC,),
    (LwF,),
    (Joint,),
    (FOT,),
    (GPM,),
    (GradientGPM,),
    (RGO,),
    (FedProTIP,),
    (FedAvg, FedProx),
    (FedAvg, FedNTD),
    (FedAvg, MOON),
    (FedAvg, FedSAM),
    (FedAvg, FedSOL),
    (FedAvg, FullFedSOL),
    (FedAvg, Scaffold),
    (FedAvg, FedDyn),
    (FedAvg, FedNova),
    (FedAvg, FedAvgM),
    (FedAvg, ScaffoldInFedSOL),
    (FedAvg, FedDynInFedSOL),
    (FOT, FedProx),
    (FOT, FedDyn, FedAvgM),
    (FOT, FedSOL, Scaffold, FedNova),
    (ER, FedSOL),
    (ER, FullFedSOL, FedDyn),
    (EWC, Scaffold, FedAvgM),
    (LimitedEWC, FedSAM, FedProx),
    (GLFC, FedNTD, FedNova),
    (LwF, MOON, Scaffold),
    (Joint, Scaffold, FedAvgM),
    (GPM, Scaffold, FedNova),
    (GradientGPM, FedProx, Scaffold),
    (RGO, FedSOL, Scaffold),
    (FedProTIP, FedDyn, FedSAM),
]
GROWING = [
    (FedAvg,),
    (EWC, Scaffold, FedAvgM),
    (ER,),
    (ER, FedSOL),
    (PublishedGLFC,),
    (PublishedGLFC, FedNTD, FedNova),
    (LwF,),
    (LwF, MOON, Scaffold),
    (Joint, FedDyn),
]
VARIANTS = {PublishedGLFC: "glfc", LimitedEWC: "ewc", GradientGPM: "gpm", FullFedSOL: "fedsol"}
VARIANTS |= {ScaffoldInFedSOL: "fedsol+scaffold", FedDynInFedSOL: "fedsol+feddyn"}
SETTINGS = {  # engine, scenario, weights of the mean
    "one head": ("loop", "domain", "samples"),
    "a head per task": ("vmapped", "task", "uniform"),
    "a growing head": ("loop", "class", "samples"),
}
RUNS = [(parts, "one head") for parts in CASES]
RUNS += [(parts, "a head per task") for parts in CASES if parts[0] is not FedAvg or len(parts) == 1]  # for time
RUNS += [(parts, "a growing head") for parts in GROWING]


def stream(multi_head):
    """Tasks whose inputs lie in random subspaces of R^D; labels from a random linear map."""
    tasks = []
    for task in range(TASKS):
        span, labels = toy.random(RANK, D, seed=100 + task), toy.random(RANK, CLASSES, seed=200 + task)
        z = toy.random(80, RANK, seed=300 + task)
        x, y = (z @ span).float(), (z @ labels).argmax(1)
        y[:CLASSES] = torch.arange(CLASSES)
        tasks.append((x[:40], y[:40], x[40:], y[40:]))
    return cfl.from_tensors(tasks, multi_head=multi_head)


def session(parts, setting):
    engine, scenario, weights = SETTINGS[setting]
    options = [f"tasks={TASKS}", "rounds=[4,1,2]", f"partition.clients={CLIENTS}", "cohort=3", "drop_rate=0.2"]
    options += ["partition.name=lda", "partition.task_share=0.8", "partition.min_samples=3", f"agg.weights={weights}"]
    options += [f"local.batch_size={BATCH}", f"local.epochs={EPOCHS}", f"local.lr={LR}", f"local.lr_decay={LR_DECAY}"]
    options += [f"local.momentum={MOMENTUM}", f"local.weight_decay={WEIGHT_DECAY}", f"server.lr={SERVER_LR}"]
    options += ["seed=4", f"engine={engine}", "block=2", f"scenario={scenario}"]
    options += [option for part in parts for option in part.options]
    label = "+".join(VARIANTS.get(part, part.__name__.lower()) for part in parts)
    config = cfl.resolve("permuted-digits", method=label, overrides=options)
    return build_session(config, stream(scenario != "domain"), methods.build(config), toy.mlp(D, HIDDEN, CLASSES))


def samples(client, tasks):
    """What a client holds of the tasks."""
    found = []
    for task in tasks:
        if task in client.shares:
            x, y = client.shares[task].samples.gather(client.shares[task].rows)
            found.append(Batch(x.double(), y, torch.full_like(y, task)))
    return Batch(*(torch.cat(leaves) for leaves in zip(*found)))


def grown(w, params, tasks):
    """The weights with the parts of the head for these tasks joined to one layer, behind what is there of it."""
    parts = {name: [params[f"{name}@{task}"] for task in tasks] for name in ("2.weight", "2.bias")}
    body = {name: leaf for name, leaf in w.items() if "@" not in name}
    return {**body, **{name: torch.cat([w.get(name, own[0][:0]), *own]) for name, own in parts.items() if own}}


@cache
def recomputed(parts, setting):
    """Run and recompute, and compare the global models after every round. Returns the last one, and what was met."""
    rules, run = [part() for part in parts], session(parts, setting)
    w, last, known, met = dict(run.model.params), -1, [], set()
    for position in range(len(run.schedule)):
        info, _, clients, _ = run.prepare(position)
        tasks, lr = rules[0].sees(info.task), LR * LR_DECAY**info.round
        if info.task > last:
            last, new = info.task, [task for task in tasks if task not in known]
            known += new
            w = grown(w, run.model.params, new) if setting == "a growing head" else w
            for rule in rules:
                rule.begin(last, w)
        there = [Local(client.id, last, lr, info.key, w, samples(client, tasks)) for client in clients]
        if info.phase.train:
            held = [sum(len(run.population.deals[task].rows[id]) for task in tasks) for id in range(CLIENTS)]
            measure = held if SETTINGS[setting][2] == "samples" else [int(n > 0) for n in held]
            total = sum(measure[me.id] for me in there)
            p = {me.id: measure[me.id] / total for me in there}
            server = Round(p, sum(n > 0 for n in held), total / sum(measure))
            w = served(rules, w, {me.id: trained(rules, me) for me in there}, server)
            met |= {("held", n) for n in held} | {("arrived", len(there)), ("dropped", bool(info.dropped))}
            met |= {(me.id, info.round) for me in there if info.task == 0}
        else:
            rules[0].consolidate(there, info.clients)
        run.round(position)
        found = run.state.server["params"]
        for name, leaf in (grown(found, found, known) if setting == "a growing head" else found).items():
            assert torch.allclose(leaf, w[name], atol=1e-10, rtol=0), f"{name} after {info.place}"
    return w, met


@pytest.mark.filterwarnings("ignore:the projection removed")  # the tasks are to overlap
@pytest.mark.parametrize(
    ("parts", "setting"), RUNS, ids=["+".join(part.__name__ for part in parts) + f", {place}" for parts, place in RUNS]
)
def test_a_run_is_that_of_plain_torch(parts, setting):
    w, _ = recomputed(parts, setting)
    for other in {(FedAvg,), parts[:1], *((FedAvg, rule) for rule in parts[1:])} - {parts}:
        if (other, setting) in RUNS:
            unlike, _ = recomputed(other, setting)
            assert max((w[name] - leaf).abs().max() for name, leaf in unlike.items()) > 1e-3, other


@pytest.mark.parametrize("setting", ["one head", "a head per task"])
def test_the_runs_are_as_uneven_as_they_are_meant_to_be(setting):
    _, met = recomputed((FedAvg,), setting)
    sizes = {n for what, n in met if what == "held"}
    assert 0 in sizes and len(sizes) > 4 and any(0 < n < BATCH for n in sizes) and any(n % BATCH for n in sizes)
    assert max(sum((id, round) in met for round in range(4)) for id in range(CLIENTS)) >= 3  # its state came back twice
    assert ("dropped", True) in met and {n for what, n in met if what == "arrived"} >= {2, 3}
