"""FedAvgM: velocities by hand, FedAvg without momentum, and zero velocity at the start of each task."""

import torch
from torch import nn

import cfl
from cfl.methods.regularizers import FedAvgM
from cfl.models import Model
from tests import toy


def test_the_servers_steps_by_hand():
    rule, own = FedAvgM(momentum=0.5), {"a": torch.tensor(0.0), "still": torch.tensor(3.0)}
    taken = []
    for mean in (1.0, 1.0, -2.0):
        step, own = rule.server_step({"a": torch.tensor(mean), "running": torch.tensor(9.0)}, own, {}, {}, None)
        taken.append(step["a"].item())
        assert step["running"].item() == 9.0 and own["still"].item() == 3.0  # statistics are averages, not steps
    assert taken == [1.0, 1.5, -1.25]  # 0.5 * 0 + 1, 0.5 * 1 + 1, 0.5 * 1.5 - 2


def test_statistics_have_no_velocity():
    model = Model(toy.net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (3,), [2, 2], multi_head=True)
    velocity = FedAvgM().init_shared(model.params, model)
    assert set(velocity) == {*model.trainable(0), *model.trainable(1)}
    assert not any(leaf.any() for leaf in velocity.values())


def run(momentum, strategy=None):
    members = {} if momentum is None else {"fedavgm": FedAvgM(momentum=momentum)}
    config = toy.config("rounds=3", "cohort=4", method="fedavg")
    return cfl.run(config, stream=toy.stream(), strategy=strategy, regularizers=members)


def test_without_momentum_it_is_fedavg():
    plain, without = run(None).params, run(0.0).params
    assert all(torch.equal(without[name], leaf) for name, leaf in plain.items())
