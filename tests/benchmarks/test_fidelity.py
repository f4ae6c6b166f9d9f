"""`benchmarks/fidelity.py`: what it measures, with small parameters, against closed forms and brute force."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import cfl
from cfl import models
from cfl.methods.regularizers import FedSAM
from cfl.streams import datasets

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("fidelity", "fidelity_baselines", "fidelity_fot", "fidelity_local", "fidelity_tables")
SHORT = ("tasks=2", "rounds=1")


@pytest.fixture(scope="module")
def scripts(script):
    return {name: script(name) for name in NAMES}


@pytest.fixture
def fot(scripts):
    return scripts["fidelity_fot"]


@pytest.fixture
def baselines(scripts):
    return scripts["fidelity_baselines"]


@pytest.fixture
def local(scripts):
    return scripts["fidelity_local"]


# -- tables


def test_cells_of_a_table(scripts):
    tables = scripts["fidelity_tables"]
    columns = {"name": "", "share": "%.1f", "size": ",.1f", "none": ".2f"}
    table = tables.Table("title", columns, [["a", [0.25, 0.35], 1234.56, None]])
    # mean 30 and deviation 5 percent
    assert tables.markdown(table).splitlines() == [
        "| name | share | size | none |",
        "|---|---|---|---|",
        "| a | 30.0 ± 5.0 | 1,234.6 | – |",
    ]


def test_a_part_is_printed_and_stored(scripts, tmp_path, capsys):
    scripts["fidelity"].main(["--parts", "sizes", "--output", str(tmp_path)])
    stored = json.loads((tmp_path / "sizes.json").read_text())
    assert stored["command"] == "python benchmarks/fidelity.py --parts sizes" and stored["machine"]["cores"] >= 1
    assert [table["title"] for table in stored["tables"]] == ["Megabytes", "Megabytes of a whole run"]
    assert "### Megabytes\n\n| benchmark | model |" in capsys.readouterr().out


# -- FOT and GPM


def marchenko_pastur(ratio: float, asked: float) -> float:
    """Share of the directions with the share `asked` of a sketch's energy; flat spectrum, ratio = d / s."""
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    values = np.linspace(low, high, 100_001)[1:-1]
    density = np.sqrt((high - values) * (values - low)) / values
    energy = np.cumsum((density * values)[::-1])
    return float((np.cumsum(density[::-1]) / density.sum())[np.searchsorted(energy, asked * energy[-1])])


def test_coverage_is_that_of_the_marchenko_pastur_law(fot):
    (table,) = fot.coverage(draws=1, size=100, samples=20_000)
    flat, *others = table.rows
    # with 200 inputs a dimension the inputs' own spectrum is flat within 2 / sqrt(200)
    assert flat[1:5] == pytest.approx([marchenko_pastur(1 / mult, 0.94) for mult in (1, 2, 5, 20)], abs=0.03)
    for _, *shares in (flat, *others):
        assert shares[:4] == sorted(shares[:4]) or max(shares[:4]) - min(shares[:4]) < 0.02
        assert shares[4] >= 0.94  # the Gram matrix is exact, and the last direction at most a hundredth here
    assert flat[5] < 0.96


@pytest.mark.filterwarnings("ignore:FOT's eq. 12")
def test_ranks_by_brute_force_and_runs_of_each_rule(fot):
    table, runs = fot.ranks((0,), *SHORT)
    energy = np.exp(-np.arange(100) / 10)
    f = np.concatenate([[0], np.cumsum(energy) / energy.sum()])
    for share, *found in table.rows:
        rho = math.sqrt(1 - share)
        meets = [share + (1 - share) * f >= 0.9 - 1e-12, f > (rho - 0.1) / rho, np.sqrt(f) + rho > 0.9]
        assert found == [int(np.argmax(rule)) for rule in meets]
    rows = {name: scores for name, *scores in runs.rows}
    assert rows["eq12"][:3] == [*rows["fedavg"][:2], [0.0]]  # nothing is protected, so it is FedAvg
    assert rows["norm_ratio"][2] == rows["energy"][2] > [0.0]  # in the first task the two rules are one
    assert rows["fedavg"][2:] == [None, None]


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 5.0), (0.6852, 5.0), (0.6852, 0.5), (2.0, 0.5)])
def test_delta_is_the_hockey_stick_divergence(fot, sigma, epsilon):
    # of N(1, sigma^2) from N(0, sigma^2), integrated where the first exceeds e^epsilon times the second
    start, (first, second) = 0.5 + epsilon * sigma**2, (stats.norm(mean, sigma) for mean in (1.0, 0.0))
    whole, _ = integrate.quad(
        lambda x: first.pdf(x) - math.exp(epsilon) * second.pdf(x), start, start + 12 * sigma, epsabs=0
    )
    found = fot.gaussian_delta(epsilon, 1 / sigma)
    assert found == pytest.approx(whole, rel=1e-6)
    assert fot.gaussian_epsilon(1 / sigma, found) == pytest.approx(epsilon, rel=1e-6)


