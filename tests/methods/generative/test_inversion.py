"""Inversion: each term of its loss by brute force, and its steps against torch's optimisers."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.contract import Phase, Pixels, RoundInfo
from cfl.core import rng, tree
from cfl.core.options import build
from cfl.methods.generative import generator
from cfl.methods.generative.inversion import Inversion, Target, drawn, redrawn, watched
from cfl.models import Model
from tests import toy

SHAPE = (1, 8, 8)
SMALL = dict(samples=6, latent=5, width=3, g_steps=3, student_steps=2)


def network():
    with rng.fork(1):
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4), nn.BatchNorm1d(4),
            nn.ReLU(), nn.Linear(4, 2),
        )  # fmt: skip


def model(growing=True, classes=(2, 3, 2), multi_head=True):
    found = Model(network(), SHAPE, classes, multi_head=multi_head, growing=growing, norm_stats="running")
    source = rng.generator(3)
    for name, leaf in found.params.items():  # running statistics of some training
        if "running" in name:
            leaf.copy_(torch.rand(leaf.shape, generator=source) + 0.5)
    return found


def info(model, number=0, task=1, pixels=Pixels(torch.tensor(0.3), torch.tensor(0.6))):
    names = (*model.trainable(task), *model.buffers(task))
    phase = Phase("generate", 4, cohort="none", train=False)
    return RoundInfo(
        task, 3, phase, number, (), names, frozenset(), (task,), 1, 0.1, model, key=50 + number, pixels_of=(pixels,)
    )


def begun(rule, model, **more):
    """The server's trees before the first round."""
    return {"params": model.params, **rule._fresh(model.params, info(model, **more))}


def statistics(model, params, x):
    """Mean and variance of what enters each normalisation, pass by pass through the network."""
    leaves, found = {name: leaf.clone() for name, leaf in params.items()}, {}
    h = F.conv2d(x, leaves["0.weight"], leaves["0.bias"])
    found["1.mean"], found["1.var"] = h.mean((0, 2, 3)), ((h - h.mean((0, 2, 3))[:, None, None]) ** 2).mean((0, 2, 3))
    h = F.batch_norm(h, leaves["1.running_mean"], leaves["1.running_var"], leaves["1.weight"], leaves["1.bias"])
    h = F.linear(F.relu(h).flatten(1), leaves["4.weight"], leaves["4.bias"])
    found["5.mean"], found["5.var"] = h.mean(0), ((h - h.mean(0)) ** 2).mean(0)
    return found


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_r_bn_is_the_distance_of_batch_statistics_from_running_ones(later):
    rule, own = Inversion(bn=2.0, label=0.0, adversarial=0.0, bn_momentum=0.9, **SMALL), model()
    x = torch.rand(6, *SHAPE, generator=rng.generator(4))
    found = statistics(own, own.params, (x - 0.3) / 0.6)
    before = {name: torch.full_like(leaf, 0.2) for name, leaf in found.items()} if later else {}
    target = Target(torch.ones(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))
    with own.evaluation():
        loss, seen = rule._loss(x, {**begun(rule, own), "statistics": before}, target, info(own))
    expected = 0.0
    for name, batch in found.items():
        running = own.params[name.replace(".mean", ".running_mean").replace(".var", ".running_var")]
        blend = 0.1 * batch + 0.9 * 0.2 if later else batch
        torch.testing.assert_close(seen[name], blend)
        expected += math.sqrt(sum((a - b) ** 2 for a, b in zip(running.tolist(), blend.tolist())))
    assert loss.item() == pytest.approx(2 * expected, rel=1e-5)


def test_norms_that_are_called_with_a_keyword_are_watched():
    own = Model(toy.ByKeyword(nn.BatchNorm1d(4), nn.Linear(4, 2)), (4,), [2], multi_head=False)
    x = torch.rand(6, 4, generator=rng.generator(4))
    with own.evaluation(), watched(own) as found:
        own.logits(own.params, x, 0)
    assert torch.equal(found["0.mean"][0], x.mean(0))


