"""Strategies as their papers have them."""

from collections import defaultdict

import torch
import torch.nn.functional as F

from cfl.core import rng
from tests.methods.whole_runs.federation import (
    BATCH,
    CLASSES,
    TASKS,
    Batch,
    Part,
    errors,
    gradient,
    inputs_of,
    layers,
    outputs,
    shuffled,
)


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
    the mean of the w_s with weights F_s. Without the limit, this strength makes weights of 1e35 with
    one head.
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

    L_GC: mean of w BCE, where BCE is the mean over all classes; w = g / (mean of g over new, or over replayed,
    samples), g = 1 - sigmoid(z_y), also without memory.
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
    """FOT, eq. 6 to 8: the server projects its step off the inputs of earlier tasks of all clients, bias included.

    Gram matrices take the place of the sketches (eq. 9), and energies that of the norms (eq. 12).
    """

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
    dq/dW, q = sum_b z_y sqrt(a_y - a_y^2), a = softmax(z), the root a constant. Only some clients, drawn for
    each task, update P.
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
    after the first task. A client sends V S^2 V^T, with the fewest V that hold the threshold of its |X|^2; the server
    extends U by the fewest leading directions of the sum outside U, until U holds the threshold of all |X|^2.
    """

    threshold, step = 0.775, 0.001
    options = (f"strategy.threshold={threshold}", f"strategy.threshold_step={step}")

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
            held = (core.trace() - values.sum() + torch.cat([torch.zeros(1).double(), values.cumsum(0)])) / energy
            self.bases[name] = torch.cat([u, vectors[:, : int((held < threshold).sum())]], dim=1)
            assert u.shape[1] < self.bases[name].shape[1] < len(u)
