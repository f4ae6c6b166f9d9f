"""Unlabelled inputs of another data set for a stream."""

import warnings

import numpy as np
import pytest
import torch

import cfl
from cfl import streams
from cfl.core import ConfigError, DataError
from cfl.streams import with_public
from tests import toy


def _save(root, name, shape, classes=10, size=6):
    draws = np.random.default_rng(len(name))
    arrays = {f"x_{part}": draws.integers(0, 256, (size, *shape), dtype=np.uint8) for part in ("train", "test")}
    arrays |= {f"y_{part}": np.arange(1, size + 1) % classes for part in ("train", "test")}
    np.savez(root / f"{name}.npz", **arrays)
    return torch.from_numpy(np.concatenate([arrays["x_train"], arrays["x_test"]]))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)
    _save(tmp_path, "cifar10", (8, 8, 3))
    _save(tmp_path, "mnist", (8, 8))
    return tmp_path


def _stream(name, root):
    return streams.build(name, data_root=root)


def public(name, stream, **options):
    return with_public(stream, name, **options).public


def _all(part):
    return part.gather(torch.arange(len(part)))


def test_images_of_the_same_shape_are_normalised_as_the_task(root):
    raw = _save(root, "svhn", (8, 8, 3))  # (12, 8, 8, 3), train before test
    stream = _stream("cifar10", root)
    part = public("svhn", stream, data_root=root)
    x, y = _all(part)
    assert len(part) == 12 and y.tolist() == [0] * 12 and part.index.tolist() == list(range(12))
    # normalisation of CIFAR-10 in the benchmark: FedSOL's code, rounded
    mean, std = torch.tensor([0.4914, 0.48216, 0.44653]), torch.tensor([0.24703, 0.24349, 0.26159])
    expected = ((raw / 255 - mean) / std).permute(0, 3, 1, 2)
    assert torch.allclose(x, expected, atol=1e-6)


