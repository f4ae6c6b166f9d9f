"""FedSOL: perturbations and steps by hand, the paper's toy example, borrowed terms, and whole runs."""

import copy
import functools
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedDyn, FedNTD, FedProx, FedSOL, Moon, Scaffold
from cfl.methods.regularizers.fedsol import proximal_gradient
from cfl.methods.strategies.fot import FOT
from cfl.models import Model
from tests import toy

BATCH = Batch(toy.random(6, 3), torch.tensor([0, 1, 2, 1, 1, 0]), torch.ones(6, dtype=torch.float64), torch.arange(6))
HEAD = ("2.weight", "2.bias")
BODY = ("0.weight", "0.bias")
SCOPES = {"head": HEAD, "body": BODY, "full": (*BODY, *HEAD)}
SCALES = ("output_axis", "layer", "none")
BOTH = list(itertools.product(SCOPES, SCALES))


# --- helpers ---------------------------------------------------------------------------------------------------------


def make(optimizer=None, module=None, strategy=None, **local):
    module = toy.mlp(3, 4, 3) if module is None else module
    model = Model(module, (3,), [3], multi_head=False, norm_stats="running")
    model.module.train()
    composed = ComposedMethod({"strategy": strategy or Strategy(), **local})
    return model, LocalStep(model, 0, frozenset(), composed, optimizer or optim.sgd())


def elsewhere(params, size=0.3, seed=7):
    """The weights plus random shifts."""
    return {
        name: leaf + size * toy.random(*leaf.shape, seed=seed + number)
        for number, (name, leaf) in enumerate(params.items())
    }


def trajectory(model, step, steps=4, state=None):
    local, seen = step.start(model.params), []
    for index in range(steps):
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, state=state or {}, lr=0.1, step=index))
        seen.append(local._replace(params=tree.clone(local.params)))
    return seen


def shift(step, params, shared, state=None, batch=BATCH):
    """The perturbation of each leaf: the point of the gradient minus `params`."""
    points = []

    def look(at, ctx):
        points.append(at)
        return at

    ctx = step.context(StepInputs(shared, batch, state=state or {}, lr=0.1, step=1))
    step.composed.around(look)(params, ctx)
    (point,) = points
    return tree.sub(point, params)


def by_autograd(model, params, loss):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    loss(model.logits(leaves, BATCH.x, 0)).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def plain(logits):
    return nn.functional.cross_entropy(logits, BATCH.y)


def to_the_global(model, temperature):
    """KL(global || local) as an explicit formula."""
    p = (model.logits(model.params, BATCH.x, 0) / temperature).softmax(1)
    return lambda logits: (p * (p.log() - (logits / temperature).log_softmax(1))).sum(1).mean()


def norm(leaves):
    return tree.dot(leaves, leaves).sqrt().item()


def cosine(a, b):
    return (tree.dot(a, b) / (norm(a) * norm(b))).item()


def run(*overrides, method="fedsol", multi_head=False, **objects):
    config = toy.config("tasks=2", *overrides, method=method)
    return cfl.run(config, stream=toy.stream(config.tasks, multi_head=multi_head), **objects)


@functools.cache
def reference(method):
    """The final model of a plain run."""
    return run(method=method).params


def same(a, b):
    return all(torch.equal(leaf, b[name]) for name, leaf in a.items())


# --- the perturbation ------------------------------------------------------------------------------------------------


def test_perturbation_by_hand():
    center = {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0]]), "b": torch.tensor([0.0, 0.0])}
    params = {"w": torch.tensor([[4.0, 1.0], [5.0, 3.0]]), "b": torch.tensor([0.0, -2.0])}
    gradient = {"w": torch.tensor([[1.0, 1.0], [-1.0, 2.0]]), "b": torch.tensor([3.0, 3.0])}
    # |g_p| = sqrt(1 + 1 + 1 + 4 + 9 + 9) = 5, rho / |g_p| = 2; moved: ((3, 0), (4, 2)) the weight, (0, -2) the bias
    expected = {
        "none": ([[2, 2], [-2, 4]], [6, 6]),
        # columns (3, 4) and (0, 2), of length 5 and 2: Lambda ((.6, 0), (.8, 1))
        "output_axis": ([[1.2, 0], [-1.6, 4]], [0, 6]),
        # the whole layer has length sqrt(9 + 16 + 4)
        "layer": ([[6 / 29**0.5, 0], [-8 / 29**0.5, 8 / 29**0.5]], [0, 6]),
    }
    for scale, (weight, bias) in expected.items():
        found = FedSOL(rho=10.0, scale=scale).perturbation(gradient, params, center)
        assert torch.allclose(found["w"], torch.tensor(weight, dtype=torch.float32), atol=1e-6)
        assert torch.allclose(found["b"], torch.tensor(bias, dtype=torch.float32), atol=1e-6)


