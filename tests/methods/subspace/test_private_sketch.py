"""GPSE under differential privacy: sensitivity of uploads to a client or a sample, and the bases at the server."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cfl
from cfl.contract import Privacy
from cfl.core import ConfigError, rng
from cfl.methods.strategies.fot import FOT
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import private_sketch as private
from cfl.methods.subspace.sketch import Direct, Gram, unpack
from tests import toy
from tests.gpse_round import clients_of
from tests.gpse_round import info_of as one_round

NONE = torch.zeros(5, 0, dtype=torch.float64)


def info_of(model, privacy, **options):
    return replace(one_round(model, **options), privacy=privacy)


def client_of(x):
    return clients_of(x, [torch.arange(len(x))])[0]


def released(strategy, model, x, privacy, key=11, basis=None):
    """A client's upload in GPSE, as a tree."""
    info = info_of(model, privacy, key=key)
    server = {"params": model.params, **strategy.init_server(model.params, model)}
    if basis is not None:
        server["basis"] = basis
    shared = strategy.broadcast(server, info)
    return strategy.work(shared["params"], client_of(x), shared, {}, info)[0]


def flat(tree):
    return torch.cat([leaf.double().flatten() for leaf in tree.values()])


def handle(module, shape):
    return cfl.Model(module, shape, [3] * 3, multi_head=False)


