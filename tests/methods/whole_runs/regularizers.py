"""Local regularizers and rules of the server as their papers have them."""

from collections import defaultdict

import torch
import torch.nn.functional as F

from tests.methods.whole_runs.federation import MOMENTUM, Part, features, gradient, head, length, outputs


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
    """Lee et al., 2024, eq. 5 and 6: the gradient at w + rho Lambda g_p / |g_p|, with g_p the gradient of
    KL(softmax(z_global / T) || softmax(z / T)), and Lambda = |w - w_global| over its norm across a layer's outputs,
    as in the authors' code (eq. 7 has the norm of the whole layer). Only the head is perturbed.
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
    c <- c + 1 / N sum of the changes of c_i. a_i: `effective`, the paper's K without momentum.
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
        tau_eff = sum(p * self.own[id] for id, p in info.p.items())
        return {name: tau_eff * leaf for name, leaf in step.items()}


class FedAvgM(Part):
    """Hsu et al., 2019: v <- 0.9 v + step; the step is v. A task starts with v = 0."""

    def begin(self, task, w):
        self.v = {}

    def server(self, step, info):
        self.v = {name: 0.9 * self.v.get(name, 0.0) + leaf for name, leaf in step.items()}
        return self.v