@pytest.mark.parametrize("scale", ["output_axis", "layer", "none"])
def test_a_growing_head_is_scaled_as_a_whole(scale):
    """In a model with a growing head the parts of the tasks have a leaf each."""
    shapes = {"body.weight": (5, 4), "head.weight": (6, 5), "head.bias": (6,)}
    center, params, gradient = ({name: toy.random(*shape, seed=s) for name, shape in shapes.items()} for s in (1, 2, 3))

    def parts(leaves):
        head = {
            f"{name}@{task}": leaves[name][2 * task : 2 * task + 2] for task in range(3) for name in list(shapes)[1:]
        }
        return {"body.weight": leaves["body.weight"], **head}

    whole = FedSOL(scale=scale).perturbation(gradient, params, center)
    found = FedSOL(scale=scale).perturbation(parts(gradient), parts(params), parts(center), growing=True)
    assert all(torch.allclose(leaf, found[name], atol=1e-12) for name, leaf in parts(whole).items())


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2), (4,), ()])
def test_scales_have_unit_norm(shape):
    moved = toy.random(*shape, 1).squeeze(-1)
    across = FedSOL(scale="output_axis").weight_scale(moved, moved)
    whole = FedSOL(scale="layer").weight_scale(moved, moved)
    assert across.shape == whole.shape == moved.shape
    assert across.min() >= 0 and whole.min() >= 0
    lengths = across.reshape(shape[0] if shape else 1, -1).norm(dim=0)  # for each input, the norm over the outputs
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-12)
    assert whole.norm().item() == pytest.approx(1, abs=1e-12)
    if len(shape) < 2:
        assert torch.allclose(across, whole, atol=1e-12)


@pytest.mark.parametrize("scale", ["output_axis", "layer"])
def test_weights_that_have_not_moved_have_scale_zero(scale):
    rule = FedSOL(scale=scale)
    assert rule.weight_scale(torch.zeros(4, 3), torch.zeros(4, 3)).tolist() == torch.zeros(4, 3).tolist()
    moved = toy.random(4, 3)
    moved[:, 1] = 0
    found = rule.weight_scale(moved, moved)
    assert found[:, 1].tolist() == [0, 0, 0, 0]
    assert found[:, [0, 2]].min() > 0  # and no NaN


def test_length_of_the_perturbation():
    # |e| = rho |Lambda g_p| / |g_p|, and each entry of Lambda is in [0, 1], or 1 without a scale
    for seed in range(10):
        center, gradient = ({"w": toy.random(4, 3, seed=seed + s), "b": toy.random(4, seed=seed + s)} for s in (1, 50))
        params = elsewhere(center, seed=seed + 200)
        lengths = [norm(FedSOL(rho=0.7, scale=scale).perturbation(gradient, params, center)) for scale in SCALES]
        assert 0 < lengths[1] < lengths[0] < 0.7  # a layer's norm is at least that of its columns
        assert lengths[2] == pytest.approx(0.7, abs=1e-9)


@pytest.mark.parametrize("guard", [True, False])
def test_a_gradient_of_rounding_error_does_not_perturb(guard):
    rule = FedSOL(rho=1.5, scale="none", first_step_guard=guard)
    weights = {"w": torch.zeros(2, dtype=torch.float64)}

    def length(*gradient):
        return norm(rule.perturbation({"w": torch.tensor(gradient, dtype=torch.float64)}, weights, weights))

    assert length(0.0, 0.0) == 0
    assert length(0.0, 1.1e-6) == pytest.approx(1.5, rel=1e-5)
    assert length(0.0, 0.9e-6) == pytest.approx(0.0 if guard else 1.5, rel=1e-5)


