"""FOT: GPSE by itself against NumPy, its edge cases and options, and what whole runs guarantee."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl import tree
from cfl.errors import ConfigError, UpdateError
from cfl.strategies.fot import FOT
from cfl.subspace.projection import input_vectors, names, width
from cfl.types import Client, Phase, RoundInfo, Share

GPSE = Phase("gpse", cohort="available", train=False, work=True)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _label(value):
    """A test's name that is the same in every process: sets print in an order of their own."""
    return str(sorted(value) if isinstance(value, set | frozenset) else value)


def _random(*shape, seed=0):
    """Normal draws in float64 that float32, in which streams keep their samples, holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


class _Net(nn.Sequential):
    """A sequence that takes samples in the precision of its weights."""

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


def _mlp(*widths, bias=True):
    pairs = zip(widths[:-1], widths[1:], strict=True)
    layers = [part for a, b in pairs for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in layers[::2]:
            layer.reset_parameters()
    return _Net(*layers[:-1]).double()


def _handle(module, input_shape, tasks=2, outputs=3, **options):
    return cfl.Model(module, input_shape, [outputs] * tasks, multi_head=False, **options)


def _info(model, task=0, tasks=3, phase=GPSE, clients=(0,), key=11):
    return RoundInfo(
        task=task,
        tasks=tasks,
        phase=phase,
        round=0,
        clients=tuple(clients),
        names=(*model.trainable(0), *model.buffers(0)),
        frozen=frozenset(),
        heads=(0,),
        population=len(clients),
        lr=0.1,
        model=model,
        key=key,
    )


def _clients(x, parts):
    """Clients that hold the given positions of one task's samples x."""
    y = torch.zeros(len(x), dtype=torch.int64)
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return [Client(id, {0: Share(samples, rows)}, 0, (0,)) for id, rows in enumerate(parts)]


def _gpse(strategy, model, server, clients, info):
    """One GPSE round as the engine runs it: broadcast, work, sum, absorb. Returns the server and the sum."""
    shared = strategy.broadcast(server, info)
    total: dict[str, torch.Tensor] = {}
    for client in clients:
        up, _ = strategy.work(shared["params"], client, shared, {}, info)
        total = {name: total[name] + leaf if name in total else leaf for name, leaf in up.items()}
    return strategy.absorb(server, {"work": total}, info, 1.0), total


def _start(strategy, model):
    return {"params": model.params, **strategy.init_server(model.params, model)}


def _one_gpse(strategy, model, x, parts=None, **info):
    parts = [torch.arange(len(x))] if parts is None else parts
    return _gpse(strategy, model, _start(strategy, model), _clients(x, parts), _info(model, **info))


def _inputs(model, params, x, layer, augment=True):
    """X (d, n) of a layer of an MLP, by running the modules before it."""
    stop = int(layer.path)
    with torch.no_grad():
        for number in range(stop):
            part = model.module[number]
            x = x @ params[f"{number}.weight"].T + params[f"{number}.bias"] if isinstance(part, nn.Linear) else part(x)
    return input_vectors(x[:, None, :], layer, augment)[:, 0].T


def _projector(basis):
    return basis @ basis.T


def _ranks(server):
    return {name: basis.shape[1] for name, basis in server["basis"].items()}


def _tasks(count=2, n=40, d=12, classes=3, rank=5):
    """Tasks whose inputs lie in random subspaces; labels from a random linear map, train and test of n samples each."""
    tasks = []
    for task in range(count):
        span, labels = _random(rank, d, seed=100 + task), _random(rank, classes, seed=200 + task)
        z = _random(2 * n, rank, seed=300 + task)
        x, y = (z @ span).float(), (z @ labels).argmax(1)
        y[:classes] = torch.arange(classes)
        tasks.append((x[:n], y[:n], x[n:], y[n:]))
    return tasks


def _config(*overrides, method="fot", tasks=2):
    small = ["partition.clients=4", "cohort=4", "rounds=2", "local.batch_size=5", "local.lr=0.1", f"tasks={tasks}"]
    return cfl.resolve("permuted-digits", method=method, overrides=[*small, *overrides])


@dataclass(frozen=True)
class Recorder(FOT):
    """FOT that keeps (info, server before, server after, sums) of each round."""

    rounds: list = field(default_factory=list)

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        self.rounds.append((info, server, new, mean))
        return new


def _run(tasks, *overrides, strategy=None, model=None, multi_head=False, method="fot"):
    stream = cfl.from_tensors(tasks, multi_head=multi_head)
    config = _config(*overrides, tasks=len(tasks), method=method)
    return cfl.run(config, stream=stream, strategy=strategy, model=model)


# --- GPSE by itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [True, False])
def test_gpse_keeps_the_leading_left_singular_vectors_of_each_layers_inputs(augment):
    # GPM's basis for one client: the first r left singular vectors of X, r the least with the energy share asked for.
    model, x = _handle(_mlp(12, 10, 8, 3), (12,)), _random(40, 12)
    strategy = FOT(sketch="gram", threshold=0.8, bias="augment" if augment else "free")
    server, sums = _one_gpse(strategy, model, x)
    for layer in model.layers:
        inputs = _inputs(model, model.params, x, layer, augment)
        u, s, _ = np.linalg.svd(inputs.numpy())
        shares = np.cumsum(s**2) / np.sum(s**2)
        rank = int(np.argmax(shares >= 0.8)) + 1
        assert 0 < rank < len(inputs)
        expected = u[:, :rank] @ u[:, :rank].T
        np.testing.assert_allclose(_projector(server["basis"][layer.name]).numpy(), expected, atol=1e-9)
        energy = float((inputs**2).sum())
        assert sums[f"energy/{layer.name}"].tolist() == pytest.approx([energy, energy])  # nothing is covered yet


