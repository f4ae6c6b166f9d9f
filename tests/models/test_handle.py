"""The handle on any module: names in the tree, heads, running statistics and features."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.core import ConfigError, rng
from cfl.models import Model
from cfl.models.mlp import mlp
from tests import toy


def seeded(make):
    with rng.fork(1):
        return make()


def bn_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class Custom(nn.Module):
    """Layers out of order, one never called, one called twice, a normalisation layer, and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.unused = nn.Linear(100, 100)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.entry = nn.Linear(4, 6, bias=False)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.twice(self.twice(self.entry(x)))
        return self.head(F.relu(self.norm(x)) * self.gain)


def test_single_head_names_are_the_modules_own():
    module = seeded(lambda: mlp((4,), 3, hidden=(5,)))
    model = Model(module, (4,), [3, 3], multi_head=False)
    names = ("1.weight", "1.bias", "3.weight", "3.bias")
    assert tuple(model.params) == model.trainable(0) == model.trainable(1) == names
    assert model.head(1) == ("3.weight", "3.bias")
    assert [layer.name for layer in model.layers] == ["1", "3"]  # the shared head is a layer like any other


def test_multi_head_names_carry_the_task():
    model = Model(seeded(lambda: mlp((4,), 3, hidden=(5,))), (4,), [3, 2], multi_head=True)
    body = ("1.weight", "1.bias")
    assert model.trainable(1) == (*body, "3.weight@1", "3.bias@1")
    assert model.head(0) == ("3.weight@0", "3.bias@0")
    assert set(model.params) == {*body, "3.weight@0", "3.bias@0", "3.weight@1", "3.bias@1"}
    assert model.params["3.weight@0"].shape == (3, 5) and model.params["3.weight@1"].shape == (2, 5)
    assert [layer.name for layer in model.layers] == ["1"]


def test_heads_are_initialised_from_the_seed_and_the_task():
    def heads(seed):
        model = Model(seeded(lambda: mlp((4,), 3, hidden=(5,))), (4,), [3, 3], multi_head=True, seed=seed)
        return model.params["3.weight@0"], model.params["3.weight@1"]

    assert all(torch.equal(a, b) for a, b in zip(heads(0), heads(0)))
    assert not torch.equal(*heads(0))
    assert not torch.equal(heads(0)[0], heads(1)[0])


def test_logits_equal_those_of_the_module_with_the_head_of_the_task():
    module = seeded(lambda: mlp((4,), 3, hidden=(5,)))
    model, x = Model(module, (4,), [3, 2], multi_head=True), torch.randn(7, 4, generator=rng.generator(1))
    hidden = F.relu(F.linear(x, model.params["1.weight"], model.params["1.bias"]))
    for task in (0, 1):
        expected = F.linear(hidden, model.params[f"3.weight@{task}"], model.params[f"3.bias@{task}"])
        assert torch.equal(model.logits(model.params, x, task), expected)
    single = Model(module, (4,), [3], multi_head=False)
    assert torch.equal(single.logits(single.params, x, 0), module(x))


def test_the_users_module_is_copied():
    module = seeded(bn_net)
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    model = Model(module, (4,), [3], multi_head=False, norm_stats="batch")
    model.params["0.weight"].add_(1)
    model.module.train()
    model.logits(model.params, torch.randn(5, 4, generator=rng.generator(1)), 0)
    assert module[1].track_running_stats
    assert all(torch.equal(leaf, before[name]) for name, leaf in module.state_dict().items())


