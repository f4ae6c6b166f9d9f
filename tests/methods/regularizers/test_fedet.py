"""Fed-ET: the consensus by hand and by brute force, its loss, and what the server sees of each client."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cfl
from cfl.contract import Phase
from cfl.core import tree
from cfl.methods.regularizers import FedET
from cfl.methods.regularizers.fedet import consensus
from tests import toy

PUBLIC = toy.stream().public  # 20 inputs (d=8)
X = PUBLIC.gather(torch.arange(20))[0].double()


def looking():
    """Fed-ET with lists of the gathered uploads and of (student, loss) of each distillation."""

    class Looking(FedET):
        gathered, distillations = [], []

        def server_step(self, step, own, gathered, params, info):
            self.gathered.append(gathered)
            return super().server_step(step, own, gathered, params, info)

        def distilled(self, student, loss, info):
            self.distillations.append((student, loss))
            return super().distilled(student, loss, info)

    return Looking


def one(*logits):
    """The consensus of clients on one sample: label, dissenters' mean, whether there are any."""
    label, dissent, dissenting = consensus(torch.tensor(logits).double()[:, None])
    return int(label), dissent[0].tolist(), float(dissenting)


def small(method, *overrides, **options):
    """A short run of one task on the toy stream, two rounds of three clients."""
    config = toy.config("tasks=1", "public.name=stream", *overrides, method=method)
    return cfl.run(config, stream=options.pop("stream", toy.stream(tasks=1)), **options)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(leaf, b[name]) for name, leaf in a.items())


# --- the consensus, by hand ------------------------------------------------------------------------------------------


def test_the_surer_clients_weigh_more():
    # variances: 4 of (4, 0), 2.25 of (0, 3). The plain sum (4, 6) gives class 1; 4 (4, 0) + 2 x 2.25 (0, 3) gives 0.
    label, dissent, dissenting = one((4.0, 0.0), (0.0, 3.0), (0.0, 3.0))
    assert (label, dissent, dissenting) == (0, pytest.approx([0.0, 3.0]), 1.0)


def test_dissenters_weigh_by_their_own_variance():
    # variances 25, 1 and 4: 25 (10, 0) outvotes the others, whose mean is (1 (0, 2) + 4 (1, 5)) / 5
    label, dissent, _ = one((10.0, 0.0), (0.0, 2.0), (1.0, 5.0))
    assert (label, dissent) == (0, pytest.approx([0.8, 4.4]))


def test_clients_that_agree_leave_no_dissent():
    assert one((2.0, 1.0, 0.0), (5.0, -1.0, 3.0)) == (0, [0.0, 0.0, 0.0], 0.0)
    assert one((2.0, 5.0, 3.0))[::2] == (1, 0.0)  # one client agrees with itself


def test_clients_without_an_opinion_do_not_count():
    label, dissent, dissenting = one((0.0, 1.0), (3.0, 3.0))  # a flat prediction has a class, but no weight
    assert (label, dissent, dissenting) == (1, [0.0, 0.0], 0.0)
    assert one((1.0, 1.0), (2.0, 2.0))[1:] == ([0.0, 0.0], 0.0)  # all predictions are flat: a label, and no NaN