def test_second_task_adds_what_the_energy_rule_still_lacks():
    model, strategy = _handle(_mlp(12, 3), (12,)), FOT(sketch="gram", threshold=0.9)
    first, second = _random(40, 12), _random(40, 12, seed=1)
    server, _ = _one_gpse(strategy, model, first)
    old = server["basis"]["0"]
    new = _gpse(strategy, model, server, _clients(second, [torch.arange(40)]), _info(model, task=1))[0]["basis"]["0"]
    assert torch.equal(new[:, : old.shape[1]], old)
    x = _inputs(model, model.params, second, model.layers[0]).numpy()
    residual = x - old.numpy() @ (old.numpy().T @ x)
    u, s, _ = np.linalg.svd(residual)
    covered = 1 - np.sum(s**2) / np.sum(x**2)
    shares = covered + np.concatenate([[0], np.cumsum(s**2)]) / np.sum(x**2)
    rank = int(np.argmax(shares >= 0.9))
    assert 0 < rank == new.shape[1] - old.shape[1]
    expected = _projector(old).numpy() + u[:, :rank] @ u[:, :rank].T
    np.testing.assert_allclose(_projector(new).numpy(), expected, atol=1e-9)


def test_nothing_grows_on_data_that_is_covered():
    model, x = _handle(_mlp(12, 10, 3), (12,)), _random(40, 12)
    for threshold in (0.8, 1.0):
        strategy = FOT(sketch="gram", threshold=threshold)
        server, _ = _one_gpse(strategy, model, x[:6])
        again, _ = _gpse(strategy, model, server, _clients(x[:6], [torch.arange(6)]), _info(model, task=1))
        assert all(torch.equal(again["basis"][name], basis) for name, basis in server["basis"].items())
        assert all(basis.shape[1] < basis.shape[0] for basis in server["basis"].values())  # it had room to grow
    # The authors' rule adds at least one direction whatever is covered.
    strategy = FOT(sketch="gram", criterion="norm_ratio", threshold=0.8)
    server, _ = _one_gpse(strategy, model, x)
    again, _ = _gpse(strategy, model, server, _clients(x, [torch.arange(40)]), _info(model, task=1))
    assert all(_ranks(again)[name] > rank for name, rank in _ranks(server).items())


def test_float32_data_that_is_covered_adds_nothing_at_threshold_one():
    # The basis goes down in float32, so that the clients' residual is rounding noise and not zero.
    module, x = _mlp(12, 3).float(), _random(6, 12).float()
    for sketch in ("gram", "gaussian"):
        model, strategy = _handle(module, (12,)), FOT(sketch=sketch, threshold=1.0)
        server, _ = _one_gpse(strategy, model, x)
        assert _ranks(server) == {"0": 6}  # six samples
        again, _ = _gpse(strategy, model, server, _clients(x, [torch.arange(6)]), _info(model, task=1))
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
    model = _handle(_mlp(12, 3).to(dtype), (12,))
    client = _clients(_random(6, 12).float(), [torch.arange(6)])[0]
    empty = torch.zeros(13, 0, dtype=dtype)
    assert FOT(**options)._accumulator(model.layers[0], empty, client, _info(model, task=task)).products == products


def test_products_in_float32_choose_the_subspace_of_those_in_float64(monkeypatch):
    module = _Net(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten())
    module = module.extend([nn.Linear(6 * 64, 3)]).float()
    model, x = _handle(module, (2, 8, 8)), _random(30, 2, 8, 8).float()
    strategy, found = FOT(threshold=0.95, sketch="gram", bias="freeze"), []
    for products in (torch.float32, torch.float64):
        monkeypatch.setattr(FOT, "_products", lambda *_, products=products: products)
        found.append(_one_gpse(strategy, model, x)[0])
    assert _ranks(found[0]) == _ranks(found[1]) and _ranks(found[0])["2"] > 0
    # The sums differ by 1e-7 of the largest eigenvalue; a direction turns by that over the gap to the next value.
    for name, basis in found[0]["basis"].items():
        assert (_projector(basis) - _projector(found[1]["basis"][name])).abs().max() < 1e-3