def test_leaves_have_the_memory_layout_of_those_that_a_checkpoint_returns():
    """With another one, a killed and resumed run would differ from one that was never killed."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)).to(memory_format=torch.channels_last)
    assert not net[0].weight.is_contiguous()
    assert all(leaf.is_contiguous() for leaf in Model(net, (2, 3, 3), [3], multi_head=False).params.values())


def test_building_keeps_mode_hooks_and_global_randomness():
    module, state = seeded(bn_net).train(), torch.get_rng_state()
    model = Model(module, (4,), [3, 3], multi_head=True)
    assert model.module.training and not any(layer._forward_pre_hooks for layer in model.module.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.params["1.num_batches_tracked@0"].item() == 0  # the traced pass does not count as a batch


def test_a_custom_module_is_read_from_its_forward_pass():
    model = Model(seeded(Custom), (4,), [2, 2], multi_head=True)
    assert [(layer.name, layer.size, layer.bias) for layer in model.layers] == [
        ("entry", 4, None),
        ("twice", 6, "twice.bias"),
    ]
    assert model.head(1) == ("head.weight@1", "head.bias@1")
    assert "unused.weight" in model.trainable(0) and "gain" in model.trainable(0)
    assert model.norms == {"norm.weight": 2, "norm.bias": 2}  # after both projected layers
    assert model.logits(model.params, torch.zeros(3, 4), 1).shape == (3, 2)


def test_a_module_that_is_one_linear_layer():
    for multi_head, names in ((False, ("weight", "bias")), (True, ("weight@1", "bias@1"))):
        model = Model(seeded(lambda: nn.Linear(4, 3)), (4,), [3, 3], multi_head=multi_head)
        assert model.trainable(1) == model.head(1) == names
        assert [layer.weight for layer in model.layers] == ([] if multi_head else ["weight"])
        expected = F.linear(torch.ones(1, 4), model.params[names[0]], model.params[names[1]])
        assert torch.equal(model.logits(model.params, torch.ones(1, 4), 1), expected)


def test_a_model_without_a_final_linear_layer():
    conv = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())  # 4 x 4 inputs: three outputs
    with pytest.raises(ConfigError, match=r"a head for each task.*not nn\.Linear: end the model in a Linear layer"):
        Model(conv, (1, 4, 4), [3, 3], multi_head=True)
    single = Model(conv, (1, 4, 4), [3, 3], multi_head=False)
    assert single.head(0) == () and [layer.size for layer in single.layers] == [16]


class Auxiliary(nn.Module):
    """Its last Linear layer is not that of its outputs."""

    def __init__(self, both):
        super().__init__()
        self.main, self.other, self.both = nn.Linear(4, 3), nn.Linear(4, 3), both

    def forward(self, x):
        outputs, other = self.main(x), self.other(x)
        return outputs + other if self.both else outputs


@pytest.mark.parametrize("both", [False, True], ids=["aside", "added"])
def test_a_head_for_each_task_has_to_be_all_that_the_outputs_depend_on(both):
    with pytest.raises(ConfigError, match="'other', but the outputs depend on the samples without this layer, too"):
        Model(Auxiliary(both), (4,), [3, 3], multi_head=True)
    Model(Auxiliary(both), (4,), [3, 3], multi_head=False)  # one head for all tasks may be anything


@pytest.mark.parametrize("norm", [nn.ReLU, lambda: nn.BatchNorm1d(8)], ids=["relu", "batch"])
def test_a_lazy_head_becomes_one_for_each_task(norm):
    model = Model(nn.Sequential(nn.LazyLinear(8), norm(), nn.LazyLinear(3)), (4,), [3, 3], multi_head=True)
    assert model.head(1) == ("2.weight@1", "2.bias@1") and model.params["2.weight@1"].shape == (3, 8)


@pytest.mark.parametrize("behind", [nn.LogSoftmax(1), nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()), nn.Dropout(0.5)])
def test_what_follows_a_head_may_change_its_outputs(behind):
    model = Model(nn.Sequential(nn.Linear(4, 3), behind), (4,), [3, 3], multi_head=True)
    assert model.head(1) == ("0.weight@1", "0.bias@1")


def test_outputs_and_inputs_must_fit_the_stream():
    with pytest.raises(ConfigError, match="the model has 3 outputs, but the stream has 5 classes"):
        Model(seeded(bn_net), (4,), [5], multi_head=False)
    with pytest.raises(ConfigError, match=r"does not take inputs of shape \(batch, \(9,\)\)"):
        Model(seeded(bn_net), (9,), [3], multi_head=False)


@pytest.mark.parametrize(
    ("stats", "names"),
    [
        ("per_task", {f"1.{name}@{task}" for name in ("running_mean", "running_var", "num_batches_tracked")
                      for task in (0, 1)}),
        ("running", {"1.running_mean", "1.running_var", "1.num_batches_tracked"}),
        ("batch", set()),
    ],
)  # fmt: skip
def test_names_of_running_statistics(stats, names):
    model = Model(seeded(bn_net), (4,), [3, 3], multi_head=False, norm_stats=stats)
    parameters = set(model.trainable(0))
    assert set(model.params) - parameters == names
    assert {*model.buffers(0), *model.buffers(1)} == names
    assert parameters >= {"1.weight", "1.bias"}  # affine parameters are shared, whatever the statistics


def test_running_statistics_are_those_of_the_task():
    model = Model(seeded(bn_net), (4,), [3, 3], multi_head=False)
    assert model.notes() == ["accuracies are those with the statistics of each test sample's task"]
    x = torch.randn(8, 4, generator=rng.generator(2)) + 5
    before = {name: leaf.clone() for name, leaf in model.params.items()}
    model.module.train()
    with torch.no_grad():
        model.logits(model.params, x, 1)
    hidden = F.linear(x, before["0.weight"], before["0.bias"])
    assert torch.allclose(model.params["1.running_mean@1"], 0.1 * hidden.mean(0))  # momentum 0.1, from 0
    assert torch.allclose(model.params["1.running_var@1"], 0.9 + 0.1 * hidden.var(0))  # from 1
    changed = {name for name, leaf in model.params.items() if not torch.equal(leaf, before[name])}
    assert changed == set(model.buffers(1))


def test_batch_statistics_normalise_with_the_batch_in_evaluation_too():
    model = Model(seeded(bn_net), (4,), [3], multi_head=False, norm_stats="batch")
    x, seen = torch.randn(8, 4, generator=rng.generator(2)) + 5, []
    model.module[1].register_forward_hook(lambda *call: seen.append(call[2]))
    model.module.eval()
    with torch.no_grad():
        model.logits(model.params, x, 0)
    assert torch.allclose(seen[0].mean(0), torch.zeros(6), atol=1e-5)
    assert torch.allclose(seen[0].var(0, unbiased=False), torch.ones(6), atol=1e-3)


@pytest.mark.parametrize("multi_head", [False, True])
def test_features_are_the_inputs_of_the_last_linear_layer(multi_head):
    model = Model(seeded(lambda: mlp((4,), 3, hidden=(5, 6))), (4,), [3, 3], multi_head=multi_head)
    x = torch.randn(7, 4, generator=rng.generator(1))
    features = model.features(model.params, x, 1)
    hidden = F.relu(F.linear(x, model.params["1.weight"], model.params["1.bias"]))
    hidden = F.relu(F.linear(hidden, model.params["3.weight"], model.params["3.bias"]))
    assert features.shape == (7, 6) and torch.equal(features, hidden)
    weight, bias = (model.params[name] for name in model.head(1))
    assert torch.equal(F.linear(features, weight, bias), model.logits(model.params, x, 1))


def test_features_depend_on_the_parameters_and_have_gradients():
    model = Model(seeded(lambda: mlp((4,), 3, hidden=(5,))), (4,), [3], multi_head=False)
    x = torch.randn(7, 4, generator=rng.generator(1))
    gradient = torch.func.grad(lambda at: model.features(at, x, 0).sum())(model.params)
    active = (F.linear(x, model.params["1.weight"], model.params["1.bias"]) > 0).float()
    assert torch.allclose(gradient["1.weight"], active.T @ x, atol=1e-5)
    assert not gradient["3.weight"].any()


def test_watched_features_are_those_of_each_pass_and_watching_ends():
    model, x = Model(seeded(bn_net), (4,), [3], multi_head=False), torch.randn(7, 4, generator=rng.generator(1))
    model.module.eval()
    with pytest.raises(ZeroDivisionError), model.watched_features() as seen:
        model.logits(model.params, x, 0)
        model.logits(model.params, x[:2], 0)
        raise ZeroDivisionError
    assert [len(one) for one in seen] == [7, 2]
    assert torch.allclose(seen[1], seen[0][:2], atol=1e-6)
    model.logits(model.params, x, 0)
    assert len(seen) == 2 and not model.module[3]._forward_pre_hooks  # the hook is gone, after an error too


def test_features_of_images_are_flat():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 3, 2), nn.Linear(27, 2)

        def forward(self, x):
            return self.head(self.conv(x).flatten(1))

    model = Model(seeded(Head), (1, 4, 4), [2], multi_head=False)
    assert model.features(model.params, torch.zeros(5, 1, 4, 4), 0).shape == (5, 27)


def test_features_of_a_head_that_is_called_with_a_keyword():
    model = Model(toy.ByKeyword(nn.Tanh(), nn.Linear(4, 2)), (4,), [2], multi_head=False)
    x = torch.randn(5, 4, generator=rng.generator(1))
    assert torch.equal(model.features(model.params, x, 0), x.tanh())


@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("folded", [True, False])
def test_a_last_layer_whose_rows_are_no_samples_gives_no_features(folded, multi_head):
    model = Model(toy.ManyRows(4, 2, folded=folded), (4,), [2, 2], multi_head=multi_head)
    with pytest.raises(ConfigError, match="let the inputs of that layer, 'head', have the samples as their first dim"):
        model.features(model.params, torch.zeros(5, 4), 0)
    with model.watched_features() as seen:
        model.logits(model.params, torch.zeros(5, 4), 0)
    assert seen == []


def test_a_model_without_a_last_linear_layer_has_no_features():
    model = Model(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), [3], multi_head=False)
    with pytest.raises(
        ConfigError, match=r"features are the inputs of the last Linear layer; end the model in nn\.Linear"
    ):
        model.features(model.params, torch.zeros(2, 1, 4, 4), 0)
    with model.watched_features() as seen:
        model.logits(model.params, torch.zeros(2, 1, 4, 4), 0)
    assert seen == []


@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("stats", ["per_task", "running", "batch"])
def test_is_parameter_is_false_for_running_statistics(multi_head, stats):
    model = Model(seeded(bn_net), (4,), [3, 3], multi_head=multi_head, norm_stats=stats)
    parameters = {*model.trainable(0), *model.trainable(1)}
    assert {name for name in model.params if model.is_parameter(name)} == parameters
    assert ("3.weight@1" in parameters) == multi_head and "1.weight" in parameters


def test_a_head_with_a_computed_weight_is_refused():
    net = nn.Sequential(nn.Linear(4, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    with pytest.raises(ConfigError, match="'1', has a parametrization such as weight_norm; remove it"):
        Model(net, (4,), [3, 2], multi_head=True)
    assert Model(net, (4,), [3], multi_head=False).params


def test_masks_among_the_buffers_are_on_every_client_and_are_not_sent():
    """A mask of infinities has no difference to the broadcast, and one of truth values no mean."""

    class Masked(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            self.register_buffer("mask", mask)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            shown = self.layer(x * self.scale)
            hidden = self.mask if self.mask.dtype == torch.bool else self.mask.exp() == 0
            return self.head(shown.masked_fill(hidden, 0))

    hidden = torch.tensor([False, True, False, False])
    for mask in (hidden, torch.zeros(4).masked_fill(hidden, -torch.inf)):
        with rng.fork(1):
            net = Masked(mask)
        model, x = Model(net, (4,), [3], multi_head=False), torch.randn(2, 4)
        assert model.buffers(0) == ("scale@0",) and set(model.params) == {*model.trainable(0), "scale@0"}
        assert torch.equal(model.logits(model.params, x, 0), net(x))
        assert model.bind(model.params, 0).keys() == net.state_dict().keys()  # an exported file has them


class Hidden(nn.Module):
    """Reads a layer through a function, or its weight through a list."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.head, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), kind
        self.first, self.weights = (lambda x: self.layer(x)), [self.layer.weight]

    def forward(self, x):
        return self.head(self.first(x) if self.kind == "function" else F.linear(x, self.weights[0]))