def test_labels_and_disagreement_of_the_student_by_hand():
    own = model()
    rule = Inversion(bn=0.0, label=0.5, adversarial=3.0, warmup=1, **SMALL)
    trees, x = begun(rule, own), 4 * torch.randn(6, *SHAPE, generator=rng.generator(4))
    for task in (0, 1):  # heads that tell samples apart, and a student that is like the teacher
        own.params[f"7.weight@{task}"].mul_(10)
    noise = torch.randn(3, 4, generator=rng.generator(5))
    trees["student"] = {**own.params, "7.weight@1": own.params["7.weight@1"] + noise}
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    target = Target(torch.ones_like(y), y)
    with own.evaluation():
        losses = [float(rule._loss(x, trees, target, info(own, number))[0]) for number in (0, 1)]
        entered = (x - 0.3) / 0.6
        teacher = own.logits(own.params, entered, 1).softmax(1).tolist()
        student = own.logits({name: trees["student"][name] for name in own.params}, entered, 1).softmax(1).tolist()
    label = -sum(math.log(p[c]) for p, c in zip(teacher, y.tolist())) / 6
    apart = [
        sum(a * math.log(a / b) for a, b in zip(p, q)) if p.index(max(p)) == q.index(max(q)) else 0.0
        for p, q in zip(teacher, student)
    ]
    assert 0 < len([each for each in apart if each]) < 6, "the networks agree on some samples"
    assert losses[0] == pytest.approx(0.5 * label, rel=1e-5)  # before `warmup` without the student
    assert losses[1] == pytest.approx(0.5 * label - 3 * sum(apart) / 6, rel=1e-4)


# --- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_two_rounds_of_the_generator_are_those_of_torchs_adam(meta):
    own = model()
    rule = Inversion(rounds=2, warmup=9, meta=meta, generator_lr=0.01, latent_lr=0.05, **SMALL)
    trees = begun(rule, own)
    slow = {name: nn.Parameter(leaf.clone()) for name, leaf in trees["generator"].items() if "adam/" not in name}
    outer, made = torch.optim.Adam(slow.values(), lr=0.03, betas=(0.5, 0.999)), []  # lr times steps
    for number in (0, 1):
        place = info(own, number)
        source = rng.generator(rng.key(place.key, "samples"))
        target = Target(*drawn(own, 1, 6, source))
        z = nn.Parameter(torch.randn(6, 5, generator=source))
        fast = {name: nn.Parameter(leaf.detach().clone()) for name, leaf in slow.items()}
        inner = torch.optim.Adam([{"params": fast.values()}, {"params": [z], "lr": 0.05}], lr=0.01, betas=(0.5, 0.999))
        total, losses, samples = {name: 0.0 for name in fast}, [], []
        for _ in range(3):
            inner.zero_grad()
            x = generator.generate(fast, z, 3, SHAPE, place.pixels)
            with own.evaluation():
                loss, _ = rule._loss(x, trees, target, place)
            loss.backward()
            losses.append(loss.item())
            samples.append(x.detach())
            total = {name: total[name] + leaf.grad for name, leaf in fast.items()}
            inner.step()
        for name, leaf in slow.items():
            leaf.grad = total[name] if meta == "fomaml" else 67 * (leaf.detach() - fast[name].detach())
        outer.step()
        made.append((samples[losses.index(min(losses))] * 255).round().to(torch.uint8))
        trees = rule.invert(trees if number else {"params": own.params}, place)
        for name, leaf in slow.items():
            torch.testing.assert_close(trees["generator"][name], leaf.detach(), atol=1e-6, rtol=1e-5)
    assert (trees["synthetic"]["x"].int() - torch.cat(made).int()).abs().max() <= 1  # rounding to 8 bits
    assert trees["labels"]["y"].shape == (12,)


def test_the_student_learns_as_by_torchs_sgd_with_a_cosine():
    own = model()
    rule = Inversion(rounds=3, warmup=1, student_lr=0.05, student_temperature=4.0, adversarial=0.0, **SMALL)
    trees = rule.invert({"params": own.params}, info(own, 0))
    momentum = None
    for total, number in ((12, 1), (18, 101)):
        before, trees = trees["student"], rule.invert(trees, info(own, number))
        source = rng.generator(rng.key(50 + number, "student batches"))
        leaves = {name: leaf.clone() for name, leaf in before.items() if not name.startswith("sgd/")}
        trained = {name: nn.Parameter(leaf) for name, leaf in leaves.items() if own.is_parameter(name)}
        # cosine from lr to lr / 1000 over 200 rounds, from the first round of the student on
        lr = 0.05 / 1000 + (0.05 - 0.05 / 1000) * (1 + math.cos(math.pi * (number - 1) / 200)) / 2
        optimizer = torch.optim.SGD(trained.values(), lr=lr, momentum=0.9, weight_decay=1e-4)
        if momentum is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": momentum})
        whole = trees["synthetic"]["x"]
        for _ in range(2):
            rows = torch.randint(total, (6,), generator=source)
            x = (whole[rows].float() / 255 - 0.3) / 0.6
            optimizer.zero_grad()
            with own.evaluation():
                wanted = F.log_softmax(own.logits(own.params, x, 1).detach() / 4, dim=1)
            own.module.train()
            said = F.log_softmax(own.logits({**leaves, **trained}, x, 1) / 4, dim=1)
            (16 * F.kl_div(said, wanted, reduction="batchmean", log_target=True)).backward()
            for leaf in trained.values():  # parts of the head that later tasks train
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            optimizer.step()
        momentum = optimizer.state_dict()["state"]
        for name, leaf in trained.items():
            torch.testing.assert_close(trees["student"][name], leaf.detach(), atol=3e-6, rtol=3e-6)
    assert {name.partition("@")[0] for name in trained} == {name for name, _ in network().named_parameters()}


