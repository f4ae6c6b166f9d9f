"""EWC: Fisher against loops over samples, the penalty against a sum over tasks, uploads and storage of runs."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cfl
from cfl.contract import Batch, Client, LocalRegularizer, Phase, RoundInfo, Share, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, UpdateError, optim, rng, tree
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies.ewc import EWC
from cfl.models import Model
from tests import toy

# --- helpers ---------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Samples in the precision of the test: streams keep float32."""

    x: Tensor
    targets: Tensor
    augment = ()

    @property
    def index(self) -> Tensor:
        return torch.arange(len(self.x))

    def __len__(self) -> int:
        return len(self.x)

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]:
        return self.x[rows], self.targets[rows]


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=rng.generator(seed))


def client(x, y, task=0):
    return Client(0, {task: Share(Data(x, y), torch.arange(len(x)))}, task, (task,))


def info(model, task=0):
    phase = Phase("consolidate", cohort="available", train=False, work=True)
    names = (*model.trainable(task), *model.buffers(task))
    model.module.eval()  # as the engine runs `work`
    return RoundInfo(task, 3, phase, 0, (0,), names, frozenset(), (task,), 1, 0.1, model, 0)


def net(kind):
    """A float64 network of 2 outputs and its input shape."""
    with rng.fork(1):
        if kind == "norm":
            layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)]
        else:
            layers = [nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)]
    return nn.Sequential(*layers).double(), (2, 4, 4) if kind == "norm" else (5,)


def two_tasks():
    """A model, and a client's state after two tasks with weights and samples of each."""
    module, shape = net("dropout")
    model = Model(module, shape, [2, 2, 2], multi_head=False)
    state, past = {}, []
    for task in range(2):
        params = {name: leaf + 0.2 * random(*leaf.shape, seed=task) for name, leaf in model.params.items()}
        mine = client(random(9, 5, seed=10 + task), torch.arange(9) % 2, task)
        _, state = EWC().work(params, mine, {}, state, info(model, task))
        past.append((params, EWC().importance(list(params), params, mine, info(model, task))))
    return model, state, past


@dataclass(frozen=True)
class Recorder(EWC):
    """EWC that keeps (task, client, params, state before, state after) of each consolidation."""

    seen: list = field(default_factory=list)

    def work(self, params, client, shared, state, info):
        up, new = super().work(params, client, shared, state, info)
        self.seen.append((info.task, client.id, params, state, new))
        return up, new


def pull(rule, params, ctx):
    """Gradient of the penalty alone, by a loss without gradient."""
    return rule.around(lambda at, seen: tree.map(torch.zeros_like, at))(params, ctx)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_consolidation_and_a_step_by_hand():
    # Logits (w0 x, w1 x) with w0 = w1 = 1, so p = (1/2, 1/2), and d log p(y | x) / d w_k = ([y = k] - 1/2) x = +-x/2.
    # Samples 2 and 4: F = (1 + 4) / 2 = 2.5 for both weights, which are 1.
    with rng.fork(0):
        model = Model(nn.Linear(1, 2, bias=False).double(), (1,), [2, 2], multi_head=False)
    ones = {"weight": torch.ones(2, 1, dtype=torch.float64)}
    up, state = EWC().work(
        ones, client(torch.tensor([[2.0], [4.0]]).double(), torch.tensor([0, 1])), {}, {}, info(model)
    )
    assert up == {}
    assert {name: leaf.flatten().tolist() for name, leaf in state.items()} == {
        "fisher/weight": [2.5, 2.5],
        "anchor/weight": [1.0, 1.0],
    }
    # Task 1, at w = (3, 1), with a sample 0 whose cross-entropy has no gradient: the penalty's is
    # 2 * 2.5 * ((3, 1) - 1) = (10, 0), so a step of 0.1 goes to (2, 1).
    params = {"weight": torch.tensor([[3.0], [1.0]]).double()}
    step = LocalStep(model, 1, frozenset(), ComposedMethod({"strategy": EWC(strength=2.0)}), optim.sgd())
    batch = Batch(torch.zeros(1, 1).double(), torch.tensor([1]), torch.ones(1).double(), torch.arange(1))
    states = {f"strategy/{name}": leaf for name, leaf in state.items()}
    local, loss = step(step.start(params), StepInputs({"params": params}, batch, state=states, lr=0.1))
    assert local.params["weight"].flatten().tolist() == pytest.approx([2.0, 1.0], abs=1e-15)
    assert loss.item() == pytest.approx(torch.tensor(2.0).log().item())  # of the cross-entropy alone


