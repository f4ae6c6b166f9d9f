"""The local step: for one client, and the same code for stacked clients under torch.func.vmap."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, rng, tree
from cfl.engines.step import Local, LocalStep, StepInputs
from cfl.methods.regularizers import KL, FedNTD, FedProx, LocalRegularizer
from cfl.models import Model

CLIENTS, STEPS, SIZE, LR = 4, 3, 6, 0.1


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))


def convnet():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def bn_net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


NETS = {"mlp": (mlp, (4,)), "conv": (convnet, (1, 6, 6)), "norm": (bn_net, (4,))}
OPTIMIZERS = {"sgd": optim.sgd(momentum=0.9, weight_decay=1e-2), "adam": optim.adam(weight_decay=1e-2)}


def make(net, optimizer=OPTIMIZERS["sgd"], members=None, **options):
    module, shape = NETS[net]
    with rng.fork(1):
        model = Model(module(), shape, [3, 3], multi_head=True, **options)
    model.module.train()
    members = {"strategy": Strategy(), "fedprox": FedProx(mu=0.5)} if members is None else members
    return model, LocalStep(model, 0, frozenset(), ComposedMethod(members), optimizer)


def batch(net, client, index, live=SIZE):
    source = rng.generator(rng.key(0, client, index))
    x = torch.randn(SIZE, *NETS[net][1], generator=source)
    y = torch.randint(3, (SIZE,), generator=source)
    return Batch(x, y, (torch.arange(SIZE) < live).float(), torch.arange(SIZE))


def assert_same(a, b):
    for one, other in zip(a, b, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_step_equals_autograd_and_torch_sgd():
    model, step = make("mlp", optim.sgd(weight_decay=0.1), members={"strategy": Strategy()})
    reference = copy.deepcopy(model.module)
    reference[3].load_state_dict({"weight": model.params["3.weight@0"], "bias": model.params["3.bias@0"]})
    data = batch("mlp", 0, 0)
    expected = F.cross_entropy(reference(data.x), data.y)
    expected.backward()
    torch.optim.SGD(reference.parameters(), lr=LR, weight_decay=0.1).step()
    after, loss = step(step.start(model.params), StepInputs({"params": model.params}, data, lr=LR))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for name, leaf in reference.named_parameters():
        assert torch.allclose(after.params[model.tree_name(name, 0)], leaf, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_vmap_over_clients_equals_the_loop(net, optimizer):
    """As in the engine: gradients of a block of clients by vmap, then one in-place update of the stacked trees."""
    model, step = make(net, OPTIMIZERS[optimizer])
    shared = {"params": model.params}
    live = [[6, 6, 6], [6, 6, 2], [5, 4], [3]]  # samples by client and step; finished clients leave the block

    looped, losses = [], []
    for client in range(CLIENTS):
        local = step.start(model.params)
        for index, samples in enumerate(live[client]):
            local, loss = step(local, StepInputs(shared, batch(net, client, index, samples), lr=LR, step=index, key=7))
            losses.append((index, client, loss.item()))
        looped.append(local)

    stacked = Local(*map(tree.stack, zip(*(step.start(model.params) for _ in range(CLIENTS)))))
    found = []
    for index in range(STEPS):
        there = sum(len(steps) > index for steps in live)  # the first clients have the most steps
        block = Local(*(tree.map(lambda leaf, there=there: leaf[:there], part) for part in stacked))
        parts = zip(*(batch(net, client, index, live[client][index])[:4] for client in range(there)))

        def one(params, buffers, parts, index=index):
            return step.gradient(
                params, buffers, step.context(StepInputs(shared, Batch(*parts), step=index, key=7), buffers), {}
            )

        grads, buffers, loss = torch.func.vmap(one, randomness="different")(
            block.params, block.buffers, tuple(map(torch.stack, parts))
        )
        step.optimizer.update(grads, block.optimizer, block.params, LR, index)  # in `stacked`, too: views
        for name, leaf in buffers.items():
            stacked.buffers[name][:there] = leaf
        found += [(index, client, value) for client, value in enumerate(loss.tolist())]

    assert found == [(*place, pytest.approx(value, abs=1e-6)) for *place, value in sorted(losses)]
    for client, local in enumerate(looped):
        for together, alone in zip(stacked, local, strict=True):
            for name, leaf in alone.items():
                assert together[name].dtype == leaf.dtype
                assert torch.allclose(together[name][client], leaf, atol=1e-6), name
    if net == "norm":
        assert stacked.buffers["1.num_batches_tracked@0"].tolist() == [3, 3, 2, 1]


@pytest.mark.parametrize("net", NETS)
def test_the_gradient_by_plain_autograd_is_that_of_torch_func(net):
    model, step = make(net)
    local, shared, data = step.start(model.params), {"params": model.params}, batch(net, 0, 0, live=5)
    local = local._replace(params=tree.map(lambda leaf: leaf + 0.1, local.params))  # FedProx is then not 0
    ctx = step.context(StepInputs(shared, data, key=7), local.buffers)
    grads, buffers, loss = step.gradient(local.params, local.buffers, ctx, {})
    expected, (mean, after) = torch.func.grad(step.loss, has_aux=True)(local.params, local.buffers, ctx)
    assert_same((grads, buffers, {"loss": loss}), (expected, after, {"loss": mean}))
    assert not any(leaf.requires_grad for leaf in (*grads.values(), *buffers.values(), loss))


def test_weights_outside_of_the_loss_have_a_gradient_of_zero():
    model, step = make("mlp", optim.sgd())
    step = LocalStep(model, 0, frozenset(), step.composed, step.optimizer, heads=(0, 1))
    local = step.start(model.params)
    ctx = step.context(StepInputs({"params": model.params}, batch("mlp", 0, 0), key=7))
    grads, *_ = step.gradient(local.params, local.buffers, ctx, {})
    assert set(grads) == set(local.params) >= {*model.head(0), *model.head(1)}
    assert not any(grads[name].any() for name in model.head(1)) and all(grads[name].any() for name in model.head(0))


def test_the_gradient_changes_no_input_and_is_zero_for_a_batch_of_padding():
    for net in NETS:
        model, step = make(net, members={"strategy": Strategy()})
        local, shared = step.start(model.params), {"params": model.params}
        before = [tree.clone(part) for part in (model.params, *local)]
        for live in (SIZE, 0):
            ctx = step.context(StepInputs(shared, batch(net, 0, 0, live), key=7), local.buffers)
            grads, _, loss = step.gradient(local.params, local.buffers, ctx, {})
            assert_same(before, [model.params, *local])
            assert any(leaf.any() for leaf in grads.values()) == (loss.item() != 0) == (live > 0)


@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_padding_does_not_change_a_step(net):
    model, step = make(net)
    padded = batch(net, 0, 0, live=4)
    cut = Batch(*(part[:4] for part in padded[:4]))
    a, loss_a = step(step.start(model.params), StepInputs({"params": model.params}, padded, lr=LR))
    b, loss_b = step(step.start(model.params), StepInputs({"params": model.params}, cut, lr=LR))
    assert loss_a.item() == pytest.approx(loss_b.item(), abs=1e-6)
    assert all(torch.allclose(a.params[name], leaf, atol=1e-6) for name, leaf in b.params.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_a_step_writes_only_to_its_carry(net, optimizer):
    model, step = make(net, OPTIMIZERS[optimizer])
    shared, local, data = {"params": model.params}, step.start(model.params), batch(net, 0, 0)
    leaves = dict(zip("xymi", data))
    before = [tree.clone(part) for part in (model.params, local.buffers, leaves)]
    start = tree.clone(local.params)
    after, _ = step(local, StepInputs(shared, data, lr=LR, key=7))
    step.context(StepInputs(shared, data, step=1), after.buffers).forward(after.params, data)
    assert_same(before, [model.params, local.buffers, leaves])
    assert after.params is local.params and after.optimizer is local.optimizer
    assert not any(torch.equal(after.params[name], leaf) for name, leaf in start.items())


def test_start_takes_the_tasks_names_without_the_frozen_ones():
    model, step = make("norm")
    local = step.start(model.params)
    assert tuple(local.params) == model.trainable(0) and tuple(local.buffers) == model.buffers(0)
    assert set(local.optimizer) == set(local.params)
    assert "3.weight@1" in model.params and "3.weight@1" not in local.params
    frozen = LocalStep(model, 0, frozenset({"0.weight"}), step.composed, step.optimizer)
    local = frozen.start(model.params)
    bias = local.params["0.bias"].clone()
    assert "0.weight" not in local.params and "0.weight" not in local.optimizer
    after, _ = frozen(local, StepInputs({"params": model.params}, batch("norm", 0, 0), lr=LR))
    assert "0.weight" not in after.params and not torch.equal(after.params["0.bias"], bias)


def test_batch_statistics_reach_the_buffers():
    model, step = make("norm")
    data = batch("norm", 0, 0)
    after, _ = step(step.start(model.params), StepInputs({"params": model.params}, data, lr=LR))
    hidden = F.linear(data.x, model.params["0.weight"], model.params["0.bias"])
    assert torch.allclose(after.buffers["1.running_mean@0"], 0.1 * hidden.mean(0), atol=1e-6)  # momentum 0.1, from 0
    assert after.buffers["1.num_batches_tracked@0"].item() == 1


class Above(LocalRegularizer):
    """Takes gradients at weights that are 1 and 2 larger, none at the weights themselves."""

    def around(self, grad_fn):
        def shifted(params, ctx, by):
            return grad_fn(tree.map(lambda leaf: leaf + by, params), ctx)

        return lambda params, ctx: tree.add(shifted(params, ctx, 1), shifted(params, ctx, 2))


@pytest.mark.parametrize(("net", "shift"), [("mlp", 1), ("norm", 0)])
def test_without_a_gradient_at_the_weights_the_loss_is_the_first_one_and_statistics_those_of_the_weights(net, shift):
    """Statistics take a pass at the weights, and then the loss is that of this pass."""
    model, step = make(net, members={"strategy": Strategy(), "above": Above()})
    _, plain = make(net, members={"strategy": Strategy()})
    given = StepInputs({"params": model.params}, batch(net, 0, 0))
    params, buffers, _ = step.start(model.params)
    _, after, loss = step.gradient(params, buffers, step.context(given, buffers), {})
    there = tree.map(lambda leaf: leaf + shift, params)
    _, expected, value = plain.gradient(there, buffers, plain.context(given, buffers), {})
    assert loss.item() == pytest.approx(value.item(), rel=1e-6)
    assert_same([after], [expected])


def test_features_come_from_the_same_pass_as_the_logits():
    """With dropout passes differ: the last layer maps only the features of the same pass to the logits."""
    seen = []

    class Looks(LocalRegularizer):
        def penalty(self, params, logits, ctx):
            seen.append(F.linear(ctx.features, params["2.weight@0"], params["2.bias@0"]) - logits)
            again = ctx.forward(params, ctx.batch, features=True)
            assert again.shape == ctx.features.shape and not torch.equal(again, ctx.features)  # another draw of dropout
            return 0.0

    with rng.fork(1):
        module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        model = Model(module, (4,), [3, 3], multi_head=True)
    model.module.train()
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), "looks": Looks()}), optim.sgd())
    with rng.fork(2):
        step(step.start(model.params), StepInputs({"params": model.params}, batch("mlp", 0, 0), lr=LR))
    assert len(seen) == 1 and seen[0].abs().max() < 1e-6


def test_features_are_none_if_the_last_layer_is_not_linear():
    seen = []

    class Looks(LocalRegularizer):
        def penalty(self, params, logits, ctx):
            seen.append(ctx.features)
            return 0.0

    model = Model(nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()), (1, 6, 6), [3], multi_head=False)
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), "looks": Looks()}), optim.sgd())
    step(step.start(model.params), StepInputs({"params": model.params}, batch("conv", 0, 0), lr=LR))
    assert seen == [None]


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.9), ("adam", 0.0)])
def test_the_context_holds_momentum_client_step_and_public_data(optimizer, momentum):
    model, step = make("mlp", OPTIMIZERS[optimizer])
    public = object()
    step = LocalStep(model, 0, frozenset(), step.composed, step.optimizer, public=public)
    ctx = step.context(StepInputs({"params": model.params}, step=3, client=torch.tensor(5)))
    assert (ctx.momentum, ctx.client.item(), ctx.step) == (momentum, 5, 3)
    assert ctx.public is public


def test_with_masked_only_the_loss_leaves_out_old_classes():
    """Penalties and `forward` have all classes seen: the gradient is that of both terms written out."""

    class Kept(LocalRegularizer):
        def penalty(self, params, logits, ctx):
            whole = ctx.forward(params, ctx.batch)
            return (logits - whole).square().sum() + whole.logsumexp(1).mean()

    with rng.fork(1):
        model = Model(mlp(), (4,), [1, 2], multi_head=True, growing=True)
    model.module.train()
    members = {"strategy": Strategy(), "kept": Kept()}
    step = LocalStep(model, 1, frozenset(), ComposedMethod(members), optim.sgd(), heads=(0, 1), masked=True)
    local = step.start(model.params)
    given = batch("mlp", 0, 0)._replace(y=torch.tensor([1, 2, 1, 2, 0, 1]), task=torch.tensor([1, 1, 1, 1, 0, 1]))
    grads, _, loss = step.gradient(
        local.params, local.buffers, step.context(StepInputs({"params": model.params}, given)), {}
    )

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in local.params.items()}
    logits = model.logits({**model.params, **leaves}, given.x, 1)
    # new samples choose among classes 1 and 2, the replayed one (y = 0) among all three
    new = F.cross_entropy(logits[:, 1:], (given.y - 1).clamp(min=0), reduction="none")
    losses = torch.where(given.task == 1, new, F.cross_entropy(logits, given.y, reduction="none"))
    expected = torch.autograd.grad(losses.mean() + logits.logsumexp(1).mean(), [*leaves.values()])
    assert loss.item() == pytest.approx(losses.mean().item(), abs=1e-6)
    for name, found in zip(leaves, expected, strict=True):
        assert torch.allclose(grads[name], found, atol=1e-6), name


@pytest.mark.parametrize("rule", [KL(), FedNTD()])
def test_distillation_keeps_old_classes_where_the_loss_leaves_them_out(rule):
    # Two new classes: of FedNTD's classes without the true one, one alone would be left without the old class.
    with rng.fork(1):
        model = Model(mlp(), (4,), [1, 2], multi_head=True, growing=True)
    model.module.train()
    steps = [
        LocalStep(model, 1, frozenset(), ComposedMethod({"strategy": Strategy(), **more}), optim.sgd(), masked=True)
        for more in ({}, {"rule": rule})
    ]
    given = StepInputs({"params": model.params}, batch("mlp", 0, 0)._replace(y=torch.tensor([1, 2, 1, 2, 2, 1])))
    # the client has moved away from the global model, in all three classes
    moved = tree.map(lambda leaf: leaf + 0.5 * leaf.cos(), steps[0].start(model.params).params)
    plain, kept = (step.gradient(moved, {}, step.context(given), {})[0] for step in steps)

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in moved.items()}
    ours, theirs = (model.logits({**model.params, **own}, given.batch.x, 1) for own in (leaves, {}))
    true = F.one_hot(given.batch.y, 3).bool() & isinstance(rule, FedNTD)
    temperature = rule.tau if isinstance(rule, FedNTD) else rule.temperature
    p, q = ((leaf.masked_fill(true, -1e9) / temperature).softmax(1) for leaf in (theirs.detach(), ours))
    divergence = (p * ((p + true.float()) / (q + true.float())).log()).sum(1).mean()
    scale = rule.tau**2 if isinstance(rule, FedNTD) else 1
    expected = torch.autograd.grad(rule.beta * scale * divergence, [*leaves.values()])
    for name, found in zip(leaves, expected, strict=True):
        assert torch.allclose(kept[name] - plain[name], found, atol=1e-6), name
    assert max(float(found.abs().max()) for found in expected) > 1e-3
