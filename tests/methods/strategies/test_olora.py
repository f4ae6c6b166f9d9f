"""O-LoRA: the overlap by hand, what moves in each task, and FedAvg on adapters as the limit."""

from types import SimpleNamespace

import pytest
import torch

import cfl
from cfl.core import ConfigError
from cfl.methods.strategies.olora import OLoRA, of_task, overlap
from cfl.testing import check_strategy, toy_config
from tests import toy

ADAPTED = ("model.adapter=lora", "model.adapter_rank=6")


def at(task, tasks):
    return SimpleNamespace(task=task, model=SimpleNamespace(tasks=tasks))


def run(*options, tasks=3, **own):
    rule = toy.recording(OLoRA)(**own)
    config = toy.config(*ADAPTED, "local.lr=0.3", *options, method="olora")
    return cfl.run(config, stream=toy.stream(tasks, multi_head=True), strategy=rule), rule


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_overlap_by_hand():
    # Pairs of rank 1: A_0 = (1, 2), A_1 = (0, 1), A_2 = (3, 4). In task 2: (3 + 8)^2 + 4^2 = 137; in task 1: 2^2 = 4.
    a = torch.tensor([[1.0, 2], [0, 1], [3, 4]])
    assert [overlap(a, 1, at(task, 3)).item() for task in (1, 2)] == [4, 137]
    # Two groups have inputs of their own: A_0 and A_1 are rows 0 and 1 of the first group, 2 and 3 of the second.
    a = torch.tensor([[1.0, 2], [3, 4], [0, 1], [5, 6]])
    assert overlap(a, 2, at(1, 2)).item() == 11**2 + 6**2


@pytest.mark.parametrize("groups", [1, 2])
def test_the_entries_of_a_task_by_hand(groups):
    net = torch.nn.Conv2d(2, 4, 3, groups=groups)
    layer = cfl.models.adapters.Adapted(net, rank=4, scale=1.0)
    model = SimpleNamespace(module=torch.nn.Sequential(layer), tasks=2)
    ones = {f"0.{part}.weight": torch.ones_like(getattr(layer, part).weight) for part in "ab"}
    left = of_task(ones, 1, model)
    assert left["0.a.weight"][:, 0, 0, 0].tolist() == [0, 0, 1, 1] * groups
    assert left["0.b.weight"][0, :, 0, 0].tolist() == [0, 0, 1, 1]


# --- limit -----------------------------------------------------------------------------------------------------------


def test_with_one_task_it_is_fedavg_on_adapters():
    ours = run("tasks=1", tasks=1)[0]
    plain = cfl.run(
        toy.config(*ADAPTED, "local.lr=0.3", "tasks=1", method="fedavg"), stream=toy.stream(1, multi_head=True)
    )
    assert torch.equal(toy.flat(ours.params), toy.flat(plain.params))


def test_without_adapters_it_is_fedavg_and_says_so():
    with pytest.warns(UserWarning, match="without adapters 'olora' is FedAvg; set model.adapter=lora"):
        ours = cfl.run(toy.config(method="olora"), stream=toy.stream())
    plain = cfl.run(toy.config(method="fedavg"), stream=toy.stream())
    assert torch.equal(toy.flat(ours.params), toy.flat(plain.params))


# --- property --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("local.momentum=0.9", "local.weight_decay=0.01"), ("local.optimizer=adam",)])
def test_a_task_moves_its_own_pair_alone(options):
    for info, down, server in run(*options)[1].rounds:
        own = slice(2 * info.task, 2 * info.task + 2)
        for name in ("1.a.weight", "3.a.weight", "1.b.weight", "3.b.weight"):
            moved = (server["params"][name] != down["params"][name]).any(dim=1 if ".a." in name else 0)
            assert not moved[: own.start].any() and not moved[own.stop :].any(), name
        assert not server["params"]["1.b.weight"][:, own.stop :].any()


def test_more_strength_leaves_less_overlap():
    def left(strength):
        # A step of lr 0.02 moves A_t by -2 lr lambda A_t A_s^T A_s, less than |A_t| for rows of norm about 0.6.
        params = run("local.lr=0.02", "rounds=10", strength=strength)[0].params
        return sum(float(overlap(params[f"{layer}.a.weight"], 1, at(task, 3))) for layer in (1, 3) for task in (1, 2))

    assert left(10.0) < 0.1 * left(0.0)


# --- conformance -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [("tasks=2", "model.adapter_rank=2"), pytest.param((), marks=pytest.mark.slow)])
def test_conformance(more):
    check_strategy(OLoRA(), config=toy_config(*ADAPTED, *more))


def test_a_rank_that_tasks_cannot_share_is_refused():
    with pytest.raises(
        ConfigError, match=r"each of 4 tasks .* model.adapter_rank, which is 6; set it to a multiple of 4"
    ):
        run_of_four = toy.config(*ADAPTED, method="olora")
        cfl.run(run_of_four, stream=toy.stream(4, multi_head=True))


def test_other_tasks_pairs_rest_in_local_training_too():
    """A regularizer that changes gradients acts before the mask."""
    seen = []
    config = toy.config("tasks=2", "local.lr=0.3", "model.adapter=lora", "model.adapter_rank=4", "local.epochs=2",
                        method="olora+prox_projection")  # fmt: skip
    cfl.run(
        config, stream=toy.stream(2), observe=lambda info, id, params: seen.append((info.task, params["1.a.weight"]))
    )
    first, second = ([a for task, a in seen if task == number] for number in (0, 1))
    assert all(torch.equal(a[2:], first[0][2:]) for a in first) and not torch.equal(first[0][:2], first[-1][:2])
    assert all(torch.equal(a[:2], second[0][:2]) for a in second) and not torch.equal(second[0][2:], second[-1][2:])