def test_a_limit_of_one_over_lr_and_lambda_brings_a_step_to_the_old_weights_and_not_beyond():
    # As above: F = 2.5 at w = 1. With lambda 4 and lr 1 a step of the penalty multiplies w - 1 by 1 - 4 * 2.5 = -9, and
    # the next by -9 again. With F limited to 1 / (4 * 1) the factor is 1 - 1 = 0. A limit above F has no effect.
    with rng.fork(0):
        model = Model(nn.Linear(1, 2, bias=False).double(), (1,), [2, 2], multi_head=False)
    ones, mine = (
        {"weight": torch.ones(2, 1).double()},
        client(torch.tensor([[2.0], [4.0]]).double(), torch.tensor([0, 1])),
    )
    away = {"weight": torch.tensor([[3.0], [1.0]]).double()}
    reached = {}
    for limit in (None, 0.25, 3.0):
        rule = EWC(strength=4.0, max_fisher=limit)
        _, state = rule.work(ones, mine, {}, {}, info(model))
        step = 1.0 * pull(rule, away, toy.context({}, state, None, model, task=1))["weight"]
        reached[limit] = (away["weight"] - step).flatten().tolist()
    assert reached == {None: [1.0 - 9 * 2, 1.0], 0.25: [1.0, 1.0], 3.0: [1.0 - 9 * 2, 1.0]}


@pytest.mark.parametrize("half", [True, False])
def test_by_default_no_step_of_the_penalty_goes_beyond_the_old_weights(half):
    """|w - old| after a step of size lr lies between 0, where F is above 1 / (lr lambda), and |w - old| before."""
    model, state, _ = two_tasks()
    params = {name: leaf + random(*leaf.shape, seed=5) for name, leaf in model.params.items()}
    reached_zero = 0
    for lr in (1e-3, 0.1, 10.0):
        ctx = toy.context({}, state, None, model, task=2, lr=lr)
        for name, pulled in pull(EWC(strength=40.0, half=half), params, ctx).items():
            before = params[name] - state[f"anchor/{name}"]
            share = 1 - lr * pulled / before  # what is left of the distance
            assert share.min() > -1e-9 and share.max() <= 1
            full = state[f"fisher/{name}"] >= 1 / (lr * 40.0 * (1 if half else 2))
            assert share[full].abs().max() < 1e-9 if full.any() else True
            reached_zero += int(full.sum())
    assert reached_zero > 0
    assert EWC().max_fisher == "auto" and EWC(strength=0.0).max_fisher == "auto"
    still = pull(EWC(strength=0.0), params, toy.context({}, state, None, model, task=2))
    assert all(not leaf.any() for leaf in still.values())


def test_the_limit_is_of_the_sum_over_tasks_and_changes_nothing_that_is_stored():
    model, state, past = two_tasks()
    limit = state["fisher/0.weight"].quantile(0.5).item()  # half of the entries are above it
    params = {name: leaf + random(*leaf.shape, seed=5) for name, leaf in model.params.items()}
    found = pull(EWC(strength=3.0, max_fisher=limit), params, toy.context({}, state, None, model, task=2))
    for name, leaf in params.items():
        total = sum(fisher[name] for _, fisher in past)
        anchor = sum(fisher[name] * old[name] for old, fisher in past) / total.clamp(min=1e-300)
        torch.testing.assert_close(found[name], 3.0 * total.clamp(max=limit) * (leaf - anchor), atol=1e-12, rtol=0)
    mine = client(random(9, 5, seed=10), torch.arange(9) % 2, 0)
    _, cut = EWC(max_fisher=limit).work(past[0][0], mine, {}, {}, info(model, 0))
    assert torch.equal(cut["fisher/0.weight"], past[0][1]["0.weight"]) and (cut["fisher/0.weight"] > limit).any()