def test_the_student_trains_without_dropout():
    rule, found = Inversion(rounds=1, warmup=0, **SMALL), []
    for layer in (nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Dropout(0.5))):
        own = model()
        own.module[2] = layer
        found.append(rule.invert({"params": own.params}, info(own))["student"])
    assert tree.equal(*found)


def test_the_released_constants_never_train_the_student_and_the_default_does():
    def students(preset):
        rule, own = Inversion(preset=preset, **{**SMALL, "g_steps": None}), model()
        rule = replace(rule, g_steps=1, student_steps=1)
        trees = rule.invert({"params": own.params}, info(own, 0))
        first = trees["student"]
        for number in range(1, rule.rounds):
            trees = rule.invert(trees, info(own, number))
        return first, trees["student"], rule

    first, last, rule = students("official")
    assert (rule.rounds, rule.warmup, rule.student_lr) == (10, 20, 0.2)
    assert tree.equal(first, last)
    first, last, rule = students("repaired")
    assert rule.rounds == 40 and not tree.equal(first, last)


def test_options_that_are_given_precede_those_of_the_preset():
    rule = build(Inversion, {"preset": "official", "rounds": 3}, "strategy")
    assert (rule.rounds, rule.warmup, rule.g_steps) == (3, 20, 10)


def test_notes_say_what_has_no_effect():
    assert Inversion(**SMALL).notes(model()) == []  # 40 rounds, of which 10 come before the student
    (note,) = Inversion(**SMALL, rounds=10).notes(model())
    assert note == "the student never trains, as strategy.warmup=10 and strategy.rounds=10"
    for module, norm_stats in (
        (nn.Linear(4, 2), "running"),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "batch"),
    ):
        own = Model(module, (4,), [2], multi_head=False, norm_stats=norm_stats)
        (note,) = Inversion(**SMALL).notes(own)
        assert note.startswith("strategy.bn has no effect, as the model has no running statistics")


# --- labels and weights ----------------------------------------------------------------------------------------------


def test_labels_are_uniform_over_the_classes_so_far():
    own, y = drawn(model(), 1, 5000, rng.generator(1))
    assert own.unique().tolist() == [1] and (y.bincount() / 5000 - 0.2).abs().max() < 0.03  # 5 deviations of 0.0057
    own, y = drawn(model(growing=False), 1, 6000, rng.generator(1))  # heads of 2 and 3 classes
    for task, classes in enumerate((2, 3)):
        assert (y[own == task].bincount() / 6000 - 1 / (2 * classes)).abs().max() < 0.03
    own, y = drawn(model(growing=False, multi_head=False, classes=(2, 2, 2)), 1, 6000, rng.generator(1))
    assert own.unique().tolist() == [1] and (y.bincount() / 6000 - 0.5).abs().max() < 0.04


def test_the_students_weights_are_drawn_as_in_the_official_code():
    with rng.fork(0):
        module = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
    own = Model(module, (200,), (2, 2), multi_head=True, growing=True, norm_stats="running")
    new = redrawn(own.params, own, rng.generator(1))
    assert new.keys() == own.params.keys()
    assert new["0.weight"].std().item() == pytest.approx(math.sqrt(2 / 500), rel=0.02)  # Xavier: 2 / (200 + 300)
    assert new["0.bias"].std().item() == pytest.approx(1, rel=0.15)
    assert new["1.weight"].mean().item() == pytest.approx(1, abs=0.01)
    assert new["1.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    assert not new["1.bias"].any() and not new["1.running_mean"].any() and (new["1.running_var"] == 1).all()


def test_crops_are_shifted_and_mirrored():
    rule, x, flips = Inversion(crop=True), torch.rand(3, 1, 5, 6) + 1, set()
    for seed in range(8):
        source = rng.generator(seed)
        top, left, flip = (int(torch.randint(most, (), generator=source)) for most in (9, 9, 2))
        padded = torch.zeros(3, 1, 13, 14)
        padded[:, :, 4:9, 4:10] = x
        expected = padded[:, :, top : top + 5, left : left + 6]
        expected = expected[:, :, :, [5, 4, 3, 2, 1, 0]] if flip else expected
        assert torch.equal(rule._cropped(x, rng.generator(seed)), expected)
        flips.add(flip)
    assert flips == {0, 1}
