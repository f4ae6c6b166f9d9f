"""GPSE alone: against NumPy, edge cases and options."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Client, Phase, Privacy, Share
from cfl.core import ConfigError
from cfl.methods.strategies.fot import FOT
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import gpse as module
from cfl.methods.subspace.sketch import pack, unpack
from tests import toy
from tests.gpse_round import (
    GPSE_PHASE,
    Net,
    clients_of,
    draws,
    gpse,
    handle,
    info_of,
    inputs_of,
    label,
    mlp,
    one_gpse,
    projector,
    ranks_of,
    start,
)

KINDS = [{"sketch": "gaussian"}, {"sketch": "gram"}, {"sketch": "gaussian", "draw": "sample"}]

# --- GPSE by itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [True, False])
def test_gpse_keeps_the_leading_left_singular_vectors_of_each_layers_inputs(augment):
    # GPM's basis for one client: the first r left singular vectors of X, with the smallest r that meets the threshold.
    model, x = handle(mlp(12, 10, 8, 3), (12,)), draws(40, 12)
    strategy = FOT(sketch="gram", threshold=0.8, bias="augment" if augment else "free")
    server, sums = one_gpse(strategy, model, x)
    for layer in model.layers:
        inputs = inputs_of(model, model.params, x, layer, augment)
        u, s, _ = np.linalg.svd(inputs.numpy())
        shares = np.cumsum(s**2) / np.sum(s**2)
        rank = int(np.argmax(shares >= 0.8)) + 1
        assert 0 < rank < len(inputs)
        expected = u[:, :rank] @ u[:, :rank].T
        np.testing.assert_allclose(projector(server["basis"][layer.name]).numpy(), expected, atol=1e-9)
        energy = float((inputs**2).sum())
        assert sums[f"energy/{layer.name}"].tolist() == pytest.approx([energy, energy])  # nothing is covered yet


def test_second_task_adds_what_the_energy_rule_still_lacks():
    model, strategy = handle(mlp(12, 3), (12,)), FOT(sketch="gram", threshold=0.9)
    first, second = draws(40, 12), draws(40, 12, seed=1)
    server, _ = one_gpse(strategy, model, first)
    old = server["basis"]["0"]
    new = gpse(strategy, model, server, clients_of(second, [torch.arange(40)]), info_of(model, task=1))[0]["basis"]["0"]
    assert torch.equal(new[:, : old.shape[1]], old)
    x = inputs_of(model, model.params, second, model.layers[0]).numpy()
    residual = x - old.numpy() @ (old.numpy().T @ x)
    u, s, _ = np.linalg.svd(residual)
    covered = 1 - np.sum(s**2) / np.sum(x**2)
    shares = covered + np.concatenate([[0], np.cumsum(s**2)]) / np.sum(x**2)
    rank = int(np.argmax(shares >= 0.9))
    assert 0 < rank == new.shape[1] - old.shape[1]
    expected = projector(old).numpy() + u[:, :rank] @ u[:, :rank].T
    np.testing.assert_allclose(projector(new).numpy(), expected, atol=1e-9)


def test_nothing_grows_on_data_that_is_covered():
    model, x = handle(mlp(12, 10, 3), (12,)), draws(40, 12)
    for threshold in (0.8, 1.0):
        strategy = FOT(sketch="gram", threshold=threshold)
        server, _ = one_gpse(strategy, model, x[:6])
        again, _ = gpse(strategy, model, server, clients_of(x[:6], [torch.arange(6)]), info_of(model, task=1))
        assert all(torch.equal(again["basis"][name], basis) for name, basis in server["basis"].items())
        assert all(basis.shape[1] < basis.shape[0] for basis in server["basis"].values())  # the bases can grow
    # The authors' rule adds at least one direction even if everything is covered.
    strategy = FOT(sketch="gram", criterion="norm_ratio", threshold=0.8)
    server, _ = one_gpse(strategy, model, x)
    again, _ = gpse(strategy, model, server, clients_of(x, [torch.arange(40)]), info_of(model, task=1))
    assert all(ranks_of(again)[name] > rank for name, rank in ranks_of(server).items())


def test_float32_data_that_is_covered_adds_nothing_at_threshold_one():
    # The basis is broadcast in float32, so the clients' residual is rounding noise, not zero.
    module, x = mlp(12, 3).float(), draws(6, 12).float()
    for sketch in ("gram", "gaussian"):
        model, strategy = handle(module, (12,)), FOT(sketch=sketch, threshold=1.0)
        server, _ = one_gpse(strategy, model, x)
        assert ranks_of(server) == {"0": 6}  # six samples
        again, _ = gpse(strategy, model, server, clients_of(x, [torch.arange(6)]), info_of(model, task=1))
        assert torch.equal(again["basis"]["0"], server["basis"]["0"])


@pytest.mark.parametrize(
    "options,task,dtype,products",
    [
        (dict(threshold=0.9), 0, torch.float32, torch.float32),
        (dict(threshold=0.9), 0, torch.float64, torch.float64),
        (dict(threshold=1.0), 0, torch.float32, torch.float64),
        (dict(threshold=0.99, threshold_step=0.005), 1, torch.float32, torch.float32),
        (dict(threshold=0.99, threshold_step=0.005), 2, torch.float32, torch.float64),
    ],
)
def test_products_are_float32_only_where_the_rule_does_not_ask_for_everything(options, task, dtype, products):
    assert FOT(**options).products(dtype, task) == products


def test_products_in_float32_choose_the_subspace_of_those_in_float64(monkeypatch):
    module = Net(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten())
    module = module.extend([nn.Linear(6 * 64, 3)]).float()
    model, x = handle(module, (2, 8, 8)), draws(30, 2, 8, 8).float()
    strategy, found = FOT(threshold=0.95, sketch="gram", bias="freeze"), []
    for products in (torch.float32, torch.float64):
        monkeypatch.setattr(FOT, "products", lambda *_, products=products: products)
        found.append(one_gpse(strategy, model, x)[0])
    assert ranks_of(found[0]) == ranks_of(found[1]) and ranks_of(found[0])["2"] > 0
    # The sums differ by 1e-7 of the largest eigenvalue; a direction turns by this over the gap to the next eigenvalue.
    for name, basis in found[0]["basis"].items():
        assert (projector(basis) - projector(found[1]["basis"][name])).abs().max() < 1e-3


@pytest.mark.parametrize("count", [2, 7, 50])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("patches", [0, 4])
def test_the_subspace_does_not_depend_on_the_partition(count, sort, patches):
    module = Net(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = handle(module, (2, 4, 4)), draws(50, 2, 4, 4)
    strategy = FOT(sketch="gaussian", draw="sample", threshold=0.8, max_patches=patches)
    whole, one = one_gpse(strategy, model, x)
    order = x.flatten(1)[:, 0].argsort() if sort else torch.randperm(50, generator=torch.Generator().manual_seed(3))
    dealt, many = one_gpse(strategy, model, x, list(order.tensor_split(count)), clients=range(count))
    for name, leaf in one.items():
        assert (many[name] - leaf).norm() < 1e-9 * leaf.norm()
    for name, basis in whole["basis"].items():
        assert 0 < basis.shape[1] < basis.shape[0]
        assert torch.linalg.matrix_norm(projector(dealt["basis"][name]) - projector(basis), 2) < 1e-8


def test_projection_at_the_server_is_projection_at_the_clients():
    model, first, second = handle(mlp(12, 10, 3), (12,)), draws(30, 12), draws(30, 12, seed=1)
    client = FOT(sketch="gaussian", draw="sample", threshold=0.7, s_mult=50.0)
    server_side = replace(client, project_at="server")
    server, _ = one_gpse(client, model, first)
    info, holders = info_of(model, task=1), clients_of(second, [torch.arange(15), torch.arange(15, 30)])
    shared = {strategy: strategy.broadcast(server, info) for strategy in (client, server_side)}
    assert "basis" in shared[client] and "basis" not in shared[server_side]
    at_client, sums = gpse(client, model, server, holders, info)
    at_server, raw = gpse(server_side, model, server, holders, info)
    assert not any(name.startswith("energy/") for name in raw)
    for layer in model.layers:
        a, basis = raw[f"sketch/{layer.name}"], server["basis"][layer.name]
        a_star = a - basis @ (basis.T @ a)
        torch.testing.assert_close(a_star, sums[f"sketch/{layer.name}"], atol=1e-10, rtol=0)
        # The share of energy outside the basis, estimated from the sketch. E |A|^2 = s |X|^2 and the relative variance
        # of |A|^2 is at most 2 / s, s = 50 d > 500: the ratio is within a few times sqrt(4 / 500) = 9 % of the share.
        full, residual = sums[f"energy/{layer.name}"].tolist()
        estimate = float(a_star.square().sum() / a.square().sum())
        assert estimate == pytest.approx(residual / full, rel=0.25)
        # Both bases hold the leading singular vectors of the same A*: one span lies in the other.
        small, large = sorted(
            (at_client["basis"][layer.name], at_server["basis"][layer.name]), key=lambda o: o.shape[1]
        )
        assert (small - large @ (large.T @ small)).abs().max() < 1e-9
        assert large.shape[1] - small.shape[1] <= 1


def test_a_wide_sketch_gives_the_ranks_of_the_gram_matrix():
    model = handle(mlp(60, 50, 3), (60,))
    x = (draws(200, 60) * torch.arange(1, 61) ** -0.5).float().double()
    exact, _ = one_gpse(FOT(sketch="gram"), model, x)
    sketched, _ = one_gpse(FOT(sketch="gaussian", s_mult=50.0), model, x)
    for name, rank in ranks_of(exact).items():
        assert abs(ranks_of(sketched)[name] - rank) <= max(1, 0.02 * rank)  # 2 %, or one where 2 % is less than one


@pytest.mark.parametrize("project_at", ["client", "server"])
def test_coverage_is_measured_on_the_new_basis(project_at):
    model, x = handle(mlp(12, 10, 3), (12,)), draws(40, 12)
    strategy = FOT(threshold=0.7, project_at=project_at)  # either way clients get the basis to measure it
    server, _ = one_gpse(strategy, model, x)
    phase = replace(GPSE_PHASE, name="coverage", diagnostic=True)
    after, sums = gpse(strategy, model, server, clients_of(x, [torch.arange(40)]), info_of(model, phase=phase))
    assert set(sums) == {"energy/0", "energy/2"}
    assert after["basis"] is server["basis"]
    report = strategy.report(after, model)
    for layer in model.layers:
        inputs, basis = inputs_of(model, model.params, x, layer), server["basis"][layer.name]
        share = float((basis.T @ inputs).square().sum() / inputs.square().sum())
        assert report["coverage"][layer.name] == pytest.approx(share, rel=1e-9)
        assert report["subspace_use"][layer.name] == basis.shape[1] / basis.shape[0]


# A Gram matrix sums up to 4,096 products in float32.
@pytest.mark.parametrize("filters,error", [(0, 1e-6), (18, 1e-12)])
def test_energies_of_overlapping_patches_by_gram_matrix_or_convolution(filters, error, monkeypatch):
    monkeypatch.setattr(module, "FILTERS", filters)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    model, x = handle(Net(conv, nn.Flatten(), nn.Linear(48, 3)).double(), (2, 4, 4)), draws(5, 2, 4, 4)
    strategy, phase = (
        FOT(sketch="gram", threshold=0.6, bias="free"),
        replace(GPSE_PHASE, name="coverage", diagnostic=True),
    )
    server, _ = one_gpse(strategy, model, x)
    _, sums = gpse(strategy, model, server, clients_of(x, [torch.arange(5)]), info_of(model, phase=phase))
    patches, basis = model.layers[0].inputs(x).flatten(0, 1).T, server["basis"]["0"]
    residual = patches - basis @ (basis.T @ patches)
    expected = [float(part.square().sum()) for part in (patches, residual)]
    assert 0 < expected[1] < 0.4 * expected[0]
    assert sums["energy/0"].tolist() == pytest.approx(expected, rel=error)


@pytest.mark.parametrize("criterion", ["energy", "norm_ratio"])
def test_the_estimated_coverage_is_exact_of_a_gram_matrix_and_too_high_of_a_narrow_sketch(criterion):
    model, x = handle(mlp(12, 10, 3), (12,)), draws(40, 12)
    for sketch, exact in (("gram", True), ("gaussian", False)):
        strategy = FOT(threshold=0.8, sketch=sketch, s_mult=1.0, criterion=criterion)
        server = start(strategy, model)
        for task, seen in enumerate((x, draws(40, 12, seed=1))):  # the second has energy in the first one's basis
            clients = clients_of(seen, [torch.arange(40)])
            server, _ = gpse(strategy, model, server, clients, info_of(model, task))
            phase = replace(GPSE_PHASE, name="coverage", diagnostic=True)
            server, _ = gpse(strategy, model, server, clients, info_of(model, task, phase=phase))
            report = strategy.report(server, model)
            for name, real in report["coverage"].items():
                above = report["coverage_estimate"][name] - real
                assert abs(above) < 1e-9 if exact else above > 0.01


def test_under_noise_the_estimated_coverage_is_of_all_energy():
    """Five eigenvalues of 1 exceed the noise and lose std (2 sqrt(d) + 3 sqrt(2)) = 0.2; sixty of 0.05 do not."""
    model, values = handle(mlp(64, 3), (64,)), torch.tensor([1.0] * 5 + [0.05] * 60, dtype=torch.float64)
    info = replace(info_of(model), privacy=Privacy("client", 1.0, noise=0.01))
    strategy = FOT(sketch="gram", project_at="server", threshold=0.9)
    basis, share = strategy.extended("0", bases.empty(65), {"sketch/0": pack(values.diag())}, info)
    assert basis.shape[1] == 5
    assert float(share) == pytest.approx(5 * (1 - 0.01 * (2 * 65**0.5 + 3 * 2**0.5)) / 8)
    # Noise makes eigenvalues negative, too: what is found, 0.8, may be more than the trace, 1 - 64 / 100.
    values = torch.tensor([1.0] + [-0.01] * 64, dtype=torch.float64)
    assert strategy.extended("0", bases.empty(65), {"sketch/0": pack(values.diag())}, info)[1] == 1


@pytest.mark.parametrize("sent", [0.0, 0.4, 1.0, 1.6])
def test_missing_clients_and_noise_do_not_look_like_the_coverage_of_an_empty_basis(sent):
    """sent: remaining energy in the sum, as a share of that of the expected clients. Four equal
    eigenvalues and a threshold of 0.7 ask for three directions. A basis that covers 0.6 lacks 0.1, a quarter of the
    remaining 0.4, which one of three equal directions covers."""
    model, strategy = handle(mlp(3, 3), (3,)), FOT(sketch="gram", threshold=0.7)
    info = replace(info_of(model), privacy=Privacy("client", 1.0), expected=10.0)
    sums = {"sketch/0": pack(torch.eye(4)), "energy/0": torch.tensor(10 * sent / 2**0.5)}  # two parts, so clip / sqrt 2
    assert strategy.extended("0", bases.empty(4), sums, info)[0].shape[1] == 3
    if sent == 0.4:
        begun, below = torch.eye(4)[:, :1], {**sums, "sketch/0": pack(torch.diag(torch.tensor([0.0, 1.0, 1.0, 1.0])))}
        assert strategy.extended("0", begun, below, info)[0].shape[1] == 2


def test_where_the_number_of_clients_is_hidden_the_basis_does_not_tell_it():
    """Eigenvalues 1 and 1e-6: the second exceeds the rounding error of one matrix, but not of a sum of 1,400."""
    model, strategy = handle(mlp(3, 3), (3,)), FOT(sketch="gram", project_at="server", threshold=1.0)
    sums = {"sketch/0": pack(torch.tensor([1.0, 1e-6, 0.0, 0.0]).diag())}
    info = replace(info_of(model), privacy=Privacy("client", 1.0, hidden=True))
    ranks = {
        (expected, len(ids)): strategy.extended(
            "0", bases.empty(4), sums, replace(info, clients=ids, expected=expected)
        )
        for expected in (1.0, 1400.0)
        for ids in ((0,), tuple(range(1400)))
    }
    assert {key: basis.shape[1] for key, (basis, _) in ranks.items()} == {
        (1.0, 1): 2, (1.0, 1400): 2, (1400.0, 1): 1, (1400.0, 1400): 1
    }  # fmt: skip


# --- edge cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["energy", "norm_ratio"])
@pytest.mark.parametrize(
    "options",
    [*KINDS, {"min_rank": 1}],
    ids=label,
)
def test_a_dead_layer_learns_nothing(criterion, options):
    model = handle(mlp(12, 10, 3), (12,))
    model.params["0.bias"].fill_(-100.0)  # ReLU outputs zeros for all samples
    server, sums = one_gpse(FOT(bias="free", criterion=criterion, **options), model, draws(20, 12))
    assert server["basis"]["2"].shape == (10, 0) and server["coverage_estimate"]["2"] == 1  # nothing is uncovered
    assert server["basis"]["0"].shape[1] > 0
    assert all(torch.isfinite(leaf).all() for leaf in sums.values())


@pytest.mark.parametrize("options", KINDS, ids=label)
def test_a_single_sample_spans_one_direction(options):
    model, x = handle(mlp(12, 10, 3), (12,)), draws(1, 12)
    for data in (x, x.expand(7, 12)):
        server, _ = one_gpse(FOT(threshold=1.0, **options), model, data)
        assert ranks_of(server) == {"0": 1, "2": 1}


@pytest.mark.parametrize("options", KINDS, ids=label)
def test_inputs_of_width_one(options):
    model = handle(mlp(1, 1, 3), (1,))
    model.params["0.bias"].fill_(100.0)
    server, _ = one_gpse(FOT(bias="free", **options), model, draws(9, 1))
    assert server["basis"]["0"].abs().tolist() == [[1.0]]
    full, sums = gpse(
        FOT(bias="free", **options), model, server, clients_of(draws(9, 1), [torch.arange(9)]), info_of(model)
    )
    assert torch.equal(full["basis"]["0"], server["basis"]["0"])
    assert not sums  # layers whose basis is full send nothing


def test_threshold_one_on_full_rank_data_fills_the_space():
    model = handle(mlp(6, 5, 3), (6,))
    server, _ = one_gpse(FOT(sketch="gram", threshold=1.0, bias="free"), model, draws(80, 6))
    assert ranks_of(server) == {"0": 6, "2": 5}


def test_nan_in_the_sum_is_an_error():
    model, strategy = handle(mlp(6, 3), (6,)), FOT(sketch="gaussian")
    server, sums = one_gpse(strategy, model, draws(9, 6))
    sums["sketch/0"][1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        strategy.absorb(server, {"work": sums}, info_of(model), 1.0)


def test_min_rank_and_threshold_schedule():
    model, x = handle(mlp(12, 3), (12,)), draws(40, 12)
    covered = FOT(sketch="gram", threshold=0.8)
    server, _ = one_gpse(covered, model, x)
    holders, rank = clients_of(x, [torch.arange(40)]), ranks_of(server)["0"]
    for options, task, expected in ((dict(min_rank=2), 1, rank + 2), (dict(threshold_step=0.0), 1, rank)):
        again, _ = gpse(replace(covered, **options), model, server, holders, info_of(model, task=task))
        assert ranks_of(again)["0"] == expected
    # After task t the threshold is threshold + t x step: 0.7 + 2 x 0.05 is the rank of 0.8, and 0.7 + 9 x 0.05 is 1.
    rising = FOT(sketch="gram", threshold=0.7, threshold_step=0.05)
    by_task = {task: ranks_of(one_gpse(rising, model, x, task=task)[0])["0"] for task in (0, 2, 9)}
    at_first = ranks_of(one_gpse(FOT(sketch="gram", threshold=0.7), model, x)[0])["0"]
    assert at_first < rank
    assert by_task == {0: at_first, 2: rank, 9: 13}


# --- the norm-ratio rule, patches, other options of the sketch -------------------------------------------------------


def test_norm_ratio_is_the_clients_mean_weighted_by_samples():
    model, strategy = handle(mlp(12, 3), (12,)), FOT(criterion="norm_ratio", sketch="gram", bias="free")
    server, _ = one_gpse(strategy, model, draws(6, 12))
    x, parts = draws(30, 12, seed=1), [torch.arange(5), torch.arange(5, 30)]
    basis = server["basis"]["0"]
    _, sums = gpse(strategy, model, server, clients_of(x, parts), info_of(model, task=1))
    ratios = [float((x[rows] - x[rows] @ projector(basis)).norm() / x[rows].norm()) for rows in parts]
    assert sums["energy/0"].tolist() == pytest.approx([30.0, 5 * ratios[0] + 25 * ratios[1]])


def test_norm_ratio_takes_more_than_energy():
    model, x = handle(mlp(12, 10, 3), (12,)), draws(40, 12)
    ranks = {}
    for criterion in ("energy", "norm_ratio"):
        strategy = FOT(criterion=criterion, sketch="gram", threshold=0.6)
        server, _ = one_gpse(strategy, model, x)
        second = clients_of(draws(40, 12, seed=1), [torch.arange(40)])
        ranks[criterion] = ranks_of(gpse(strategy, model, server, second, info_of(model, task=1))[0])
    assert all(ranks["norm_ratio"][name] >= rank for name, rank in ranks["energy"].items())
    assert ranks["norm_ratio"] != ranks["energy"]


def test_the_printed_rule_protects_nothing_in_the_first_task():
    model = handle(mlp(12, 10, 3), (12,))
    with pytest.warns(UserWarning, match="eq. 12"):
        server, _ = one_gpse(FOT(criterion="eq12"), model, draws(40, 12))
    assert set(ranks_of(server).values()) == {0}


def test_the_server_cannot_apply_a_rule_that_needs_the_clients_norms():
    with pytest.raises(ConfigError, match="strategy.project_at=client"):
        FOT(project_at="server", criterion="norm_ratio")


def test_max_patches_limits_what_an_image_adds():
    module = Net(nn.Conv2d(2, 4, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = handle(module, (2, 4, 4)), draws(2, 2, 4, 4)
    for patches, rank in ((0, 8), (1, 2), (3, 6)):  # two images, d = 8; all nine patches fill the space
        server, _ = one_gpse(FOT(sketch="gram", threshold=1.0, max_patches=patches), model, x)
        assert ranks_of(server)["0"] == rank


def test_a_dense_stem_has_its_patches_at_stride_1():
    # As in the authors' code, whose Mini-ImageNet network has a stem of stride 2.
    convs = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.Conv2d(4, 4, 2, stride=2, bias=False)
    model = handle(Net(*convs, nn.Flatten(), nn.Linear(4, 3)).double(), (2, 4, 4))
    x = draws(3, 2, 4, 4)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    patches = torch.stack([padded[:, :, i : i + 3, j : j + 3].flatten(1) for i in range(4) for j in range(4)])
    own = patches.view(4, 4, 3, 18)[::2, ::2]
    _, plain = one_gpse(FOT(bias="free"), model, x)
    server, dense = one_gpse(FOT(bias="free", dense_stem=True), model, x)
    assert float(plain["energy/0"][0]) == pytest.approx(float(own.square().sum()))
    assert float(dense["energy/0"][0]) == pytest.approx(float(patches.square().sum()))
    for name in ("1", "3"):  # the inputs of later layers are the same
        assert torch.equal(dense[f"energy/{name}"], plain[f"energy/{name}"])
    coverage = Phase("coverage", cohort="available", train=False, work=True, diagnostic=True)
    _, real = gpse(
        FOT(bias="free", dense_stem=True),
        model,
        server,
        clients_of(x, [torch.arange(3)]),
        info_of(model, 0, 3, coverage),
    )
    assert float(real["energy/0"][0]) == pytest.approx(float(own.square().sum()))  # coverage is of real inputs


def test_augmented_gpse_sees_the_images_that_training_may_see():
    # The bright pixel of all images is on the left. A random flip moves it to the right in half of them.
    model, x = handle(Net(nn.Flatten(), nn.Linear(2, 3)), (1, 1, 2)), torch.tensor([[[[1.0, 0.0]]]] * 32)
    y, columns = torch.zeros(32, dtype=torch.int64), {}
    samples = cfl.from_tensors([(x, y, x, y)]).with_augment(["flip"]).tasks[0].train
    clients = [Client(0, {0: Share(samples, torch.arange(32))}, 0, (0,))]
    for augmented in (False, True):
        strategy = FOT(sketch="gram", threshold=1.0, bias="free", augmented=augmented)
        server, _ = gpse(strategy, model, start(strategy, model), clients, info_of(model))
        columns[augmented] = server["basis"]["1"].shape[1]
        measured = replace(
            info_of(model), phase=Phase("coverage", cohort="available", train=False, work=True, diagnostic=True)
        )
        _, sums = gpse(strategy, model, server, clients, measured)
        assert sums["energy/1"].tolist() == pytest.approx([32.0, 0.0], abs=1e-9)  # of images without augmentation
    assert columns == {False: 1, True: 2}


@pytest.mark.parametrize("option", ["augmented", "dropout"])
def test_clients_draw_changes_of_images_and_dropout_each_for_itself(option):
    # Without draws, clients with the same samples send the same Gram matrix.
    images = option == "augmented"
    first = [nn.Flatten()] if images else [nn.Flatten(), nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.ReLU()]
    model, x = handle(Net(*first, nn.Linear(2, 3)).double(), (1, 1, 2)), draws(32, 1, 1, 2)
    y = torch.zeros(32, dtype=torch.int64)
    samples = cfl.from_tensors([(x, y, x, y)]).with_augment(["flip"]).tasks[0].train
    clients = [Client(id, {0: Share(samples, torch.arange(32))}, 0, (0,)) for id in range(2)]
    for drawn in (False, True):
        strategy = FOT(sketch="gram", bias="free", **{option: drawn})
        server, info = start(strategy, model), info_of(model, clients=(0, 1))
        shared = strategy.broadcast(server, info)
        one, two = (strategy.work(model.params, client, shared, {}, info)[0] for client in clients)
        last = f"sketch/{model.layers[-1].name}"  # of the inputs behind all draws
        assert torch.equal(one[last], two[last]) is not drawn


@pytest.mark.parametrize("option", ["augmented", "dropout"])
def test_what_is_drawn_by_client_does_not_go_with_draws_by_sample(option):
    with pytest.raises(ConfigError, match=f"strategy.{option}=true draws by client"):
        FOT(sketch="gaussian", draw="sample", **{option: True})


def test_sketch_shapes_by_layer_kind():
    module = Net(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = handle(module, (2, 4, 4)), draws(5, 2, 4, 4)
    _, sums = one_gpse(FOT(sketch="gaussian", s_mult=2.0, s_mult_conv=0.5), model, x)
    assert sums["sketch/0"].shape == (9, 4)  # d = 2 x 2 x 2 + 1; round(4.5) = 4
    assert sums["sketch/3"].shape == (37, 74)
    _, sums = one_gpse(FOT(sketch="gram"), model, x)
    assert sums["sketch/0"].shape == (9 * 10 // 2,)


@pytest.mark.parametrize(("columns", "smaller"), [(7, "gram"), (6, "gaussian")])
def test_auto_sends_the_smaller_of_sketch_and_gram_matrix(columns, smaller):
    # d = 12 + 1: a Gram matrix has 13 x 14 / 2 = 91 numbers, sketches have 13 x 7 = 91 and 13 x 6 = 78
    model, x = handle(mlp(12, 3), (12,)), draws(40, 12)
    auto, named = (one_gpse(FOT(sketch=sketch, columns=columns), model, x) for sketch in ("auto", smaller))
    assert auto[1]["sketch/0"].numel() == {"gram": 91, "gaussian": 78}[smaller]
    assert all(torch.equal(auto[1][name], leaf) for name, leaf in named[1].items())
    assert torch.equal(auto[0]["basis"]["0"], named[0]["basis"]["0"])


@pytest.mark.parametrize("options", [{"draw": "sample"}, {"distribution": "uniform"}], ids=label)
def test_auto_refuses_what_only_gaussian_sketches_have(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"strategy.{name}={value} is for Gaussian sketches: set strategy.sketch"):
        FOT(**options)


def test_uniform_draws_give_a_third_of_the_energy():
    # |A|^2 has mean s |X|^2 Var(G), and Var is 1/3 on (-1, 1). 50 d columns: within a few per cent.
    model, x = handle(mlp(12, 3), (12,)), draws(40, 12)
    _, sums = one_gpse(FOT(sketch="gaussian", distribution="uniform", s_mult=50.0), model, x)
    columns, energy = sums["sketch/0"].shape[1], float(sums["energy/0"][0])
    assert float(sums["sketch/0"].square().sum()) == pytest.approx(columns * energy / 3, rel=0.1)


# --- outcome ---------------------------------------------------------------------------------------------------------


def test_a_convolution_that_sees_images_of_two_sizes():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 2), nn.Linear(2, 3)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3)) + self.conv(x[:, :, :4, :3]).mean((2, 3)))

    model, x = handle(Pyramid(), (1, 6, 6)), draws(5, 1, 6, 6)
    _, sums = one_gpse(FOT(sketch="gram", bias="free"), model, x)
    rows = torch.cat([model.layers[0].inputs(part).flatten(0, 1) for part in (x, x[:, :, :4, :3])]).float()
    torch.testing.assert_close(unpack(sums["sketch/conv"]).float(), rows.T @ rows, rtol=1e-5, atol=1e-5)


def test_a_layer_called_with_a_keyword_is_seen():
    model = handle(toy.ByKeyword(nn.Linear(12, 3)), (12,))
    server, _ = one_gpse(FOT(sketch="gram", threshold=1.0, bias="free"), model, draws(5, 12))
    assert server["basis"]["0"].shape == (12, 5)


@pytest.mark.parametrize("sketch", ["gram", "gaussian"])
def test_rounding_errors_of_a_covered_span_are_no_directions(sketch):
    """Float32 inputs in the span of the basis leave a residual of 1e-7 at the server, which adds no rank."""
    model, x = handle(mlp(12, 3), (12,)), draws(40, 5).float() @ draws(5, 12, seed=1).float()
    model = handle(mlp(12, 3).float(), (12,))
    strategy = FOT(sketch=sketch, project_at="server", bias="free", threshold=1.0, min_rank=3)
    once, _ = one_gpse(strategy, model, x)
    twice, _ = gpse(strategy, model, once, clients_of(x, [torch.arange(40)]), info_of(model))
    assert once["basis"]["0"].shape[1] == twice["basis"]["0"].shape[1] == 5
