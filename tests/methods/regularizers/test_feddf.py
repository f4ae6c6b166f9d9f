"""FedDF: the loss and a server step by hand, the clients' uploads, and a student that learns its teacher."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Phase
from cfl.core import rng, tree
from cfl.methods.regularizers import FedDF
from cfl.methods.regularizers.distillation import public_logits
from tests import toy

PUBLIC = toy.stream().public  # 20 inputs (d=8)
X = PUBLIC.gather(torch.arange(20))[0].double()


def looking(base=FedDF):
    """The method, with a list `seen` of (student, loss, info, rows of each step) of each distillation."""

    class Looking(base):
        seen = []

        def distilled(self, student, loss, info):
            rows = []
            self.seen.append((student, loss, info, rows))

            def noted(part, logits, at):
                rows.append(part)
                return loss(part, logits, at)

            return super().distilled(student, noted, info)

    return Looking


def make(*widths, module=None):
    """A model of 8 inputs, the info of a round of it, a mean step of the clients, and logits for its public data."""
    module = toy.mlp(8, *widths) if module is None else module
    model = cfl.Model(module, (8,), [3], multi_head=False)
    info = replace(toy.consolidation(model), phase=Phase("train"), public=PUBLIC)
    step = {
        name: 0.1 * toy.random(*leaf.shape, seed=number) if leaf.is_floating_point() else torch.zeros_like(leaf)
        for number, (name, leaf) in enumerate(model.params.items())
    }
    return model, info, step, {"logits": 2 * 3 * toy.random(20, 3, seed=9), "clients": torch.tensor(2.0).double()}


def student_of(method, model, info, step, gathered):
    """The model after the server's step."""
    change, own = method.server_step(step, {}, gathered, model.params, info)
    assert own == {}
    return tree.sub(model.params, change)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(leaf, b[name]) for name, leaf in a.items())


def distance(a, b):
    return max(float((leaf - b[name]).detach().abs().max()) for name, leaf in a.items())


def small(method, *overrides, **options):
    """A short run of one task on the toy stream, two rounds of three clients."""
    config = toy.config("tasks=1", "public.name=stream", *overrides, method=method)
    return cfl.run(config, stream=options.pop("stream", toy.stream(tasks=1)), **options)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_by_hand():
    # T = 2 and Z = (2 ln 3, 0): the teacher predicts (3/4, 1/4), a flat student (1/2, 1/2)
    teacher, logits = torch.tensor([[2 * math.log(3.0), 0.0]]), torch.zeros(1, 2, requires_grad=True)
    loss = FedDF(temperature=2.0).knowledge(teacher, logits)
    assert loss.item() == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[0].tolist() == pytest.approx([2 * (0.5 - 0.75), 2 * (0.5 - 0.25)])  # T (q - p), one sample


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_gradient_is_t_times_the_difference_over_the_batch(temperature):
    teacher, logits = toy.random(7, 4, seed=1), toy.random(7, 4, seed=2).requires_grad_()
    (gradient,) = torch.autograd.grad(FedDF(temperature=temperature).knowledge(teacher, logits), logits)
    apart = (logits / temperature).softmax(1) - (teacher / temperature).softmax(1)
    assert torch.allclose(gradient, temperature * apart / 7, atol=1e-14)


def test_a_step_of_the_server_by_hand():
    """A linear student on all samples at once: dW = G^T X and db = sum of G, with G = T (q - p) / n; the first step of
    Adam is lr g / (|g| + 1e-8)."""
    model, info, step, gathered = make(3)
    student = student_of(FedDF(server_batch=20, server_lr=0.01, temperature=3.0), model, info, step, gathered)
    average = tree.sub(model.params, step)
    p = (gathered["logits"] / 2 / 3).softmax(1)  # two clients; T = 3
    q = ((X @ average["0.weight"].T + average["0.bias"]) / 3).softmax(1)
    slope = 3 * (q - p) / 20
    for name, gradient in (("0.weight", slope.T @ X), ("0.bias", slope.sum(0))):
        expected = average[name] - 0.01 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(student[name], expected, atol=1e-12)


def test_several_steps_are_those_of_torchs_adam():
    model, info, step, gathered = make(5, 3)
    method = looking()(server_batch=8, server_epochs=2, server_lr=0.01)
    student = student_of(method, model, info, step, gathered)
    leaves = {name: leaf.requires_grad_() for name, leaf in tree.clone(tree.sub(model.params, step)).items()}
    adam = torch.optim.Adam(leaves.values(), lr=0.01)
    for rows in method.seen[0][3]:
        adam.zero_grad()
        log_q = (model.logits(leaves, X[rows], 0) / 3).log_softmax(1)
        p = (gathered["logits"][rows] / 2 / 3).softmax(1)
        (9 * F.kl_div(log_q, p, reduction="batchmean")).backward()
        adam.step()
    assert distance(student, leaves) < 1e-12 < distance(student, tree.sub(model.params, step))


