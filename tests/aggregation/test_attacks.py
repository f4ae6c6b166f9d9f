"""Simulated hostile clients: who they are, what each sends by hand, the same under all engines, and what is refused."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import cfl
from cfl.aggregation.attacks import STRENGTHS, Attack, AttackedSum, hostile, usual_z
from cfl.aggregation.plain import UploadSum
from cfl.assembly.resolve import dump
from cfl.contract import Strategy
from cfl.contract.combining import STRATEGY, WORK
from cfl.core import ConfigError, UpdateError, tree
from cfl.experiments import compare
from cfl.methods.strategies.fot import FOT
from cfl.runtime.fingerprint import decisive
from tests import toy

INFO = SimpleNamespace(uploading=tuple(range(4)), key=5, place="task 0", phase=SimpleNamespace(protected=True))
NAMES = ("sign_flip", "scale", "label_flip", "alie", "ipm", "sketch")


def summed(name, uploads, strength=None, strategy=None, order=None):
    """The mean of the updates of four clients with weights 1, 2, 3, 4, of whom two are hostile; and their ids."""
    own = () if strength is None else (f"attack.strength={strength}",)
    config = toy.config(f"attack.name={name}", "attack.clients=2", *own)
    total = Attack(config, strategy or Strategy(), UploadSum).sum(INFO, {"strategy": "mean", "work": "sum"})
    for client in order or range(4):
        assert total.add(client, uploads[client], client + 1.0)
    return total.close(), sorted(hostile(config))


def of(*values):
    return [{STRATEGY: {"w": torch.tensor(value, dtype=torch.float64)}} for value in values]


def mean(values):
    return sum((client + 1) * torch.tensor(value, dtype=torch.float64) for client, value in enumerate(values)) / 10


VALUES = [[1.0, 2.0], [3.0, -4.0], [5.0, 6.0], [-7.0, 8.0]]


def replaced(ids, *sent):
    """The updates with those of the hostile clients replaced."""
    found = list(VALUES)
    for client, value in zip(ids, sent, strict=True):
        found[client] = value
    return found


@pytest.mark.parametrize("name", ["sign_flip", "scale", "alie", "ipm"])
def test_the_order_in_which_uploads_arrive_changes_nothing(name):
    found, _ = summed(name, of(*VALUES))
    other, _ = summed(name, of(*VALUES), order=(2, 0, 3, 1))
    assert torch.allclose(found[STRATEGY]["w"], other[STRATEGY]["w"], rtol=1e-14)


def test_a_flip_of_labels_has_no_strength():
    with pytest.raises(ConfigError, match="attack.strength does not apply to attack.name=label_flip"):
        toy.config("attack.name=label_flip", "attack.strength=2")


@pytest.mark.parametrize("strength", [None, 3.0])
def test_sign_flip_by_hand(strength):
    found, ids = summed("sign_flip", of(*VALUES), strength)
    s = strength or 1.0
    expected = mean(replaced(ids, *([-s * x for x in VALUES[client]] for client in ids)))
    assert torch.allclose(found[STRATEGY]["w"], expected)


def test_colluding_clients_by_hand():
    _, ids = summed("ipm", of(*VALUES))
    a, b = (torch.tensor(VALUES[client]) for client in ids)
    centre, spread = (a + b) / 2, (a - b).abs() / 2  # mean and standard deviation of two values
    found, _ = summed("ipm", of(*VALUES), 2.0)
    assert torch.allclose(found[STRATEGY]["w"], mean(replaced(ids, *[(-2 * centre).tolist()] * 2)))
    found, _ = summed("alie", of(*VALUES), 1.5)
    assert torch.allclose(found[STRATEGY]["w"], mean(replaced(ids, *[(centre - 1.5 * spread).tolist()] * 2)))


def test_the_papers_factor_of_alie():
    # 50 clients, 24 hostile: s = 26 - 24 = 2 of 26, and a normal draw lies below 1.43 with probability 24 / 26
    assert usual_z(50, 24) == pytest.approx(1.426, abs=1e-3)
    assert 0.5 * (1 + math.erf(usual_z(50, 24) / 2**0.5)) == pytest.approx(24 / 26)
    assert usual_z(20, 1) == 0.0  # (19 - 10) / 19 is below a half
    assert usual_z(4, 3) == 3.0


def test_noise_has_the_size_that_the_strength_says():
    large = [{STRATEGY: {"w": torch.full((20_000,), 2.0)}} for _ in range(4)]
    found, ids = summed("scale", large, 5.0)
    weights = [client + 1 for client in ids]
    noise = found[STRATEGY]["w"] - 2.0 * (10 - sum(weights)) / 10
    expected = 5.0 * 2.0 * math.sqrt(sum(weight**2 for weight in weights)) / 10  # independent of each other
    assert noise.std().item() == pytest.approx(expected, rel=0.03)
    assert noise.mean().abs().item() < 5 * expected / 20_000**0.5


def test_a_poisoned_sketch_replaces_those_of_hostile_clients():
    uploads = [{WORK: {"energy/1": torch.tensor([8.0, 2.0])}} for _ in range(4)]
    found, _ = summed("sketch", uploads, 10.0, FOT())
    assert found[WORK]["energy/1"].tolist() == [2 * 8 + 2 * 80, 2 * 2 + 2 * 80]
    uploads = [{WORK: {"features/count": torch.tensor([5.0])}} for _ in range(4)]
    assert summed("sketch", uploads, 10.0, FOT())[0][WORK]["features/count"].tolist() == [20]  # no sketch
    with pytest.raises(ConfigError, match="attack.name=sketch poisons the sketches of 'fot', and 'ewc' sends none"):
        toy.config("attack.name=sketch", method="ewc")


def test_an_attack_on_updates_is_refused_where_clients_send_none():
    with pytest.raises(ConfigError, match="attack.name=scale replaces updates, and 'fedcil' sends none; use attack"):
        toy.config("attack.name=scale", method="fedcil")
    toy.config("attack.name=label_flip", method="fedcil")


def test_counters_and_uploads_of_regularizers_stay_honest():
    uploads = [{STRATEGY: {"w": torch.tensor(1.0), "count": torch.tensor(3)}, "rule": {"x": torch.tensor(2.0)}}] * 4
    config = toy.config("attack.name=sign_flip", "attack.clients=4")
    total = AttackedSum(Attack(config, Strategy(), UploadSum), INFO, {"strategy": "mean", "rule": "sum"})
    for client, own in enumerate(uploads):
        total.add(client, own, 1.0)
    found = total.close()
    assert found[STRATEGY]["w"].item() == -1 and found[STRATEGY]["count"].item() == 3
    assert found["rule"]["x"].item() == 8


def test_measurements_and_label_flips_have_plain_sums():
    config = toy.config("attack.name=sketch")
    diagnostic = SimpleNamespace(**{**vars(INFO), "phase": SimpleNamespace(protected=False)})
    assert type(Attack(config, FOT(), UploadSum).sum(diagnostic, {})) is UploadSum
    assert type(Attack(toy.config("attack.name=label_flip"), FOT(), UploadSum).sum(INFO, {})) is UploadSum


def test_hostile_clients_are_drawn_by_the_seed():
    many = ("partition.clients=50", "attack.name=ipm", "attack.clients=7", "local.batch_size=1")
    drawn = [hostile(toy.config(*many, f"seed={seed}")) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and all(len(ids) == 7 and max(ids) < 50 for ids in drawn)
    assert hostile(toy.config()) == frozenset()
    with pytest.raises(ConfigError, match=r"attack.clients=5 is more than partition.clients=4; lower it"):
        toy.config("attack.name=ipm", "attack.clients=5")


def test_labels_are_reversed_for_hostile_clients_alone():
    seen = {}

    class Sees(Strategy):
        def augment(self, batch, ctx):
            for id, y in zip(batch.ids.tolist(), batch.y.tolist(), strict=True):
                seen.setdefault(id, set()).add(y)
            return batch

    stream, overrides = toy.stream(), ("tasks=1", "rounds=1", "cohort=4")
    runs = []
    for own in ((), ("attack.name=label_flip", "attack.clients=4")):
        seen.clear()
        cfl.run(toy.config(*overrides, *own, method="fedavg"), stream=stream, strategy=Sees())
        runs.append({id: next(iter(labels)) for id, labels in seen.items()})
    honest, flipped = runs
    assert honest and flipped == {id: toy.CLASSES - 1 - y for id, y in honest.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", toy.quick("vmapped", of=["vmapped", "pool"]))
def test_engines_agree(name, engine):
    options = (f"attack.name={name}", "attack.clients=2", "tasks=2", "rounds=1")
    runs = [
        cfl.run(toy.config(*options, f"engine={each}", "block=2", method="fot+rfa"), stream=toy.stream())
        for each in ("loop", engine)
    ]
    for leaf, other in zip(runs[0].params.values(), runs[1].params.values(), strict=True):
        assert torch.allclose(leaf, other, atol=1e-5)
    plain = cfl.run(toy.config(*options[2:], method="fot+rfa"), stream=toy.stream())
    assert not tree.equal(runs[0].params, plain.params)
    assert runs[0].metrics["bytes_up"] == plain.metrics["bytes_up"] == runs[1].metrics["bytes_up"]


@pytest.mark.parametrize("name", NAMES)
def test_protected_runs_refuse_attacks_on_uploads(name):
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson")
    for own, text in ((("secagg=full",), "replaces uploads, which secagg=full hides"), (private, "set dp.level=none")):
        if name == "label_flip":
            assert toy.config(f"attack.name={name}", *own).attack.name == name
            continue
        with pytest.raises(ConfigError, match=text):
            toy.config(f"attack.name={name}", *own)


def test_an_unknown_attack_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown value of attack.name 'sign-flip'; did you mean 'sign_flip'"):
        toy.config("attack.name=sign-flip")
    assert set(STRENGTHS) == set(NAMES) - {"label_flip", "alie"}


def test_runs_without_attack_keep_the_hashes_of_versions_that_had_none():
    config, attacked = toy.config(), toy.config("attack.name=ipm")
    options = dump(config)
    assert "attack" not in decisive(options) and "attack" in decisive(dump(attacked))
    older = {name: value for name, value in options.items() if name != "attack"}
    assert json.dumps(decisive(options)) == json.dumps(decisive(older))
    assert "attack" not in compare._options(config) and compare.digest(config) != compare.digest(attacked)


def test_an_upload_that_is_not_finite_is_refused_though_its_client_is_hostile():
    config = toy.config("attack.name=sign_flip", "attack.clients=2")
    bad = sorted(hostile(config))
    uploads = of(*VALUES)
    uploads[bad[0]][STRATEGY]["w"][0] = math.nan
    total = Attack(config, Strategy(), UploadSum).sum(INFO, {"strategy": "mean"})
    assert [total.add(c, uploads[c], 1.0) for c in range(4)] == [c != bad[0] for c in range(4)]
    expected = sum(torch.tensor(VALUES[c]).double() * (-1 if c == bad[1] else 1) for c in range(4) if c != bad[0]) / 3
    assert torch.allclose(total.close()[STRATEGY]["w"], expected)


def test_an_attack_beyond_the_range_of_numbers_is_named():
    with pytest.raises(UpdateError, match="the attack's upload is not finite .*lower attack.strength"):
        summed("sign_flip", of(*VALUES), 1e308)  # each has an entry of 2 or more, and 2e308 is no float64


def test_alie_counts_the_hostile_clients_of_the_round():
    config = toy.config("attack.name=alie", "attack.clients=3", "partition.clients=6", "local.batch_size=1")
    bad = sorted(hostile(config))
    there = [client for client in range(6) if client != bad[0]]
    info = SimpleNamespace(**{**vars(INFO), "uploading": tuple(there)})
    total = Attack(config, Strategy(), UploadSum).sum(info, {"strategy": "mean"})
    values = {client: torch.tensor([float(client**2)], dtype=torch.float64) for client in there}
    for client in there:
        total.add(client, {STRATEGY: {"w": values[client]}}, 1.0)
    a, b = (values[client] for client in bad[1:])
    # 5 clients, 2 of them hostile: s = 3 - 2 = 1 of 3 honest ones, so Phi(z) = 2 / 3
    z = torch.special.ndtri(torch.tensor(2 / 3, dtype=torch.float64))
    sent = (a + b) / 2 - z * (a - b).abs() / 2
    honest = sum(values[client] for client in there if client not in bad)
    assert torch.allclose(total.close()[STRATEGY]["w"], (honest + 2 * sent) / 5)