@pytest.mark.parametrize("guard", [True, False])
def test_a_float32_client_at_the_global_model(guard):
    # The gradient is rounding error, about 1e-8; without a scale, only the guard prevents a perturbation of length rho.
    rule = FedSOL(rho=1.5, scope="full", scale="none", first_step_guard=guard)
    model, step = make(module=toy.mlp(3, 40, 3).float(), fedsol=rule)
    batch = BATCH._replace(x=BATCH.x.float(), mask=BATCH.mask.float())
    ctx = step.context(StepInputs({"params": model.params}, batch))
    gradient = proximal_gradient("kl", 3.0, model.params, frozenset(model.params), ctx)
    assert 0 < norm(gradient) < 1e-6
    found = shift(step, model.params, {"params": model.params}, batch=batch)
    assert norm(found) == pytest.approx(0.0 if guard else 1.5, rel=1e-2)


def test_the_direction_is_the_gradient_of_the_divergence_from_the_global_model():
    for temperature in (1.0, 3.0):
        rule = FedSOL(rho=0.8, scope="full", scale="none", temperature=temperature)
        model, step = make(fedsol=rule)
        params = elsewhere(model.params)
        expected = by_autograd(model, params, to_the_global(model, temperature))
        found = shift(step, params, {"params": model.params})
        for name, leaf in expected.items():
            assert torch.allclose(found[name], 0.8 * leaf / norm(expected), atol=1e-9)


def test_the_l2_direction_leads_away_from_the_global_model():
    model, step = make(fedsol=FedSOL(rho=0.8, scope="full", scale="none", proximal="l2"))
    params = elsewhere(model.params)
    moved = tree.sub(params, model.params)
    found = shift(step, params, {"params": model.params})
    assert all(torch.allclose(leaf, 0.8 * moved[name] / norm(moved), atol=1e-9) for name, leaf in found.items())


@pytest.mark.parametrize("proximal", ["kl", "l2"])
@pytest.mark.parametrize("scope", SCOPES)
def test_weights_out_of_scope_train_without_perturbation(scope, proximal):
    # The norm in the denominator covers only the leaves in scope.
    model, step = make(fedsol=FedSOL(rho=0.8, scope=scope, scale="none", proximal=proximal))
    params = elsewhere(model.params)
    found = shift(step, params, {"params": model.params})
    for name, leaf in found.items():
        assert (leaf.abs().max() > 0) == (name in SCOPES[scope])
    assert norm(found) == pytest.approx(0.8, abs=1e-9)
    after, _ = step(step.start(params), StepInputs({"params": model.params}, BATCH, lr=0.1, step=1))
    assert all((after.params[name] - leaf).abs().max() > 1e-4 for name, leaf in params.items())


@pytest.mark.parametrize("scope, found", [("head", ["2.bias@1", "2.weight@1"]), ("body", ["0.bias", "0.weight"])])
def test_no_head_is_in_the_body_even_if_heads_of_earlier_tasks_train(scope, found):
    """As with strategy.train_old_heads=true of ER."""
    model = Model(toy.mlp(3, 4, 3), (3,), [3, 3], multi_head=True)
    assert sorted(FedSOL(scope=scope).perturbed_names(model.params, SimpleNamespace(model=model, task=1))) == found


