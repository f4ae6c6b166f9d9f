"""FedProj: the projection by hand and against the conditions of its minimum, the memory, and the server's anchor."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Batch, Phase, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedDF, FedProj
from tests import toy

PUBLIC = toy.stream().public  # 20 inputs (d=8)
X = PUBLIC.gather(torch.arange(20))[0].double()
BATCH = Batch(toy.random(6, 8, seed=4), torch.arange(6) % 3, torch.ones(6).double(), torch.arange(6))
PLACE = "local/fedproj"
FIXED = SimpleNamespace(growing=False)  # what the rule asks of the model


def watching(base=FedProj):
    """FedProj with lists of its hooks' arguments, and of whether a client's gradient was changed."""

    class Watching(base):
        owned, sent, adjusted = [], [], []

        def provide(self, own, info):
            self.owned.append(own)
            self.sent.append((info, super().provide(own, info)))
            return self.sent[-1][1]

        def adjust(self, grads, params, ctx):
            after = super().adjust(grads, params, ctx)
            changed = any(not torch.equal(leaf, after[name]) for name, leaf in grads.items())
            self.adjusted.append((len(self.sent) - 1, int(ctx.client), changed))
            return after

    return Watching


def make(*rules, optimizer=None):
    """A smooth network of 8 inputs and 3 classes, and its local step under FedAvg with these regularizers."""
    model = cfl.Model(toy.net(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), (8,), [3], multi_head=False)
    composed = ComposedMethod({"strategy": Strategy(), **dict(zip(("fedproj",), rules))})
    return model, LocalStep(model, 0, frozenset(), composed, optimizer or optim.sgd(), public=PUBLIC)


def memory(seed=0, size=20):
    """The broadcast of a round: the memory's rows of the public data, and the ensemble's logits on them."""
    return {"rows": torch.arange(20).flip(0)[:size], "logits": 3 * toy.random(size, 3, seed=seed)}


def memory_loss(model, sent, temperature=3.0):
    """KL(softmax(Z / T) || softmax(f / T)) on the whole memory, as a function of the parameters."""

    def loss(params):
        log_q = (model.logits(params, X[sent["rows"]], 0) / temperature).log_softmax(1)
        p = (sent["logits"] / temperature).softmax(1)
        return (p * (p.log() - log_q)).sum(1).mean()

    return loss


CONFLICT = ("partition.name=shards", "local.lr=0.5", "local.epochs=2")  # clients that forget without the memory


def vectors(model, seed):
    """A random tree with the names of a model."""
    return {name: toy.random(*leaf.shape, seed=100 * seed + i) for i, (name, leaf) in enumerate(model.params.items())}


def small(method, *overrides, tasks=1, **options):
    """A short run on the toy stream, of rounds of three clients."""
    config = toy.config(f"tasks={tasks}", "public.name=stream", *overrides, method=method)
    return cfl.run(config, stream=options.pop("stream", toy.stream(tasks=tasks)), **options)


def models_of(method, *overrides, **options):
    """The clients' models of a run, in the order of training."""
    seen = []
    small(method, *overrides, observe=lambda info, id, params: seen.append((info.round, id, params)), **options)
    return seen


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(leaf, b[name]) for name, leaf in a.items())


def distance(a, b):
    return max(float((leaf - b[name]).abs().max()) for name, leaf in a.items())


# --- the client's gradient, by hand ----------------------------------------------------------------------------------


