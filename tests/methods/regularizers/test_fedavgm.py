"""FedAvgM: velocities by hand, FedAvg without momentum, and zero velocity at the start of each task."""

import pytest
import torch
from torch import nn

import cfl
from cfl.methods.regularizers import FedAvgM
from cfl.methods.strategies.fot import FOT
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


@pytest.mark.parametrize("base", [cfl.Strategy, FOT])
def test_each_task_starts_with_zero_velocity(base):
    """In each round of training, `absorb` gets the round's mean plus half of the previous step of the task."""
    means = []

    class Watch(base):
        def absorb(self, server, mean, info, lr):
            if info.phase.train:
                means.append((info.task, mean["strategy"]))
            return super().absorb(server, mean, info, lr)

    class Own(FedAvgM):
        def server_step(self, step, own, gathered, params, info):
            seen.append(step)
            return super().server_step(step, own, gathered, params, info)

    seen = []
    config = toy.config("tasks=2", "rounds=3", "cohort=4", method="fedavg")
    cfl.run(config, stream=toy.stream(tasks=2), strategy=Watch(), regularizers={"own": Own(momentum=0.5)})
    assert [task for task, _ in means] == [0, 0, 0, 1, 1, 1] and len(seen) == 6
    for first in (0, 3):
        for name in means[first][1]:
            a, b, c = (seen[first + place][name] for place in range(3))
            for (_, given), expected in zip(means[first : first + 3], (a, 0.5 * a + b, 0.5 * (0.5 * a + b) + c)):
                torch.testing.assert_close(given[name], expected, rtol=1e-6, atol=1e-9)
