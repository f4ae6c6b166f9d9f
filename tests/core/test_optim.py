"""Local optimisers against torch.optim, to the bit."""

import pytest
import torch

from cfl.core import optim, tree

SHAPES = {"a": (3, 4), "b": (5,), "c": ()}
WIDE = {"d": (7, 31)}

CASES = {
    "sgd": (optim.sgd, torch.optim.SGD, {}, {}),
    "momentum": (optim.sgd, torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.9}),
    "decay": (optim.sgd, torch.optim.SGD, {"weight_decay": 1e-2}, {"weight_decay": 1e-2}),
    "both": (optim.sgd, torch.optim.SGD, *([{"momentum": 0.7, "weight_decay": 3e-2}] * 2)),
    "adam": (optim.adam, torch.optim.Adam, {}, {}),
    "adam-all": (
        optim.adam,
        torch.optim.Adam,
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 1e-2},
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 1e-2},
    ),
}


def drawn(seed, dtype):
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source, dtype=dtype) for name, shape in (SHAPES | WIDE).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch_to_the_bit(case, dtype):
    ours, theirs, options, torch_options = CASES[case]
    optimizer, params = ours(**options), drawn(0, dtype)
    state = optimizer.init(params)
    leaves = [torch.nn.Parameter(leaf.clone()) for leaf in params.values()]
    reference = theirs(leaves, lr=0.05, **torch_options)
    for step in range(20):
        lr = 0.05 * 0.9**step  # a schedule: the rate of the step counts, not that of the first
        grads = drawn(step + 1, dtype)
        optimizer.update(grads, state, params, lr, step)
        reference.param_groups[0]["lr"] = lr
        for leaf, grad in zip(leaves, grads.values()):
            leaf.grad = grad.clone()
        reference.step()
        for name, leaf in zip(params, leaves):
            assert torch.equal(params[name], leaf.data), (name, step)


def test_leaves_of_any_layout_are_stepped_element_by_element():
    """A weight or a gradient that is transposed, or a view with gaps, has its own numbers stepped and no others."""
    source = torch.Generator().manual_seed(3)
    layouts = [lambda x: x.clone(), lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]]
    weight, grad = torch.randn(2, 6, 8, generator=source)
    for of_weight in layouts:
        for of_grad in layouts:
            leaf = of_weight(weight)
            optim.sgd(weight_decay=0.1).update({"w": of_grad(grad)}, {}, {"w": leaf}, 0.5, 0)
            assert torch.allclose(leaf, weight - 0.5 * (grad + 0.1 * weight))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_may_be_mapped_over_clients(momentum):
    optimizer = optim.sgd(momentum, weight_decay=0.1)
    weights, grads = torch.arange(24.0).view(4, 6), torch.ones(4, 6)

    def stepped(weight, grad):
        params = {"w": weight.clone()}
        optimizer.update({"w": grad}, optimizer.init(params), params, 0.5, 0)
        return params["w"]

    assert torch.allclose(torch.func.vmap(stepped)(weights, grads), weights - 0.5 * (grads + 0.1 * weights))


@pytest.mark.parametrize("grad", [torch.tensor(2.0), torch.full((1, 8), 2.0), torch.full((6, 8), 2.0).double()])
def test_a_gradient_may_be_of_another_shape_or_precision(grad):
    """Such as the zero that a hook returns for what it freezes."""
    weight = torch.arange(48.0).view(6, 8)
    leaf = weight.clone()
    optim.sgd(weight_decay=0.1).update({"w": grad}, {}, {"w": leaf}, 0.5, 0)
    assert torch.allclose(leaf, weight - 0.5 * (2.0 + 0.1 * weight))


def test_a_step_without_gradients_changes_nothing():
    """As where a method pauses all parameters."""
    params = {"w": torch.ones(3)}
    optim.sgd(weight_decay=0.1).update({}, {}, params, 0.5, 0)
    assert torch.equal(params["w"], torch.ones(3))


