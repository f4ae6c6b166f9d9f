"""Rounds of LoRM, O-LoRA, TARGET, FedDF, Fed-ET and FedProj, recomputed in plain torch in float64.

Three clients with unequal numbers of samples, one of them without data in the second task, take two steps of gradient
descent on all their samples in each of three rounds of two tasks. The network has 8-6-6-2 units and a head per task.
"""

import pytest
import torch
import torch.nn.functional as F

from cfl.assembly import methods
from cfl.runtime.builder import build_session
from tests import toy

LR, STEPS = 0.3, 2
ENGINES = pytest.mark.parametrize("engine", [("engine=loop",), ("engine=vmapped", "block=2")], ids=["loop", "vmapped"])
ADAPTED = ("model.adapter=lora", "model.adapter_rank=4", "model.adapter_alpha=6")
SCALE = 6 / 4  # alpha / r
BODY = ["0.weight", "0.bias", "2.weight", "2.bias"]


# --- runs ------------------------------------------------------------------------------------------------------------


def rounds(method, *options):
    """Yield each round: its inputs, all weights before it, samples (id, x, y) of clients, the server's new trees."""
    config = toy.config(
        "tasks=2", "rounds=3", "partition.name=dirichlet", "partition.alpha=0.3", "partition.clients=3", "cohort=3",
        "local.batch_size=1000", f"local.epochs={STEPS}", f"local.lr={LR}", *options, method=method,
    )  # fmt: skip
    session = build_session(config, toy.stream(2, multi_head=True), methods.build(config), toy.mlp(8, 6, 6, 2))
    for position in range(len(session.schedule)):
        inputs = session.prepare(position)
        leaves = {**dict(session.model.module.named_parameters()), **session.state.server["params"]}
        before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        batches = [(client.id, next(client.batches(1000))) for client in inputs.clients]
        if inputs.info.phase.train:
            sizes = {len(batch.y) for _, batch in batches}
            assert len(sizes) == len(batches) == 3 - inputs.info.task  # in the second task, one client has no data
        session.round(position)
        yield inputs, before, [(id, batch.x.double(), batch.y) for id, batch in batches], session.state.server


def assert_same(server, expected):
    for name, leaf in server["params"].items():
        torch.testing.assert_close(leaf, expected[name], atol=1e-12, rtol=0)


# --- the network and its training ------------------------------------------------------------------------------------


def inputs_of_layers(p, x):
    """Inputs of the layers 0, 2 and 4. A layer computes W x + b, or W x + b + (alpha / r) B A x."""
    inputs = [x]
    for layer in "02":
        own = f"{layer}.base" if f"{layer}.base.weight" in p else layer
        z = inputs[-1] @ p[f"{own}.weight"].T + p[f"{own}.bias"]
        if own != layer:
            z = z + SCALE * inputs[-1] @ p[f"{layer}.a.weight"].T @ p[f"{layer}.b.weight"].T
        inputs.append(z.relu())
    return inputs


def logits(p, x, task):
    return inputs_of_layers(p, x)[2] @ p[f"4.weight@{task}"].T + p[f"4.bias@{task}"]


def head(task):
    return [f"4.weight@{task}", f"4.bias@{task}"]


def plain(task):
    """The loss of FedAvg."""
    return lambda p, id, x, y, step: F.cross_entropy(logits(p, x, task), y)


def gradient(loss, p, names):
    at = {name: p[name].clone().requires_grad_() for name in names}
    return dict(zip(names, torch.autograd.grad(loss({**p, **at}), list(at.values())), strict=True))


def trained(p, names, data, loss, adjust=lambda grads, p: grads):
    """Each client's weights after its steps. loss: of (weights, id, x, y, step); adjust: its gradients at weights."""
    local = []
    for client in data:
        own = dict(p)
        for step in range(STEPS):
            grads = adjust(gradient(lambda at, c=client, s=step: loss(at, *c, s), own, names), own)
            own.update({name: own[name] - LR * grads[name] for name in names})
        local.append(own)
    return local


def mean(p, names, local, data):
    """The weights `p` with the clients' means of these leaves, weighted by samples.

    A weight that no client moves stays to the bit: Adam would turn a gradient of 1e-17 into steps.
    """
    sizes = torch.tensor([len(y) for *_, y in data])
    shares = sizes / sizes.sum().double()
    return {**p, **{n: p[n] - sum(share * (p[n] - own[n]) for share, own in zip(shares, local)) for n in names}}


