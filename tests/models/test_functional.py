"""Every network under `torch.func`: gradients, also of several parameter sets at once, as the engines need them."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from cfl import models
from cfl.core import rng
from cfl.models import Model

NETWORKS = [
    ("cnn", (1, 8, 8), {"width": 3, "hidden": 7}),
    ("cnn", (1, 8, 8), {"width": 3, "hidden": 7, "repeat_grey": True}),
    ("vgg11", (1, 16, 16), {"width": 2}),
    ("vgg11", (1, 16, 16), {"width": 2, "norm": True}),
    ("resnet8", (3, 16, 16), {"width": 2}),
    ("resnet18", (3, 16, 16), {"width": 2}),
    ("resnet18", (3, 16, 16), {"width": 2, "norm": True}),
    ("resnet18_cifar", (3, 16, 16), {"width": 2, "norm": False}),
    ("resnet18_cifar", (3, 16, 16), {"width": 2}),
    ("vit_small", (1, 8, 8), {"patch": 4, "width": 12, "depth": 2, "heads": 3}),
]


class Tied(torch.nn.Module):
    """Two layers with one weight, and running statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.norm(self.second(self.first(x).tanh())))


def make(name, shape, options):
    with rng.fork(1):
        return models.build(name, shape, 5, options) if name else Tied()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "shape", "options"), [*NETWORKS, (None, (4,), {})])
def test_logits_gradients_and_buffers_equal_those_of_functional_call(name, shape, options, training):
    model = Model(make(name, shape, options), shape, [5], multi_head=False)
    model.module.train(training)
    x = torch.randn(3, *shape, generator=rng.generator(2))

    def result(call):
        params = {
            leaf: 1.1 * value if model.is_parameter(leaf) else value.clone() for leaf, value in model.params.items()
        }
        leaves = [params[leaf].requires_grad_() for leaf in model.trainable(0)]
        with rng.fork(3):
            logits = call(params)
        return [
            logits,
            *torch.autograd.grad(logits.square().sum(), leaves),
            *(params[leaf] for leaf in model.buffers(0)),
        ]

    ours = result(lambda params: model.logits(params, x, 0))
    theirs = result(lambda params: functional_call(model.module, model.bind(params, 0), (x,)))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_error_in_a_pass_restores_the_parameters_of_the_module():
    model = Model(make(None, (4,), {}), (4,), [5], multi_head=False)
    own = list(model.module.parameters())
    with pytest.raises(RuntimeError):
        model.logits({name: leaf + 1 for name, leaf in model.params.items()}, torch.zeros(2, 3), 0)
    assert all(a is b for a, b in zip(model.module.parameters(), own, strict=True))


def close(a, b):
    """Equal to 1e-10 of the largest entry."""
    return (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.filterwarnings("error:There is a performance drop")  # vmap warns when it runs one model at a time
@pytest.mark.parametrize(("name", "shape", "options"), NETWORKS)
def test_gradients_equal_those_of_autograd_also_for_stacked_parameters(name, shape, options):
    module = make(name, shape, options).double().eval()
    x = torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))
    params = {leaf: value.detach() for leaf, value in module.named_parameters()}
    if "token" in params:  # the class token of the transformer, initially 0
        params["token"] = torch.randn(params["token"].shape, dtype=torch.float64, generator=rng.generator(3))
        module.token.data = params["token"]
    stacked = {leaf: torch.stack([value, value / 2, value + 0.1]) for leaf, value in params.items()}

    def loss(leaves, x):
        return functional_call(module, leaves, (x,)).square().sum()

    together = vmap(grad(loss), (0, None))(stacked, x)
    module(x).square().sum().backward()
    for leaf, value in module.named_parameters():
        assert value.grad.abs().max() > 0
        assert close(together[leaf][0], value.grad)
    for i in (1, 2):
        alone = grad(loss)({leaf: values[i] for leaf, values in stacked.items()}, x)
        assert all(close(together[leaf][i], value) for leaf, value in alone.items())
