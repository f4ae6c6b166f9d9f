"""Projected steps: invariants, to the bit or up to rounding, with and without an augmented bias."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.core import tree
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace import removed_energy
from cfl.methods.subspace.projection import input_vectors, names, project, project_step, width
from tests import toy


def _model(module, input_shape, outputs=3):
    return cfl.Model(module.double(), input_shape, [outputs], multi_head=False)


def _moved(params, seed=0):
    """The parameters after an arbitrary step."""
    source = torch.Generator().manual_seed(seed)
    return {name: leaf + torch.randn(leaf.shape, dtype=leaf.dtype, generator=source) for name, leaf in params.items()}


def _orthonormal(size, rank, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64, generator=source)).Q


def _span(vectors):
    """An orthonormal basis of the span of rows (n, d)."""
    _, singular, right = torch.linalg.svd(vectors, full_matrices=False)
    return right[singular > 1e-10 * singular[0]].T


def _bases(model, augment, rank):
    return {layer.name: _orthonormal(width(layer, augment), rank) for layer in model.layers}


def test_projected_step_by_hand():
    model = _model(nn.Sequential(nn.Linear(2, 1)), (2,), 1)
    old = {"0.weight": torch.tensor([[1.0, 1.0]]).double(), "0.bias": torch.tensor([1.0]).double()}
    new = {"0.weight": torch.tensor([[3.0, 2.0]]).double(), "0.bias": torch.tensor([5.0]).double()}
    # Free bias: the step (2, 1) loses its part 2 along (1, 0).
    basis = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    free = project_step(old, new, {"0": basis}, model.layers, False)
    assert free["0.weight"].tolist() == [[1.0, 2.0]] and free["0.bias"].tolist() == [5.0]
    # Augmented: the step (2, 1, 4) loses its part along (0.6, 0, 0.8), which is 4.4 (0.6, 0, 0.8) = (2.64, 0, 3.52).
    basis = torch.tensor([[0.6], [0.0], [0.8]], dtype=torch.float64)
    both = project_step(old, new, {"0": basis}, model.layers, True)
    torch.testing.assert_close(both["0.weight"], torch.tensor([[1 - 0.64, 2.0]]).double())
    torch.testing.assert_close(both["0.bias"], torch.tensor([1 + 0.48]).double())


@pytest.mark.parametrize("augment", [False, True])
def test_empty_bases_keep_the_very_tensors(augment):
    model = _model(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))
    new = _moved(model.params)
    result = project_step(model.params, new, _bases(model, augment, 0), model.layers, augment)
    assert all(result[name] is new[name] for name in new)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_bases_freeze_the_layer_to_the_bit(augment, dtype):
    model = _model(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))
    old = {name: leaf.to(dtype) for name, leaf in model.params.items()}
    new = _moved(old)
    full = {layer.name: _orthonormal(width(layer, augment), width(layer, augment)) for layer in model.layers}
    result = project_step(old, new, full, model.layers, augment)
    for layer in model.layers:
        assert torch.equal(result[layer.weight], old[layer.weight])
        assert torch.equal(result[layer.bias], old[layer.bias] if augment else new[layer.bias])


def test_inputs_are_not_written_to():
    model = _model(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,))
    old, new = dict(model.params), _moved(model.params)
    copies = [{name: leaf.clone() for name, leaf in params.items()} for params in (old, new)]
    project_step(old, new, _bases(model, True, 2), model.layers, True)
    for params, copy in zip((old, new), copies, strict=True):
        assert all(torch.equal(params[name], copy[name]) for name in params)


@pytest.mark.parametrize("augment", [False, True])
def test_the_step_is_that_of_the_joint_matrix(augment):
    model = _model(nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), (7,))
    new, basis = _moved(model.params), _bases(model, augment, 3)
    result = project_step(model.params, new, basis, model.layers, augment)

    def joint(params, layer):
        return torch.cat([params[name].reshape(len(params[layer.weight]), -1) for name in names(layer, augment)], 1)

    for layer in model.layers:
        o = basis[layer.name]
        projector = torch.eye(len(o), dtype=torch.float64) - o @ o.T
        expected = (joint(new, layer) - joint(model.params, layer)) @ projector
        step = joint(result, layer) - joint(model.params, layer)
        torch.testing.assert_close(step, expected, atol=1e-13, rtol=0)


def test_names_and_widths():
    model = _model(nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)), (7,))
    with_bias, without = model.layers
    assert names(with_bias, True) == ["0.weight", "0.bias"] and width(with_bias, True) == 8
    assert names(with_bias, False) == ["0.weight"] and width(with_bias, False) == 7
    assert names(without, True) == ["2.weight"] and width(without, True) == 5
    inputs = torch.randn(2, 4, 7)
    assert input_vectors(inputs, with_bias, False) is inputs
    assert input_vectors(inputs[..., :5], without, True).shape == (2, 4, 5)
    augmented = input_vectors(inputs, with_bias, True)
    assert torch.equal(augmented[..., :7], inputs) and torch.equal(augmented[..., 7], torch.ones(2, 4))


@pytest.mark.parametrize(
    "options", [dict(), dict(stride=2, padding=1), dict(padding="same", dilation=2), dict(groups=2)], ids=str
)
@pytest.mark.parametrize("augment", [False, True])
def test_a_convolution_keeps_its_output_on_protected_images(options, augment):
    conv = nn.Conv2d(4, 6, 3, **options)
    model = _model(nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)), (4, 5, 5))
    # One 5 x 5 image has at most 25 patches of 4 x 9 = 36 values, which do not span the space. With two groups a patch
    # has 18 values, so the image is zero except for one pixel, which each patch has in one of 9 positions.
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    if conv.groups > 1:
        x = x * F.one_hot(torch.tensor(12), 25).reshape(5, 5)
    basis = {layer.name: _span(input_vectors(layer.inputs(x), layer, augment)[0]) for layer in model.layers[:-1]}
    layers = model.layers[:-1]
    assert all(0 < o.shape[1] < o.shape[0] for o in basis.values())
    new = _moved(model.params)
    result = project_step(model.params, new, basis, layers, augment)

    def output(params, images):
        stride, dilation, padding = conv.stride, conv.dilation, conv.padding
        bias = params["0.bias"] if augment else model.params["0.bias"]
        return F.conv2d(images, params["0.weight"], bias, stride, padding, dilation, conv.groups)

    torch.testing.assert_close(output(result, x), output(model.params, x), atol=1e-12, rtol=0)
    assert (output(new, x) - output(model.params, x)).abs().max() > 0.1  # the unprojected step changes the output
    other = torch.randn_like(x)
    assert (output(result, other) - output(model.params, other)).abs().max() > 0.1  # outputs for other inputs change


def test_groups_are_projected_apart():
    model = _model(nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.Flatten(), nn.Linear(6, 3)), (4, 1, 1))
    first, second, _ = model.layers
    new = _moved(model.params)
    basis = {first.name: torch.eye(3, dtype=torch.float64), second.name: bases.empty(3)}
    result = project_step(model.params, new, basis, (first, second), True)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(result[name][:3], model.params[name][:3])
        assert torch.equal(result[name][3:], new[name][3:])


def test_float32_steps_lose_the_component_to_rounding():
    model = _model(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 3)), (64,))
    old = {name: leaf.float() for name, leaf in model.params.items()}
    new, basis = _moved(old), _bases(model, False, 20)
    result = project_step(old, new, basis, model.layers, False)
    for layer in model.layers:
        step = (result[layer.weight] - old[layer.weight]).double()
        assert result[layer.weight].dtype == torch.float32
        assert (step @ basis[layer.name]).norm() < 1e-6 * step.norm()


# --- `project`: projection of a step or a gradient, without parameters -----------------------------------------------


def _every_kind():
    """A convolution, one of two groups, and a Linear layer."""
    module = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )
    return _model(module, (2, 4, 4))


def _step(model, seed=0):
    zeros = {name: torch.zeros_like(leaf) for name, leaf in model.params.items()}
    return _moved(zeros, seed)


def _difference(ours, theirs):
    assert list(ours) == list(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_projection_by_hand():
    # g = (2, 1) and b = 4. Free bias: g loses its part 2 along (1, 0). Augmented: (2, 1, 4) loses its part 4.4 along
    # (0.6, 0, 0.8), which is (2.64, 0, 3.52).
    model = _model(nn.Sequential(nn.Linear(2, 1)), (2,), 1)
    step = {"0.weight": torch.tensor([[2.0, 1.0]]).double(), "0.bias": torch.tensor([4.0]).double()}
    free = project(step, {"0": torch.tensor([[1.0], [0.0]]).double()}, model.layers, False)
    assert free["0.weight"].tolist() == [[0.0, 1.0]] and free["0.bias"] is step["0.bias"]
    both = project(step, {"0": torch.tensor([[0.6], [0.0], [0.8]]).double()}, model.layers, True)
    assert both["0.weight"][0].tolist() == pytest.approx([-0.64, 1.0])
    assert both["0.bias"].tolist() == pytest.approx([0.48])


@pytest.mark.parametrize("augment", [False, True])
def test_projection_is_the_dense_formula_of_each_layer_and_group(augment):
    model = _every_kind()
    step, basis = _step(model), _bases(model, augment, 3)
    result = project(step, basis, model.layers, augment)
    assert [layer.name for layer in model.layers] == ["0", "2.group0", "2.group1", "5"]
    for layer in model.layers:
        # g (outputs, d): the rows of the group's weight, and of its bias as one more column
        outputs = layer.rows.stop - layer.rows.start
        g = torch.cat([step[name][layer.rows].reshape(outputs, -1) for name in names(layer, augment)], dim=1)
        o = basis[layer.name]
        expected = g @ (torch.eye(len(o), dtype=torch.float64) - o @ o.T)
        weight = result[layer.weight][layer.rows].reshape(outputs, -1)
        torch.testing.assert_close(weight, expected[:, : layer.size], atol=1e-13, rtol=0)
        if augment:
            torch.testing.assert_close(result[layer.bias][layer.rows], expected[:, -1], atol=1e-13, rtol=0)
        else:
            assert result[layer.bias] is step[layer.bias]
        assert result[layer.weight].shape == step[layer.weight].shape


@pytest.mark.parametrize("augment", [False, True])
def test_projection_is_linear_and_idempotent(augment):
    model = _every_kind()
    basis = _bases(model, augment, 3)

    def p(step):
        return project(step, basis, model.layers, augment)

    a, b = _step(model, 1), _step(model, 2)
    once = p(a)
    assert _difference(once, a) > 0.1
    assert _difference(p(once), once) < 1e-13
    joint = p({name: 2 * a[name] - 3 * b[name] for name in a})
    assert _difference(joint, {name: 2 * once[name] - 3 * leaf for name, leaf in p(b).items()}) < 1e-13


@pytest.mark.parametrize("basis", ["missing", "empty"])
def test_without_a_basis_projection_keeps_the_very_tensors(basis):
    model = _every_kind()
    step = _step(model)
    given = {} if basis == "missing" else _bases(model, True, 0)
    result = project(step, given, model.layers, True)
    assert list(result) == list(step) and all(result[name] is leaf for name, leaf in step.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_bases_project_to_zeros(dtype):
    model = _every_kind()
    step = {name: leaf.to(dtype) for name, leaf in _step(model).items()}
    full = {layer.name: _orthonormal(width(layer, True), width(layer, True)) for layer in model.layers}
    result = project(step, full, model.layers, True)
    assert all(torch.equal(result[name], torch.zeros_like(leaf)) for name, leaf in step.items())
    assert all(leaf.dtype == dtype for leaf in result.values())


def test_what_a_step_does_not_hold_is_not_made_up():
    model = _every_kind()
    step, basis = _step(model), _bases(model, False, 3)
    rest = {name: leaf for name, leaf in step.items() if name != "2.weight"}
    result, whole = project(rest, basis, model.layers, False), project(step, basis, model.layers, False)
    assert list(result) == list(rest)
    assert all(torch.equal(result[name], whole[name]) for name in rest)
    other = {"head.weight@1": torch.ones(2, 2)}
    assert project(other, basis, model.layers, False)["head.weight@1"] is other["head.weight@1"]


@pytest.mark.parametrize(("of_step", "of_basis"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_projections_run_in_the_finer_precision(of_step, of_basis):
    model = _every_kind()
    step = {name: leaf.to(of_step) for name, leaf in _step(model).items()}
    basis = {name: leaf.to(of_basis) for name, leaf in _bases(model, True, 3).items()}
    start = {name: torch.ones_like(leaf) for name, leaf in step.items()}
    for function in (partial(project, step), partial(project_step, start, step)):
        result = function(basis, model.layers, True)
        given = [{name: leaf.double() for name, leaf in leaves.items()} for leaves in function.args]
        exact = function.func(*given, {name: leaf.double() for name, leaf in basis.items()}, model.layers, True)
        # rounded once, at the end
        assert all(torch.equal(result[name], leaf.to(of_step)) for name, leaf in exact.items())


def test_a_client_in_float32_loses_what_rounding_does():
    """Compared with float64, the error is at most a few units in the last place of the largest number."""
    model = _every_kind()
    step = {name: leaf.float() for name, leaf in _step(model).items()}
    basis = {name: leaf.float() for name, leaf in _bases(model, True, 3).items()}
    start = {name: torch.ones_like(leaf) for name, leaf in step.items()}
    result = project_step(start, step, basis, model.layers, True)
    exact = project_step(start, step, {name: leaf.double() for name, leaf in basis.items()}, model.layers, True)
    largest = max(float(leaf.abs().max()) for leaf in exact.values())
    assert _difference(result, exact) < 8 * torch.finfo(torch.float32).eps * largest


def test_projection_writes_to_nothing_it_is_given():
    model = _every_kind()
    step, basis = _step(model), _bases(model, True, 3)
    copies = [{name: leaf.clone() for name, leaf in given.items()} for given in (step, basis)]
    project(step, basis, model.layers, True)
    for given, copy in zip((step, basis), copies, strict=True):
        assert all(torch.equal(given[name], leaf) for name, leaf in copy.items())


@pytest.mark.parametrize("augment", [False, True])
def test_projection_of_stacked_clients_is_that_of_each(augment):
    model = _every_kind()
    steps = [_step(model, seed) for seed in range(3)]
    known = [
        {layer.name: _orthonormal(width(layer, augment), 4, seed=10 + seed) for layer in model.layers}
        for seed in range(3)
    ]
    stacked = torch.func.vmap(lambda step, basis: project(step, basis, model.layers, augment))(
        tree.stack(steps), tree.stack(known)
    )
    for ours, step, basis in zip(toy.unstacked(stacked), steps, known, strict=True):
        assert _difference(ours, project(step, basis, model.layers, augment)) < 1e-13


@pytest.mark.parametrize("augment", [False, True])
def test_a_projected_step_of_the_model_is_the_start_and_the_projection(augment):
    model = _every_kind()
    basis = {**_bases(model, augment, 3), "5": bases.empty(width(model.layers[-1], augment))}
    step = _step(model)
    end = tree.add(model.params, step)
    ours = project_step(model.params, end, basis, model.layers, augment)
    theirs = tree.add(model.params, project(step, basis, model.layers, augment))
    assert _difference(ours, theirs) < 1e-13
    assert _difference(ours, end) > 0.1


# --- the energy that a projection removes ----------------------------------------------------------------------------


def test_the_largest_share_of_earlier_tasks_is_kept():
    """So a layer that loses most of its steps in the first and the third task, but not in the second, is named once."""
    for removed, kept in ((0.5, 0.75), (0.9, 0.9)):
        server = {"basis": {"a": torch.zeros(3, 1)}, "steps": {"a": torch.tensor([4.0, 1.0])}}  # 1 - 1 / 4
        new = removed_energy.for_new_task({**server, "removed": {"a": torch.tensor(removed)}})
        assert new["removed"]["a"].item() == pytest.approx(kept) and new["steps"]["a"].tolist() == [0, 0]


def test_the_layer_that_loses_most_is_named_among_those_that_are_new():
    """More than half is lost in a, b and c, of which c was named after an earlier task; d loses half, no more."""
    with pytest.warns(UserWarning, match="removed 90% .* in layer 'b', and more than half in 3 of 4 layers"):
        removed_energy.warn_of_slow_layers({"a": 0.6, "b": 0.9, "c": 0.95, "d": 0.5}, {"c": torch.tensor(0.8)}, 0.9)


def test_energies_of_steps_are_those_of_each_group():
    net = nn.Sequential(nn.Conv2d(2, 4, 1, groups=2, bias=False), nn.Flatten(), nn.Linear(4, 2))
    layers = cfl.Model(net, (2, 1, 1), [2], multi_head=False).layers[:2]
    old, whole = {"0.weight": torch.zeros(4, 1, 1, 1)}, {"0.weight": torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1, 1)}
    steps = {layer.name: torch.zeros(2, dtype=torch.float64) for layer in layers}
    found = removed_energy.added(steps, old, whole, tree.scale(whole, 0.5), layers, augment=False)
    assert [pair.tolist() for pair in found.values()] == [[1 + 4, 5 / 4], [9 + 16, 25 / 4]]