def test_the_teacher_is_the_global_model_in_evaluation_mode():
    # The client's pass has dropout and batch statistics; the global model's predictions have neither.
    net = toy.net(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    model, step = make(module=net, fedsol=FedSOL(rho=0.8, scope="head", scale="none"))
    shared = {**model.params, "1.running_mean": model.params["1.running_mean"] + 0.5}
    params = elsewhere(step.start(model.params).params)
    teacher, student = (copy.deepcopy(model.module) for _ in range(2))
    teacher.load_state_dict(shared)
    student.load_state_dict({**model.params, **params})
    with torch.no_grad():
        p = (teacher.eval()(BATCH.x) / 3).softmax(1)
    with rng.fork(5):  # the same dropout masks
        logits = student.train()(BATCH.x)
    (p * (p.log() - (logits / 3).log_softmax(1))).sum(1).mean().backward()
    expected = {name: leaf.grad for name, leaf in student.named_parameters() if name.startswith("4")}
    with rng.fork(5):
        found = shift(step, params, {"params": shared})
    assert all(torch.allclose(found[name], 0.8 * leaf / norm(expected)) for name, leaf in expected.items())
    assert all(layer.training for layer in model.module.modules())


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope, scale", BOTH)
def test_a_step_starts_at_the_weights_with_the_gradient_of_the_perturbed_point(scope, scale):
    # w - lr v, v = momentum v + g_u + decay w: weight decay and momentum do not see the perturbation
    lr, momentum, decay, rho = 0.1, 0.9, 0.05, 0.7
    rule = FedSOL(rho=rho, scope=scope, scale=scale)
    model, step = make(optim.sgd(momentum, decay), fedsol=rule)
    local, velocity = step.start(model.params), tree.map(torch.zeros_like, model.params)
    for index in range(4):
        before = tree.clone(local.params)
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=lr, step=index))
        beside = dict(before)
        if index:  # at the first step the client's model is the global model
            g_p = tree.select(by_autograd(model, before, to_the_global(model, 3.0)), SCOPES[scope])
            for name, leaf in g_p.items():
                moved = (before[name] - model.params[name]).abs()
                lengths = {"output_axis": moved.norm(dim=0), "layer": moved.norm(), "none": moved}
                beside[name] = before[name] + rho * moved / lengths[scale] * leaf / norm(g_p)
        g_u = by_autograd(model, beside, plain)
        velocity = {name: momentum * v + g_u[name] + decay * before[name] for name, v in velocity.items()}
        for name, leaf in local.params.items():
            assert torch.allclose(leaf, before[name] - lr * velocity[name], atol=1e-9)


@pytest.mark.parametrize("scope, scale", BOTH)
def test_the_first_step_is_fedavgs_and_the_second_is_not(scope, scale):
    # With scales, Lambda is 0 as no weight has moved; without, the guard skips a gradient of rounding error.
    (model, free), (_, stable) = make(), make(fedsol=FedSOL(scope=scope, scale=scale))
    theirs, ours = trajectory(model, free, steps=2), trajectory(model, stable, steps=2)
    assert same(ours[0].params, theirs[0].params)
    assert not same(ours[1].params, theirs[1].params)


@pytest.mark.parametrize("scale", ["output_axis", "layer"])
def test_scales_alone_make_the_first_step_fedavgs(scale):
    rule = FedSOL(scope="full", scale=scale, first_step_guard=False)
    (model, free), (_, stable) = make(), make(fedsol=rule)
    assert same(trajectory(model, stable, steps=1)[0].params, trajectory(model, free, steps=1)[0].params)


@pytest.mark.parametrize("scope", SCOPES)
def test_rho_zero_is_fedavg_to_the_bit(scope):
    norms = toy.net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    for module in (None, norms):
        (model, free), (_, stable) = (
            make(optim.sgd(0.9, 1e-2), module, **rules) for rules in ({}, {"fedsol": FedSOL(rho=0.0, scope=scope)})
        )
        for ours, theirs in zip(trajectory(model, stable), trajectory(model, free), strict=True):
            assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_network_that_is_all_head_has_no_body_to_perturb():
    module = nn.Sequential(nn.Flatten(), nn.Linear(toy.DIMENSIONS, toy.CLASSES))
    with pytest.raises(ConfigError, match="fedsol.*scope"):
        run("regularizer.fedsol.scope=body", model=module)


