"""The trial run of a module changes neither the module nor the state of random draws."""

import torch
from torch import nn

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