def hand_context(**more):
    """A model whose logits are its two parameters, for every input; the ensemble predicts (3/4, 1/4)."""
    sent = {"rows": torch.tensor([3]), "logits": torch.tensor([[math.log(3.0), 0.0]])}

    def forward(params, batch):
        return params["w"].expand(len(batch.y), 2)

    one = torch.tensor(1)
    return toy.context({}, {}, None, FIXED, sent={**sent, **more}, forward=forward, public=PUBLIC, client=one)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        # T = 1, w = 0: g_m = (1/2 - 3/4, 1/2 - 1/4) = (-1/4, 1/4), and |g_m|^2 = 1/8
        ((1.0, 0.0), (0.5, 0.5)),  # <g, g_m> = -1/4: g + 2 g_m
        ((0.0, 1.0), (0.0, 1.0)),  # <g, g_m> = +1/4
        ((1.0, 1.0), (1.0, 1.0)),  # <g, g_m> = 0
        ((3.0, -1.0), (1.0, 1.0)),  # <g, g_m> = -1: g + 8 g_m
    ],
)
def test_projection_by_hand(gradient, expected):
    params = {"w": torch.zeros(2)}
    found = FedProj(temperature=1.0).adjust({"w": torch.tensor(gradient)}, params, hand_context())
    assert found["w"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "gradient", "expected"),
    [
        ({"project": "always"}, (0.0, 1.0), (0.5, 0.5)),  # <g, g_m> = +1/4, |g_m|^2 = 1/8: g - 2 g_m
        ({"project": "always"}, (1.0, 0.0), (0.5, 0.5)),
        ({"clamp": 4.0}, (3.0, -1.0), (2.0, 0.0)),  # g + 4 g_m in place of g + 8 g_m
        ({"clamp": 10.0}, (3.0, -1.0), (1.0, 1.0)),
    ],
)
def test_projection_as_printed_and_as_coded_by_hand(options, gradient, expected):
    params = {"w": torch.zeros(2)}
    found = FedProj(temperature=1.0, **options).adjust({"w": torch.tensor(gradient)}, params, hand_context())
    assert found["w"].tolist() == pytest.approx(expected)


def test_temperature_by_hand():
    # T = 2: p has the ratio sqrt(3) to 1, so that g_m still points along (-1, 1), and the projection is the same
    params = {"w": torch.zeros(2)}
    found = FedProj(temperature=2.0).adjust({"w": torch.tensor([1.0, 0.0])}, params, hand_context())
    assert found["w"].tolist() == pytest.approx([0.5, 0.5])
    # w = (ln 2, 0) at T = 1 predicts (2/3, 1/3), less than 3/4: g_m has the same direction. At T = 1/2 it predicts
    # (4/5, 1/5), and Z (9/10, 1/10). With Z = (0, 0) the direction of g_m is reversed.
    ctx = hand_context(logits=torch.zeros(1, 2))
    found = FedProj(temperature=1.0).adjust({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([0.7, 0.0])}, ctx)
    assert found["w"].tolist() == pytest.approx([0.5, 0.5])


def test_the_server_decides_which_clients_project():
    gradient, params = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.zeros(2)}
    for who, expected in (([1.0, 0.0, 1.0], [1.0, 0.0]), ([0.0, 1.0, 0.0], [0.5, 0.5])):
        found = FedProj(temperature=1.0).adjust(gradient, params, hand_context(projects=torch.tensor(who)))
        assert found["w"].tolist() == pytest.approx(expected)  # this is client 1


# --- the client's gradient, as a constrained minimum -----------------------------------------------------------------


def test_the_projected_gradient_meets_the_conditions_of_the_minimum():
    """min |g - g_new|^2 subject to <g, g_m> >= 0 is convex, so the conditions of Karush, Kuhn and Tucker suffice."""
    model, step = make(FedProj())
    kinds = set()
    for seed in range(30):
        sent, gradient = memory(seed), vectors(model, seed)
        ctx = step.context(StepInputs({"params": model.params, PLACE: sent}, BATCH))
        found = step.composed.adjust(gradient, model.params, ctx)
        reference = torch.func.grad(memory_loss(model, sent))(model.params)
        square, change = tree.dot(reference, reference), tree.sub(found, gradient)
        weight = tree.dot(change, reference) / square  # lambda
        assert square > 1e-4
        assert tree.dot(found, reference) >= -1e-10  # feasible
        assert weight >= 0 and distance(change, tree.scale(reference, weight)) < 1e-12  # stationary
        assert abs(weight * tree.dot(found, reference)) < 1e-10  # complementary
        assert tree.dot(found, found) <= tree.dot(gradient, gradient) * (1 + 1e-14)
        feasible = bool(tree.dot(gradient, reference) >= 0)
        kinds.add(feasible)
        assert same(found, gradient) == feasible
    assert kinds == {True, False}


def test_a_memory_without_loss_changes_nothing():
    model, step = make(FedProj())
    sent = memory() | {"logits": model.logits(model.params, X[memory()["rows"]], 0)}
    for seed in range(5):
        gradient = vectors(model, seed)
        ctx = step.context(StepInputs({"params": model.params, PLACE: sent}, BATCH))
        assert same(step.composed.adjust(gradient, model.params, ctx), gradient)