def divergence(teacher, student, temperature):
    """KL(softmax(teacher / T) || softmax(student / T)), the mean over samples."""
    p, q = ((leaf / temperature).softmax(dim=1) for leaf in (teacher, student))
    return (p * (p / q).log()).sum(dim=1).mean()


# --- adapters --------------------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("gamma", [1.0, 0.3, 0.0])
def test_lorm(engine, gamma):
    """Salami et al., section 3.2: B and A in turn, each merged as RegMean merges a layer with this factor's inputs."""

    def merged(name, before, local, data):
        grams = []
        for (_, x, _), own in zip(data, local, strict=True):
            inputs = inputs_of_layers(own, x)["02".index(name[0])]
            inputs = inputs @ own[f"{name[0]}.a.weight"].T if ".b." in name else inputs
            gram = inputs.T @ inputs
            grams.append(gamma * gram + (1 - gamma) * gram.diag().diag())
        total, products = sum(grams), sum(own[name] @ gram for own, gram in zip(local, grams, strict=True))
        # (sum W_i G_i) (sum G_i)^-1; along directions that no client's inputs have, as of dead units, the weight stays
        inverse = torch.linalg.pinv(total, rtol=1e-6, hermitian=True)
        return products @ inverse + before[name] - before[name] @ total @ inverse

    for (info, *_), before, data, server in rounds("lorm", *ADAPTED, f"strategy.gamma={gamma}", *engine):
        task, factor = info.task, "ba"[info.round % 2]
        factors = [f"{layer}.{factor}.weight" for layer in "02"]
        names = [*factors, *head(task)]
        local = trained(before, names, data, plain(task))
        expected = mean(before, head(task), local, data)
        assert_same(server, {**expected, **{name: merged(name, before, local, data) for name in factors}})


@ENGINES
def test_olora(engine):
    """Wang et al., eq. 7 and 8: the pair of the task trains on CE + lambda sum_layers sum_{s < t} |A_s A_t^T|^2."""
    pairs = [f"{layer}.{factor}.weight" for layer in "02" for factor in "ab"]
    rows = [slice(0, 2), slice(2, 4)]  # of the rank 4

    def overlap(p, task):
        of_a = [p[f"{layer}.a.weight"] for layer in "02"]
        return sum((a[rows[s]] @ a[rows[task]].T).square().sum() for a in of_a for s in range(task))

    def penalised(task):
        return lambda p, *client: plain(task)(p, *client) + 0.7 * overlap(p, task)

    def masked(grads, task):
        kept = {}
        for name in pairs:
            own = (rows[task], slice(None)) if ".a." in name else (slice(None), rows[task])
            kept[name] = torch.zeros_like(grads[name])
            kept[name][own] = grads[name][own]
        return {**grads, **kept}

    for (info, *_), before, data, server in rounds("olora", *ADAPTED, "strategy.strength=0.7", *engine):
        task, names = info.task, [*pairs, *head(info.task)]
        local = trained(before, names, data, penalised(task), lambda grads, p, task=task: masked(grads, task))
        assert overlap(before, task) > 0.01 or not task
        assert_same(server, mean(before, names, local, data))


# --- TARGET ----------------------------------------------------------------------------------------------------------


@ENGINES
def test_target(engine):
    """CE + lambda CE_T(teacher, student) on synthetic samples (Zhang et al.); the teacher is the last task's model.

    The samples, their order and the first row are those of the run; test_inversion.py tests how they are made.
    """
    small = dict(rounds=2, warmup=1, g_steps=2, samples=10, latent=4, width=4, student_steps=2, batch=5)
    options = [f"strategy.{name}={value}" for name, value in {**small, "strength": 3.0, "temperature": 2.0}.items()]

    def second(teacher, u, first):
        """The loss of the second task; u: (20, 8) synthetic samples; first: the row with which client 0 begins."""

        def loss(p, id, x, y, step):
            batch = u[(first + 7919 * id + 5 * step + torch.arange(5)) % 20].double()
            wanted, said = (logits(at, batch, 0) / 2.0 for at in (teacher, p))
            distilled = -(wanted.softmax(dim=1) * said.log_softmax(dim=1)).sum(dim=1).mean()
            return F.cross_entropy(logits(p, x, 1), y) + 3.0 * distilled

        return loss

    for (info, shared, *_), before, data, server in rounds("target", *options, *engine):
        if not info.phase.train:  # the server makes samples
            teacher, synthetic = before, server["synthetic"]["x"]
            assert_same(server, before)
        elif info.task:
            u = shared["synthetic"]["x"]  # in random order
            assert sorted(u.tolist()) == sorted(synthetic.tolist())
            names = [*BODY, *head(0), *head(1)]
            local = trained(before, names, data, second(teacher, u, shared["start"]["row"]))
            assert_same(server, mean(before, names, local, data))
        else:
            local = trained(before, [*BODY, *head(0)], data, plain(0))
            assert_same(server, mean(before, [*BODY, *head(0)], local, data))