def test_noise_of_appendix_h(fot):
    noises, signals = fot.dp(widths=(60,))
    printed, classical, analytic, composed = noises.rows
    assert printed[1] == pytest.approx(math.sqrt(math.log(125_000)) / 5) and printed[2] > 1e-5
    assert classical[1] == pytest.approx(math.sqrt(2 * math.log(125_000)) / 5)
    assert analytic[2] == pytest.approx(1e-5, rel=1e-6) and analytic[3] == pytest.approx(5, rel=1e-6)
    assert composed[4] == pytest.approx(5, rel=0.01)  # solved with the accountant of runs, to 0.2 % of epsilon
    for row in noises.rows:
        assert row[4] <= row[5] * (1 + 1e-6) <= 1.15 * row[4]  # RDP is an upper bound, some percent above
    ((d, formula, norm, most, drawn, share, taken),) = signals.rows
    assert formula == pytest.approx(printed[1] * (math.sqrt(60) + math.sqrt(300))) and norm == pytest.approx(
        formula, rel=0.1
    )
    assert most == 50 and drawn == pytest.approx(math.sqrt(50), rel=0.1)  # fifty independent unit vectors in 300
    assert d == 60 and 0 <= share <= 1 and 0 < taken < 60


def test_numbers_of_the_networks(fot):
    million = 1e6 / 4  # megabytes to float32 numbers
    mlp, alexnet, five, mini = (fot.megabytes(net) for net in fot.NETWORKS.values())
    # parameters: of the MLP by hand, of the others the counts of their docstrings
    layers = [(784, 400), (400, 400), (400, 400), (400, 10)]
    counts = [sum((a + 1) * b for a, b in layers), 6_704_128, 1_122_140, 3_025_440]
    assert [own["model"] * million for own in (mlp, alexnet, five, mini)] == pytest.approx(counts)
    assert mlp["A, code"] * million == pytest.approx(784**2 + 3 * 400**2)
    convolutions, dense = [3 * 16, 64 * 9, 128 * 4], [1024, 2048]
    code = sum(d**2 for d in convolutions) + 5 * sum(d**2 for d in dense)
    assert alexnet["A, code"] * million == pytest.approx(code)
    assert alexnet["A, paper"] * million == pytest.approx(5 * sum(d**2 for d in convolutions + dense))
    for own, width in ((five, 20), (mini, 32)):  # stem; four blocks of a stage; shortcuts of the last three
        ways = [width * 2**stage for stage in range(4)]
        widths = [27, *[9 * c for c in ways for _ in range(4)]]
        for before, c in zip(ways, ways[1:], strict=False):  # a stage's first convolution has fewer channels
            widths[widths.index(9 * c)] = 9 * before
        widths += ways[:3]
        assert len(widths) == 20
        assert own["all of O"] * million == pytest.approx(sum(d**2 for d in widths))
        assert own["A, paper"] == own["A, code"] == pytest.approx(5 * own["all of O"])
        assert own["Gram matrices"] * million == pytest.approx(sum(d * (d + 1) / 2 for d in widths))