@pytest.mark.parametrize("samples", [1, 10])  # the loss is their mean: their number does not matter
def test_a_memory_gradient_shorter_than_a_thousandth_changes_nothing(samples):
    """w = (0, 0) and Z = (4 d, 0) at T = 1 give g_m = (-d, d) up to d^3; its length is 1e-3 at d = 0.0007071."""
    gradient, params = {"w": torch.tensor([1.0, 0.0]).double()}, {"w": torch.zeros(2).double()}
    for size, expected in ((7.0e-4, 1.0), (7.2e-4, 0.5)):
        logits = torch.tensor([[4 * size, 0.0]] * samples).double()
        ctx = hand_context(rows=torch.arange(samples), logits=logits)
        found = FedProj(temperature=1.0).adjust(gradient, params, ctx)
        assert float(found["w"][0]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 7])  # seeds of clients in conflict with the memory
def test_a_small_step_of_sgd_raises_the_memory_loss_to_second_order_only(seed):
    """Halving the learning rate divides the change of the memory's loss by four with projection. Without projection the
    loss rises, and the change is halved."""
    sent = memory(seed)
    changes = {}
    for name, rules in (("plain", ()), ("projected", (FedProj(),))):
        model, step = make(*rules)
        loss = memory_loss(model, sent)
        # the client's labels are the least probable classes of the ensemble
        batch = BATCH._replace(x=X[sent["rows"]], y=sent["logits"].argmin(1), mask=torch.ones(20).double())
        shared = {"params": model.params, PLACE: sent}
        changes[name] = [
            float(loss(step(step.start(model.params), StepInputs(shared, batch, lr=lr))[0].params) - loss(model.params))
            for lr in (4e-3, 2e-3, 1e-3)
        ]
    for (plain, half), (projected, quarter) in zip(
        zip(changes["plain"], changes["plain"][1:]), zip(changes["projected"], changes["projected"][1:])
    ):
        assert plain > 0 and plain / half == pytest.approx(2, rel=0.02)
        assert projected / quarter == pytest.approx(4, rel=0.02)
        assert abs(projected) < plain / 100


def test_running_statistics_of_a_client_do_not_see_the_memory():
    module = toy.net(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model = cfl.Model(module, (8,), [3], multi_head=False)
    found = []
    for rules in ({}, {"fedproj": FedProj()}):
        step = LocalStep(
            model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), **rules}), optim.sgd(), public=PUBLIC
        )
        shared = {"params": model.params, PLACE: memory()}
        found.append(step(step.start(model.params), StepInputs(shared, BATCH, lr=0.1))[0])
    assert same(found[0].buffers, found[1].buffers) and not same(found[0].params, found[1].params)
    assert distance(found[0].buffers, model.params) > 1e-2  # they differ from those of the broadcast


# --- the memory ------------------------------------------------------------------------------------------------------


def info_of(model, round=1, key=11, **more):
    info = toy.consolidation(model, key=key)
    return replace(info, phase=Phase("train"), round=round, trained=round, public=PUBLIC, **more)


LOGITS = toy.random(20, 3, seed=7)


MODEL, _ = make()


def drawn(size=6, **more):
    return FedProj(memory=size).provide({"logits": LOGITS}, info_of(MODEL, **more))


@pytest.mark.parametrize(("size", "expected"), [(6, 6), (20, 20), (500, 20), (None, 20)])
def test_the_memory_is_drawn_without_replacement(size, expected):
    sent = drawn(size)
    rows = sent["rows"].tolist()
    assert len(rows) == len(set(rows)) == expected and set(rows) <= set(range(20))
    assert sent["rows"].dtype == torch.int64 and set(sent) == {"rows", "logits"}
    assert torch.equal(sent["logits"], LOGITS[rows])


def test_the_memory_is_drawn_by_the_key_of_the_round():
    rows = [drawn(key=key)["rows"].tolist() for key in (1, 1, 2, 3, 4)]
    assert rows[0] == rows[1] and len({tuple(sorted(part)) for part in rows}) == 4  # of 38,760 subsets
    with rng.fork(9):
        assert drawn(key=1)["rows"].tolist() == rows[0]


def test_each_public_sample_is_drawn_with_the_same_chance():
    """A sample is in Bin(1000, 6/20) memories; by Hoeffding's inequality, a count is off by more than 100 with a
    probability below 2 exp(-2 100^2 / 1000) = 4e-9."""
    counts = torch.stack([drawn(key=key)["rows"] for key in range(1000)]).flatten().bincount(minlength=20)
    assert (counts - 300).abs().max() < 100