@pytest.mark.parametrize("kind", ["function", "list"])
def test_parameters_that_no_gradient_reaches_are_named(kind):
    (note,) = Model(Hidden(kind), (4,), [3], multi_head=False).notes()
    assert note.startswith("no gradient reaches layer.weight, layer.bias: ")
    assert Model(nn.Sequential(nn.Linear(4, 3)), (4,), [3], multi_head=False).notes() == []


def test_a_buffer_that_appears_in_training_is_no_buffer_of_the_tree():
    class Late(nn.Linear):
        def forward(self, input):
            if self.training and not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(3))
            return super().forward(input)

    assert Model(Late(4, 3), (4,), [3], multi_head=False).buffers(0) == ()


def test_a_constant_buffer_is_no_statistic():
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("mean", torch.ones(4))

        def forward(self, input):
            return super().forward(input - self.mean)

    assert Model(Shifted(), (4,), [3, 3], multi_head=False).notes() == []


def test_a_client_with_one_sample_for_a_network_that_takes_none_is_named_before_the_run():
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    stream = cfl.from_tensors([(x, y, x, y)], clients=[[1] * 19 + [3]])
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    few = ["partition.name=stream", "partition.clients=4", "rounds=1"]
    with pytest.raises(ConfigError, match="client 3 has one sample to train on in task 0, but"):
        cfl.run(cfl.resolve("custom", overrides=few), stream=stream, model=net)
    with pytest.raises(ConfigError, match="local.batch_size=1, but the model fails on a batch of one sample"):
        cfl.run(cfl.resolve("custom", overrides=[*few, "local.batch_size=1"]), stream=stream, model=net)


def test_a_client_with_one_sample_of_a_task_and_more_of_another_may_train_on_both_at_once():
    """Client 3 has 1 + 20 samples if training sees all tasks, in batches of 8, 8 and 5. The one alone is refused."""
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    stream = cfl.from_tensors([(x, y, x, y)] * 2, clients=[[1] * 19 + [3], [3] * 20])
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    few = ["partition.name=stream", "partition.clients=4", "rounds=1", "local.batch_size=8", "model.norm_stats=running"]
    with pytest.raises(ConfigError, match="client 3 has one sample to train on in task 0, but"):
        cfl.run(cfl.resolve("custom", overrides=few), stream=stream, model=net)
    result = cfl.run(cfl.resolve("custom", method="joint", overrides=few), stream=stream, model=net)
    assert len(result.accuracy_matrix) == 2
    later = cfl.from_tensors([(x, y, x, y)] * 2, clients=[[3] * 20, [1] * 19 + [3]])
    with pytest.raises(ConfigError, match="client 3 has one sample to train on in task 1, but"):
        cfl.run(cfl.resolve("custom", overrides=few), stream=later, model=net)