def conv():
    return toy.net(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


MODELS = {"mlp": (lambda: toy.mlp(5, 4, 3), (5,)), "cnn": (conv, (1, 4, 4))}
# inputs of an adversary: of any size, all alike, or all alike except one
adversarial = st.tuples(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.sampled_from([1e-8, 1.0, 1e8]),
    st.sampled_from(["any", "alike", "one"]),
)


def chosen(shape, seed, count, scale, kind):
    x = torch.randn(count, *shape, generator=rng.generator(seed))
    if kind == "alike":
        x = x[:1].expand_as(x).clone()
    x = scale * x
    if kind == "one":
        x[0] *= 1e4
    return x


# --- scaling --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(1e-12, 1e12))
@settings(max_examples=50, deadline=None)
def test_each_sample_has_energy_one_over_all_its_positions(seed, scale):
    inputs = scale * torch.randn(4, 3, 5, dtype=torch.float64, generator=rng.generator(seed))
    unit = private.unit_energy(inputs)
    torch.testing.assert_close(unit.square().sum((1, 2)), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(unit * inputs.square().sum((1, 2), keepdim=True).sqrt(), inputs)  # the same direction


def test_a_layer_that_never_runs_sends_zeros():
    for part in private.scaled(Gram(NONE, None, 0), Privacy("client", 2.0), 0, parts=1):
        assert not part.any()


def test_a_sample_of_zeros_stays_one():
    assert torch.equal(private.unit_energy(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-25, 1e-12, 1.0, 1e19, 1e30, 3e38])
def test_the_size_of_the_inputs_does_not_matter(scale, dtype):
    """The squares of most of these sizes are beyond the range of float32; 1e-38 and 1e-45 are subnormal. The direction
    is that of the signs, so each of the 15 entries is +-1 / sqrt(15)."""
    signs = torch.randn(2, 3, 5, generator=rng.generator(1)).sign()
    unit = private.unit_energy((scale * signs.double()).to(dtype))
    assert unit.dtype == dtype
    torch.testing.assert_close(unit, (signs / math.sqrt(15)).to(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_counts_as_zero(value):
    inputs = torch.ones(3, 2, 2)
    inputs[1, 0, 1] = value
    unit = private.unit_energy(inputs)
    assert torch.equal(unit[1], torch.zeros(2, 2)) and torch.equal(unit[::2], torch.full((2, 2, 2), 0.5))


@pytest.mark.parametrize("net", MODELS)
@pytest.mark.parametrize("value", [1e-45, 1e-25, 1e30, 3e38])
def test_no_sample_raises_a_part_above_its_share(value, net):
    """The norm of one sample's part in a sum is at most clip / sqrt(parts), up to the rounding of float32. Inputs of
    3e38 overflow in the first layer, so that the inputs of the second are infinite or NaN."""
    made, shape = MODELS[net]
    model, strategy = handle(made(), shape), FOT(sketch="gram", project_at="server", bias="free")
    others = torch.randn(3, *shape, generator=rng.generator(2))
    extreme = torch.cat([others, value * torch.ones(1, *shape)])
    privacy = Privacy("example", 0.8)
    without, with_it = (released(strategy, model, x, privacy) for x in (others, extreme))
    share = 0.8 / math.sqrt(len(model.layers))
    moved = [float((part.double() - without[name].double()).norm()) for name, part in with_it.items()]
    assert all(0 <= norm <= share * (1 + 1e-6) for norm in moved)
    assert moved[0] > 0.1 * share  # it counts in the first layer, however small or large it is


def test_shares_make_up_the_clip():
    assert private.share(Privacy("client", 3.0), 4) == 1.5
    assert sum(private.share(Privacy("client", 3.0), 7) ** 2 for _ in range(7)) == pytest.approx(9.0)


@given(adversarial, st.floats(1e-3, 1e3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gram_matrix_and_energy_of_a_client_are_within_their_share(inputs, clip, known):
    x = chosen((2, 5), *inputs).double()
    basis = torch.eye(5, dtype=torch.float64)[:, :2] if known else NONE
    sums = Gram(basis, None, key=0)
    sums.add(private.unit_energy(x), torch.arange(len(x)))
    gram, energy = private.scaled(sums, Privacy("client", clip), len(x), parts=3)
    share = clip / math.sqrt(3)
    assert gram.norm() <= share * (1 + 1e-12) and 0 <= energy <= share * (1 + 1e-12)
    trace = torch.trace(unpack(gram))
    torch.testing.assert_close(trace, energy, rtol=1e-9, atol=1e-12 * share)  # |X*|^2 is the trace of X* X*^T


def test_the_bound_is_reached():
    # all inputs along one axis: the mean Gram matrix has a single entry, 1
    sums = Gram(NONE, None, key=0)
    sums.add(private.unit_energy(torch.eye(5, dtype=torch.float64)[:1].expand(7, 1, 5)), torch.arange(7))
    gram, energy = private.scaled(sums, Privacy("client", 2.0), 7, parts=4)
    assert gram.norm() == pytest.approx(1.0) and energy == pytest.approx(1.0)  # 2 / sqrt(4)


@pytest.mark.parametrize("way", ["root of the Gram matrix", "row by row"])
def test_a_gaussian_sketch_has_its_share_on_average(way):
    x = private.unit_energy(torch.randn(6, 2, 5, dtype=torch.float64, generator=rng.generator(1)))
    squares = []
    for key in range(400):
        sums = Gram(NONE, 8, key) if way.startswith("root") else Direct(NONE, 8, key, by_sample=False)
        sums.add(x, torch.arange(6))
        sketch, _ = private.scaled(sums, Privacy("client", 3.0), 6, parts=9)
        assert sketch.shape == (5, 8)
        squares.append(float(sketch.square().sum()))
    # E |A|^2 = s |X|^2 = 8 x 6, over s n: 1, times the share 3 / sqrt(9) = 1
    assert np.mean(squares) == pytest.approx(1.0, abs=4 * np.std(squares) / math.sqrt(len(squares)))


# --- whole uploads of FOT -------------------------------------------------------------------------------------------

WAYS = {
    "gram, server": {"sketch": "gram", "project_at": "server"},
    "gram, client": {"sketch": "gram", "project_at": "client"},
    "gram, free biases": {"sketch": "gram", "bias": "free"},
    "gram, few patches": {"sketch": "gram", "max_patches": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", MODELS)
def test_a_clients_whole_upload_is_within_the_clip(net, way):
    made, shape = MODELS[net]
    model, strategy = handle(made(), shape), FOT(**WAYS[way])

    @given(adversarial, st.sampled_from([0.01, 1.0, 50.0]))
    @settings(max_examples=15, deadline=None)
    def check(inputs, clip):
        up = released(strategy, model, chosen(shape, *inputs), Privacy("client", clip))
        assert len(up) == len(model.layers) * (1 if way == "gram, server" else 2)
        assert 0 < flat(up).norm() <= clip * (1 + 1e-9)

    check()


@pytest.mark.parametrize("net", MODELS)
def test_a_sample_moves_the_upload_by_no_more_than_the_clip(net):
    made, shape = MODELS[net]
    model, strategy = handle(made(), shape), FOT(sketch="gram", project_at="server")
    privacy = Privacy("example", 0.8)

    @given(adversarial.filter(lambda inputs: inputs[1] > 1))
    @settings(max_examples=20, deadline=None)
    def check(inputs):
        x = chosen(shape, *inputs)
        whole = flat(released(strategy, model, x, privacy))
        moved = [
            (whole - flat(released(strategy, model, torch.cat([x[:i], x[i + 1 :]]), privacy))).norm()
            for i in range(len(x))
        ]
        assert max(moved) <= 0.8 * (1 + 1e-9)
        assert whole.norm() <= len(x) * 0.8

    check()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_samples_bound_is_reached(samples):
    """The packed Gram matrix of one sample has norm 1 if the input lies along an axis; those of samples are summed."""
    model = handle(toy.net(nn.Linear(5, 3, bias=False)), (5,))
    privacy, x = Privacy("example", 0.8), 1e3 * torch.eye(5)[:1].repeat(samples, 1)
    up = released(FOT(sketch="gram", project_at="server"), model, x, privacy)
    assert flat(up).norm() == pytest.approx(0.8 * samples)


def test_a_full_basis_leaves_its_share_to_the_others():
    """The first of three layers has a full basis: an upload has four parts, each of norm 1 / sqrt(4) at most."""
    model = handle(toy.mlp(5, 4, 4, 3), (5,))
    basis = {layer.name: bases.empty(layer.size + 1) for layer in model.layers}
    basis[model.layers[0].name] = torch.eye(6, dtype=torch.float64)
    up = released(FOT(sketch="gram"), model, torch.randn(9, 5), Privacy("client", 1.0), basis=basis)
    names = [layer.name for layer in model.layers[1:]]
    assert set(up) == {f"{kind}/{name}" for kind in ("sketch", "energy") for name in names}
    assert all(up[f"energy/{name}"] == pytest.approx(0.5) for name in names)  # energy 1 x 1 / sqrt(4)


class Twice(nn.Sequential):
    """One layer runs twice per pass, the other once."""

    def forward(self, x):
        x = x.to(self[0].weight)
        return self[1](torch.relu(self[0](torch.relu(self[0](x)))))


def test_a_layer_that_runs_several_times_a_pass_is_refused_for_single_samples():
    """Each run is scaled to energy 1, so a sample would change the sum by the clip once for each run."""
    model = handle(toy.net(nn.Linear(5, 5), nn.Linear(5, 3)), (5,))
    twice = handle(Twice(*model.module), (5,))
    strategy, x = FOT(sketch="gram", project_at="server"), torch.randn(130, 5, generator=rng.generator(0))
    for samples in (1, 130):  # one batch of 64, and three
        assert released(strategy, model, x[:samples], Privacy("example", 1.0))
        with pytest.raises(ConfigError, match="layer '0' runs several times per forward pass"):
            released(strategy, twice, x[:samples], Privacy("example", 1.0))
    # uploads of clients are clipped as a whole, and runs without privacy need no bound
    assert set(released(strategy, twice, x, Privacy("client", 1.0))) == {"sketch/0", "sketch/1"}
    assert set(released(strategy, twice, x, None)) == {"sketch/0", "sketch/1"}


class Routed(nn.Sequential):
    """A layer runs twice per pass, for the samples whose first number is not negative."""

    def forward(self, x):
        x = x.to(self[0].weight)
        positive = x[:, 0] >= 0
        hidden = self[0](torch.relu(self[0](x[positive])))
        return self[1](x.masked_scatter(positive[:, None], hidden))


def test_a_layer_that_sees_no_more_inputs_than_samples_but_some_of_them_twice_is_refused():
    net = toy.net(nn.Linear(5, 5), nn.Linear(5, 3))
    x = torch.randn(40, 5, generator=rng.generator(0))
    x[:, 0] = torch.tensor([1.0, -1.0]).repeat(20)  # 20 samples, twice: 40 inputs of 40 samples
    with pytest.raises(ConfigError, match="layer '0' runs several times per forward pass"):
        released(FOT(sketch="gram", project_at="server"), handle(Routed(*net), (5,)), x, Privacy("example", 1.0))


class Again(nn.Sequential):
    """Sends each sample through its first layer once, in two calls, or as two rows of one call."""

    way: str

    def forward(self, x):
        x = x.to(self[0].weight)
        hidden = self[0](x.repeat(2, 1) if self.way == "rows" else x)[: len(x)]
        return self[1]((self[0](x) if self.way == "calls" else hidden).relu())


@pytest.mark.parametrize("way", ["calls", "rows"])
def test_inputs_that_come_twice_count_once_at_client_level(way):
    """The inputs to a layer are twice as many, with the same directions, and a client sends means over them: its upload
    is that of a network in which they come once. So the server, which expects an energy of 1 x the share 1 / sqrt(4) of
    inputs that no basis covers, finds that nothing is covered."""
    layers, x = toy.net(nn.Linear(5, 5), nn.Linear(5, 3)), torch.randn(9, 5, generator=rng.generator(0))
    once, twice = (Again(*layers) for _ in range(2))
    once.way, twice.way = "once", way
    first, second = (
        released(FOT(sketch="gram"), handle(net, (5,)), x, Privacy("client", 1.0)) for net in (once, twice)
    )
    assert float(second["energy/0"]) == pytest.approx(0.5)
    torch.testing.assert_close(second, first)


class Rows(nn.Sequential):
    """A layer whose rows are positions of samples: positions first, or samples and positions in one dimension."""

    first: bool

    def forward(self, x):
        x = x.to(self[0].weight).transpose(0, 1) if self.first else x.to(self[0].weight).flatten(0, 1)
        x = self[0](x).relu()
        return self[1](x.mean(0) if self.first else x.unflatten(0, (-1, 4)).mean(1))


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_mixes_the_samples_is_refused_where_single_samples_count(first):
    """Each row is scaled to energy 1, so one sample of 4 positions would change the sum by 4 times its share."""
    module = Rows(*toy.net(nn.Linear(5, 5), nn.Linear(5, 3)))
    module.first = first
    model, x = handle(module, (4, 5)), torch.randn(4, 4, 5, generator=rng.generator(0))
    exact, drawn = dict(sketch="gram", project_at="server"), dict(sketch="gaussian", draw="sample")
    for options, privacy in ((exact, Privacy("example", 1.0)), (drawn, None), (dict(max_patches=2), None)):
        with pytest.raises(ConfigError, match="the samples are not the first dimension of the inputs of layer '0'"):
            released(FOT(**options), model, x, privacy)
    assert set(released(FOT(**exact), model, x, None)) == {"sketch/0", "sketch/1"}


def test_the_groups_of_a_convolution_run_once():
    """Each group of channels has its own basis; a second group is not a second run of the layer."""
    grouped = toy.net(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = handle(grouped, (2, 4, 4))
    x = torch.randn(70, 2, 4, 4, generator=rng.generator(0))
    up = released(FOT(sketch="gram", project_at="server"), model, x, Privacy("example", 1.0))
    assert len(model.layers) == 3 and set(up) == {f"sketch/{layer.name}" for layer in model.layers}


def test_a_run_refuses_such_a_layer_by_name():
    options = ["dp.level=example", "dp.noise_multiplier=1", "agg.weights=uniform", "dp.accountant=rdp", "tasks=2"]
    config = toy.config(*options, "rounds=1", "strategy.sketch=gram", "strategy.project_at=server")
    with pytest.raises(ConfigError, match="layer '0' runs several times per forward pass"):
        cfl.run(config, stream=toy.stream(2), model=Twice(nn.Linear(8, 8), nn.Linear(8, 2)))


# --- what the server learns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("project_at", ["client", "server"])
def test_without_noise_the_server_gets_the_subspace_of_unit_inputs(project_at):
    """Against NumPy: the leading eigenvectors of the sum over clients of the mean of x x^T / |x|^2, in two tasks."""
    model = handle(toy.net(nn.Linear(6, 3, bias=False)), (6,))
    strategy = FOT(sketch="gram", threshold=0.7, threshold_step=0.2, project_at=project_at)
    privacy, parts = Privacy("client", 1e-3), [toy.random(n, 6, seed=n) * 10.0**n for n in (4, 5, 6)]
    units = [x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True) for x in parts]
    values, vectors = np.linalg.eigh(sum(unit.T @ unit / len(unit) for unit in units))
    shares = np.cumsum(values[::-1]) / values.sum()

    server = {"params": model.params, **strategy.init_server(model.params, model)}
    for task, threshold in enumerate((0.7, 0.9)):
        info = info_of(model, privacy, clients=(0, 1, 2), task=task)
        shared = strategy.broadcast(server, info)
        uploads = [strategy.work(shared["params"], client_of(x.float()), shared, {}, info)[0] for x in parts]
        total = {name: sum(up[name] for up in uploads) for name in uploads[0]}
        server = strategy.absorb(server, {"work": total}, info, 1.0)
        found, rank = server["basis"]["0"].numpy(), int(np.argmax(shares >= threshold)) + 1
        wanted = vectors[:, ::-1][:, :rank]
        assert found.shape == (6, rank) and (1, 2)[task] < rank < 6
        np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-5)  # inputs are in float32
        assert float(server["coverage_estimate"]["0"]) == pytest.approx(shares[rank - 1], abs=1e-5)


@dataclass(frozen=True)
class UnitEnergy(FOT):
    """FOT with sketches of unit-energy inputs, as under privacy, but without noise."""

    def work(self, params, client, shared, state, info):
        return super().work(params, client, shared, state, _scaled(info))

    def absorb(self, server, mean, info, lr):
        return super().absorb(server, mean, _scaled(info), lr)


def _scaled(info):
    return info if info.phase.diagnostic else replace(info, privacy=Privacy("client", 1e3))


def _bases(*overrides, strategy):
    config = toy.config("seed=1", "cohort=4", "agg.weights=uniform", "tasks=2", *overrides)
    record = toy.recording(strategy)(**config.strategy)
    cfl.run(config, stream=toy.stream(2), strategy=record)
    return record.rounds[-1][-1]["basis"]


# A Gram matrix meets its bound. A Gaussian sketch exceeds it in half of the draws, by a fraction of about
# 1 / sqrt(2 s d), and is then clipped: the weights of clients differ by a few percent. With seed 1 no
# layer's rank is so near the next one that this changes it.
@pytest.mark.parametrize(("sketch", "apart"), [("gram", 1e-4), ("gaussian", 0.05)])
@pytest.mark.parametrize("secagg", ["none", "sum"])
def test_a_run_with_next_to_no_noise_finds_the_basis_of_one_without(secagg, sketch, apart):
    # noise of 1e-9 x 1e3 = 1e-6 in sums whose entries are near 1e3; integers with 40 fractional bits
    options = ["dp.noise_multiplier=1e-9", "dp.clip=1e3", "dp.accountant=rdp", f"secagg={secagg}"]
    options += ["secure.fraction_bits=40", f"strategy.sketch={sketch}"]
    noisy, plain = _bases(*options, strategy=FOT), _bases(options[-1], strategy=UnitEnergy)
    assert list(noisy) == list(plain)
    assert any(0 < basis.shape[1] < basis.shape[0] for basis in plain.values())
    for name, basis in plain.items():
        assert noisy[name].shape == basis.shape
        torch.testing.assert_close(noisy[name] @ noisy[name].T, basis @ basis.T, rtol=0, atol=apart)


@pytest.mark.parametrize("sketch", ["gaussian", "gram"])
def test_a_run_whose_noise_hides_all_says_so(sketch):
    options = ["dp.noise_multiplier=1000", "sampling=poisson", "agg.weights=uniform", "dp.accountant=rdp", "tasks=2"]
    options += ["seed=1", "local.lr=1e-6", f"strategy.sketch={sketch}"]
    with pytest.warns(UserWarning, match=r"the noise hides all directions \(task 0, phase gpse, round 0\)"):
        result = cfl.run(toy.config(*options), stream=toy.stream(2))
    assert set(result.metrics["subspace_use"].values()) == {0.0}


# --- the first layer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uploads(FOT):
    """Record the names in updates and in uploads of `work` by task, and the parameters after each round."""

    updates: list = field(default_factory=list)
    works: list = field(default_factory=list)
    weights: list = field(default_factory=list)

    def finish(self, params, ctx, steps):
        up, state = super().finish(params, ctx, steps)
        self.updates.append((ctx.task, set(up)))
        return up, state

    def work(self, params, client, shared, state, info):
        up, state = super().work(params, client, shared, state, info)
        self.works.append((info.task, info.phase.name, set(up)))
        return up, state

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        self.weights.append((info.task, new["params"]))
        return new


IMAGES = [  # 3 tasks of 48 images
    (x[:, :, None].expand(-1, 8, 8)[:, None].clone(), y)
    for x, y in ((torch.randn(48, 8, generator=rng.generator(t)), torch.arange(48) % 2) for t in range(3))
]


@pytest.mark.parametrize("project_at", ["client", "server"])
@pytest.mark.parametrize("protection", [[], ["dp.noise_multiplier=0.01", "sampling=poisson"], ["secagg=sum"]], ids=str)
@pytest.mark.parametrize("net", toy.quick("mlp", of=["mlp", "cnn"]))
@pytest.mark.filterwarnings("ignore:the noise hides all")
def test_with_the_first_layer_frozen_nothing_of_its_inputs_is_ever_sent(net, protection, project_at):
    """Its inputs are the data. After the first task no upload contains its weights, which stay bit-identical."""
    if net == "mlp":
        stream, module = toy.stream(), None
    else:
        stream = cfl.from_tensors([(x, y, x[:8], y[:8]) for x, y in IMAGES])
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, 2)
        )
    options = [*protection, "agg.weights=uniform", "strategy.freeze_first=true", f"strategy.project_at={project_at}"]
    config = toy.config(*options, "dp.accountant=rdp")
    strategy = Uploads(**config.strategy)
    result = cfl.run(config, stream=stream, strategy=strategy, model=module)
    first = result.model.layers[0]
    others = {layer.name for layer in result.model.layers[1:]}

    sketched = {name.partition("/")[2] for _, _, names in strategy.works for name in names}
    assert sketched == others and first.name not in sketched
    assert {phase for _, phase, _ in strategy.works} == {"gpse", "coverage"}  # nor in the diagnostic phase
    for task, names in strategy.updates:
        assert ({first.weight, first.bias} <= names) == (task == 0)
        assert task == 0 or not {first.weight, first.bias} & names
    at_end_of_first = [params for task, params in strategy.weights if task == 0][-1]
    for name in (first.weight, first.bias):
        assert torch.equal(result.params[name], at_end_of_first[name])
        assert not torch.equal(at_end_of_first[name], result.model.params[name])  # it trained in the first task


def test_without_that_the_first_layers_inputs_are_sketched():
    strategy = Uploads(**toy.config().strategy)
    result = cfl.run(toy.config("tasks=2"), stream=toy.stream(2), strategy=strategy)
    first = result.model.layers[0]
    assert any(f"sketch/{first.name}" in names for _, _, names in strategy.works)
    assert all(first.weight in names for _, names in strategy.updates)


# --- nothing to send ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protection",
    [["secagg=sum"], ["dp.noise_multiplier=1e-6", "dp.clip=1e3", "sampling=poisson", "dp.accountant=rdp"]],
    ids=["secagg", "dp"],
)
def test_a_round_of_sketches_in_which_all_bases_are_full_goes_on(protection):
    """With full bases after the first task, clients have nothing to send in GPSE of the second task."""
    options = ["agg.weights=uniform", "strategy.threshold=1.0", *protection]
    plain = cfl.run(toy.config(*options[:2]), stream=toy.stream(), model=nn.Linear(8, 2))
    assert set(plain.metrics["subspace_use"].values()) == {1.0}
    result = cfl.run(toy.config(*options), stream=toy.stream(), model=nn.Linear(8, 2))
    assert set(result.metrics["subspace_use"].values()) == {1.0}
