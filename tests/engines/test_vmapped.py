"""Engines with blocks and processes against the loop engine: whole runs of every method, and clients of unequal size.

Networks are in float64. Engines add the same numbers in different orders, with relative errors of about 1e-16 a sum. In
a run of a few dozen steps these stay below 1e-10, while real faults (a wrong mask, another client's buffers) exceed
1e-4. A few networks are in float32: sums have errors of 1e-7, and runs stay below 1e-5.
"""

import math

import pytest
import torch
from torch import nn

import cfl
from cfl import engines
from cfl.aggregation.gaussian import SampleNoise
from cfl.contract import Client, LocalRegularizer, RoundInputs, Share, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import UpdateError, optim, plugins, rng, tree
from cfl.engines import traced
from cfl.engines.block import Block
from cfl.models import Model
from cfl.streams import from_tensors
from cfl.streams.store import Pool, TaskSamples
from tests import toy
from tests.engines.test_loop import info_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.int64: 0}
BLOCKS = {f"vmapped, {block}": ("engine=vmapped", f"block={block}") for block in (2, 3, 99)}
POOLS = {
    "pool, 1": ("engine=pool", "block=1", "workers=2"),
    "pool, 2": ("engine=pool", "block=2", "workers=3"),
    "pool+vmapped, 2": ("engine=pool+vmapped", "block=2", "workers=1"),
}
RAGGED = ("partition.name=lda", "partition.alpha=0.5", "partition.min_samples=1", "local.batch_size=5", "local.lr=0.2")
SMALL = ("tasks=2", "partition.clients=6", "cohort=5", *RAGGED)


def images():
    """Two tasks of 40 training and 20 test images, 1 x 6 x 6, with a bright column that depends on the class."""
    parts = []
    for task in range(2):
        x, y = torch.randn(60, 1, 6, 6, generator=rng.generator(task)) / 2, torch.arange(60) % 2
        x[torch.arange(60), 0, :, 2 * task + y] += 1
        parts.append((x[:40], y[:40], x[40:], y[40:]))
    return from_tensors(parts, name="images", multi_head=False)


def conv():
    return toy.net(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))


def conv_norm():
    return toy.net(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))