@pytest.mark.parametrize("scale", SCALES)
def test_running_statistics_come_from_the_unperturbed_weights(scale):
    net = toy.net(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    rule = FedSOL(rho=5.0, scope="full", scale=scale)
    (model, free), (_, stable) = make(module=net), make(module=net, fedsol=rule)
    params = elsewhere(free.start(model.params).params)
    ours, theirs = (
        step(step.start({**model.params, **params}), StepInputs({"params": model.params}, BATCH, lr=0.1, step=1))[0]
        for step in (stable, free)
    )
    assert not same(ours.params, theirs.params)
    assert ours.buffers["1.num_batches_tracked"] == 1
    assert same(ours.buffers, theirs.buffers)


def test_penalties_are_taken_at_the_perturbed_point():
    # FedProx listed before FedSOL is part of the loss whose gradient is taken at w + e: mu (w + e - w_global).
    mu = 0.5
    (model, alone), (_, both) = (
        make(**rules, fedsol=FedSOL(rho=0.8, scope="full", scale="none")) for rules in ({}, {"fedprox": FedProx(mu=mu)})
    )
    params, shared = elsewhere(model.params), {"params": model.params}
    e = shift(alone, params, shared)
    without, with_it = (
        step(step.start(params), StepInputs(shared, BATCH, lr=1.0, step=1))[0].params for step in (alone, both)
    )
    for name, leaf in e.items():
        expected = mu * (params[name] + leaf - model.params[name])
        assert torch.allclose(without[name] - with_it[name], expected, atol=1e-9)


# --- the paper's example in two dimensions ---------------------------------------------------------------------------


def bowl(rule, delta):
    """The global model at 0, which is the global optimum; the local step, and the batch."""
    model = Model(toy.Point(), (2,), [2], multi_head=False)
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": toy.Bowl(), "rule": rule}), optim.sgd())
    x = torch.tensor([[1.0, delta]], dtype=torch.float64)
    return model, step, Batch(x, torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.arange(1))


# FedSOL: w (1 + rho / |w|) = w_l, so w = (1 - rho / |w_l|) w_l with w_l = (2, 1) and rho = .5, for every delta.
# FedProx with mu = 1: (2 / (1 + mu), delta / (delta + mu)), which is skewed unless delta = 1.
SOL = (1.552786, 0.776393)
ENDS = [(0.1, SOL, (1, 0.0909)), (1.0, SOL, (1, 0.5)), (5.0, SOL, (1, 0.8333))]


@pytest.mark.parametrize("delta, stable, proximal", ENDS)
def test_the_end_of_training_in_the_toy_example(delta, stable, proximal):
    # the end does not depend on the learning rate; the slowest component shrinks by 1 - lr delta, or 1 - lr, per step
    lr, steps = (0.5, 300) if delta < 1 else (0.2, 100)
    fedsol = FedSOL(rho=0.5, scope="full", scale="none", proximal="l2")
    for rule, end in ((fedsol, stable), (FedProx(mu=1.0), proximal)):
        model, step, batch = bowl(rule, delta)
        local = step.start(model.params)
        for index in range(steps):
            local, _ = step(local, StepInputs({"params": model.params}, batch, lr=lr, step=index))
        assert local.params["w"].tolist() == pytest.approx(end, abs=5e-5)


def test_orthogonality_is_a_crossing_in_the_toy_example():
    # at w = (.5, .6) the proximal gradient is w, and g_u = (u - 2, 5 (v - 1)) at w (1 + rho / |w|)
    w, found = torch.tensor([0.5, 0.6], dtype=torch.float64), []
    for rho in (0, 0.25, 0.5, 1, 2):
        model, step, batch = bowl(FedSOL(rho=float(rho), scope="full", scale="none", proximal="l2"), 5.0)
        after, _ = step(step.start({"w": w}), StepInputs({"params": model.params}, batch, lr=1.0, step=1))
        found.append(cosine({"w": w - after.params["w"]}, {"w": w}))
    assert found == pytest.approx([-0.999, -0.977, -0.690, 0.425, 0.743], abs=5e-4)


# --- borrowed terms --------------------------------------------------------------------------------------------------


def borrowed(lender, rule):
    """FedSOL with a lender, in both orders of the members."""
    name = type(rule).__name__.lower()
    assert name == lender
    fedsol = FedSOL(rho=0.8, scope="full", scale="none", proximal=lender)
    return [make(**members)[1] for members in ({lender: rule, "fedsol": fedsol}, {"fedsol": fedsol, lender: rule})]


LENDERS = {
    "fedprox": FedProx(mu=0.3),
    "scaffold": Scaffold(),
    "feddyn": FedDyn(alpha=0.3),
    "moon": Moon(mu=0.5, tau=0.5),
    "fedntd": FedNTD(),
}


def situation(model):
    """Weights of a client, the broadcast and the client's state, all with different values."""
    c, c_i, h, previous = (elsewhere(model.params, seed=seed) for seed in (20, 30, 40, 50))
    state = {
        **{f"scaffold/{name}": leaf for name, leaf in c_i.items()},
        **{f"feddyn/{name}": leaf for name, leaf in h.items()},
        **{f"moon/{name}": leaf for name, leaf in previous.items()},
    }
    return elsewhere(model.params), {"params": model.params, "local/scaffold": c}, state


def contrast(model, params, previous, mu, tau):
    """MOON's penalty as an explicit formula, for the features of an MLP."""

    def features(leaves):
        return torch.relu(BATCH.x @ leaves["0.weight"].T + leaves["0.bias"])

    def cos(a, b):
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    z, near, far = features(params), features(model.params), features(previous)
    a, b = torch.exp(cos(z, near) / tau), torch.exp(cos(z, far) / tau)
    return -mu * torch.log(a / (a + b)).mean()


@pytest.mark.parametrize("lender", LENDERS)
def test_the_perturbation_is_along_the_lenders_correction(lender):
    model, _ = make()
    params, shared, state = situation(model)
    moved = tree.sub(params, model.params)

    def own(owner):
        return {name: state[f"{owner}/{name}"] for name in params}

    if lender == "fedprox":
        expected = moved
    elif lender == "scaffold":
        expected = tree.sub(shared["local/scaffold"], own("scaffold"))
    elif lender == "feddyn":
        expected = tree.sub(tree.scale(moved, 0.3), own("feddyn"))
    elif lender == "moon":
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        contrast(model, leaves, own("moon"), 0.5, 0.5).backward()
        expected = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    else:
        other = torch.tensor([[1, 2], [0, 2], [0, 1], [0, 2], [0, 2], [1, 2]])  # the classes other than the true one
        p = model.logits(model.params, BATCH.x, 0).gather(1, other).softmax(1)
        expected = by_autograd(
            model, params, lambda logits: (p * (p.log() - logits.gather(1, other).log_softmax(1))).sum(1).mean()
        )
    for step in borrowed(lender, LENDERS[lender]):
        found = shift(step, params, shared, state)
        assert all(
            torch.allclose(leaf, 0.8 * expected[name] / norm(expected), atol=1e-8) for name, leaf in found.items()
        )


@pytest.mark.parametrize("scope", SCOPES)
def test_borrowed_corrections_stay_in_scope_too(scope):
    rules = {"fedprox": FedProx(mu=0.3), "fedsol": FedSOL(rho=0.8, scope=scope, scale="none", proximal="fedprox")}
    model, step = make(**rules)
    params = elsewhere(model.params)
    moved = tree.select(tree.sub(params, model.params), SCOPES[scope])
    for name, leaf in shift(step, params, {"params": model.params}).items():
        expected = 0.8 * moved[name] / norm(moved) if name in moved else torch.zeros_like(leaf)
        assert torch.allclose(leaf, expected, atol=1e-8)


@pytest.mark.parametrize("lender", LENDERS)
def test_the_lenders_terms_are_not_in_the_update(lender):
    # the update is the gradient of the cross-entropy alone, at w + e
    model, _ = make()
    params, shared, state = situation(model)
    for step in borrowed(lender, LENDERS[lender]):
        e = shift(step, params, shared, state)
        expected = by_autograd(model, tree.add(params, e), plain)
        after, _ = step(step.start(params), StepInputs(shared, BATCH, state=state, lr=1.0, step=1))
        for name, leaf in expected.items():
            assert torch.allclose(params[name] - after.params[name], leaf, atol=1e-9)


def test_only_the_named_regularizer_is_borrowed():
    # FedProx lends; FedNTD's penalty stays in the loss, at the perturbed point
    fedsol = FedSOL(rho=0.8, scope="full", scale="none", proximal="fedprox")
    model, step = make(fedntd=FedNTD(), fedprox=FedProx(mu=0.3), fedsol=fedsol)
    params, shared = elsewhere(model.params), {"params": model.params}
    moved = tree.sub(params, model.params)
    beside = {name: params[name] + 0.8 * leaf / norm(moved) for name, leaf in moved.items()}
    other = torch.tensor([[1, 2], [0, 2], [0, 1], [0, 2], [0, 2], [1, 2]])
    p = model.logits(model.params, BATCH.x, 0).gather(1, other).softmax(1)

    def loss(logits):
        return plain(logits) + (p * (p.log() - logits.gather(1, other).log_softmax(1))).sum(1).mean()

    expected = by_autograd(model, beside, loss)
    after, _ = step(step.start(params), StepInputs(shared, BATCH, lr=1.0, step=1))
    assert all(torch.allclose(params[name] - after.params[name], leaf, atol=1e-9) for name, leaf in expected.items())


@pytest.mark.parametrize(
    ("method", "proximal", "message"),
    [
        ("fedsol", "fedprox", "'fedsol' borrows the terms of 'fedprox', which is not used; add --local fedprox"),
        ("fedsol", "fedsol", "'fedsol' borrows the terms of 'fedsol', which has none to lend"),
        ("fedsol+fednova", "fednova", "'fedsol' borrows the terms of 'fednova', which has none to lend"),
        ("fedsol", "fedprx", "unknown regularizer borrowed by 'fedsol': 'fedprx'; did you mean 'fedprox'"),
        ("fedsol+moon", "moon", "the terms of 'moon' cover all layers .Table 4.; set regularizer.fedsol.scope=full"),
    ],
)
def test_a_lender_without_terms_is_refused(method, proximal, message):
    with pytest.raises(ConfigError, match=message):
        toy.config(f"regularizer.fedsol.proximal={proximal}", method=method)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, plain_method", [("fedsol", "fedavg"), ("fot+fedsol", "fot")])
def test_a_run_with_rho_zero_equals_the_run_without_it(method, plain_method):
    assert same(run("regularizer.fedsol.rho=0", method=method).params, reference(plain_method))
    assert not same(run(method=method).params, reference(plain_method))


def test_a_run_of_one_local_step_per_round_is_fedavg():
    # 48 samples on 4 clients: 12 each, one batch
    assert same(run("local.batch_size=12").params, run("local.batch_size=12", method="fedavg").params)


@pytest.mark.parametrize("lender", ["fedprox", "moon", "scaffold"])
def test_with_rho_zero_a_borrowing_run_is_fedavg(lender):
    # the lender's terms are not in the update, and none of these three changes the server's step
    options = [f"regularizer.fedsol.proximal={lender}", "regularizer.fedsol.scope=full"]
    for rho, equal in ((0.0, True), (1.5, False)):
        found = run(*options, f"regularizer.fedsol.rho={rho}", method=f"{lender}+fedsol").params
        assert same(found, reference("fedavg")) == equal


@dataclass(frozen=True)
class Watching(FedSOL):
    """FedSOL that records the perturbed and the other trainable leaves."""

    seen: list = field(default_factory=list)

    def perturbation(self, gradient, params, center, growing=False):
        result = super().perturbation(gradient, params, center, growing)
        self.seen.append((set(gradient), set(params), norm(result)))
        return result


def test_nothing_is_perturbed_if_the_strategy_freezes_the_whole_scope():
    rule = Watching()
    run(method="fot", strategy=FOT(second_half="freeze"), regularizers={"fedsol": rule})
    assert len(rule.seen) == 2 * 3 * 3  # in the first task: 2 rounds of 3 clients of 3 local steps


def test_with_fot_only_the_current_tasks_head_is_perturbed():
    rule, recorder = Watching(), toy.recording(FOT)()
    model = run(method="fot", multi_head=True, strategy=recorder, regularizers={"fedsol": rule}).model
    for task in range(2):
        head = set(model.head(task))
        assert head == {f"5.weight@{task}", f"5.bias@{task}"}
        of_task = [(length, trained) for perturbed, trained, length in rule.seen if perturbed == head]
        assert len(of_task) == 2 * 3 * 3  # 2 rounds of 3 clients of 3 local steps
        assert all(trained == set(model.trainable(task)) for _, trained in of_task)
        assert [length > 0 for length, _ in of_task] == [False, True, True] * 6  # not in the first step
    assert len(rule.seen) == 36  # and no other calls
    # the first task's head is not broadcast in the second task, and does not change
    servers = {info.task: server["params"] for info, _, server in recorder.rounds}
    assert all(torch.equal(servers[1][name], servers[0][name]) for name in model.head(0))
    assert not any(torch.equal(servers[1][name], servers[0][name]) for name in model.head(1))