@pytest.mark.parametrize(("batch", "size"), [(3, 8), (4, 8), (8, 8), (99, 8), (1, 3)])
def test_minibatches_cycle_through_the_memory(batch, size):
    sent, seen = memory(size=size), []

    def forward(params, batch):
        seen.extend(batch.ids.tolist())
        return batch.x.double() @ params["w"]

    method = FedProj(memory_batch=batch)
    for number in range(6):
        ctx = toy.context({}, {}, None, FIXED, sent=sent, forward=forward, public=PUBLIC, step=number)
        method.adjust({"w": torch.ones(8, 3).double()}, {"w": torch.zeros(8, 3).double()}, ctx)
    steps = min(batch, size)
    order = sent["rows"].tolist()
    assert seen == (order * 99)[: 6 * steps]


def test_targets_stay_with_their_samples():
    """In a step on a part of the memory, the reference is the gradient of the loss on that part."""
    model, step = make(FedProj(memory_batch=3))
    sent = memory(1, size=8)
    for number, part in ((0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 0])):
        own = {name: leaf[part] for name, leaf in sent.items()}
        reference = torch.func.grad(memory_loss(model, own))(model.params)
        ctx = step.context(StepInputs({"params": model.params, PLACE: sent}, BATCH, step=number))
        found = step.composed.adjust(tree.scale(reference, -2.0), model.params, ctx)
        assert distance(found, tree.scale(reference, 0.0)) < 1e-12  # the whole gradient is against the memory


# --- when it projects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"start": 3}, [3, 4, 5]),
        ({"stop": 4}, [1, 2, 3]),
        ({"start": 2, "stop": 3}, [2]),
        ({"stop": 1}, []),
    ],
    ids=str,
)
def test_rounds_that_project(options, expected):
    model = MODEL
    method = FedProj(**options)
    found = [round for round in range(6) if method.provide({"logits": LOGITS}, info_of(model, round))]
    assert found == expected
    assert not any(method.provide({}, info_of(model, round)) for round in range(6))  # no logits yet


def test_the_first_round_is_fedavg_and_the_second_is_not():
    own = "regularizer.fedproj.server_lr=1e-30"
    plain, ours = models_of("fedavg", *CONFLICT), models_of("fedproj", own, *CONFLICT)
    assert [(round, id) for round, id, _ in plain] == [(round, id) for round, id, _ in ours]
    for (round, _, expected), (_, _, found) in zip(plain, ours, strict=True):
        assert same(expected, found) if round == 0 else distance(expected, found) > 1e-4


def test_clients_drop_out_independently():
    """A quarter of 4000 clients drops out; more than 160 off has probability 2 exp(-2 160^2 / 4000) < 1e-5."""
    model = MODEL
    method = FedProj(drop=0.25)
    who = [method.provide({"logits": LOGITS}, info_of(model, key=key, population=4000))["projects"] for key in (1, 2)]
    for draw in who:
        assert draw.shape == (4000,) and set(draw.tolist()) == {0.0, 1.0}
        assert abs(float(draw.sum()) - 3000) < 160
    assert abs(float((who[0] * who[1]).sum()) - 4000 * 9 / 16) < 160  # draws of two rounds are independent
    assert torch.equal(method.provide({"logits": LOGITS}, info_of(model, key=1, population=4000))["projects"], who[0])


def test_in_a_run_exactly_the_drawn_clients_project():
    method = watching()(drop=0.5, server_lr=0.01)
    small("fedproj", "rounds=6", *CONFLICT, regularizers={"fedproj": method})
    changed: dict[tuple[int, int], bool] = {}
    for round, client, change in method.adjusted:
        changed[round, client] = changed.get((round, client), False) or change
    kinds = set()
    for round, (info, sent) in enumerate(method.sent):
        for client in info.clients:
            does = bool(sent) and bool(sent["projects"][client])
            assert changed[round, client] == does, (round, client)
            kinds.add((round > 0, does))
    assert kinds == {(False, False), (True, False), (True, True)}


