"""The AC-GAN: generators, latent codes, consistency by hand, heads and running statistics; test_fedcil.py has steps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.contract import Pixels
from cfl.core import ConfigError, optim, rng, tree
from cfl.methods.generative import acgan
from cfl.methods.generative.acgan import ACGAN, Game, Labelled, choose
from cfl.models import Model

SIZES = {"task": (2, 3), "class": (2, 3), "domain": (3, 3)}
LATENT = 9


def model_of(scenario="domain", hidden=(), **options):
    """A 4-5-classes MLP."""
    sizes = SIZES[scenario]
    with rng.fork(3):
        module = nn.Sequential(nn.Linear(4, 5), *hidden, nn.ReLU(), nn.Linear(5, sizes[0]))
    multi_head = scenario != "domain"
    return Model(module, (4,), sizes, multi_head=multi_head, growing=scenario == "class", **options)


def gan_of(model, task=1, pixels=None):
    return ACGAN(
        model, acgan.generator_network(model.input_shape, LATENT, 1, 5), LATENT, task, pixels or (None,) * (task + 1)
    )


def leaves_of(gan):
    params = {name: leaf for name, leaf in gan.model.params.items()}
    critic = tree.under("critic", acgan.initial_critic(gan.model, 6))
    # weights of N(0, 0.02^2) give outputs near 0: larger ones let every term of a loss count
    return tree.clone(
        {**params, **critic, **tree.under("generator", {n: 10 * w for n, w in gan.network.named_parameters()})}
    )


def game_of(gan, names=None, seed=7, **options):
    leaves = leaves_of(gan)
    names = [*gan.model.trainable(gan.task), "critic/weight", "critic/bias"] if names is None else names
    return Game(gan, leaves, names, optim.adam(0.5, 0.99, weight_decay=0.01), 0.1, rng.generator(seed), **options)


def real(classes, seed=8):
    return Labelled(torch.randn(len(classes), 4, generator=rng.generator(seed)), torch.tensor(classes))


# --- the generator ---------------------------------------------------------------------------------------------------


def test_the_number_of_parameters_of_the_papers_generator_for_28_pixels():
    # 7 x 7 is doubled twice. Only the last convolution has a bias, as batch normalisation takes out those before it.
    network = acgan.generator_network((1, 28, 28), 110, 64, key=0)
    linear, norms = 110 * 256 * 7 * 7, 2 * (256 + 128 + 64)
    convolutions = 256 * 128 * 4 * 4 + 128 * 64 * 4 * 4 + (64 * 3 * 3 + 1)
    assert sum(leaf.numel() for leaf in network.parameters()) == linear + norms + convolutions
    assert not [*network.buffers()]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 30, 17), (2, 1, 5), (6,)])
def test_images_of_any_size(shape):
    network = acgan.generator_network(shape, 12, 2, key=0)
    assert network(torch.randn(3, 12)).shape == (3, *shape)
    again, other = (acgan.generator_network(shape, 12, 2, key=key).state_dict() for key in (0, 1))
    assert tree.equal(network.state_dict(), again) and not tree.equal(again, other)


def test_the_initial_weights_are_small():
    weight = acgan.generator_network((64,), 100, 50, key=0)[0].weight
    # 40,000 draws: the error of the deviation is 0.02 / sqrt(80,000)
    assert weight.std().item() == pytest.approx(0.02, abs=5 * 0.02 / math.sqrt(80_000))


def test_the_first_entries_of_a_latent_code_are_the_class():
    gan, classes = gan_of(model_of("class")), torch.tensor([4, 0, 2])
    z = gan.latents(classes, rng.generator(1))
    draws = torch.randn(3, LATENT, generator=rng.generator(1))
    assert z[:, :5].tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert torch.equal(z[:, 5:], draws[:, 5:])


def test_pictures_become_inputs_as_those_of_the_stream_do():
    model, classes = model_of(), torch.tensor([0, 5])
    raw, scaled, normalised = (
        gan_of(model, pixels=(pixels, pixels)).draw(named_generator(model), classes, rng.generator(1))
        for pixels in (None, Pixels(None, None), Pixels(torch.tensor(0.25), torch.tensor(0.5)))
    )
    torch.testing.assert_close(scaled, torch.sigmoid(2 * raw))  # (tanh(x) + 1) / 2
    torch.testing.assert_close(normalised, 2 * scaled - 0.5)


def test_pictures_of_earlier_tasks_are_normalised_as_those_of_their_task():
    """Sizes 2 and 3: classes 0 and 1 are of the first task."""
    model, classes = model_of(), torch.tensor([0, 3, 1, 4])
    each = Pixels(torch.tensor(0.25), torch.tensor(0.5)), Pixels(torch.tensor(0.75), None)
    draw = [
        gan_of(model, pixels=own).draw(named_generator(model), classes, rng.generator(1))
        for own in ((each[0],) * 2, (each[1],) * 2, each, (None, each[1]), (None, None))
    ]
    first, second, both, mixed, plain = draw
    assert torch.equal(both[::2], first[::2]) and torch.equal(both[1::2], second[1::2])
    assert torch.equal(mixed[::2], plain[::2]) and torch.equal(mixed[1::2], second[1::2])


def named_generator(model):
    return dict(gan_of(model).network.named_parameters())


def test_classes_of_the_stream_and_labels_of_the_heads():
    # Sizes 2 and 3. A growing head numbers as the stream does; the others start at 0 in each task.
    cases = {
        "task": (5, [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
        "class": (5, [0, 0, 1, 1, 1], [0, 1, 2, 3, 4]),
        "domain": (6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]),
    }
    for scenario, (count, tasks, labels) in cases.items():
        gan, classes = gan_of(model_of(scenario)), torch.arange(count)
        assert [leaf.tolist() for leaf in gan.tasks_and_labels(classes)] == [tasks, labels]
        own = torch.tensor(labels)[torch.tensor(tasks) == 1]
        assert torch.equal(gan.classes_of(own), classes[torch.tensor(tasks) == 1])


def test_classes_are_drawn_uniformly():
    drawn = choose(torch.tensor([2, 5, 7]), 30_000, rng.generator(0))
    # a count is binomial with mean 10,000 and deviation sqrt(30,000 x 1/3 x 2/3) = 82
    assert drawn.bincount(minlength=8).tolist() == pytest.approx([0, 0, 1e4, 0, 0, 1e4, 0, 1e4], abs=5 * 82)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(2.0, 0.0, 0.0), (0.0, 3.0, 0.0), (0.0, 0.0, 4.0)])
def test_each_term_of_the_consistency_by_hand(weights):
    gan, known = gan_of(model_of()), torch.tensor([1, 3, 5])
    game, batch, source = game_of(gan), real([4, 5, 3]), rng.generator(7)
    teacher = {name: leaf + 0.1 for name, leaf in game.generator.items()}
    term = game.consistency(teacher, batch, known, weights)(game.leaves)
    body = gan.model.module
    own, theirs = copy.deepcopy(gan.network), copy.deepcopy(gan.network)
    own.load_state_dict(game.generator)
    theirs.load_state_dict(teacher)

    def draw(network, classes):
        return F.softmax(body(network(gan.latents(classes, source))), dim=1)

    alike = draw(theirs, batch.classes)
    c = known[torch.randint(3, (3,), generator=source)]
    p, q = draw(theirs, c), draw(own, c)
    data = F.softmax(body(batch.x), dim=1)
    kd_d = (alike * (alike / data).log()).sum() / 3
    kd_g1 = (p * (p / q).log()).sum() / 3
    kd_g2 = -p[torch.arange(3), c % 3].log().mean()
    expected = weights[0] * kd_d + weights[1] * kd_g1 + weights[2] * kd_g2
    assert expected > 1e-4 and term.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_targets_of_the_consistency_are_constants():
    # KL(p || q) by the logits of q alone is q - p; for equal images it is 0, as is that of the term.
    gan = gan_of(model_of())
    game, batch = game_of(gan), real([4, 5, 3])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(gan).items()}
    of_data = game.consistency(game.generator, batch, torch.tensor([3]), (1.0, 0.0, 0.0))(leaves)
    (found,) = torch.autograd.grad(of_data, [leaves["2.bias"]])
    with torch.no_grad():
        teacher = gan.draw(leaves_generator(leaves), batch.classes, rng.generator(7))
        p, q = (F.softmax(gan.model.logits(leaves, x, 1), dim=1) for x in (teacher, batch.x))
    torch.testing.assert_close(found, (q - p).mean(dim=0))


def leaves_generator(leaves):
    return tree.part({name: leaf.detach() for name, leaf in leaves.items()}, "generator")


def test_without_weights_there_is_no_consistency_and_no_draw():
    game = game_of(gan_of(model_of()))
    assert game.consistency(game.generator, real([3]), torch.tensor([3]), (0.0, 0.0, 0.0)) is None
    assert torch.equal(game.source.get_state(), rng.generator(7).get_state())


def test_samples_go_through_the_heads_of_their_tasks():
    model = model_of("task")
    gan, batch = gan_of(model), real([0, 3, 1, 4])
    leaves = leaves_of(gan)
    _, logits = gan.judge(leaves, *batch)
    for row, (task, label) in enumerate([(0, 0), (1, 1), (0, 1), (1, 2)]):
        expected = model.logits(leaves, batch.x[row : row + 1], task)[0]
        torch.testing.assert_close(logits[row, : len(expected)], expected)
        alone = F.cross_entropy(expected[None], torch.tensor([label]))
        realness = gan.judge(leaves, batch.x[row : row + 1], batch.classes[row : row + 1])[0]
        found = gan.loss(leaves, Labelled(batch.x[row : row + 1], batch.classes[row : row + 1]), 1.0)
        torch.testing.assert_close(found, alone + F.softplus(-realness)[0])


def test_heads_that_do_not_train_keep_their_weights_in_spite_of_weight_decay():
    gan = gan_of(model_of("task"))
    game = game_of(gan, names=[*gan.model.trainable(1), "critic/weight"])
    before = tree.clone(game.leaves)
    game.step([real([2, 3])], torch.tensor([2, 3]))
    same = {name for name, leaf in game.leaves.items() if torch.equal(leaf, before[name])}
    assert same == {"2.weight@0", "2.bias@0", "critic/bias"}


def test_running_statistics_are_of_batches_that_count_as_real():
    model = model_of(hidden=(nn.BatchNorm1d(5),), norm_stats="running")
    gan, batch = gan_of(model), real([3, 4, 5])
    game = game_of(gan)
    x = F.linear(batch.x, *(game.leaves[f"0.{name}"] for name in ("weight", "bias")))
    expected = 0.9 * game.leaves["1.running_mean"] + 0.1 * x.mean(dim=0)  # torch's momentum
    with acgan.training(model, key=1):
        game.step([batch], torch.tensor([3, 4, 5]))
        torch.testing.assert_close(game.leaves["1.running_mean"], expected)
        game.step([batch], torch.tensor([3, 4, 5]), keep=False)
    torch.testing.assert_close(game.leaves["1.running_mean"], expected)
    assert game.leaves["1.num_batches_tracked"] == 1


def test_training_mode_ends_and_draws_nothing_from_the_global_generator():
    model = model_of(hidden=(nn.Dropout(),))
    model.module.eval()
    state = torch.get_rng_state()
    with acgan.training(model, key=1):
        assert model.module[1].training
        first = model.module(torch.ones(1, 4))
    assert not model.module[1].training and torch.equal(torch.get_rng_state(), state)
    with acgan.training(model, key=1):
        assert torch.equal(model.module(torch.ones(1, 4)), first)


def test_a_game_goes_on_with_the_moments_it_is_given():
    gan, known, batch = gan_of(model_of()), torch.tensor([3, 4]), real([3, 4])
    whole, first = game_of(gan), game_of(gan)
    whole.step([batch], known)
    first.step([batch], known)
    options = {"moments": tree.clone(first.moments), "steps": 1}
    second = Game(gan, tree.clone(first.leaves), first.trained, first.adam, 0.1, first.source, **options)
    whole.step([batch], known)
    second.step([batch], known)
    assert tree.equal(whole.leaves, second.leaves) and tree.equal(whole.moments, second.moments)


class Pooled(nn.Module):
    """The mean over two positions of the logits of each."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x.unflatten(1, (2, 2))).relu()).mean(1)


def test_the_critic_reads_all_positions_of_the_last_layers_inputs():
    model = Model(Pooled(), (4,), SIZES["domain"], multi_head=False)
    gan, batch = gan_of(model), real([0, 1, 2])
    leaves = leaves_of(gan)
    features = model.module.body(batch.x.unflatten(1, (2, 2))).relu().flatten(1)  # (3, 2 positions x 5)
    realness, logits = gan.judge(leaves, *batch)
    expected = features @ leaves["critic/weight"][0] + leaves["critic/bias"]
    torch.testing.assert_close(realness, expected)
    torch.testing.assert_close(logits, model.module(batch.x))


def test_a_model_without_a_last_linear_layer_is_refused():
    model = Model(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), (1, 2, 2), [3], multi_head=False)
    with pytest.raises(
        ConfigError, match="the critic reads the inputs of the model's last Linear layer; end the model"
    ):
        acgan.initial_critic(model, 0)