def test_a_tie_goes_to_one_side_and_the_other_dissents():
    sides = ((1.0, 0.0), (0.0, 1.0))
    label, dissent, dissenting = one(*sides)
    assert (dissent, dissenting) == (pytest.approx(list(sides[1 - label])), 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_consensus_by_brute_force(seed):
    clients, samples, classes = 4, 15, 3
    logits = toy.random(clients, samples, classes, seed=seed)
    labels, dissent, dissenting = consensus(logits)
    kinds = set()
    for sample in range(samples):
        variances, total = [], [0.0] * classes
        for client in range(clients):
            row = logits[client, sample].tolist()
            mean = sum(row) / classes
            variances.append(sum((value - mean) ** 2 for value in row) / classes)
        weights = [variance / sum(variances) for variance in variances]
        for client in range(clients):
            for label in range(classes):
                total[label] += weights[client] * float(logits[client, sample, label])
        label = max(range(classes), key=lambda one: total[one])
        against = [client for client in range(clients) if int(logits[client, sample].argmax()) != label]
        assert int(labels[sample]) == label and float(dissenting[sample]) == bool(against)
        kinds.add(len(against))
        for one in range(classes) if against else ():
            shares = [weights[client] * float(logits[client, sample, one]) for client in against]
            expected = sum(shares) / sum(weights[client] for client in against)
            assert float(dissent[sample, one]) == pytest.approx(expected, abs=1e-12)
    assert len(kinds) >= 3  # of 0 to 3 dissenters


# --- the loss --------------------------------------------------------------------------------------------------------


def server(logits, **options):
    """The student before distillation, its loss, and the server's step, given the clients' logits."""
    model = cfl.Model(toy.mlp(8, 5, 3), (8,), [3], multi_head=False)
    info = replace(toy.consolidation(model), phase=Phase("train"), public=PUBLIC)
    step = {name: 0.1 * toy.random(*leaf.shape, seed=leaf.numel()) for name, leaf in model.params.items()}
    method = looking()(server_lr=0.01, **options)
    change, own = method.server_step(step, {}, {"logits": logits}, model.params, info)
    assert own == {}
    student, loss = method.distillations[0]
    average = tree.sub(model.params, step)
    assert same(student, average)
    return average, loss, tree.sub(model.params, change), model


def test_larger_logits_do_not_outvote_clients_that_are_as_sure():
    # Probabilities are all (1, 0, 0) or (0, 1, 0) within 1 %, so two clients outvote one; the logits' variances are
    # 88.9 for (20, 0, 0) and 8 for (0, 6, 0), and 88.9 x 20 is more than 2 x 8 x 6.
    logits = torch.tensor([[20.0, 0, 0], [0, 6.0, 0], [0, 6.0, 0]]).double()[:, None].expand(3, 20, 3)
    for opinions, label in (("probabilities", 1), ("logits", 0)):
        _, loss, _, _ = server(logits, diversity=0.0, opinions=opinions)
        z = torch.zeros(20, 3).double()
        z[:, label] = 50.0
        assert loss(torch.arange(20), z, {}).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("opinions", ["probabilities", "logits"])
def test_the_loss_by_hand(opinions):
    """Two clients, T = 1: on sample 0 the second dissents with (1/4, 3/4), on sample 1 neither does. A flat student has
    cross-entropy ln 2 on both, and KL((1/4, 3/4) || (1/2, 1/2)) / 2 times lambda."""
    logits = torch.zeros(2, 20, 2).double()
    logits[0, :, 0] = 9.0
    logits[1, 0, 1] = math.log(3.0)
    logits[1, 1:, 0] = 9.0
    model = cfl.Model(toy.mlp(8, 2), (8,), [2], multi_head=False)
    info = replace(toy.consolidation(model), phase=Phase("train"), public=PUBLIC)
    method = looking()(diversity=0.3, opinions=opinions)
    method.server_step(tree.scale(model.params, 0.0), {}, {"logits": logits}, model.params, info)
    loss = method.distillations[0][1]
    apart = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    found = loss(torch.tensor([0, 1]), torch.zeros(2, 2).double(), {})
    assert float(found) == pytest.approx(math.log(2) + 0.3 * apart / 2)


@pytest.mark.parametrize("opinions", ["probabilities", "logits"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_cross_entropy_on_the_label_and_divergence_from_dissenters(temperature, opinions):
    every, z = toy.random(20, 3) + toy.random(3, 20, 3, seed=1), toy.random(6, 3, seed=2)
    _, loss, _, _ = server(every, diversity=0.4, temperature=temperature, opinions=opinions)
    softened = opinions == "probabilities"
    labels, dissent, dissenting = consensus(every.softmax(2) if softened else every)
    rows = torch.tensor([1, 3, 5, 7, 11, 19])
    assert set(dissenting[rows].tolist()) == {0.0, 1.0}
    p = torch.full((6, 3), 1 / 3).double()  # unused without dissent
    for row in dissenting[rows].nonzero().flatten():
        said = dissent[rows[row]]  # probabilities at temperature T: p^(1/T), normalised
        p[row] = (
            said ** (1 / temperature) / (said ** (1 / temperature)).sum()
            if softened
            else (said / temperature).softmax(0)
        )
    q = (z / temperature).softmax(1)
    apart = (p * (p / q).log()).sum(1) * dissenting[rows]
    assert torch.allclose(loss(rows, z, {}), F.cross_entropy(z, labels[rows]) + 0.4 * apart.mean(), atol=1e-12)


def test_without_diversity_the_student_learns_only_the_labels():
    every, z = 2 * toy.random(3, 20, 3, seed=1), toy.random(20, 3, seed=2)
    _, loss, first, _ = server(every, diversity=0.0)
    labels, _, dissenting = consensus(every.softmax(2))
    rows = torch.arange(20)
    assert torch.equal(loss(rows, z, {}), F.cross_entropy(z, labels)) and dissenting.any()
    _, _, second, _ = server(every, diversity=0.5)
    assert not same(first, second)


def test_the_student_learns_what_the_clients_agree_on():
    truth = (X @ toy.random(8, 3, seed=8)).argmax(1)
    every = torch.stack([(2 + client) * F.one_hot(truth, 3).double() for client in range(3)])
    average, loss, student, model = server(every, server_epochs=150)
    rows, accuracies = torch.arange(20), []
    for params in (average, student):
        logits = model.logits(params, X, 0)
        accuracies.append((float((logits.argmax(1) == truth).float().mean()), float(loss(rows, logits, {}))))
    (before, high), (after, low) = accuracies
    assert before < 0.7 and after == 1.0 and low < high / 5


# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_server_sees_what_each_client_sent():
    method, models = looking()(), {}
    result = small(
        "fedet",
        model=toy.mlp(8, 6, 2),
        regularizers={"fedet": method},
        observe=lambda info, id, params: models.setdefault(info.round, {}).update({id: params}),
    )
    assert len(method.gathered) == 2
    for round, gathered in enumerate(method.gathered):
        assert gathered["logits"].shape == (3, 20, 2)  # clients, samples, classes
        assert list(models[round]) == sorted(models[round])
        for logits, params in zip(gathered["logits"], models[round].values(), strict=True):
            assert torch.allclose(logits, result.model.logits(params, X, 0), atol=1e-12)


def test_clients_train_as_under_fedavg():
    models = {}
    for method in ("fedavg", "fedet"):
        seen = models[method] = []
        small(method, "rounds=1", observe=lambda info, id, params, seen=seen: seen.append((id, params)))
    for (id, plain), (other, ours) in zip(models["fedavg"], models["fedet"], strict=True):
        assert id == other and same(plain, ours)


def test_labels_of_public_data_are_never_used():
    stream = toy.stream(tasks=1)
    garbage = replace(stream, public=replace(stream.public, targets=torch.arange(20) * 1000 - 7))
    options = ("regularizer.fedet.server_lr=0.01",)
    plain, ours = (small("fedet", *options, stream=own).params for own in (stream, garbage))
    assert same(plain, ours)


def test_bytes_and_what_a_client_keeps():
    """MLP 8-6-6-2: 110 float32 parameters each way. A client also uploads 20 x 2 logits and a count of one."""
    sink = toy.Rows()
    result = small("fedet", sink=sink)
    assert [(row["bytes_down"], row["bytes_up"]) for row in sink.rows] == [(3 * 440, 3 * (440 + 4 * 20 * 2 + 4))] * 2
    # 20 public samples of 8 float32 numbers, each with its (meaningless) int64 label
    assert result.metrics["client_bytes"] == result.metrics["client_bytes_max"] == 20 * (8 * 4)