def test_if_all_clients_drop_out_they_train_as_under_feddf():
    own = ("server_lr=0.01", "server_epochs=2", "server_batch=7")
    feddf = models_of("feddf", "rounds=3", *(f"regularizer.feddf.{option}" for option in own))
    fedproj = models_of("fedproj", "rounds=3", *(f"regularizer.fedproj.{option}" for option in (*own, "drop=1.0")))
    assert len(feddf) == 9
    for (_, id, expected), (_, other, found) in zip(feddf, fedproj, strict=True):
        assert id == other and same(expected, found)


def test_the_ensembles_logits_are_void_at_a_task_switch():
    method = watching()(server_lr=0.01)
    sink = toy.Rows()
    config = toy.config("public.name=stream", "rounds=3", method="fedproj")
    cfl.run(config, stream=toy.stream(multi_head=True), regularizers={"fedproj": method}, sink=sink)
    assert [(info.task, info.round, bool(sent)) for info, sent in method.sent] == [
        (task, round, round > 0) for task in range(3) for round in range(3)
    ]
    assert [bool(own) for own in method.owned] == [bool(sent) for _, sent in method.sent]  # the server's trees
    for round, _, change in method.adjusted:
        assert not change or method.sent[round][0].round > 0
    firsts = [row["bytes_down"] for row in sink.rows if row["round"] == 0]
    assert len(set(firsts)) == 1 and all(row["bytes_down"] > firsts[0] for row in sink.rows if row["round"] > 0)


# --- the server ------------------------------------------------------------------------------------------------------


def test_forward_and_reverse_divergence_by_hand():
    teacher, student = (torch.tensor([[math.log(a), math.log(b)]]) for a, b in ((0.9, 0.1), (0.5, 0.5)))
    forward, reverse = (
        float(FedProj(temperature=1.0, kl=kl).knowledge(teacher, student)) for kl in ("forward", "reverse")
    )
    # 0.9 ln 1.8 + 0.1 ln 0.2, and 0.5 ln(5 / 9) + 0.5 ln 5
    assert forward == pytest.approx(0.3681, abs=5e-5) and reverse == pytest.approx(0.5108, abs=5e-5)


def test_both_divergences_carry_the_square_of_the_temperature():
    teacher, logits = toy.random(7, 4, seed=1), toy.random(7, 4, seed=2)
    p, q = (teacher / 3).softmax(1), (logits / 3).softmax(1)
    expected = {"forward": (p * (p / q).log()).sum(1).mean(), "reverse": (q * (q / p).log()).sum(1).mean()}
    for kl, value in expected.items():
        assert torch.allclose(FedProj(kl=kl).knowledge(teacher, logits), 9 * value, atol=1e-12)


def server(method, params=None):
    """A server step: (global model, averaged model, student, new tree of the regularizer, distillation loss)."""
    model = MODEL
    step = {name: leaf / 10 for name, leaf in vectors(model, 5).items()}
    gathered = {"logits": 2 * LOGITS, "clients": torch.tensor(2.0).double()}
    losses = []

    class Seen(type(method)):
        def distilled(self, student, loss, info):
            losses.append(loss)
            return super().distilled(student, loss, info)

    seen = Seen(**{name: getattr(method, name) for name in ("server_lr", "server_epochs", "server_batch")}, **params)
    change, own = seen.server_step(step, {}, gathered, model.params, info_of(model))
    return model.params, tree.sub(model.params, step), tree.sub(model.params, change), own, losses[0]


QUICK = dict(server_lr=0.01, server_epochs=3, server_batch=8)


def test_without_an_anchor_the_server_is_feddfs_to_the_bit():
    feddf, fedproj = server(FedDF(**QUICK), {}), server(FedProj(**QUICK), {"alpha": 0.0})
    assert same(feddf[2], fedproj[2]) and distance(feddf[2], feddf[1]) > 1e-3
    assert feddf[3] == {} and torch.equal(fedproj[3]["logits"], LOGITS)  # the memory's targets: the teacher's logits


