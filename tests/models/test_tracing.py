"""The trial run of a module changes neither the module nor the state of random draws."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cfl.core import ConfigError
from cfl.models import Model


def test_a_trial_run_leaves_no_trace() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    state = torch.get_rng_state()
    model = Model(module, (8,), [2], multi_head=False, norm_stats="running")
    assert torch.get_rng_state().equal(state)
    for own in (module, model.module):
        assert not own.training
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in own.modules())
        assert all(leaf.equal(before[name]) for name, leaf in own.state_dict().items())
    assert all(leaf.equal(before[name]) for name, leaf in model.params.items())


class Checkpointed(nn.Module):
    """A network that keeps no activations and computes them again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body, self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_are_refused(reentrant: bool) -> None:
    """The backward pass would compute with the module's own weights instead of the client's."""
    with pytest.raises(ConfigError, match="activation checkpointing .* is not supported"):
        Model(Checkpointed(reentrant), (8,), [2], multi_head=False)


class Statistics(nn.Module):
    """Running means that the forward replaces, or writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("lost", torch.ones(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept.mul_(0.9).add_(0.1 * x.mean(0))
            self.lost = 0.9 * self.lost + 0.1 * x.mean(0)
            self.count = self.count + 1
        return self.head(x - self.kept - self.lost)


def test_a_buffer_that_the_forward_replaces_is_named() -> None:
    model = Model(Statistics(), (4,), [3], multi_head=False, norm_stats="running")
    leaves = {name: leaf.clone() for name, leaf in model.params.items()}
    model.module.train()
    model.logits(leaves, torch.zeros(2, 4), 0)
    assert torch.equal(leaves["lost"], torch.ones(4)) and torch.allclose(leaves["kept"], torch.full((4,), 0.9))
    assert model.notes() == ["buffers that the forward replaces never change; write into lost"]


class Centred(nn.Module):
    """A running mean that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.head(x - self.mean)


def test_a_running_mean_that_begins_at_zero_moves() -> None:
    assert Model(Centred(), (4,), [3], multi_head=False, norm_stats="running").moving == ["mean"]


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x).squeeze())


def test_a_network_that_drops_the_dimension_of_a_single_sample_is_refused() -> None:
    """In a run it would end in the middle, at the first batch of one sample."""
    with pytest.raises(ConfigError, match=r"shape \(2,\) for a single sample; it has to be \(1, 2\), so keep"):
        Model(Squeezed(), (3, 4, 4), [2], multi_head=False)


def test_lazy_layers_draw_by_the_seed_and_leave_the_global_generator() -> None:
    def first(seed: int) -> Tensor:
        before = torch.get_rng_state()
        model = Model(nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(2)), (4,), [2], multi_head=False, seed=seed)
        assert torch.get_rng_state().equal(before)
        torch.rand(1)
        return model.params["0.weight"]

    assert first(3).equal(first(3)) and not first(3).equal(first(4))
