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
