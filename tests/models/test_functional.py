"""Every network under `torch.func`: gradients, and those of many parameter sets at once, as the engines need them."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from cfl import models
from cfl.core import rng

NETWORKS = [
    ("cnn", (1, 8, 8), {"width": 3, "hidden": 7}),
    ("vgg11", (1, 16, 16), {"width": 2}),
    ("vgg11", (1, 16, 16), {"width": 2, "norm": True}),
    ("resnet8", (3, 16, 16), {"width": 2}),
    ("resnet18", (3, 16, 16), {"width": 2}),
    ("resnet18", (3, 16, 16), {"width": 2, "norm": True}),
    ("resnet18_cifar", (3, 16, 16), {"width": 2, "norm": False}),
    ("resnet18_cifar", (3, 16, 16), {"width": 2}),
    ("vit_small", (1, 8, 8), {"patch": 4, "width": 12, "depth": 2, "heads": 3}),
]


def close(a, b):
    """Equal to ten digits of the largest."""
    return (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.filterwarnings("error:There is a performance drop")  # vmap's warning where it runs a model at a time
@pytest.mark.parametrize(("name", "shape", "options"), NETWORKS)
def test_gradients_are_autograds_and_those_of_stacked_parameters_are_those_of_each(name, shape, options):
    with rng.fork(1):
        module = models.build(name, shape, 5, options).double().eval()
    x = torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))
    params = {leaf: value.detach() for leaf, value in module.named_parameters()}
    if "token" in params:  # of the transformer; it starts as 0
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
