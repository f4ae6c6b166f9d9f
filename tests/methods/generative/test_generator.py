"""TARGET's generator: its parameters, the shapes that it makes, and 8-bit images."""

import pytest
import torch

from cfl.contract import Pixels
from cfl.core import rng
from cfl.methods.generative import generator


def parameters(latent, width, channels, start):
    """Number of parameters, layer by layer."""
    first = latent * 2 * width * start**2 + 2 * width * start**2
    norms = 2 * (2 * width) + 2 * (2 * width) + 2 * width
    convolutions = (2 * width) ** 2 * 9 + 2 * width * width * 9 + width * channels * 9 + channels
    return first + norms + convolutions


@pytest.mark.parametrize("latent,width,channels,side", [(256, 64, 3, 32), (256, 64, 1, 28), (16, 8, 3, 64)])
def test_it_has_the_parameters_of_its_layers(latent, width, channels, side):
    tree = generator.initial(0, latent, width, (channels, side, side), torch.device("cpu"))
    assert sum(leaf.numel() for leaf in tree.values()) == parameters(latent, width, channels, side // 4)


def test_at_32_pixels_it_has_the_size_of_the_official_one():
    # Linear 2,105,344; normalisations 256, 256 and 128; convolutions 147,456, 73,728 and 1,731
    assert parameters(256, 64, 3, 8) == 2105344 + 256 + 147456 + 256 + 73728 + 128 + 1731 == 2328899


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 9, 14), (7,)])
def test_samples_have_the_shape_of_the_models_inputs(shape):
    tree = generator.initial(0, 5, 4, shape, torch.device("cpu"))
    z = torch.randn(6, 5, generator=rng.generator(1))
    x = generator.generate(tree, z, 4, shape, Pixels(None, None))
    assert x.shape == (6, *shape)
    assert 0 <= x.min() and x.max() <= 1
    free = generator.generate(tree, z, 4, shape, None)
    torch.testing.assert_close(free.sigmoid(), x)


def test_the_first_parameters_follow_from_the_key_alone():
    def first(key):
        return generator.initial(key, 5, 4, (1, 8, 8), torch.device("cpu"))

    before = torch.get_rng_state()
    a, b, other = first(1), first(1), first(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(leaf, b[name]) for name, leaf in a.items())
    assert not torch.equal(a["first.weight"], other["first.weight"])


def test_images_are_rounded_to_8_bits_and_normalised_as_the_streams_are():
    x = torch.tensor([0.0, 0.5, 0.7, 1.0])
    pixels = Pixels(torch.tensor(0.25), torch.tensor(0.5))
    kept = generator.stored(x, pixels)
    assert kept.tolist() == [0, 128, 178, 255]  # 127.5 goes to the even neighbour, 178.5 in float32 is 178.49999
    assert generator.inputs(kept, *pixels).tolist() == pytest.approx([(v / 255 - 0.25) / 0.5 for v in kept.tolist()])
    assert generator.stored(x, None) is x and generator.inputs(x, None, None) is x


def test_images_are_shown_by_class():
    classes = torch.tensor([3, 0, 3, 0, 3, 0, 0] + [3] * 20)
    shown = generator.by_class(torch.arange(27).view(-1, 1, 1, 1), classes)
    assert shown.flatten(2).tolist() == [[[1], [3], [5], [6]], [[0], [2], [4], [7]]]  # class 0 has four
    one = generator.by_class(torch.arange(20).view(-1, 1, 1, 1), torch.zeros(20))
    assert one.shape == (1, 8, 1, 1, 1) and one.flatten().tolist() == [*range(8)]


@pytest.mark.parametrize(("shape", "shown"), [((5,), False), ((4, 5), False), ((2, 4, 5), False), ((3, 4, 5), True)])
def test_only_grey_and_rgb_images_are_shown(shape, shown):
    found = generator.by_class(torch.zeros(6, *shape), torch.arange(6) % 2)
    assert (found is not None) == shown