def test_an_epoch_visits_every_public_sample_once_in_a_new_order():
    model, info, step, gathered = make(3)

    def orders(key):
        method = looking()(server_batch=8, server_epochs=2)
        student_of(method, model, replace(info, key=key), step, gathered)
        rows = method.seen[0][3]
        assert [len(part) for part in rows] == [8, 8, 4] * 2
        epochs = torch.cat(rows[:3]).tolist(), torch.cat(rows[3:]).tolist()
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        return epochs

    first, other = orders(1), orders(2)
    assert first == orders(1)
    assert len({tuple(epoch) for epoch in (*first, *other)}) == 4


# --- limits ----------------------------------------------------------------------------------------------------------


def test_clients_train_as_under_fedavg():
    models = {}
    for method in ("fedavg", "feddf"):
        seen = models[method] = []
        small(method, "rounds=1", observe=lambda info, id, params, seen=seen: seen.append((id, params)))
    for (id, plain), (other, ours) in zip(models["fedavg"], models["feddf"], strict=True):
        assert id == other and same(plain, ours)


def test_with_a_vanishing_learning_rate_the_server_is_fedavgs():
    plain, ours = (small(method, *own).params for method, own in (
        ("fedavg", ()),
        ("feddf", ("regularizer.feddf.server_lr=1e-30",)),
    ))  # fmt: skip
    assert distance(plain, ours) < 1e-6  # float32: the server's step is subtracted and added back
    assert distance(plain, small("feddf", "regularizer.feddf.server_lr=1e-2").params) > 1e-3


def test_one_client_has_nothing_to_learn():
    """Without batch statistics and dropout the teacher is the student: KL and gradient are 0 up to rounding. (Adam
    would turn that rounding into steps of full length.)"""
    method = looking()()
    alone = ("partition.clients=1", "cohort=1")
    result = small("feddf", *alone, model=toy.mlp(8, 6, 2), regularizers={"feddf": method})
    assert len(method.seen) == 2
    for student, loss, info, _ in method.seen:
        rows = torch.arange(20)

        def objective(at, loss=loss, rows=rows):
            return loss(rows, result.model.logits(at, X, 0), at)

        gradient, value = torch.func.grad_and_value(objective)(student)
        assert abs(float(value)) < 1e-14 and float(tree.dot(gradient, gradient)) < 1e-28
        assert distance(student, result.model.params) > 1e-3  # the client has trained
        assert info.clients == (0,)


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [20, 8])
def test_the_student_learns_a_teacher_that_it_can_express(batch):
    """The teacher is another network of the same architecture."""
    model, info, step, _ = make(6, 3)
    other = tree.map(lambda leaf: leaf + 0.5 * toy.random(*leaf.shape, seed=leaf.numel()), model.params)
    teacher = model.logits(other, X, 0)
    method = FedDF(server_epochs=200, server_batch=batch, server_lr=0.01)
    student = student_of(method, model, info, step, {"logits": 3 * teacher, "clients": torch.tensor(3.0).double()})
    before, after = (
        float(method.knowledge(teacher, model.logits(params, X, 0)))
        for params in (tree.sub(model.params, step), student)
    )
    assert before > 0.1 and after < before / 20


def test_what_clients_send_sums_to_the_mean_logits_of_their_models():
    """Dropout is off, and batch normalisation uses the client's own running statistics."""
    gathered, models = [], {}

    class Server(FedDF):
        def server_step(self, step, own, got, params, info):
            gathered.append(got)
            return super().server_step(step, own, got, params, info)

    module = toy.net(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))
    result = small(
        "feddf",
        model=module,
        regularizers={"feddf": Server()},
        observe=lambda info, id, params: models.setdefault(info.round, []).append(params),
    )
    assert len(gathered) == 2
    with result.model.evaluation():
        for round, got in enumerate(gathered):
            assert got["logits"].shape == (20, 2) and got["clients"].item() == 3 == len(models[round])
            every = torch.stack([result.model.logits(params, X, 0) for params in models[round]])
            assert torch.allclose(got["logits"] / got["clients"], every.mean(0), atol=1e-12)