def test_one_step_of_sgd_by_hand():
    # decayed gradient 3 + 0.5 * 2 = 4; buffer 0.9 * 1 + 4 = 4.9; weight 2 - 0.1 * 4.9 = 1.51
    optimizer = optim.sgd(momentum=0.9, weight_decay=0.5)
    params, state = {"w": torch.tensor(2.0)}, {"w": torch.tensor(1.0)}
    optimizer.update({"w": torch.tensor(3.0)}, state, params, 0.1, 1)
    assert params["w"].item() == pytest.approx(1.51) and state["w"].item() == pytest.approx(4.9)


BUILT = {
    "sgd": (("sgd", 0.9, 1e-2), optim.sgd(0.9, 1e-2)),
    "sgd, plain": (("sgd", 0.0, 0.0), optim.sgd()),
    "adam": (("adam", 0.0, 1e-2), optim.adam(weight_decay=1e-2)),
    "adam, whatever the momentum": (("adam", 0.9, 0.0), optim.adam()),
}


@pytest.mark.parametrize("case", BUILT)
def test_what_is_built_by_name_is_what_the_constructor_gives(case):
    args, direct = BUILT[case]
    built = optim.build(*args)
    assert built.momentum == direct.momentum == (0.9 if case == "sgd" else 0.0)
    ours, theirs = ((drawn(0, torch.float32), optimizer.init(drawn(0, torch.float32))) for optimizer in (built, direct))
    for step in range(3):
        grads = drawn(step + 1, torch.float32)
        built.update(grads, ours[1], ours[0], 0.05, step)
        direct.update(grads, theirs[1], theirs[0], 0.05, step)
        for a, b in zip(ours, theirs, strict=True):
            assert set(a) == set(b) and all(torch.equal(a[name], leaf) for name, leaf in b.items())


@pytest.mark.parametrize("case", CASES)
def test_writes_to_parameters_and_state_alone_and_in_place(case):
    ours, _, options, _ = CASES[case]
    optimizer, params, grads = ours(**options), drawn(0, torch.float32), drawn(1, torch.float32)
    state = optimizer.init(params)
    given = tree.clone(grads)
    leaves = {**params, **{f"state/{name}": leaf for name, leaf in state.items()}}
    before = tree.clone(leaves)
    assert optimizer.update(grads, state, params, 0.1, 0) is None
    assert set(grads) == set(given) and all(torch.equal(grads[name], leaf) for name, leaf in given.items())
    assert all(params[name] is leaves[name] for name in params)
    assert all(state[name] is leaves[f"state/{name}"] for name in state)
    assert not any(torch.equal(leaf, before[name]) for name, leaf in leaves.items())  # every leaf has moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_stacked_clients_are_the_clients_one_by_one_to_the_bit(case, dtype):
    """Element by element: a leaf of 7 x 31 numbers fills vector registers otherwise than 3 of them in a row do."""
    ours, _, options, _ = CASES[case]
    optimizer, clients = ours(**options), 3
    source = torch.Generator().manual_seed(5)

    def draw():
        return {name: torch.randn(shape, generator=source, dtype=dtype) for name, shape in (SHAPES | WIDE).items()}

    alone = [draw() for _ in range(clients)]
    states = [optimizer.init(params) for params in alone]
    together = tree.stack(alone)
    state = optimizer.init(together)
    for step in range(5):
        grads = [draw() for _ in range(clients)]
        for own, params, grad in zip(states, alone, grads, strict=True):
            optimizer.update(grad, own, params, 0.05 * 0.9**step, step)
        optimizer.update(tree.stack(grads), state, together, 0.05 * 0.9**step, step)
        for client in range(clients):
            assert all(torch.equal(together[name][client], leaf) for name, leaf in alone[client].items()), step
            assert all(torch.equal(state[name][client], leaf) for name, leaf in states[client].items()), step


def test_sgd_without_momentum_carries_nothing():
    assert optim.sgd(weight_decay=0.1).init(drawn(0, torch.float32)) == {}