@pytest.mark.parametrize("anchor", ["average", "global"])
def test_the_anchors_term_and_its_gradient(anchor):
    """alpha |theta - anchor|^2, whose gradient is 2 alpha (theta - anchor); the anchor is a copy."""
    before, average, student, _, loss = server(FedProj(**QUICK), {"alpha": 0.3, "anchor": anchor})
    _, _, _, _, plain = server(FedProj(**QUICK), {"alpha": 0.0, "anchor": anchor})
    center, rows, logits = (average if anchor == "average" else before), torch.arange(20), toy.random(20, 3, seed=3)
    apart = tree.sub(student, center)
    term = loss(rows, logits, student) - plain(rows, logits, student)
    assert float(term) == pytest.approx(0.3 * float(tree.dot(apart, apart)), rel=1e-12) and term > 1e-4
    gradient = torch.func.grad(lambda at: loss(rows, logits, at))(student)
    assert distance(gradient, tree.scale(apart, 2 * 0.3)) < 1e-12
    assert float(loss(rows, logits, center) - plain(rows, logits, center)) == 0


@pytest.mark.parametrize("anchor", ["average", "global"])
def test_the_anchor_keeps_the_student_near(anchor):
    def off(alpha):
        own = {"alpha": alpha, "anchor": anchor}
        before, average, student, _, _ = server(FedProj(server_lr=0.01, server_epochs=60, server_batch=20), own)
        apart = tree.sub(student, average if anchor == "average" else before)
        return float(tree.dot(apart, apart).sqrt())

    free, held, tied = off(0.0), off(1.0), off(100.0)
    assert tied < held / 3 and held < free / 2


def test_memory_targets_are_the_mean_logits_of_the_last_rounds_models():
    """They are the teacher's, the mean over the clients of that round, not the student's."""
    method, models = watching()(server_lr=0.01, memory=7), {}
    result = small(
        "fedproj",
        "rounds=3",
        model=toy.mlp(8, 6, 2),
        regularizers={"fedproj": method},
        observe=lambda info, id, params: models.setdefault(info.round, []).append(params),
    )
    for round in (1, 2):
        sent = method.sent[round][1]
        every = torch.stack([result.model.logits(params, X[sent["rows"]], 0) for params in models[round - 1]])
        assert sent["logits"].shape == (7, 2) and torch.allclose(sent["logits"], every.mean(0), atol=1e-12)
    assert not torch.equal(method.sent[1][1]["rows"], method.sent[2][1]["rows"])


def test_one_memory_sample_a_step_is_refused_for_a_model_that_takes_none():
    """Batch normalisation has no variance of one sample; without it the run goes on."""
    options = ("regularizer.fedproj.memory_batch=1", "model.norm_stats=running")
    network = toy.net(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match="regularizer.fedproj.memory_batch=1, but the model fails on a batch of one"):
        small("fedproj", *options, model=network)
    small("fedproj", *options)


def test_one_public_sample_is_refused_for_a_model_that_takes_none():
    stream = toy.stream(tasks=1)
    first = replace(stream.public, index=stream.public.index[:1], targets=stream.public.targets[:1])
    one = replace(stream, public=first)
    network = toy.net(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match="the public data are one sample, but the model fails on a batch of one"):
        small("feddf", "model.norm_stats=running", model=network, stream=one)
    small("feddf", stream=one)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_labels_of_public_data_are_never_used():
    stream = toy.stream(tasks=1)
    garbage = replace(stream, public=replace(stream.public, targets=torch.arange(20) * 1000 - 7))
    options = ("rounds=3", "regularizer.fedproj.server_lr=0.01")
    plain, ours = (small("fedproj", *options, stream=own).params for own in (stream, garbage))
    assert same(plain, ours)


@pytest.mark.parametrize(("own", "extra"), [
    ((), 20 * (8 + 2 * 4)),  # an int64 row and two float32 logits for each public sample
    (("memory=6",), 6 * (8 + 2 * 4)),
    (("memory=6", "drop=0.5"), 6 * (8 + 2 * 4) + 4 * 4),  # plus one number for each of the four clients
    (("start=2",), 0),
])  # fmt: skip
def test_bytes_of_a_round(own, extra):
    """MLP 8-6-6-2: 110 float32 parameters each way. A client also uploads 20 x 2 logits and a count of one."""
    sink = toy.Rows()
    result = small("fedproj", *(f"regularizer.fedproj.{option}" for option in own), sink=sink)
    assert [row["bytes_up"] for row in sink.rows] == [3 * (440 + 4 * 20 * 2 + 4)] * 2
    assert [row["bytes_down"] for row in sink.rows] == [3 * 440, 3 * (440 + extra)]
    # 20 public samples of 8 float32 numbers, each with its (meaningless) int64 label
    assert result.metrics["client_bytes"] == result.metrics["client_bytes_max"] == 20 * (8 * 4)