def norm():
    return toy.net(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def plain():
    return toy.mlp(8, 6, 6, 2)


def single():
    return toy.mlp(8, 6, 6, 2).float()


def conv_single():
    return conv().float()


def toys(multi_head=False):
    return lambda: toy.stream(2, multi_head=multi_head)


def run(make, stream, options, method="fedavg", **more):
    """Run, and return the result and the reported rows."""
    log = toy.Rows()
    config = toy.config(*SMALL, *options, method=method)
    return cfl.run(config, stream=stream(), model=make(), sink=log, **more), log.rows


def assert_near(found, expected, where=""):
    """Assert equality up to rounding errors; "seconds" are not compared."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected.keys() - {"seconds"}:
            assert_near(found[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_near(one, other, f"{where}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, where
        assert float((found.double() - expected.double()).abs().max()) <= TOLERANCE[found.dtype], where
    elif isinstance(expected, float):
        close = 1e-10 if "/local/" in where else 1e-6  # float32 networks have float32 losses
        assert found == pytest.approx(expected, abs=close, rel=close, nan_ok=True), where
    else:
        assert found == expected, where


def assert_same_run(make, stream, options, names, method="fedavg"):
    """Compare the runs of other engines with that of the loop engine; return the latter's result and rows."""
    whole, rows = run(make, stream, options, method)
    for name in names:
        found, found_rows = run(make, stream, (*options, *{**BLOCKS, **POOLS}[name]), method)
        for what in ("params", "metrics"):
            assert_near(getattr(found, what), getattr(whole, what), f"{name}: {what}")
        assert_near(found_rows, rows, f"{name}: rows")
    return whole, rows


EPOCHS = ("local.epochs=2", "local.momentum=0.9", "local.weight_decay=0.01")
CASES = {
    "mlp": (plain, toys(), EPOCHS, "fedavg"),
    "adam": (plain, toys(), ("local.optimizer=adam", "local.epochs=2", "local.lr=0.01"), "fedavg"),
    "uniform weights": (plain, toys(True), ("agg.weights=uniform", "server.lr=0.7"), "fedavg"),
    "conv": (conv, images, EPOCHS, "fedavg"),
    "augmented": (conv, images, ("local.augment=[crop,flip]", "local.epochs=2"), "fedavg"),
    "norm, per task": (conv_norm, images, EPOCHS, "fedavg"),
    "norm, running": (conv_norm, images, ("model.norm_stats=running", *EPOCHS), "fedavg"),
    "norm, batch": (conv_norm, images, ("model.norm_stats=batch", *EPOCHS), "fedavg"),
    "norm, conv, augmented": (conv_norm, images, ("local.augment=[flip]", *EPOCHS), "fedavg"),
    "memories": (plain, toys(True), ("strategy.memory=5", "tasks=2", "seed=1"), "er"),
    "memories, norm": (conv_norm, images, ("strategy.memory=5",), "er"),
    "all tasks at once": (single, toys(True), EPOCHS, "joint"),
    "all tasks at once, augmented": (conv_single, images, ("local.augment=[crop]",), "joint"),
    "poisson": (plain, toys(), ("sampling=poisson", "cohort=3", "rounds=4"), "fedavg"),
    "drop-outs": (plain, toys(), ("drop_rate=0.4", "rounds=3"), "scaffold"),
    "local models": (conv_norm, images, ("eval_local=1",), "fedavg"),
    "sum": (plain, toys(), ("secagg=sum", "secure.fraction_bits=50"), "fot+scaffold"),
    "masked": (plain, toys(), ("secagg=full", "secure.fraction_bits=50", "drop_rate=0.2"), "fedavg"),
}


QUICK = ("norm, running", "memories")


@pytest.mark.parametrize("case", toy.quick(*QUICK, of=CASES))
def test_a_run_equals_that_of_the_loop_engine(case):
    make, stream, options, method = CASES[case]
    names = [*BLOCKS, *POOLS] if case == "mlp" else ["vmapped, 3", "pool+vmapped, 2"]
    whole, rows = assert_same_run(make, stream, options, names, method)
    start = whole.model.params  # the initial model
    assert max(float((whole.params[name] - start[name]).abs().max()) for name in start) > 1e-2  # it has trained
    if case == "poisson":
        assert len({row["clients"] for row in rows}) > 2


def test_the_clients_of_these_runs_have_unequal_sizes():
    from cfl.runtime.population import Population

    config = toy.config(*SMALL)
    sizes = [size for deal in Population(toy.stream(2), config).deals for size in deal.sizes.tolist()]
    assert len({-(-size // 5) for size in sizes}) > 2  # steps
    assert len({size % 5 for size in sizes}) > 2  # samples in the last batch
    assert max(sizes) > 5 * min(sizes)


PRIVATE = ("dp.noise_multiplier=0.5", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson", "dp.clip=0.1")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("secagg=sum", "secure.fraction_bits=40"),
        pytest.param(("cohort=1", "dp.amplify=true"), marks=pytest.mark.slow),
    ],
)
def test_noise_on_uploads_equals_that_of_the_loop_engine(more):
    """The noise key depends on round and client, not on the block. With cohort=1 some rounds draw no client."""
    options = ("tasks=1", "rounds=4", *PRIVATE, "dp.amplify=false", *more)
    _, rows = assert_same_run(plain, toys(), options, ["vmapped, 3", "pool, 2", "pool+vmapped, 2"])
    assert any(row["shortened"] for row in rows) and (("cohort=1" in more) == any(not row["clients"] for row in rows))


def test_per_sample_clipping_equals_that_of_the_loop_engine():
    """The noise differs, as a block draws it as a whole; here it is negligible, 1e-13 of the clip."""
    options = ("tasks=1", "dp.level=example", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson")
    noise = ("dp.noise_multiplier=1e-13", "dp.amplify=false", "dp.clip=0.3", "local.epochs=2")
    found = []
    for engine in ((), BLOCKS["vmapped, 3"], POOLS["pool, 2"], POOLS["pool+vmapped, 2"]):
        found.append(run(plain, toys(), (*options, *noise, *engine))[0].params)
    for other in found[1:]:
        assert_near(other, found[0])


METHODS = [name for name in plugins.strategies.names() if name != "fedavg"] + list(plugins.local.names())
OPTIONS = {
    "fedsol": ("regularizer.fedsol.scope=full",),
    "moon": ("regularizer.moon.mu=1.0",),
    "fedcil": ("strategy.iterations=2", "strategy.consolidation=2", "strategy.width=4"),
    **dict.fromkeys(("feddf", "fedet", "fedproj"), ("public.name=stream",)),
}


@pytest.mark.parametrize(
    ("multi_head", "engine"),
    toy.quick((True, "vmapped, 3"), of=[(True, "vmapped, 3"), (False, "vmapped, 3"), (True, "pool, 2")]),
)
@pytest.mark.parametrize("method", toy.quick(*toy.STRATEGIES[1:], *toy.RULES, of=METHODS))
def test_every_method_equals_its_run_with_the_loop_engine(method, multi_head, engine):
    options = ("local.momentum=0.5",) if method not in ("scaffold", "fednova") else ()
    make = single if method == "joint" else plain  # joint's loss accepts float32 only
    assert_same_run(make, toys(multi_head), (*OPTIONS.get(method, ()), *options), [engine], method)


# --- single rounds ---------------------------------------------------------------------------------------------------


def engine_of(name, model, strategy=None, rules=None, block=None, workers=2, **options):
    strategy = strategy or Strategy()
    defaults = dict(optimizer=optim.sgd(), epochs=1, batch_size=4, weights="samples", on_bad_update="raise")
    parts = dict(model=model, composed=ComposedMethod({"strategy": strategy, **(rules or {})}))
    return engines.build(
        name, block=block, cohort=9, workers=workers, known=[model], **parts, **{**defaults, **options}
    )


def model_of(make=plain, shape=(8,)):
    return Model(make(), shape, [2, 2], multi_head=False)


def samples_of(count, seed=0, bad=()):
    x = torch.randn(count, 8, generator=rng.generator(seed))
    y = (x[:, 0] > 0).long()
    x[list(bad)] = math.nan
    return TaskSamples(Pool(x), torch.arange(count), y)


def a_round(engine, samples, rows, states=None, observe=None, **changes):
    """Run a round of task 0. rows: client id to its rows."""
    info = info_of(engine.inner.model if hasattr(engine, "inner") else engine.model, rows, **changes)
    loop = getattr(engine, "inner", engine)
    shared = loop.composed.broadcast({"params": loop.model.params}, info)
    states = states or {id: loop.composed.client_state(None, shared["params"], loop.model) for id in rows}
    clients = [Client(id, {0: Share(samples, torch.tensor(own))}, 0, (0,)) for id, own in rows.items()]
    try:
        return engine.round(RoundInputs(info, shared, clients, states), observe)
    finally:
        engine.close()


ROWS = {1: [0, 1, 2], 4: list(range(3, 17)), 6: [17, 18, 19], 7: [20, 21], 9: list(range(22, 30))}
KINDS = [("vmapped", 2), ("vmapped", 9), ("pool", 2), ("pool+vmapped", 2)]


@pytest.mark.parametrize(("name", "block"), KINDS)
def test_only_the_client_with_a_bad_update_is_excluded(name, block):
    """Client 6 has NaN images and shares a block with others; they must not be affected."""
    samples = samples_of(30, bad=[17])
    alone = a_round(engine_of("loop", model_of(), on_bad_update="exclude"), samples, ROWS)
    found = a_round(engine_of(name, model_of(), block=block, on_bad_update="exclude"), samples, ROWS)
    assert found.excluded == alone.excluded == [6] and list(found.states) == [1, 4, 7, 9]
    assert_near(found.mean, alone.mean)
    assert_near(found.loss, alone.loss, "loss")
    with pytest.raises(UpdateError, match=r"client 6 sent an update with NaN or infinity \(task 0, phase train"):
        a_round(engine_of(name, model_of(), block=block), samples, ROWS)


@pytest.mark.parametrize(("name", "block"), KINDS)
def test_observers_see_every_model_in_evaluation_mode(name, block):
    def looked(engine):
        seen, modes = {}, set()
        model = getattr(engine, "inner", engine).model

        def observe(id, params):
            assert id not in seen
            seen[id] = {key: leaf.clone() for key, leaf in params.items()}
            modes.add(model.module.training)

        a_round(engine, samples_of(30), ROWS, observe=observe)
        assert modes == {False}
        return {id: seen[id] for id in sorted(seen)}

    alone = looked(engine_of("loop", model_of(norm)))
    assert list(alone) == list(ROWS)
    assert_near(looked(engine_of(name, model_of(norm), block=block)), alone)


class Stacks(cfl.LocalRegularizer):
    """Uploads the client's id and steps, to be stacked."""

    gathers = "stack"

    def finish(self, params, ctx, steps):
        return {"id": ctx.client.double(), "steps": torch.tensor(float(steps))}, ctx.state


@pytest.mark.parametrize(("name", "block"), [("loop", None), *KINDS])
def test_stacked_uploads_are_in_the_order_of_ids(name, block):
    found = a_round(engine_of(name, model_of(), rules={"stacks": Stacks()}, block=block), samples_of(30), ROWS)
    assert found.mean["stacks"]["id"].tolist() == list(ROWS)
    assert found.mean["stacks"]["steps"].tolist() == [1, 4, 1, 1, 2]  # batches of 4


class Weighs(LocalRegularizer):
    """Multiplies gradients by the client's id."""

    def adjust(self, grads, params, ctx):
        return tree.map(lambda grad: grad * ctx.client, grads)


@pytest.mark.parametrize("make", [plain, norm])
def test_a_step_sees_the_id_of_its_client(make):
    """With batch normalisation, clients 4 and 9, 1 and 6, and 7 take the first step apart, by the size of a batch."""
    alone, found = (
        a_round(engine_of(name, model_of(make), rules={"weighs": Weighs()}, block=block), samples_of(30), ROWS)
        for name, block in (("loop", None), ("vmapped", 9))
    )
    assert_near(found.mean, alone.mean)


class Remembers(Strategy):
    """Has a state, whose shape the test makes differ between odd and even clients."""

    def init_client(self, params, model):
        return {"seen": torch.zeros(2)}

    def penalty(self, params, logits, ctx):
        return 0.1 * ctx.state["seen"].sum() * params["0.bias"].sum()

    def finish(self, params, ctx, steps):
        upload, _ = super().finish(params, ctx, steps)
        return upload, {"seen": ctx.state["seen"] + 1}


@pytest.mark.parametrize(("name", "block"), KINDS)
def test_states_of_different_shapes_go_into_different_blocks(name, block):
    states = {id: {"strategy/seen": torch.full((1 + id % 2,), float(id))} for id in ROWS}
    alone, found = (
        a_round(engine_of(kind, model_of(), Remembers(), block=size), samples_of(30), ROWS, states)
        for kind, size in (("loop", None), (name, block))
    )
    assert_near(found.mean, alone.mean)
    assert_near(found.states, alone.states)
    assert found.states[4]["strategy/seen"].tolist() == [5.0]


@pytest.mark.parametrize(("apply", "together"), [("update", [[4, 9, 1, 6, 7]]), ("gradient", [[9, 1, 7], [4, 6]])])
def test_states_that_no_step_sees_do_not_split_blocks(apply, together):
    """Even and odd clients have GPM bases of different widths; steps see the bases only if GPM projects gradients."""
    strategy, samples = plugins.strategies.get("gpm")(apply=apply, bias="free"), samples_of(30)
    even, odd = (torch.eye(8, dtype=torch.float64)[:, :width] for width in (2, 3))
    states = {id: {"strategy/basis/0": odd if id % 2 else even} for id in ROWS}
    engine = engine_of("vmapped", model_of(), strategy, block=9)
    clients = [Client(id, {0: Share(samples, torch.tensor(own))}, 0, (0,)) for id, own in ROWS.items()]
    assert [[client.id for client in block] for block in engine.blocks(clients, states)] == together
    alone, found = (a_round(each, samples, ROWS, states) for each in (engine_of("loop", model_of(), strategy), engine))
    assert_near(found.mean, alone.mean)
    assert found.states.keys() == states.keys()
    step = found.mean["strategy"]["0.weight"]
    assert float(step[:, :2].abs().max()) < 1e-12 < 1e-4 < float(step[:, 3:].abs().max())


def test_blocks_are_sorted_by_steps():
    engine, samples = engine_of("vmapped", model_of(), block=2), samples_of(30)
    clients = [Client(id, {0: Share(samples, torch.tensor(own))}, 0, (0,)) for id, own in ROWS.items()]
    found = [[client.id for client in block] for block in engine.blocks(clients, dict.fromkeys(ROWS, {}))]
    assert found == [[4, 9], [1, 6], [7]]  # 4, 2, 1, 1, 1 steps; ties: more samples first, then lower id


def test_clients_with_other_samples_are_in_other_blocks():
    """As hostile clients are, whose samples have other labels: a block gathers from the samples of its first client."""
    engine, kinds = engine_of("vmapped", model_of(), block=5), [samples_of(30), samples_of(30)]
    clients = [Client(id, {0: Share(kinds[id % 2], torch.tensor(own))}, 0, (0,)) for id, own in ROWS.items()]
    found = [[client.id for client in block] for block in engine.blocks(clients, dict.fromkeys(ROWS, {}))]
    assert sorted(found) == [[4, 6], [9, 1, 7]]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", [plain, norm])
def test_a_gather_of_a_few_steps_has_the_batches_of_these_steps(make, steps, monkeypatch):
    """Client 4 takes 8 steps, 4 in each of two epochs: a gather of 1 step is made 8 times, one of 3 steps 3 times."""
    gathered, gather = [], Block._gather
    monkeypatch.setattr(Block, "_gather", lambda block, index: gathered.append(index) or gather(block, index))
    monkeypatch.setattr("cfl.engines.block.AHEAD", steps * len(ROWS) * 4 * 8 * 4)  # batches of 4 x 8 float32
    alone, found = (
        a_round(engine_of(name, model_of(make), block=block, epochs=2), samples_of(30), ROWS)
        for name, block in (("loop", None), ("vmapped", 9))
    )
    assert gathered == [*range(0, 8, steps)]
    assert_near(found.mean, alone.mean)
    assert_near(found.loss, alone.loss, "loss")


def uploads(engine, rows, samples):
    """Each client's local model minus the global model, first layer, (clients, weights)."""
    seen = {}
    a_round(engine, samples, rows, observe=lambda id, params: seen.update({id: params["0.weight"].clone()}))
    start = getattr(engine, "inner", engine).model.params["0.weight"]
    return torch.stack([(seen[id] - start).flatten() for id in rows])


def test_clients_of_a_block_have_independent_noise_and_the_same_as_alone():
    """Six clients with the same 4 samples and noise far above the gradients: shared noise would show as correlation.

    Two independent vectors of 48 entries have a correlation above 0.6 in 1 of 10^5 pairs (4.1 standard deviations of
    1/sqrt(47)).
    """
    noise, rows = SampleNoise(1.0, 50.0, 4, seed=0), {id: list(range(4)) for id in range(6)}
    engine = engine_of("vmapped", model_of(), block=6, noise=noise, epochs=3)
    found = uploads(engine, rows, samples_of(4))
    torch.testing.assert_close(
        found, uploads(engine_of("loop", model_of(), noise=noise, epochs=3), rows, samples_of(4))
    )
    pairs = torch.corrcoef(found).triu(1).abs()
    assert 0 < float(pairs.max()) < 0.6
    # sum of 3 steps: lr x multiplier x clip / expected x sqrt(3); estimated from 6 x 48 draws, so +-4 %
    assert float(found.std()) == pytest.approx(0.1 * 50 / 4 * 3**0.5, rel=0.2)


@pytest.mark.parametrize(("name", "block"), [("loop", None), ("vmapped", 2), ("vmapped", 4)])
def test_dropout_differs_between_clients_and_repeats_with_the_run(name, block):
    """Each client has the same single sample, so nothing else differs; a client draws 8 x 6 times whether to drop."""

    def make():
        return toy.net(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))

    rows, samples = {id: [0] for id in range(4)}, samples_of(1)
    first, again = (uploads(engine_of(name, model_of(make), block=block, epochs=8), rows, samples) for _ in range(2))
    assert torch.equal(first, again)
    assert all(not torch.allclose(first[0], other, atol=1e-4) for other in first[1:])


def test_an_error_of_vmap_names_the_clients_of_the_block():
    class Branches(cfl.LocalRegularizer):
        def adjust(self, grads, params, ctx):
            return grads if grads["0.weight"].sum() > 0 else {name: -leaf for name, leaf in grads.items()}

    with pytest.raises(UpdateError, match=r"local training failed at clients 4, 9 \(task 0, phase train, round 0\): "):
        a_round(engine_of("vmapped", model_of(), rules={"odd": Branches()}, block=2), samples_of(30), ROWS)


class Centred(nn.Module):
    """Samples less the mean of their batch."""

    def forward(self, x):
        return x - x.mean(0)


def centred():
    return toy.net(nn.Linear(8, 6), Centred(), nn.ReLU(), nn.Linear(6, 2))


def instances():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    return toy.net(nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("make", [centred, instances])
@pytest.mark.parametrize("compile", ["compile=false", "compile=true"])
def test_samples_that_depend_on_their_batch_see_no_padding(make, compile, monkeypatch):
    monkeypatch.setattr(traced, "compiled", lambda graph, leaves: graph)  # the trace, without the compiler's seconds
    assert_same_run(make, toys(), (compile,), BLOCKS)


OWNED = ("partition.name=stream", "partition.clients=2", "rounds=2")


@pytest.mark.parametrize("samples", [9, 17])
def test_a_single_last_sample_joins_the_batch_before_it(samples):
    """9 = 4 + 5 samples make two steps of batch normalisation, which one sample cannot; without it they make three."""
    options = ("tasks=1", "local.batch_size=4", "model.norm_stats=running", *OWNED)
    stream = of_size(samples)
    assert_same_run(norm, lambda: stream, options, BLOCKS)
    for net, steps in ((norm, -(-samples // 4) - 1), (plain, -(-samples // 4))):
        seen = Steps()
        run(net, lambda: stream, options, regularizers={"steps": seen})
        assert set(seen.counts) == {steps}


class Steps(LocalRegularizer):
    """Notes the number of steps of each client."""

    def __init__(self):
        object.__setattr__(self, "counts", [])

    def finish(self, params, ctx, steps):
        self.counts.append(steps)
        return super().finish(params, ctx, steps)


def of_size(samples):
    x, y = toy.random(2 * samples, 8, seed=1).float(), torch.arange(2 * samples) % 2
    return cfl.from_tensors([(x, y, x, y)], clients=[torch.arange(2 * samples) // samples])


def test_padding_is_a_sample_that_the_network_takes():
    """An image of zeros has no deviation to divide by. Flips make blocks pad their batches one by one."""

    class Standardised(nn.Module):
        def forward(self, x):
            return (x - x.mean((1, 2, 3), True)) / x.std((1, 2, 3), keepdim=True)

    def make():
        return toy.net(Standardised(), nn.Flatten(), nn.Linear(16, 2))

    x, y = toy.random(20, 1, 4, 4, seed=1).float(), torch.arange(20) % 2
    stream = cfl.from_tensors([(x, y, x, y)], clients=[[0] * 13 + [1] * 7])
    assert_same_run(make, lambda: stream, ("tasks=1", "local.augment=[flip]", *OWNED), BLOCKS)


def test_a_network_that_cannot_be_vectorised_says_so():
    def make():
        return toy.net(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 2))

    with pytest.raises(
        UpdateError, match=r"clients cannot train as a block: Batching rule .*; set engine=loop or pool"
    ):
        run(make, toys(), ["engine=vmapped", "model.norm_stats=running"])


class Branching(LocalRegularizer):
    """Asks for the value of a loss."""

    def penalty(self, params, logits, ctx):
        return logits.sum() if float(logits.detach().sum()) > 0 else logits.sum() * 0


def test_a_hook_that_cannot_be_vectorised_says_so():
    hook = {"branching": Branching()}
    with pytest.raises(UpdateError, match=r"clients cannot train as a block: .*Branching\.penalty.*; set engine=loop"):
        run(lambda: None, toys(), ["engine=vmapped"], regularizers=hook)
    run(lambda: None, toys(), ["engine=loop"], regularizers=hook)


class Taped(LocalRegularizer):
    """Takes its gradient by torch.autograd, which has no effect in a function that torch.func transforms."""

    def adjust(self, grads, params, ctx):
        free = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        loss = sum(leaf.square().sum() for leaf in free.values())
        found = torch.autograd.grad(loss, [*free.values()])
        return {name: grads[name] + grad for name, grad in zip(free, found, strict=True)}


def test_a_hook_that_asks_torch_autograd_says_so():
    with pytest.raises(UpdateError, match=r"clients cannot train as a block: .*; set engine=loop or pool"):
        run(lambda: None, toys(), ["engine=vmapped"], regularizers={"taped": Taped()})
    run(lambda: None, toys(), ["engine=loop"], regularizers={"taped": Taped()})


class Fails(LocalRegularizer):
    """Reads the key, so that clients train one by one, and fails at a client."""

    def adjust(self, grads, params, ctx):
        if ctx.key and int(ctx.client) == 1:
            raise ValueError("no client 1")
        return grads


def test_a_client_that_trains_alone_is_named_alone():
    with pytest.raises(UpdateError, match=r"failed at client 1\b.*no client 1"):
        run(lambda: None, toys(), ["engine=vmapped", "block=3"], regularizers={"fails": Fails()})


class Writing(LocalRegularizer):
    """Counts its calls in place."""

    def init_client(self, params, model):
        return {"calls": torch.zeros(3)}

    def adjust(self, grads, params, ctx):
        ctx.state["calls"].add_(1)
        return grads


@pytest.mark.parametrize("engine", [["engine=loop"], ["engine=vmapped", "block=3"]], ids=["loop", "vmapped"])
def test_a_step_that_writes_to_the_state_is_refused(engine):
    with pytest.raises(UpdateError, match="a hook writes in place to the state of client"):
        run(plain, toys(), engine, regularizers={"writing": Writing()})


class Endless(LocalRegularizer):
    """Divides by zero."""

    def adjust(self, grads, params, ctx):
        return tree.map(lambda grad: grad / (grad - grad).abs().sum(), grads)


def test_a_hook_at_fault_is_named_though_its_steps_are_compiled(monkeypatch):
    monkeypatch.setattr(traced, "compiled", lambda graph, leaves: graph)
    with pytest.raises(UpdateError, match=r"adjust of regularizer\.endless \(Endless\) is NaN"):
        run(plain, toys(), ["engine=vmapped", "block=1", "compile=true"], regularizers={"endless": Endless()})
