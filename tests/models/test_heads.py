"""Several heads in one pass, each sample through its own head, and context managers for the module's modes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.core import rng
from cfl.models import Model


def linear():
    return nn.Linear(4, 3)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def convnet():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False))


NETS = {"linear": (linear, (4,)), "mlp": (mlp, (4,)), "conv": (convnet, (1, 4, 4))}
CLASSES = {"equal": [3, 3, 3], "unequal": [3, 2, 5]}


def make(net="mlp", classes=CLASSES["unequal"], multi_head=True, dtype=torch.float64, **options):
    module, shape = NETS[net] if isinstance(net, str) else net
    with rng.fork(1):
        model = Model(module().to(dtype), shape, classes, multi_head=multi_head, **options)
    return model, torch.randn(7, *shape, dtype=dtype, generator=rng.generator(2))


def narrow(model, logits, task):
    return logits[..., : len(model.params[model.head(task)[0]])]


@pytest.mark.parametrize("heads", [(0, 1, 2), (2, 0), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("net", NETS)
def test_heads_in_one_pass_equal_one_pass_for_each_head(net, classes, heads):
    model, x = make(net, CLASSES[classes])
    together = model.outputs(model.params, x, 0, heads)
    widest = max(CLASSES[classes][head] for head in heads)
    assert together.shape == (7, len(heads), widest)
    for place, head in enumerate(heads):
        alone = model.logits(model.params, x, head)
        assert torch.allclose(narrow(model, together[:, place], head), alone, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_padding_of_narrow_heads_has_no_weight(dtype):
    model, x = make(dtype=dtype)
    y = torch.arange(7) % 2
    params = {name: leaf.clone().requires_grad_() for name, leaf in model.params.items()}
    padded = model.outputs(params, x, 0, (1, 2))[:, 0]  # two classes, padded to five
    alone = model.logits(params, x, 1)
    assert padded.softmax(1)[:, 2:].tolist() == [[0.0] * 3] * 7
    assert torch.allclose(padded.softmax(1)[:, :2], alone.softmax(1))
    losses = [F.cross_entropy(logits, y) for logits in (padded, alone)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    leaves = [params[name] for name in model.trainable(1)]
    for ours, theirs in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert torch.isfinite(ours).all() and torch.allclose(ours, theirs, atol=1e-6)


def test_the_entropy_of_a_padded_head_is_finite():
    model, x = make()
    padded = model.outputs(model.params, x, 0, (1, 2))[:, 0].requires_grad_()
    alone = model.logits(model.params, x, 1)
    entropy = -(padded.softmax(1) * padded.log_softmax(1)).sum(1)
    assert torch.allclose(entropy, -(alone.softmax(1) * alone.log_softmax(1)).sum(1))  # 0 log 0 counts as 0
    assert torch.isfinite(torch.autograd.grad(entropy.sum(), padded)[0]).all()


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("net", NETS)
def test_each_sample_goes_through_its_own_head(net, classes):
    model, x = make(net, CLASSES[classes])
    own = torch.tensor([2, 0, 1, 1, 2, 0, 2])
    logits = model.own_logits(model.params, x, 0, own)
    assert logits.shape == (7, max(CLASSES[classes]))
    for place, task in enumerate(own.tolist()):
        expected = model.logits(model.params, x[place : place + 1], task)[0]
        assert torch.allclose(narrow(model, logits[place], task), expected, atol=1e-12)
        assert logits[place].softmax(0)[len(expected) :].sum() == 0


def test_own_heads_are_found_by_task_without_the_other_heads():
    model, x = make()
    travelled = {name: leaf for name, leaf in model.params.items() if not name.endswith("@1")}
    own = torch.tensor([2, 0, 2, 2, 0, 0, 2])
    few, all_ = (model.own_logits(params, x, 0, own) for params in (travelled, model.params))
    assert torch.allclose(few, all_, atol=1e-12)


def test_all_samples_go_through_the_only_head():
    model, x = make()
    own = torch.ones(7, dtype=torch.int64)
    params = {name: leaf for name, leaf in model.params.items() if "@" not in name or name.endswith("@1")}
    assert torch.equal(model.own_logits(params, x, 1, own), model.logits(model.params, x, 1))


@pytest.mark.parametrize("net", NETS)
def test_a_single_head_model_returns_its_head_for_any_request(net):
    model, x = make(net, [3, 3, 3], multi_head=False)
    expected = model.logits(model.params, x, 0)
    for heads in ((0,), (0, 1, 2)):
        assert torch.equal(model.outputs(model.params, x, 1, heads), expected[:, None])
    assert torch.equal(model.own_logits(model.params, x, 1, torch.arange(7) % 3), expected)


def test_a_single_head_model_without_a_last_linear_layer():
    model, x = make((lambda: nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4)), [3, 3], multi_head=False)
    own = torch.arange(7) % 2
    assert torch.equal(model.own_logits(model.params, x, 0, own), model.logits(model.params, x, 0))


def test_all_heads_use_the_statistics_of_the_given_task():
    def norm_net():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    model, x = make((norm_net, (4,)))
    model.params["1.running_mean@0"] += 0.3
    with model.evaluation():
        together = model.outputs(model.params, x, 0, (0, 1))
        swapped = {**model.params, "1.running_mean@1": model.params["1.running_mean@0"]}
        alone = model.logits(swapped, x, 1)
        assert torch.allclose(narrow(model, together[:, 1], 1), alone, atol=1e-12)
        assert not torch.allclose(alone, model.logits(model.params, x, 1), atol=1e-3)  # the statistics do differ


@pytest.mark.parametrize("net", NETS)
def test_own_heads_under_vmap_and_grad(net):
    """Gradients of all samples at once equal one backward pass for each sample through the head of its task."""
    model, x = make(net)
    own, y = torch.tensor([2, 0, 1, 1, 2, 0, 2]), torch.arange(7) % 2

    def loss(params, x, y, own):
        return F.cross_entropy(model.own_logits(params, x[None], 0, own[None]), y[None])

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(model.params, x, y, own)
    for place, task in enumerate(own.tolist()):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.params.items()}
        F.cross_entropy(model.logits(leaves, x[place : place + 1], task), y[place : place + 1]).backward()
        for name, leaf in leaves.items():
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # the other heads
            assert torch.allclose(found[name][place], expected, atol=1e-12), name


def test_own_heads_of_stacked_clients():
    model, x = make()
    own = torch.stack([torch.arange(7) % 3, (torch.arange(7) + 1) % 3])
    stacked = {name: torch.stack([leaf, leaf * 2]) for name, leaf in model.params.items()}
    found = torch.func.vmap(lambda params, own: model.own_logits(params, x, 0, own))(stacked, own)
    for client in range(2):
        params = {name: leaf[client] for name, leaf in stacked.items()}
        assert torch.allclose(found[client], model.own_logits(params, x, 0, own[client]), atol=1e-12)


def test_trainable_names_the_body_the_own_head_and_the_requested_heads():
    model, _ = make()
    body = ("0.weight", "0.bias")
    assert model.trainable(1) == (*body, "2.weight@1", "2.bias@1")
    assert model.trainable(1, (0, 1)) == (*body, "2.weight@1", "2.bias@1", "2.weight@0", "2.bias@0")  # each once
    single, _ = make(classes=[3, 3, 3], multi_head=False)
    assert single.trainable(1, (0, 1, 2)) == single.trainable(1) == (*body, "2.weight", "2.bias")


# --- modes -----------------------------------------------------------------------------------------------------------


def noisy():
    """Dropout at two depths and a normalisation layer."""
    inner = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    return nn.Sequential(inner, nn.BatchNorm1d(6), nn.AlphaDropout(0.5), nn.Dropout(0.9), nn.Linear(6, 3))


def modes(model):
    return [layer.training for layer in model.module.modules()]


def test_without_dropout_switches_only_dropout_off():
    model, x = make((noisy, (4,)), [3], norm_stats="batch")
    model.module.train()
    model.module[3].eval()
    before = modes(model)
    with model.without_dropout():
        assert [model.module[0][1].training, model.module[2].training, model.module[3].training] == [False] * 3
        assert model.module.training and model.module[1].training
        inside = model.logits(model.params, x, 0)
    assert modes(model) == before  # the layer that was off stays off
    with model.evaluation():  # with "batch", the modes differ in dropout only
        assert torch.equal(inside, model.logits(model.params, x, 0))
    with rng.fork(3):
        assert not torch.allclose(inside, model.logits(model.params, x, 0), atol=1e-3)  # it is on again


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("switch", ["without_dropout", "evaluation"])
def test_an_error_restores_the_modes(switch, training):
    model, _ = make((noisy, (4,)), [3])
    model.module.train(training)
    before = modes(model)
    with pytest.raises(KeyError), getattr(model, switch)():
        assert not model.module[0][1].training
        raise KeyError
    assert modes(model) == before == [training] * len(before)


def test_evaluation_and_without_dropout_nest():
    model, _ = make((noisy, (4,)), [3])
    model.module.train()
    with model.evaluation():
        with model.without_dropout():
            assert not any(modes(model))
        assert not any(modes(model))  # the end of the inner context does not switch dropout on
    assert all(modes(model))