TABLE_13 = {  # FOT's rows as printed, megabytes after each task
    "Split CIFAR-100": "2840.0 5680.3 8520.6 11360.9 14201.2 17041.4 19881.7 22722.0 25562.3 28402.6",
    "Mini-ImageNet": "1280.0 2560.7 3841.4 5122.2 6402.9 7683.6 8964.3 10245.0 11525.8 12806.5 14087.2 15367.9 16648.6 "
    "17929.4 19210.1 20490.8 21771.5 23052.2 24333.0 25613.7",
}


@pytest.mark.parametrize("name", TABLE_13)
def test_the_arithmetic_gives_the_printed_costs(fot, name):
    model, sketch, basis = fot.PRINTED[name]
    for task, printed in enumerate(map(float, TABLE_13[name].split()), start=1):
        found = fot.cumulative(task, fot.ROUNDS[name], model, sketch + basis)
        assert found == pytest.approx(printed, abs=0.051)  # one decimal, rounded either way


def test_biases_move_outputs_unless_they_are_projected(fot):
    free, augment, freeze = (
        fot.first_task_moved(0, f"strategy.bias={choice}") for choice in ("free", "augment", "freeze")
    )
    assert free > 1e-3 and max(augment, freeze) < 1e-5  # float32 has 1e-7


def test_the_guarantee_holds_for_float32_weights_whatever_the_products(fot):
    moved = fot.first_task_moved(0, "strategy.bias=freeze", "precision=bf16")
    assert 0 < moved < 1e-5  # rounding of weights to bfloat16 would move outputs by 1e-3


def test_first_task_ranks_of_gpm(baselines):
    table, runs = baselines.gpm((0,), *SHORT)
    rows = {name: own for name, *own in table.rows}
    # 1 - exp(-r / 10) >= 0.95 (1 - exp(-20)): r >= 10 ln 20 = 29.96
    assert rows["exp(-j / 10)"][::2] == [30, 29]
    assert rows["0.96, then flat"] == [1, pytest.approx(0.96), 0, 0.0]
    assert all(right == code + 1 and above >= 0.95 > below for right, above, code, below in rows.values())
    assert [name for name, *_ in runs.rows] == ["right", "as in GPM's code"]


def test_a_basis_covers_of_another_client_what_they_have_in_common(baselines):
    # Four images e_k + u with orthonormal e_k and u, two a client. Of another's image x, the projection on the plane of
    # e_1 + u and e_2 + u is that on w = e_1 + e_2 + 2 u: <x, w>^2 / (|w|^2 |x|^2) = 4 / (6 * 2).
    x, y = torch.eye(4, 5), torch.tensor([0, 1, 0, 1])
    x[:, 4] = 1.0
    few = ["tasks=2", "rounds=1", "partition.name=iid", "partition.clients=2", "cohort=2", "local.batch_size=2"]
    own = ["model.hidden=[4]", "strategy.threshold=1", "strategy.bias=free"]
    config = cfl.resolve("permuted-digits", method="gpm", overrides=[*few, *own])
    first, second = baselines.covered_energy(config, 2, cfl.from_tensors([(x, y, x, y)] * 2, multi_head=False))
    assert first == pytest.approx((1.0, 1 / 3))
    assert second[0] == pytest.approx(1.0) and 0 <= second[1] <= 1
    (table,) = baselines.overlap(1, 2, ["permuted-digits"])
    assert [row[:2] for row in table.rows] == [["permuted-digits", "iid"], ["permuted-digits", "shards"]]
    assert all(1 > own > other > 0 for *_, own, other in table.rows)