def test_public_data_have_no_labels(root):
    _save(root, "svhn", (8, 8, 3))  # its labels are 1 to 6
    part = public("svhn", _stream("cifar10", root), data_root=root)
    tensors = [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert not part.targets.any() and len(tensors) == 2  # index and targets
    assert part.pool.images.dtype == torch.uint8


def test_grey_becomes_three_equal_channels(root):
    raw = _save(root, "notmnist", (8, 8))
    images = public("notmnist", _stream("cifar10", root), data_root=root).pool.images
    assert images.shape == (12, 3, 8, 8)
    assert all(torch.equal(images[:, channel], raw) for channel in range(3))


def test_colours_become_their_mean(root):
    raw = _save(root, "svhn", (8, 8, 3))
    images = public("svhn", _stream("mnist", root), data_root=root).pool.images
    assert torch.equal(images[:, 0], (raw.double().sum(3) / 3).round().byte())  # thirds are never half-way


def test_a_smaller_image_averages_the_larger_one(root):
    """Bilinear with antialiasing by 2 has the weights 1/8 3/8 3/8 1/8 inside, and 3/7 3/7 1/7 at the border."""
    raw = _save(root, "notmnist", (16, 16))
    images = public("notmnist", _stream("mnist", root), data_root=root).pool.images
    weights = torch.zeros(8, 16, dtype=torch.float64)
    for row in range(8):  # a triangle of half-width 2 around the centre of the new pixel, in old pixels
        places = torch.arange(16) + 0.5
        weights[row] = (1 - (places - (2 * row + 1)).abs() / 2).clamp(min=0)
        weights[row] /= weights[row].sum()
    assert weights[3, 5:9].tolist() == [0.125, 0.375, 0.375, 0.125]
    expected = weights @ raw.double() @ weights.T
    assert images.shape == (12, 1, 8, 8)
    assert (images[:, 0].double() - expected).abs().max() <= 0.5 + 1e-4  # uint8 again: rounded


def test_a_subset_is_drawn_by_the_seed_and_kept_in_order(root):
    raw = _save(root, "svhn", (8, 8, 3), size=100).permute(0, 3, 1, 2)
    stream = _stream("cifar10", root)

    def rows(seed, samples=40):
        torch.manual_seed(seed * 7 + samples)
        np.random.seed(seed * 7 + samples)
        images = public("svhn", stream, samples=samples, seed=seed, data_root=root).pool.images
        return [int((raw == image).flatten(1).all(1).nonzero()) for image in images]  # each image occurs once

    first = rows(0)
    assert len(set(first)) == 40 and first == sorted(first)
    assert rows(0) == first and rows(1) != first
    assert min(first) < 100 <= max(first)  # train and test images
    assert rows(0, samples=500) == list(range(200))


def test_the_stream_keeps_its_tasks(root):
    _save(root, "svhn", (8, 8, 3))
    stream = _stream("cifar10", root)
    more = with_public(stream, "svhn", samples=5, seed=3, data_root=root)
    assert stream.public is None and len(more.public) == 5 and more.tasks == stream.tasks
    assert more.public.pool is not more.tasks[0].train.pool  # its ids are rows of its own pool
    assert torch.equal(_all(more.public)[0], _all(public("svhn", stream, samples=5, seed=3, data_root=root))[0])


def test_the_clients_own_data_are_refused(root):
    _save(root, "cifar100", (8, 8, 3), classes=100, size=200)
    with pytest.raises(ConfigError, match="'cifar10' is the data set of the clients of benchmark 'cifar10'"):
        public("cifar10", _stream("cifar10", root), data_root=root)
    with pytest.raises(ConfigError, match="'cifar100' .* 'split-cifar100'"):
        public("cifar100", _stream("split-cifar100", root), data_root=root)
    with pytest.raises(ConfigError, match="'mnist' .* 'permuted-mnist'"):
        public("mnist", _stream("permuted-mnist", root), data_root=root)
    _save(root, "fashion-mnist", (8, 8))
    assert len(public("mnist", _stream("fashion-mnist", root), data_root=root)) == 12  # another data set


def test_a_data_set_beside_the_public_data_of_a_stream_is_named():
    config = toy.config("tasks=1", "rounds=1", "public.name=mnist", method="feddf")
    with pytest.warns(UserWarning, match=r"^public.name=mnist has no effect: stream '.*' has public data of its own; "):
        cfl.run(config, stream=toy.stream(1))
    with warnings.catch_warnings():  # a method that reads no public data
        warnings.simplefilter("error", UserWarning)
        cfl.run(toy.config("tasks=1", "rounds=1", "public.name=mnist", method="fedavg"), stream=toy.stream(1))


def test_iris_has_public_inputs_of_its_own():
    stream = streams.build("iris")
    assert torch.equal(_all(stream.public)[0], _all(stream.tasks[0].train)[0])


def test_streams_of_other_samples_are_refused(root):
    vectors = streams.build("iris")
    with pytest.raises(DataError, match=r"'mnist' are uint8 images.* 'iris' are torch.float32 of shape \(2,\)"):
        public("mnist", vectors, data_root=root)
    two = torch.zeros(4, 2, 8, 8, dtype=torch.uint8)
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DataError, match="'mnist' cannot become images of 2 channels"):
        public("mnist", streams.from_tensors([(two, y, two, y)]), data_root=root)
    one = two[:, :1].float()
    with pytest.raises(DataError, match=r"float32 of shape \(1, 8, 8\)"):  # of an unknown scale
        public("mnist", streams.from_tensors([(one, y, one, y)]), data_root=root)
    with pytest.raises(ConfigError, match=r"public\.samples must be at least 1"):
        public("mnist", _stream("cifar10", root), samples=0, data_root=root)
    with pytest.raises(ConfigError, match="unknown data set 'cifar-100'; did you mean 'cifar100'"):
        public("cifar-100", _stream("cifar10", root), data_root=root)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("benchmark", "name", "total"),
    # 50,000 + 10,000; 8,000 + 2,000; 10,000 + 3,000
    [("cifar10", "cifar100", 60000), ("mnist", "notmnist", 10000), ("cifar100", "tiny-imagenet100", 13000)],
)
def test_real_public_data_have_nearly_the_scale_of_the_task(benchmark, name, total):
    toy.need_data(benchmark, name)
    stream = streams.build(benchmark)
    assert len(public(name, stream).pool.images) == total
    x, _ = _all(public(name, stream, samples=500))
    assert x.shape == (500, *stream.input_shape)
    own, _ = stream.tasks[0].train.gather(torch.arange(500))
    # photographs are about equally bright; letters of notMNIST fill more of the image than digits
    assert (x.mean() - own.mean()).abs() < (1.2 if name == "notmnist" else 0.3)
    assert 0.8 < x.std() / own.std() < 1.6