def test_logits_of_many_public_samples_keep_their_order():
    many, y = toy.random(2500, 8), torch.zeros(4, dtype=torch.int64)
    public = cfl.from_tensors([(many[:4], y, many[:4], y)], public=many).public
    model, _, _, _ = make(3)
    ctx = toy.context({}, {}, None, model, public=public, forward=lambda at, batch: model.logits(at, batch.x, 0))
    found = public_logits(model.params, ctx)
    assert torch.allclose(found, many @ model.params["0.weight"].T + model.params["0.bias"], atol=1e-12)


def test_running_statistics_are_those_of_the_clients():
    module = toy.net(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model, info, step, gathered = make(module=module)
    student = student_of(FedDF(server_lr=0.01, server_epochs=3), model, info, step, gathered)
    average = tree.sub(model.params, step)
    buffers = model.buffers(0)
    assert len(buffers) == 3  # mean, variance, number of batches
    assert distance(tree.select(student, buffers), tree.select(average, buffers)) < 1e-15
    assert distance(tree.select(student, model.head(0)), tree.select(average, model.head(0))) > 1e-3


def test_frozen_parameters_stay_as_they_are():
    model, info, step, gathered = make(5, 3)
    average = tree.sub(model.params, step)
    held = ("0.bias", "2.weight")
    student = student_of(FedDF(server_lr=0.01), model, replace(info, frozen=frozenset(held)), step, gathered)
    for name in model.params:
        moved = float((student[name] - average[name]).abs().max())
        assert moved < 1e-15 if name in held else moved > 1e-3, name


def test_the_students_dropout_draws_from_its_key_alone():
    """With all samples in one batch, another key changes the dropout masks; the new order changes only rounding."""
    module = toy.net(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    model, info, step, gathered = make(module=module)
    before = tree.clone({**model.params, **step, "logits": gathered["logits"]})
    found = []
    for seed, key in ((1, 5), (2, 5), (1, 6)):
        with rng.fork(seed):
            state = torch.get_rng_state()
            found.append(student_of(FedDF(server_lr=0.01), model, replace(info, key=key), step, gathered))
            assert torch.equal(torch.get_rng_state(), state)
    assert same(found[0], found[1]) and distance(found[0], found[2]) > 1e-3
    assert same(before, {**model.params, **step, "logits": gathered["logits"]})  # no argument is written to


def test_labels_of_public_data_are_never_used():
    stream = toy.stream(tasks=1)
    garbage = replace(stream, public=replace(stream.public, targets=torch.arange(20) * 1000 - 7))
    options = ("regularizer.feddf.server_lr=0.01",)
    plain, ours = (small("feddf", *options, stream=own).params for own in (stream, garbage))
    assert same(plain, ours)


def test_only_the_current_head_is_trained():
    config = toy.config("public.name=stream", "regularizer.feddf.server_lr=0.01", method="feddf")
    result = cfl.run(config, stream=toy.stream(multi_head=True), strategy=(watch := toy.recording(cfl.Strategy)()))
    before = result.model.params
    assert len(watch.rounds) == 6
    for info, _, after in watch.rounds:
        for task in range(3):
            names = result.model.head(task)
            assert len(names) == 2
            assert same(tree.select(after["params"], names), tree.select(before, names)) == (task != info.task)
        before = after["params"]


def test_bytes_and_what_a_client_keeps():
    """MLP 8-6-6-2: 110 float32 parameters each way. A client also uploads 20 x 2 logits and a count of one."""
    sink = toy.Rows()
    result = small("feddf", sink=sink)
    assert [(row["bytes_down"], row["bytes_up"]) for row in sink.rows] == [(3 * 440, 3 * (440 + 4 * 20 * 2 + 4))] * 2
    # 20 public samples of 8 float32 numbers, each with its (meaningless) int64 label
    assert result.metrics["client_bytes"] == result.metrics["client_bytes_max"] == 20 * (8 * 4)
    assert small("fedavg").metrics["client_bytes"] == 0


@pytest.mark.parametrize(("size", "parts"), [(4, [4, 5]), (8, [9]), (9, [9]), (5, [5, 4])])
def test_a_single_leftover_public_sample_joins_the_last_step(size, parts):
    # 9 samples: batch normalisation has no statistics for a single sample
    method = looking()(server_batch=size)
    model, info, step, gathered = make(5, 3)
    info = replace(info, public=replace(PUBLIC, index=PUBLIC.index[:9], targets=PUBLIC.targets[:9]))
    student_of(method, model, info, step, {**gathered, "logits": gathered["logits"][:9]})
    assert [len(rows) for rows in method.seen[-1][3]] == parts