def test_fisher_of_softmax_regression_at_zero_is_a_quarter_of_the_mean_square():
    # z_k = w_k x + b_k = 0, so p_k = 1/2 and d log p(y | x) / d w_k = ([y = k] - 1/2) x: squared, x^2 / 4 in both rows,
    # whatever y; and 1/4 for both biases. (Of the logistic model with the one weight w_1 - w_0 it is x^2 / 4, too.)
    model = Model(nn.Linear(3, 2).double(), (3,), [2], multi_head=False)
    zero = tree.map(torch.zeros_like, model.params)
    x, y = random(8, 3), torch.arange(8) % 2
    fisher = EWC().importance(list(zero), zero, client(x, y), info(model, 0))
    torch.testing.assert_close(fisher["weight"], x.square().mean(0).expand(2, 3) / 4, atol=1e-15, rtol=0)
    torch.testing.assert_close(fisher["bias"], torch.full((2,), 0.25).double(), atol=1e-15, rtol=0)
    # Labels are balanced: the mean gradient of the biases is 0, and its square says nothing about the Fisher.
    mean = torch.func.grad(lambda at: F.cross_entropy(model.logits(at, x, 0), y))(zero)
    assert mean["bias"].abs().max() < 1e-15


@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_fisher_is_the_mean_of_squared_gradients_of_single_samples_in_evaluation_mode(kind, multi_head):
    module, shape = net(kind)
    model = Model(module, shape, [2, 2], multi_head=multi_head)
    params = dict(model.params)
    for name in model.buffers(1):
        if params[name].is_floating_point():  # running statistics that differ from those of any batch
            params[name] = params[name] + random(*params[name].shape).abs()
    x, y = random(70, *shape), torch.arange(70) % 2  # more than the 64 samples that are computed at once
    names = model.trainable(1)
    ours = EWC().importance(list(names), params, client(x, y, 1), info(model, 1))

    module.load_state_dict(model.bind(params, 1))
    module.eval()
    leaves = list(module.parameters())
    squares = [torch.zeros_like(leaf) for leaf in leaves]
    for i in range(70):
        grads = torch.autograd.grad(-module(x[i : i + 1]).log_softmax(1)[0, y[i]], leaves)
        squares = [total + grad.square() / 70 for total, grad in zip(squares, grads, strict=True)]
    batch = torch.autograd.grad(F.cross_entropy(module(x), y), leaves)
    assert list(ours) == list(names)
    for name, expected, mean in zip(names, squares, batch, strict=True):
        torch.testing.assert_close(ours[name], expected, atol=1e-14, rtol=1e-11)
        assert mean.square().sum() < 0.5 * expected.sum()  # the square of the mean gradient is smaller


# --- the penalty -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half,factor", [(True, 1.0), (False, 2.0)])
def test_a_sum_and_a_mean_give_the_penalty_of_all_tasks(half, factor):
    model, state, past = two_tasks()
    rule, ctx = EWC(strength=3.0, half=half), toy.context({}, state, None, model, task=2)
    params = {name: leaf + random(*leaf.shape, seed=5) for name, leaf in model.params.items()}

    def listed(at):  # eq. 3, literally
        return factor * 3.0 / 2 * sum((f[name] * (at[name] - old[name]) ** 2).sum() for old, f in past for name in at)

    gradient = pull(rule, params, ctx)
    by_autograd = torch.func.grad(listed)(params)
    for name, leaf in params.items():
        by_hand = factor * 3.0 * sum(f[name] * (leaf - old[name]) for old, f in past)
        torch.testing.assert_close(gradient[name], by_hand, atol=1e-12, rtol=0)
        torch.testing.assert_close(by_autograd[name], by_hand, atol=1e-12, rtol=0)
        assert by_hand.abs().max() > 1e-3