@pytest.mark.parametrize("count", [2, 7, 50])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("patches", [0, 4])
def test_the_subspace_does_not_depend_on_the_partition(count, sort, patches):
    module = _Net(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = _handle(module, (2, 4, 4)), _random(50, 2, 4, 4)
    strategy = FOT(draw="sample", threshold=0.8, max_patches=patches)
    whole, one = _one_gpse(strategy, model, x)
    order = x.flatten(1)[:, 0].argsort() if sort else torch.randperm(50, generator=torch.Generator().manual_seed(3))
    dealt, many = _one_gpse(strategy, model, x, list(order.tensor_split(count)), clients=range(count))
    for name, leaf in one.items():
        assert (many[name] - leaf).norm() < 1e-9 * leaf.norm()
    for name, basis in whole["basis"].items():
        assert 0 < basis.shape[1] < basis.shape[0]
        assert torch.linalg.matrix_norm(_projector(dealt["basis"][name]) - _projector(basis), 2) < 1e-8


def test_projection_at_the_server_is_projection_at_the_clients():
    model, first, second = _handle(_mlp(12, 10, 3), (12,)), _random(30, 12), _random(30, 12, seed=1)
    client = FOT(draw="sample", threshold=0.7, s_mult=50.0)
    server_side = replace(client, project_at="server")
    server, _ = _one_gpse(client, model, first)
    info, holders = _info(model, task=1), _clients(second, [torch.arange(15), torch.arange(15, 30)])
    shared = {strategy: strategy.broadcast(server, info) for strategy in (client, server_side)}
    assert "basis" in shared[client] and "basis" not in shared[server_side]
    at_client, sums = _gpse(client, model, server, holders, info)
    at_server, raw = _gpse(server_side, model, server, holders, info)
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
    model = _handle(_mlp(60, 50, 3), (60,))
    x = (_random(200, 60) * torch.arange(1, 61) ** -0.5).float().double()
    exact, _ = _one_gpse(FOT(sketch="gram"), model, x)
    sketched, _ = _one_gpse(FOT(s_mult=50.0), model, x)
    for name, rank in _ranks(exact).items():
        assert abs(_ranks(sketched)[name] - rank) <= max(1, 0.02 * rank)  # 2 %, or one where 2 % is less than one


def test_coverage_is_measured_on_the_new_basis():
    model, x = _handle(_mlp(12, 10, 3), (12,)), _random(40, 12)
    strategy = FOT(threshold=0.7)
    server, _ = _one_gpse(strategy, model, x)
    phase = replace(GPSE, name="coverage", diagnostic=True)
    after, sums = _gpse(strategy, model, server, _clients(x, [torch.arange(40)]), _info(model, phase=phase))
    assert set(sums) == {"energy/0", "energy/2"}
    assert after["basis"] is server["basis"]
    report = strategy.report(after, model)
    for layer in model.layers:
        inputs, basis = _inputs(model, model.params, x, layer), server["basis"][layer.name]
        share = float((basis.T @ inputs).square().sum() / inputs.square().sum())
        assert report["coverage"][layer.name] == pytest.approx(share, rel=1e-9)
        assert report["subspace_use"][layer.name] == basis.shape[1] / basis.shape[0]


# --- edge cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["energy", "norm_ratio"])
@pytest.mark.parametrize("options", [{}, {"sketch": "gram"}, {"draw": "sample"}, {"min_rank": 1}], ids=_label)
def test_a_dead_layer_learns_nothing(criterion, options):
    model = _handle(_mlp(12, 10, 3), (12,))
    model.params["0.bias"].fill_(-100.0)  # ReLU puts out zeros for every sample
    server, sums = _one_gpse(FOT(bias="free", criterion=criterion, **options), model, _random(20, 12))
    assert server["basis"]["2"].shape == (10, 0)
    assert server["basis"]["0"].shape[1] > 0
    assert all(torch.isfinite(leaf).all() for leaf in sums.values())


@pytest.mark.parametrize("options", [{}, {"sketch": "gram"}, {"draw": "sample"}], ids=_label)
def test_a_single_sample_spans_one_direction(options):
    model, x = _handle(_mlp(12, 10, 3), (12,)), _random(1, 12)
    for data in (x, x.expand(7, 12)):
        server, _ = _one_gpse(FOT(threshold=1.0, **options), model, data)
        assert _ranks(server) == {"0": 1, "2": 1}


@pytest.mark.parametrize("options", [{}, {"sketch": "gram"}, {"draw": "sample"}], ids=_label)
def test_inputs_of_width_one(options):
    model = _handle(_mlp(1, 1, 3), (1,))
    model.params["0.bias"].fill_(100.0)
    server, _ = _one_gpse(FOT(bias="free", **options), model, _random(9, 1))
    assert server["basis"]["0"].abs().tolist() == [[1.0]]
    full, sums = _gpse(
        FOT(bias="free", **options), model, server, _clients(_random(9, 1), [torch.arange(9)]), _info(model)
    )
    assert torch.equal(full["basis"]["0"], server["basis"]["0"])
    assert not sums  # layers whose basis is full send nothing


def test_threshold_one_on_full_rank_data_fills_the_space():
    model = _handle(_mlp(6, 5, 3), (6,))
    server, _ = _one_gpse(FOT(sketch="gram", threshold=1.0, bias="free"), model, _random(80, 6))
    assert _ranks(server) == {"0": 6, "2": 5}


def test_nan_in_the_sum_is_an_error():
    model, strategy = _handle(_mlp(6, 3), (6,)), FOT()
    server, sums = _one_gpse(strategy, model, _random(9, 6))
    sums["sketch/0"][1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        strategy.absorb(server, {"work": sums}, _info(model), 1.0)


def test_nan_in_a_clients_data_names_the_client():
    tasks = _tasks()
    tasks[0][0][3, 0] = float("nan")
    with pytest.raises(UpdateError, match="client"):
        _run(tasks)


def test_min_rank_and_threshold_schedule():
    model, x = _handle(_mlp(12, 3), (12,)), _random(40, 12)
    covered = FOT(sketch="gram", threshold=0.8)
    server, _ = _one_gpse(covered, model, x)
    holders, rank = _clients(x, [torch.arange(40)]), _ranks(server)["0"]
    for options, task, expected in ((dict(min_rank=2), 1, rank + 2), (dict(threshold_step=0.0), 1, rank)):
        again, _ = _gpse(replace(covered, **options), model, server, holders, _info(model, task=task))
        assert _ranks(again)["0"] == expected
    # After task t the threshold is threshold + t x step: 0.7 + 2 x 0.05 is the rank of 0.8, and 0.7 + 9 x 0.05 is 1.
    rising = FOT(sketch="gram", threshold=0.7, threshold_step=0.05)
    by_task = {task: _ranks(_one_gpse(rising, model, x, task=task)[0])["0"] for task in (0, 2, 9)}
    at_first = _ranks(_one_gpse(FOT(sketch="gram", threshold=0.7), model, x)[0])["0"]
    assert at_first < rank
    assert by_task == {0: at_first, 2: rank, 9: 13}


# --- the norm-ratio rule, patches, other options of the sketch -------------------------------------------------------


def test_norm_ratio_is_the_clients_mean_weighted_by_samples():
    model, strategy = _handle(_mlp(12, 3), (12,)), FOT(criterion="norm_ratio", sketch="gram", bias="free")
    server, _ = _one_gpse(strategy, model, _random(6, 12))
    x, parts = _random(30, 12, seed=1), [torch.arange(5), torch.arange(5, 30)]
    basis = server["basis"]["0"]
    _, sums = _gpse(strategy, model, server, _clients(x, parts), _info(model, task=1))
    ratios = [float((x[rows] - x[rows] @ _projector(basis)).norm() / x[rows].norm()) for rows in parts]
    assert sums["energy/0"].tolist() == pytest.approx([30.0, 5 * ratios[0] + 25 * ratios[1]])


def test_norm_ratio_takes_more_than_energy():
    model, x = _handle(_mlp(12, 10, 3), (12,)), _random(40, 12)
    ranks = {}
    for criterion in ("energy", "norm_ratio"):
        strategy = FOT(criterion=criterion, sketch="gram", threshold=0.6)
        server, _ = _one_gpse(strategy, model, x)
        second = _clients(_random(40, 12, seed=1), [torch.arange(40)])
        ranks[criterion] = _ranks(_gpse(strategy, model, server, second, _info(model, task=1))[0])
    assert all(ranks["norm_ratio"][name] >= rank for name, rank in ranks["energy"].items())
    assert ranks["norm_ratio"] != ranks["energy"]


def test_the_printed_rule_protects_nothing_in_the_first_task():
    model = _handle(_mlp(12, 10, 3), (12,))
    with pytest.warns(UserWarning, match="eq. 12"):
        server, _ = _one_gpse(FOT(criterion="eq12"), model, _random(40, 12))
    assert set(_ranks(server).values()) == {0}


def test_the_server_cannot_apply_a_rule_that_needs_the_clients_norms():
    with pytest.raises(ConfigError, match="strategy.project_at=client"):
        FOT(project_at="server", criterion="norm_ratio")


def test_max_patches_limits_what_an_image_adds():
    module = _Net(nn.Conv2d(2, 4, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = _handle(module, (2, 4, 4)), _random(2, 2, 4, 4)
    for patches, rank in ((0, 8), (1, 2), (3, 6)):  # two images, d = 8; all nine patches fill the space
        server, _ = _one_gpse(FOT(sketch="gram", threshold=1.0, max_patches=patches), model, x)
        assert _ranks(server)["0"] == rank


def test_a_dense_stem_has_its_patches_at_stride_1():
    # The authors' code does so where the stem of their Mini-ImageNet network has stride 2.
    convs = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.Conv2d(4, 4, 2, stride=2, bias=False)
    model = _handle(_Net(*convs, nn.Flatten(), nn.Linear(4, 3)).double(), (2, 4, 4))
    x = _random(3, 2, 4, 4)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    patches = torch.stack([padded[:, :, i : i + 3, j : j + 3].flatten(1) for i in range(4) for j in range(4)])
    own = patches.view(4, 4, 3, 18)[::2, ::2]
    _, plain = _one_gpse(FOT(bias="free"), model, x)
    server, dense = _one_gpse(FOT(bias="free", dense_stem=True), model, x)
    assert float(plain["energy/0"][0]) == pytest.approx(float(own.square().sum()))
    assert float(dense["energy/0"][0]) == pytest.approx(float(patches.square().sum()))
    for name in ("1", "3"):  # the layers after it see what they did
        assert torch.equal(dense[f"energy/{name}"], plain[f"energy/{name}"])
    coverage = Phase("coverage", cohort="available", train=False, work=True, diagnostic=True)
    _, real = _gpse(
        FOT(bias="free", dense_stem=True), model, server, _clients(x, [torch.arange(3)]), _info(model, 0, 3, coverage)
    )
    assert float(real["energy/0"][0]) == pytest.approx(float(own.square().sum()))  # what the layer takes is measured


def test_augmented_gpse_sees_the_images_that_training_may_see():
    # All images have their one bright pixel on the left; half of those that are flipped at random, on the right.
    model, x = _handle(_Net(nn.Flatten(), nn.Linear(2, 3)), (1, 1, 2)), torch.tensor([[[[1.0, 0.0]]]] * 32)
    y, columns = torch.zeros(32, dtype=torch.int64), {}
    samples = cfl.from_tensors([(x, y, x, y)]).with_augment(["flip"]).tasks[0].train
    clients = [Client(0, {0: Share(samples, torch.arange(32))}, 0, (0,))]
    for augmented in (False, True):
        strategy = FOT(sketch="gram", threshold=1.0, bias="free", augmented=augmented)
        server, _ = _gpse(strategy, model, _start(strategy, model), clients, _info(model))
        columns[augmented] = server["basis"]["1"].shape[1]
        measured = replace(
            _info(model), phase=Phase("coverage", cohort="available", train=False, work=True, diagnostic=True)
        )
        _, sums = _gpse(strategy, model, server, clients, measured)
        assert sums["energy/1"].tolist() == pytest.approx([32.0, 0.0], abs=1e-9)  # of the images as they are
    assert columns == {False: 1, True: 2}


@pytest.mark.parametrize("option", ["augmented", "dropout"])
def test_what_is_drawn_by_client_does_not_go_with_draws_by_sample(option):
    with pytest.raises(ConfigError, match=f"strategy.{option}=true draws by client"):
        FOT(draw="sample", **{option: True})


def test_sketch_shapes_by_layer_kind():
    module = _Net(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    model, x = _handle(module, (2, 4, 4)), _random(5, 2, 4, 4)
    _, sums = _one_gpse(FOT(s_mult=2.0, s_mult_conv=0.5), model, x)
    assert sums["sketch/0"].shape == (9, 4)  # d = 2 x 2 x 2 + 1; round(4.5) = 4
    assert sums["sketch/3"].shape == (37, 74)
    _, sums = _one_gpse(FOT(sketch="gram"), model, x)
    assert sums["sketch/0"].shape == (9 * 10 // 2,)


def test_uniform_draws_give_a_third_of_the_energy():
    # |A|^2 has mean s |X|^2 Var(G), and Var is 1/3 on (-1, 1). 50 d columns: within a few per cent.
    model, x = _handle(_mlp(12, 3), (12,)), _random(40, 12)
    _, sums = _one_gpse(FOT(distribution="uniform", s_mult=50.0), model, x)
    columns, energy = sums["sketch/0"].shape[1], float(sums["energy/0"][0])
    assert float(sums["sketch/0"].square().sum()) == pytest.approx(columns * energy / 3, rel=0.1)


# --- what is frozen, projected, planned ------------------------------------------------------------------------------


def _conv_norm_model(**options):
    module = _Net(
        nn.Conv2d(4, 4, 2, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    )
    return _handle(module.double(), (4, 4, 4), **options)


NORMS = {f"{path}.{name}" for path in (1, 4, 8) for name in ("weight", "bias")}


def test_nothing_is_frozen_in_the_first_task():
    model = _conv_norm_model()
    assert FOT(freeze_first=True, bias="freeze", second_half="freeze").frozen(0, model) == frozenset()


@pytest.mark.parametrize(
    "options,frozen",
    [
        ({}, NORMS),
        ({"norm_affine": "free"}, set()),
        ({"norm_affine": "free", "bias": "freeze"}, {"0.bias", "3.bias", "7.bias", "9.bias"}),
        ({"norm_affine": "free", "freeze_first": True}, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (  # four layers: half is two, whatever the number of groups
            {"norm_affine": "free", "first_half": "freeze"},
            {f"{path}.{name}" for path in (0, 1, 3, 4) for name in ("weight", "bias")},
        ),
        (
            {"norm_affine": "free", "second_half": "freeze"},
            {f"{path}.{name}" for path in (7, 8, 9) for name in ("weight", "bias")},
        ),
        ({"norm_affine": "free", "bias": "freeze", "first_half": "finetune"}, {"7.bias", "9.bias"}),
        ({"first_half": "finetune"}, {"8.weight", "8.bias"}),  # what is fine-tuned is fine-tuned with its norms
    ],
    ids=_label,
)
def test_what_is_frozen_after_the_first_task(options, frozen):
    assert FOT(**options).frozen(1, _conv_norm_model()) == frozen


@pytest.mark.parametrize(
    "options,projected",
    [
        ({}, ["0.group0", "0.group1", "3", "7", "9"]),
        ({"freeze_first": True}, ["3", "7", "9"]),
        ({"first_half": "finetune"}, ["7", "9"]),
        ({"second_half": "freeze"}, ["0.group0", "0.group1", "3"]),
    ],
    ids=_label,
)
def test_which_layers_have_a_basis(options, projected):
    model = _conv_norm_model()
    strategy = FOT(**options)
    assert list(_start(strategy, model)["basis"]) == projected
    server, sums = _one_gpse(strategy, model, _random(9, 4, 4, 4))
    assert {name.partition("/")[2] for name in sums} == set(projected)
    assert all(rank > 0 for rank in _ranks(server).values())


def test_an_odd_number_of_layers_has_the_larger_half_first():
    model = _handle(_mlp(6, 5, 4, 3), (6,))
    assert list(_start(FOT(second_half="finetune"), model)["basis"]) == ["0", "2"]  # half of 3, rounded up


def test_plans():
    def phases(strategy, task):
        return [(phase.name, phase.rounds, phase.cohort) for phase in strategy.plan(task, 3, 7)]

    training = ("train", 7, "sampled")
    coverage = ("coverage", 1, "available")
    assert phases(FOT(), 0) == [training, ("gpse", 1, "available"), coverage]
    assert phases(FOT(), 2) == [training]
    assert phases(FOT(after_last_task=True), 2) == phases(FOT(), 0)
    assert phases(FOT(participants="sampled"), 1) == [training, ("gpse", 1, "sampled"), coverage]
    bare = FOT(measure_coverage=False)
    assert phases(bare, 0) == [training, ("gpse", 1, "available")]
    local = FOT(model="local", participants="sampled", measure_coverage=False)
    assert phases(local, 0) == [("train", 6, "sampled"), ("train+gpse", 1, "sampled")]
    assert [(phase.train, phase.work) for phase in local.plan(0, 3, 7)] == [(True, False), (True, True)]
    with pytest.raises(ConfigError, match="strategy.participants=sampled"):
        FOT(model="local").plan(0, 3, 7)


def test_notes_say_what_is_covered_and_what_is_not():
    model = _conv_norm_model()
    text = "\n".join(FOT(bias="free", norm_affine="free").notes(model))
    assert "projected: 0.weight (d=8), 0.weight (d=8), 3.weight (d=16)" in text
    unprotected = next(line for line in text.splitlines() if line.startswith("not protected"))
    assert all(name in unprotected for name in (*NORMS, "0.bias", "9.bias")) and "weight (d" not in unprotected
    text = "\n".join(FOT().notes(model))
    assert "0.weight+0.bias (d=9)" in text and "not protected" not in text


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_one_task_is_fedavg_to_the_bit():
    tasks = _tasks(1)
    fot, fedavg = (_run(tasks, method=method, model=_mlp(12, 10, 3)) for method in ("fot", "fedavg"))
    assert all(torch.equal(fot.params[name], leaf) for name, leaf in fedavg.params.items())


@pytest.mark.parametrize("options", [{}, {"model": "local", "participants": "sampled"}], ids=_label)
def test_first_task_of_many_is_fedavg_to_the_bit(options):
    recorder = Recorder(**options)
    _run(_tasks(2), "cohort=2", strategy=recorder, model=_mlp(12, 10, 3))
    alone = _run(_tasks(1), "cohort=2", method="fedavg", model=_mlp(12, 10, 3))
    after = next(before for info, before, _, _ in recorder.rounds if info.task == 1)
    assert all(torch.equal(after["params"][name], leaf) for name, leaf in alone.params.items())


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("local.momentum=0.9", "local.weight_decay=0.1"),
        ("local.optimizer=adam", "local.lr=0.01"),
        ("server.lr=0.5", "cohort=2", "agg.weights=uniform"),
        ("regularizers=[fedprox]",),
    ],
    ids=_label,
)
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_no_step_of_a_later_task_has_a_component_in_the_basis(overrides, dtype, bound):
    recorder = Recorder(threshold=0.8)
    result = _run(_tasks(3), *overrides, strategy=recorder, model=_mlp(12, 10, 3).to(dtype))
    checked = 0
    for info, before, after, _ in recorder.rounds:
        if info.task == 0 or not info.phase.train:
            continue
        step = tree.sub(after["params"], before["params"])
        total = float(torch.cat([leaf.flatten() for leaf in step.values()]).norm())
        assert total > 1e-4  # it still learns
        for layer in result.model.layers:
            basis = before["basis"][layer.name]
            assert basis.shape[1] > 0
            parts = [step[name].double().reshape(layer.rows.stop, -1) for name in names(layer, True)]
            assert float((torch.cat(parts, dim=1) @ basis).norm()) < bound * total
            checked += 1
    assert checked == 2 * 2 * 2  # two later tasks, two rounds, two layers


def _protected_network(kind):
    """A network, its input shape, and task inputs (n, ...) so few that they span no layer's whole input space."""
    if kind == "mlp":
        return _mlp(64, 64, 64, 4), (64,), 20
    module = _Net(
        nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )  # five images of four patches of 48 values
    return module.double(), (3, 8, 8), 5


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("sketch", ["gram", "gaussian"])
def test_a_protected_network_keeps_its_logits(kind, sketch):
    changes = {}
    for bias in ("augment", "free"):
        module, shape, count = _protected_network(kind)
        tasks = []
        for task in range(2):
            x, y = _random(count, *shape, seed=task), torch.arange(count) % 4
            tasks.append((x, y, x, y))
        recorder = Recorder(threshold=1.0, sketch=sketch, bias=bias)
        clients = 4 if kind == "mlp" else 1
        overrides = (f"partition.clients={clients}", "rounds=4", "local.weight_decay=0.01")
        result = _run(tasks, *overrides, strategy=recorder, model=module)
        model = result.model
        model.module.eval()
        end = next(before for info, before, _, _ in recorder.rounds if info.phase.name == "gpse")
        old, new = (model.logits(params, tasks[0][0], 0) for params in (end["params"], result.params))
        changes[bias] = float((new - old).abs().max())
        learnt = model.logits(result.params, tasks[1][0], 1) - model.logits(
            {**result.params, **{name: end["params"][name] for name in model.trainable(1)}}, tasks[1][0], 1
        )
        assert learnt.abs().max() > 1e-2  # the second task did move the network
    assert changes["augment"] < 1e-10
    assert changes["free"] > 1e-4  # the biases alone undo the guarantee: the test can fail


def test_the_removed_share_is_of_the_energy_of_a_tasks_steps():
    recorder = Recorder(threshold=0.8)
    metrics = _run(_tasks(2), strategy=recorder, model=_mlp(12, 10, 3)).metrics
    assert metrics["by_task"][0]["removed"] == {"0": 0.0, "2": 0.0}  # nothing is protected yet
    rounds = [(before["basis"], mean["strategy"]) for info, before, _, mean in recorder.rounds if info.task == 1]
    assert len(rounds) == 2
    for name, share in metrics["removed"].items():
        steps = [torch.cat([step[f"{name}.weight"], step[f"{name}.bias"][:, None]], 1) for _, step in rounds]
        inside = sum((step @ basis[name]).square().sum() for step, (basis, _) in zip(steps, rounds, strict=True))
        assert share == pytest.approx(float(inside / sum(step.square().sum() for step in steps)), rel=1e-9)
        assert 0.05 < share < 0.95


def test_the_head_of_another_task_never_moves():
    recorder = Recorder()
    result = _run(_tasks(2), "local.weight_decay=0.1", strategy=recorder, model=_mlp(12, 10, 3), multi_head=True)
    end = next(before for info, before, _, _ in recorder.rounds if info.phase.name == "gpse")
    heads = {name for name in result.params if "@" in name}
    assert heads == {"2.weight@0", "2.weight@1", "2.bias@0", "2.bias@1"}
    for name in result.model.head(0):
        assert torch.equal(result.params[name], end["params"][name])
    for name in result.model.head(1):
        assert not torch.equal(result.params[name], end["params"][name])
    assert set(result.metrics["subspace_use"]) == {"0"}  # heads of their own are not projected


@pytest.mark.parametrize(
    "options,still,moving",
    [
        ({"freeze_first": True}, {"0.weight", "0.bias"}, {"2.weight", "4.bias"}),
        ({"bias": "freeze"}, {"0.bias", "2.bias", "4.bias"}, {"0.weight", "2.weight", "4.weight"}),
        ({"second_half": "freeze"}, {"4.weight", "4.bias"}, {"0.weight", "2.weight"}),
    ],
    ids=_label,
)
def test_frozen_parameters_stay_to_the_bit(options, still, moving):
    recorder = Recorder(**options)
    result = _run(_tasks(2), "local.weight_decay=0.1", strategy=recorder, model=_mlp(12, 10, 8, 3))
    end = next(before for info, before, _, _ in recorder.rounds if info.phase.name == "gpse")
    assert all(torch.equal(result.params[name], end["params"][name]) for name in still)
    assert not any(torch.equal(result.params[name], end["params"][name]) for name in moving)


def test_fine_tuned_halves_move_as_fedavg_would():
    # Neither projected nor sketched: with both halves fine-tuned the run is FedAvg.
    both = _run(_tasks(2), "strategy.first_half=finetune", "strategy.second_half=finetune", model=_mlp(12, 10, 3))
    plain = _run(_tasks(2), method="fedavg", model=_mlp(12, 10, 3))
    assert both.metrics["subspace_use"] == {}
    assert all(torch.equal(both.params[name], leaf) for name, leaf in plain.params.items())


def test_gpse_on_the_clients_own_models():
    # One client: its model after local training is the next global one, so both kinds of GPSE see the same network.
    bases = {}
    for options in ({"model": "local", "participants": "sampled"}, {}):
        recorder = Recorder(sketch="gram", **options)
        whole = ("partition.clients=1", "local.batch_size=40")  # one batch: its order, keyed by phase, is of no account
        _run(_tasks(2), *whole, strategy=recorder, model=_mlp(12, 10, 3))
        bases[bool(options)] = next(after["basis"] for info, _, after, _ in recorder.rounds if info.phase.work)
        names_of_phases = [info.phase.name for info, *_ in recorder.rounds if info.task == 0]
        assert names_of_phases == (
            ["train", "train+gpse", "coverage"] if options else ["train", "train", "gpse", "coverage"]
        )
    for name, basis in bases[False].items():
        torch.testing.assert_close(_projector(bases[True][name]), _projector(basis), atol=1e-9, rtol=0)


def test_dropout_in_gpse_makes_wider_spans_of_deep_layers_and_repeats():
    """Noise in a layer's inputs, and therefore in what comes after it, takes directions of its own."""
    net = _mlp(10, 30, 30, 3)
    model = _handle(_Net(*net[:2], nn.Dropout(0.5), *net[2:4], nn.Dropout(0.5), net[4]), (10,))

    def ranks(dropout):
        return _ranks(_one_gpse(FOT(threshold=0.95, dropout=dropout), model, _random(80, 10))[0])

    first, second, third = ({on: ranks(on)[layer] for on in (False, True)} for layer in ("0", "3", "6"))
    assert first[True] == first[False] and second[True] == second[False]  # a layer's own dropout is left out
    assert third[True] > third[False]
    assert ranks(True) == ranks(True)


def test_the_last_task_is_sketched_on_request_only():
    ranks = {}
    for after in (False, True):
        recorder = Recorder(after_last_task=after, measure_coverage=False)
        _run(_tasks(2), strategy=recorder, model=_mlp(12, 10, 3))
        ranks[after] = [(info.task, info.phase.name) for info, *_ in recorder.rounds if info.phase.work]
    assert ranks == {False: [(0, "gpse")], True: [(0, "gpse"), (1, "gpse")]}


def test_bytes_of_gpse_from_the_shapes():
    # float32: a sketch (d, s) and two float64 energies a layer go up; the model and the empty bases go down.
    tasks = _tasks(2)
    for sketch, numbers in (("gaussian", lambda d: d * 5 * d), ("gram", lambda d: d * (d + 1) // 2)):
        result = _run(tasks, f"strategy.sketch={sketch}", model=_mlp(12, 10, 3).float())
        widths = [width(layer, True) for layer in result.model.layers]
        assert widths == [13, 11]
        moved = result.metrics["bytes_by_phase"]
        assert moved["gpse"]["up"] == 4 * sum(4 * numbers(d) + 16 for d in widths)  # four clients
        parameters = 12 * 10 + 10 + 10 * 3 + 3
        assert moved["gpse"]["down"] == 4 * 4 * parameters
        assert moved["coverage"] == {"up": 0, "down": 0}


def test_the_basis_goes_down_only_with_gpse():
    sizes = {}
    for where in ("client", "server"):
        recorder = Recorder(project_at=where, measure_coverage=False)
        result = _run(_tasks(3), strategy=recorder, model=_mlp(12, 10, 3).float())
        sizes[where] = result.metrics["bytes_by_phase"]["gpse"]["down"]
        if where == "client":  # the second GPSE carries the bases of the first, in float32, to four clients
            known = next(before["basis"] for info, before, *_ in recorder.rounds if info.task == 1 and info.phase.work)
            carried = 4 * 4 * sum(basis.numel() for basis in known.values())
        assert result.metrics["bytes_by_phase"]["train"]["down"] == 3 * 2 * 4 * 4 * (12 * 10 + 10 + 10 * 3 + 3)
    assert carried > 0 and sizes["client"] - sizes["server"] == carried


# --- outcome ---------------------------------------------------------------------------------------------------------


def _synthetic(seed, count=3, train=400, test=400):
    """Tasks with inputs z B^T + noise in random 8-dimensional subspaces of R^32, and labels from a random network."""
    tasks = []
    for task in range(count):
        source = torch.Generator().manual_seed(1000 * seed + task)

        def draw(*shape, source=source):
            return torch.randn(*shape, generator=source)

        span = torch.linalg.qr(draw(32, 8)).Q
        hidden, out = draw(8, 8), draw(8, 4)
        z = draw(train + test, 8)
        x = z @ span.T + 0.02 * draw(train + test, 32)
        y = ((z @ hidden).tanh() @ out).argmax(1)
        tasks.append((x[:train], y[:train], x[train:], y[train:]))
    return tasks


def _outcome(seed, method, *overrides):
    module = _mlp(32, 64, 64, 4, bias=False).float()
    stream = cfl.from_tensors(_synthetic(seed), multi_head=True)
    small = ("partition.clients=4", "cohort=4", "rounds=40", "local.batch_size=20", "local.lr=0.5", "tasks=3")
    config = cfl.resolve("permuted-digits", method=method, seed=seed, overrides=[*small, *overrides])
    return cfl.run(config, stream=stream, model=module).metrics


def test_fot_forgets_less_than_fedavg_and_the_authors_rule_protects_more():
    # FGT of seeds 0, 1, 2: FedAvg .079, .156, .105; FOT .014, .004, .008. ACC: FedAvg .729, .693, .718; FOT .768, .795,
    # .796. Share of the second layer's inputs used: energy .44, .41, .41; norm_ratio .50, .45, .47.
    fedavg = _outcome(0, "fedavg")
    fot = _outcome(0, "fot", "strategy.threshold=0.95")
    authors = _outcome(0, "fot", "strategy.threshold=0.95", "strategy.criterion=norm_ratio")
    assert fot["fgt"] < 0.03 < 0.05 < fedavg["fgt"]
    assert fot["acc"] > fedavg["acc"] + 0.015
    assert authors["fgt"] < 0.03
    assert authors["subspace_use"]["2"] > fot["subspace_use"]["2"]


def test_a_model_of_a_norm_and_a_head_alone_has_nothing_to_project():
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    model = cfl.Model(module, (4,), [2, 2], multi_head=True)
    assert FOT().frozen(1, model) == {"0.weight", "0.bias"}
    assert FOT(norm_affine="free").frozen(1, model) == frozenset()


def test_a_layer_called_with_a_keyword_is_seen():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x):
            return self.layer(input=x)

    server, _ = _one_gpse(FOT(sketch="gram", threshold=1.0, bias="free"), _handle(Keyword(), (12,)), _random(5, 12))
    assert server["basis"]["layer"].shape == (12, 5)


@pytest.mark.parametrize("sketch", ["gram", "gaussian"])
def test_rounding_errors_of_a_covered_span_are_no_directions(sketch):
    """Float32 inputs inside the basis leave 1e-7 of themselves at the server; that is not rank."""
    model, x = _handle(_mlp(12, 3), (12,)), _random(40, 5).float() @ _random(5, 12, seed=1).float()
    model = _handle(_mlp(12, 3).float(), (12,))
    strategy = FOT(sketch=sketch, project_at="server", bias="free", threshold=1.0, min_rank=3)
    once, _ = _one_gpse(strategy, model, x)
    twice, _ = _gpse(strategy, model, once, _clients(x, [torch.arange(40)]), _info(model))
    assert once["basis"]["0"].shape[1] == twice["basis"]["0"].shape[1] == 5