def test_encoding_acts_without_the_matrices_too(baselines):
    (table,) = baselines.encoding((0,), *SHORT)
    scores = {name: own for name, *own in table.rows}
    assert scores["FedAvg, encoded"] != scores["FedAvg"] and scores["RGO, encoded"] != scores["RGO"]
    assert scores["a model for each task"][1::2] == [None, None]  # forgetting is not defined
    with_p = cfl.resolve("permuted-digits", method="rgo", overrides=["strategy.alpha=1e12", *SHORT])
    without = cfl.resolve("permuted-digits", method="fedavg", overrides=SHORT)
    pairs = zip(cfl.run(with_p).params.values(), cfl.run(without).params.values(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)  # what its name says


# -- FedSOL and FedProj


def test_scales_differ_by_the_root_of_the_inputs(local):
    layers, scores = local.scale((0,), 2, "permuted-digits", "tasks=1")
    for _, shape, ratio, long, short in layers.rows:
        out, *rest = map(int, shape.split(" x "))
        assert ratio == pytest.approx(math.sqrt(math.prod(rest)), rel=1e-3)
        # |Lambda * g| / |g| is near the root mean square of Lambda's entries: its norm is 1, or sqrt(numel / out)
        assert short == pytest.approx(1 / math.sqrt(out * math.prod(rest)), rel=0.2)
        assert long == pytest.approx(1 / math.sqrt(out), rel=0.2)
    (fedavg, code, paper) = [away for *_, away in scores.rows]
    assert fedavg == [0.0] and code[0] > paper[0] > 0


def drawn():
    """Random images, with labels that are random for them."""
    images = torch.randint(256, (80, 1, 28, 28), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    return datasets.Arrays(images, torch.arange(80) % 10, images, torch.arange(80) % 10)


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_losses_and_gradients_of_fedsam_are_those_of_torch(local, rho):
    """SAM written out: climb by rho g / |g|, take the gradient there, return, and step with `torch.optim.SGD`."""
    train = drawn()
    found = local.descent(FedSAM(rho=rho), train, 3, steps=4, width=2, hidden=5)
    assert 0 < max(share for _, share in found) < 0.9  # other weights have a gradient, too
    torch.manual_seed(3)
    module = models.build("cnn", (1, 28, 28), 10, {"repeat_grey": True, "width": 2, "hidden": 5})
    leaves = list(module.parameters())
    optimizer = torch.optim.SGD(leaves, lr=0.01, momentum=0.9, weight_decay=1e-5)
    expected = []
    for _ in range(4):
        rows = torch.randint(80, (50,))
        x, y = (train.x_train[rows] / 255 - 0.1307) / 0.3081, train.y_train[rows]
        loss = nn.functional.cross_entropy(module(x), y)
        grads = torch.autograd.grad(loss, leaves)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        expected.append([loss.item(), (grads[-1].norm() / norm).item() ** 2])
        there = [leaf.detach().clone() for leaf in leaves]
        with torch.no_grad():
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf += rho * grad / norm
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for leaf, old in zip(leaves, there, strict=True):
                leaf.copy_(old)
        optimizer.step()
    assert np.asarray(found) == pytest.approx(np.asarray(expected), rel=1e-4)


def test_rows_of_fedsams_rho(local, monkeypatch):
    """Means over the last steps, for each seed."""
    monkeypatch.setattr(datasets, "load", lambda name: drawn())
    (table,) = local.sharpness((0, 1), steps=3, last=2, width=2, hidden=5)
    expected = []
    for rho in (0.0, 0.05, 0.1, 0.2, 0.5):
        ends = [local.descent(FedSAM(rho=rho), drawn(), seed, 3, width=2, hidden=5)[1:] for seed in (0, 1)]
        expected.append([f"{rho:g}", *np.mean(ends, axis=1).T.tolist()])
    assert [row[0] for row in table.rows] == [row[0] for row in expected]
    assert np.asarray([row[1:] for row in table.rows]) == pytest.approx(np.asarray([row[1:] for row in expected]))
    assert len({str(row[1]) for row in table.rows}) == 5


@pytest.mark.parametrize("steps", [1, 3])
def test_an_aliased_penalty_is_nothing(local, steps):
    none, alias, clone = (local.penalised(form, steps) for form in ("none", "alias", "clone"))
    assert alias[:2] == (0.0, 0.0)
    assert all(torch.equal(alias[2][name], leaf) for name, leaf in none[2].items())
    assert clone[1] == pytest.approx(math.sqrt(2 * clone[0])) and clone[0] > 0  # |d|^2 / 2, and its gradient d
    # at the first step the weights are the reference: no gradient yet
    assert local.apart(clone[2], none[2]) == 0.0 if steps == 1 else local.apart(clone[2], none[2]) > 0


def test_casts_cut_fractions_off(local):
    values = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    assert local.cut(values).tolist() == [-1.0, 0.0, 0.0, 1.0]
    # each is half off; the values' variance (divided by 3) is (2.25 + 0.25) 2 / 3
    assert local.cast(values) == (4, 3, pytest.approx(0.5 / math.sqrt(5 / 3)))


def test_rows_of_the_casts(local, monkeypatch):
    """On drawn images in place of CIFAR-100: all 256 values of a channel, cut to whole numbers from -1 to 2."""
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    monkeypatch.setattr(datasets, "load", lambda name: datasets.Arrays(images, images, images, images))
    penalties, casts, gradients = local.alias(steps=2, rounds=1)
    assert [row[0] for row in penalties.rows] == ["none", "alias", "clone"]
    assert casts.rows[0][:3] == ["pixels of CIFAR-100", 768, 4]
    assert all(-1 <= cosine <= 1 for _, cosine in gradients.rows)


def test_projection_notes_conflicts(local):
    noted: list[float] = []
    project, reference = local.watched(noted), {"w": torch.tensor([2.0, 0.0])}
    for always, expected in ((False, [[0.0, 1.0], [1.0, 1.0]]), (True, [[0.0, 1.0], [0.0, 1.0]])):
        noted.clear()
        found = [project({"w": torch.tensor([x, 1.0])}, reference, 1e-3, always=always)["w"] for x in (-1.0, 1.0)]
        assert [leaf.tolist() for leaf in found] == expected
        assert noted == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert project({"w": torch.ones(2)}, {"w": torch.zeros(2)}, 1e-3)["w"].tolist() == [1.0, 1.0] and len(noted) == 2


def test_runs_with_and_without_the_condition(local):
    (table,) = local.projection((0,), "rounds=2", "local.epochs=1")
    assert len(table.rows) == 4
    for _, _, conflicts, there, elsewhere, *accuracies in table.rows:
        assert 0 < conflicts <= 1 and 0 <= there <= 1 and 0 <= elsewhere <= 1
        assert all(len(own) == 1 and 0 < own[0] <= 1 for own in accuracies)


# -- the page

BESIDE = {  # what an option needs beside it
    "strategy.model=local": ["strategy.participants=sampled"],
    "regularizer.fedsol.proximal=moon": ["regularizer.fedsol.scope=full"],
}
PRESETS = {  # by option; the preset has ten tasks, a network without options, the default, or the option
    "rounds": "permuted-mnist",
    "model.norm": "split-cifar100",
    "strategy.sketch": "mnist",
    "model.repeat_grey": "mnist",
    "regularizer.fedsam.rho": "mnist",
}


def options_of_the_page() -> list[tuple[str, str]]:
    """Method and option for each `key=value` in the last column of a table of differences."""
    found, method = [], ""
    for line in (SCRIPTS.parent / "docs/fidelity.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (\S+)", line):
            method = heading[1].lower()
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) in (5, 6):  # with or without the presets of the paper
            own = cells[0].partition(",")[0].lower() if method == "gpm" else method
            found += [(own, option) for option in re.findall(r"`([\w.]+=[^`]+)`", cells[-1])]
    return found


@pytest.mark.parametrize(("method", "option"), options_of_the_page())
def test_options_of_the_page_change_the_configuration(method, option):
    benchmark = PRESETS.get(option.partition("=")[0], "cifar100" if method == "fedproj" else "permuted-digits")
    rule = re.match(r"regularizer\.(\w+)", option)  # a page's baselines have options, too
    name = "fedsol+moon" if option.endswith("moon") else rule[1] if rule else method
    needed = ["model.name=resnet18"] if "model.norm=" in option else []
    before, after = (
        cfl.resolve(benchmark, method=name, overrides=[*needed, *more])
        for more in ((), (*BESIDE.get(option, ()), option))
    )
    assert before != after


def test_each_method_of_the_page_has_options():
    assert {method for method, _ in options_of_the_page()} == {
        "fot",
        "gpm",
        "ewc",
        "er",
        "glfc",
        "rgo",
        "fedsol",
        "fedproj",
    }