# --- distillation at the server --------------------------------------------------------------------------------------


def knowledge(each, student, *_):
    """FedDF: T^2 KL of the clients' mean logits and the student's, T = 2."""
    return 4 * divergence(each.mean(dim=0), student, 2.0)


def anchored(each, student, moved):
    """FedProj, eq. 8: with 0.7 times the squared distance from the anchor."""
    return knowledge(each, student) + 0.7 * sum(leaf.square().sum() for leaf in moved)


def consensus(each, student, *_):
    """Fed-ET, sample by sample: cross-entropy with the consensus, and half the KL from those that dissent, T = 2."""
    total = 0.0
    for said, own in zip(each.softmax(dim=2).unbind(1), student, strict=True):
        weights = ((said - said.mean(dim=1, keepdim=True)) ** 2).mean(dim=1)  # variance over the classes
        label = sum(weight / weights.sum() * p for weight, p in zip(weights, said, strict=True)).argmax()
        total = total + F.cross_entropy(own, label)
        dissenting = [k for k, p in enumerate(said) if p.argmax() != label]
        if dissenting:
            other = sum(weights[k] * said[k] for k in dissenting) / sum(weights[k] for k in dissenting)
            total = total + 0.5 * divergence(other.log()[None], own[None], 2.0)
    return total / len(student)


@ENGINES
@pytest.mark.parametrize(
    "rule,lesson,options",
    [
        ("feddf", knowledge, ()),
        ("fedproj", anchored, ("alpha=0.7",)),
        ("fedproj", anchored, ("alpha=0.7", "anchor=global")),
        ("fedet", consensus, ("diversity=0.5",)),
    ],
    ids=["feddf", "fedproj", "fedproj-global", "fedet"],
)
def test_distillation(engine, rule, lesson, options):
    own = ("temperature=2", "server_epochs=3", "server_batch=1000", "server_lr=0.01", *options)
    given = ("public.name=stream", *(f"regularizer.{rule}.{option}" for option in own), *engine)
    conflicts = 0

    def projected(grads, p, memory, x, task, names):
        """The nearest gradient g with <g, g_m> >= 0 (FedProj, eq. 9-13)."""
        nonlocal conflicts
        of_memory = gradient(lambda at: divergence(memory, logits(at, x, task), 2.0), p, names)
        inner, square = (sum((of_memory[n] * other[n]).sum() for n in names) for other in (grads, of_memory))
        if inner >= 0:
            return grads
        conflicts += 1
        return {n: grads[n] - inner / square * of_memory[n] for n in names}

    memory = None  # the ensemble's logits of the last round
    for (info, *_), before, data, server in rounds(f"fedavg+{rule}", *given):
        task, names = info.task, [*BODY, *head(info.task)]
        public = info.public.gather(torch.arange(20))[0].double()
        memory = memory if info.round else None  # a new task has a new head, for which there are none

        def adjust(grads, p, memory=memory, x=public, task=task, names=names):
            return grads if memory is None or rule != "fedproj" else projected(grads, p, memory, x, task, names)

        local = trained(before, names, data, plain(task), adjust)
        average, each = mean(before, names, local, data), torch.stack([logits(p, public, task) for p in local])
        anchor, memory = before if "anchor=global" in options else average, each.mean(dim=0)
        student = {name: average[name].clone().requires_grad_() for name in names}
        adam = torch.optim.Adam(student.values(), lr=0.01)
        for _ in range(3):
            adam.zero_grad()
            moved = [student[name] - anchor[name] for name in names]
            lesson(each, logits({**average, **student}, public, task), moved).backward()
            adam.step()
        assert_same(server, {**average, **{name: leaf.detach() for name, leaf in student.items()}})
    assert conflicts > 10 or rule != "fedproj"