def test_two_trees_are_kept_however_many_tasks_there_were():
    model, state, past = two_tasks()
    assert set(state) == {f"{kind}/{name}" for kind in ("fisher", "anchor") for name in model.params}
    for name in model.params:
        total = sum(f[name] for _, f in past)
        torch.testing.assert_close(state[f"fisher/{name}"], total)
        weighted = sum(f[name] * old[name] for old, f in past)
        torch.testing.assert_close(total * state[f"anchor/{name}"], weighted)


def test_weights_without_any_fisher_have_an_anchor_all_the_same():
    # An input that is always 0 has no gradient in either task: 0 / 0 would be NaN, and so would NaN times 0.
    with rng.fork(0):
        model = Model(nn.Linear(2, 2).double(), (2,), [2, 2], multi_head=False)
    dead, state = torch.tensor([[2.0, 0.0], [4.0, 0.0]]).double(), {}
    for task in range(2):
        _, state = EWC().work(model.params, client(dead, torch.tensor([0, 1]), task), {}, state, info(model, task))
    assert not state["fisher/weight"][:, 1].any() and state["fisher/weight"][:, 0].all()
    assert torch.equal(state["anchor/weight"], model.params["weight"])


def test_the_penalty_is_that_of_the_weights_at_which_the_gradient_is_taken():
    @dataclass(frozen=True)
    class Elsewhere(LocalRegularizer):
        """Takes the gradient at w + 0.3, like methods that perturb the weights."""

        def around(self, grad_fn):
            return lambda params, ctx: grad_fn({name: leaf + 0.3 for name, leaf in params.items()}, ctx)

    model, state, past = two_tasks()
    model.module.eval()  # no dropout: the two steps differ in the penalty alone
    batch = Batch(random(4, 5), torch.arange(4) % 2, torch.ones(4).double(), torch.arange(4))
    states, after = {f"strategy/{name}": leaf for name, leaf in state.items()}, []
    for strategy in (Strategy(), EWC(strength=2.0)):
        composed = ComposedMethod({"strategy": strategy, "elsewhere": Elsewhere()})
        step = LocalStep(model, 2, frozenset(), composed, optim.sgd())
        after.append(
            step(step.start(model.params), StepInputs({"params": model.params}, batch, state=states, lr=0.1))[0].params
        )
    for name, leaf in model.params.items():
        gradient = 2.0 * sum(fisher[name] * (leaf + 0.3 - old[name]) for old, fisher in past)
        torch.testing.assert_close(after[0][name] - after[1][name], 0.1 * gradient, atol=1e-14, rtol=0)


def test_heads_of_single_tasks_have_no_fisher_and_a_shared_one_has():
    module, shape = net("dropout")
    mine = client(random(6, *shape), torch.arange(6) % 2)
    for multi_head, covered in ((True, {"0.weight", "0.bias"}), (False, {"0.weight", "0.bias", "3.weight", "3.bias"})):
        model = Model(module, shape, [2, 2], multi_head=multi_head)
        _, state = EWC().work(model.params, mine, {}, {}, info(model))
        assert set(state) == {f"{kind}/{name}" for kind in ("fisher", "anchor") for name in covered}


def test_statistics_of_batches_are_refused():
    # A single sample has no batch statistics: its gradient is that of a different network, or undefined.
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=r"model\.norm_stats"):
        cfl.run(toy.config("model.norm_stats=batch", method="ewc"), stream=toy.stream(), model=module)


def test_a_negative_strength_is_refused():
    with pytest.raises(ConfigError, match=r"strategy\.strength"):
        build(EWC, {"strength": -1.0}, "strategy")


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_strength_zero_is_fedavg_to_the_byte(multi_head):
    options = ("local.momentum=0.9", "local.weight_decay=0.01", "model.dropout=[0.2,0.2]", "local.lr=0.2")
    stream = toy.stream(multi_head=multi_head)
    fedavg = cfl.run(toy.config(*options, method="fedavg"), stream=stream)
    nothing, held = (
        cfl.run(toy.config(*options, f"strategy.strength={strength}", method="ewc"), stream=stream)
        for strength in (0, 40)
    )
    assert all(torch.equal(nothing.params[name], leaf) for name, leaf in fedavg.params.items())
    assert nothing.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]
    assert not all(torch.equal(held.params[name], leaf) for name, leaf in fedavg.params.items())


