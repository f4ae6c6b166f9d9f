"""Forward passes of few samples: where they are made, and that they change nothing."""

import copy

import pytest
import torch
from torch import nn

from cfl.models import Model
from cfl.models.passes import couples, passes

X = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    """Two layers with a normalisation between them; `sizes` holds the number of samples of each call."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last, self.sizes = nn.Linear(6, 4), norm, nn.Linear(4, 3), []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.last(self.norm(self.first(x)))


def model(norm, stats):
    made = Model(Counting(norm), (6,), [3], multi_head=False, norm_stats=stats)
    made.module.eval()
    made.module.sizes.clear()
    return made


@pytest.mark.parametrize(
    ("norm", "stats", "sizes"),
    [
        (nn.Identity(), "running", [100, 100, 100]),
        (nn.BatchNorm1d(4), "running", [100, 100, 100]),
        (nn.BatchNorm1d(4), "batch", [300]),  # other passes would have other statistics
    ],
)
def test_predictions_are_those_of_one_pass(norm, stats, sizes):
    made = model(norm, stats)
    found = made.predict(made.params, X, 0)
    assert made.module.sizes == sizes
    torch.testing.assert_close(found, made.logits(made.params, X, 0))


def test_no_samples_have_no_outputs():
    made = model(nn.Identity(), "running")
    assert made.predict(made.params, X[:0], 0).shape == (0, 3)


def test_no_pass_has_a_single_sample_of_several():
    """Such a pass has no statistics, and a network that squeezes its output would lose a dimension."""
    made = model(nn.Identity(), "running")
    made.predict(made.params, X[:129], 0)
    assert made.module.sizes == [65, 64]


def test_elsewhere_than_on_a_cpu_passes_are_as_large_as_they_may_be():
    parts = passes(nn.Identity(), torch.empty(2000, device="meta"), 1024)
    assert [len(part) for part in parts] == [1024, 976]


class Centred(nn.Module):
    """Samples less the mean of their batch."""

    def forward(self, x):
        return x - x.mean(0)


class Pairs(nn.Module):
    """Takes samples in pairs."""

    def forward(self, x):
        return x.unflatten(0, (-1, 2)).flatten(0, 1)


@pytest.mark.parametrize(
    ("layer", "coupled"),
    [
        (nn.Identity(), False),
        (nn.Dropout(0.5), False),
        (nn.LayerNorm(3), False),
        (nn.InstanceNorm1d(2), False),
        (nn.InstanceNorm1d(2, track_running_stats=True), True),  # its buffers
        (nn.BatchNorm1d(2), True),
        (Centred(), True),
        (Pairs(), True),
    ],
)
def test_modules_whose_samples_depend_on_each_other_are_found(layer, coupled):
    module = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), layer, nn.Flatten(), nn.Linear(6, 3))
    nn.init.zeros_(module[-1].weight)  # its outputs depend on no sample
    state = torch.get_rng_state()
    assert couples(copy.deepcopy(module), (6,), "cpu") == coupled
    assert Model(module, (6,), [3], multi_head=False).couples_samples == coupled
    assert torch.get_rng_state().equal(state)