def test_the_first_task_is_fedavg_to_the_byte():
    rule = Recorder()
    cfl.run(toy.config(method="ewc"), stream=toy.stream(), strategy=rule)
    alone = cfl.run(toy.config("tasks=1", method="fedavg"), stream=toy.stream(1))
    params = next(params for task, _, params, _, _ in rule.seen if task == 0)
    assert all(torch.equal(params[name], leaf) for name, leaf in alone.params.items())


# --- property --------------------------------------------------------------------------------------------------------


def test_weights_that_mattered_stay_nearer_the_stronger_the_penalty():
    moved = []
    for strength in (0.0, 5.0, 50.0):
        rule = Recorder(strength=strength)
        options = ("cohort=4", "rounds=10", "local.lr=0.2", "tasks=2")
        result = cfl.run(toy.config(*options, method="ewc"), stream=toy.stream(2), strategy=rule)
        moved.append(
            sum(
                (new[f"fisher/{name}"] * (result.params[name] - leaf).square()).sum().item()
                for _, _, params, _, new in rule.seen
                for name, leaf in params.items()
            )
        )
    assert moved[0] > 1.2 * moved[1] > 1.2**2 * moved[2] > 0  # 0.156, 0.103, 0.021


# --- conformance -----------------------------------------------------------------------------------------------------


def test_hooks_write_to_nothing_that_they_are_given():
    model, state, _ = two_tasks()
    before_state, before_params = tree.clone(state), tree.clone(model.params)
    _, new = EWC().work(model.params, client(random(5, 5), torch.arange(5) % 2), {}, state, info(model))
    pull(EWC(), model.params, toy.context({}, state, None, model))
    assert all(torch.equal(state[name], leaf) for name, leaf in before_state.items())
    assert all(torch.equal(model.params[name], leaf) for name, leaf in before_params.items())
    assert not any(torch.equal(new[f"fisher/{name}"], state[f"fisher/{name}"]) for name in model.params)


def test_padding_changes_nothing():
    model, state, _ = two_tasks()
    model.module.eval()
    step = LocalStep(model, 2, frozenset(), ComposedMethod({"strategy": EWC()}), optim.sgd(0.9))
    states, shared = {f"strategy/{name}": leaf for name, leaf in state.items()}, {"params": model.params}
    x, y, mask = random(6, 5), torch.arange(6) % 2, torch.tensor([1.0, 1, 1, 1, 0, 0]).double()
    whole = Batch(x, y, mask, torch.arange(6))
    short, padded = (
        step(step.start(model.params), StepInputs(shared, batch, state=states, lr=0.1))[0]
        for batch in (Batch(*(leaf[:4] for leaf in whole[:4])), whole)
    )
    for name, leaf in short.params.items():
        torch.testing.assert_close(padded.params[name], leaf, atol=1e-14, rtol=0)
        assert not torch.equal(leaf, model.params[name])


def test_a_client_without_data_of_a_task_keeps_its_state():
    rule = Recorder()
    options = (
        "cohort=3",
        "partition.clients=6",
        "partition.task_share=0.5",
        "tasks=4",
    )  # three of six clients own a task
    result = cfl.run(toy.config(*options, method="ewc"), stream=toy.stream(4), strategy=rule)
    states: dict[int, tree.Tree] = {}
    for _, id, _, before, after in rule.seen:
        known = states.get(id, {})
        assert set(before) == set(known) and all(torch.equal(before[name], leaf) for name, leaf in known.items())
        states[id] = after
    turns = [id for _, id, *_ in rule.seen]
    assert [task for task, *_ in rule.seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # no consolidation after the last task
    assert len(set(turns)) < len(turns)  # some clients return with a state
    assert result.metrics["client_bytes_max"] == 880  # of the clients that consolidated, see below


@pytest.mark.parametrize("multi_head,covered", [(False, 110), (True, 96)])
def test_consolidation_sends_nothing_up_and_stores_eight_bytes_a_parameter(multi_head, covered):
    # The 8-6-6-2 MLP has 54 + 42 = 96 parameters in its body and 14 in its head; two trees of four bytes for each.
    result = cfl.run(toy.config(method="ewc"), stream=toy.stream(multi_head=multi_head))
    moved = result.metrics["bytes_by_phase"]
    assert moved["consolidate"] == {"up": 0, "down": 2 * 4 * 4 * 110}  # after two tasks, the model to four clients
    assert moved["train"] == {"up": 3 * 2 * 3 * 4 * 110, "down": 3 * 2 * 3 * 4 * 110}
    assert result.metrics["client_bytes"] == result.metrics["client_bytes_max"] == 8 * covered


@pytest.mark.parametrize("options", [["local.lr=1.0"], ["local.lr=0.3", "strategy.strength=400"]])
def test_the_default_is_stable_where_no_limit_diverges(options):
    long = ["strategy.strength=40", "rounds=6", *options]
    with pytest.raises(
        UpdateError, match=r"lower local\.lr, strategy\.strength \(now 4.*strategy\.max_fisher \(now none\)"
    ):
        cfl.run(toy.config("strategy.max_fisher=none", *long, method="ewc"), stream=toy.stream())
    found = cfl.run(toy.config("strategy.max_fisher=auto", *long, method="ewc"), stream=toy.stream())
    assert found.metrics["acc"] > 0.6  # a coin gets 0.5


@pytest.mark.slow
def test_a_stream_that_nobody_tuned():
    """Four rotations of the same images under one head, and no option of EWC is set; without a limit, it diverges."""
    toy.need_data("fashion-mnist")
    with np.load(Path(toy.DATA, "fashion-mnist.npz")) as data:
        train, test = (
            (data[f"x_{part}"][:size], data[f"y_{part}"][:size]) for part, size in (("train", 5000), ("test", 1000))
        )
    x, y, *others = (
        torch.as_tensor(part) for part in (train[0][:, None] / 255, train[1], test[0][:, None] / 255, test[1])
    )
    turned = [
        (x.rot90(k, (2, 3)).float(), y.long(), others[0].rot90(k, (2, 3)).float(), others[1].long()) for k in range(4)
    ]
    options = ["tasks=4", "rounds=4", "cohort=10", "partition.clients=10", "local.lr=0.05", "model.hidden=[64]"]
    config = partial(cfl.resolve, "custom", method="ewc")
    assert config(overrides=options).strategy == {"strength": 40.0, "half": True, "max_fisher": "auto"}
    with pytest.raises(UpdateError, match="max_fisher"):
        cfl.run(config(overrides=[*options, "strategy.max_fisher=none"]), stream=cfl.from_tensors(turned))
    assert cfl.run(config(overrides=options), stream=cfl.from_tensors(turned)).metrics["acc"] > 0.25


def test_with_the_classes_of_the_task_alone_the_fisher_is_of_that_loss():
    """class_loss=current, by a loop over the samples: the part of the head with the old classes has none."""
    with rng.fork(1):
        module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model = Model(module, (5,), [2, 2], multi_head=True, growing=True)
    x, y = random(7, 5), torch.arange(7) % 2 + 2
    names = list(model.trainable(1, (0, 1)))
    assert {"2.weight@0", "2.weight@1"} <= {*names}
    here = replace(info(model, 1), masked=True)
    found = EWC().importance(names, model.params, client(x, y, 1), here)
    for name in names:
        squares = []
        for one, label in zip(x, y, strict=True):
            leaf = model.params[name].clone().requires_grad_()
            own = model.logits({**model.params, name: leaf}, one[None], 1)[:, 2:]
            loss = F.cross_entropy(own, label[None] - 2)
            squares.append(torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0].square())
        assert torch.allclose(found[name], torch.stack(squares).mean(0), atol=1e-12), name
    assert not found["2.weight@0"].any() and found["2.weight@1"].any()
    assert EWC().importance(names, model.params, client(x, y, 1), info(model, 1))["2.weight@0"].any()
