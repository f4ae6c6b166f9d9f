"""What FOT's sketches give away: `benchmarks/sketch_probe.py` against closed forms, and its findings on the digits."""

import json
from functools import cache
from importlib import import_module
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.metrics import roc_auc_score

from cfl.core import rng

pytestmark = pytest.mark.slow

with pytest.MonkeyPatch.context() as patch:  # as the fixture `script` finds it
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    sp = import_module("sketch_probe")


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=rng.generator(rng.key(seed, "test", *shape)))


@cache
def digits():
    return sp.dealt(0)


@cache
def attacks(clients, sigma=sp.noise_multiplier(5.0, 1e-5)):
    return sp.probe(*digits(), clients, sigma, rng.key(0, "test", clients))[0]


# -- known G: how many images a sketch determines


def test_the_sketch_of_unit_vectors_is_what_the_client_drew():
    images = [normal(3, 5, seed=1), normal(4, 5, seed=2)]
    uploads, g = sp.sketches(images, 6, [7, 8])
    assert uploads.shape == (2, 5, 6) and g.shape == (7, 6)
    for upload, own, drawn in zip(uploads, images, g.split([3, 4]), strict=True):
        assert torch.allclose(upload, own.T @ drawn, rtol=0, atol=1e-6)  # float32 keeps 24 bits, entries are some units
        assert torch.equal(upload, upload.float().double())


@pytest.mark.parametrize(("count", "clients"), [(1, 1), (30, 1), (15, 2), (6, 5)])
def test_known_draws_give_back_all_images_while_they_are_no_more_than_the_columns(count, clients):
    """N <= s: G has full row rank, so G G^+ = I. What is left is float32's 6e-8 times the condition of G, for N = 30
    about (sqrt(40) + sqrt(30)) / (sqrt(40) - sqrt(30)) = 14. Squared 1e-12; 1e-10 leaves room for chance."""
    images = [normal(count, 9, seed=client) for client in range(clients)]
    uploads, g = sp.sketches(images, 40, list(range(clients)))
    found = (uploads.sum(0) @ sp.decoder(g)).T
    assert sp.missed(found, torch.cat(images)) < 1e-10


@pytest.mark.parametrize("count", [50, 100, 400])
def test_beyond_the_columns_the_share_1_minus_s_over_n_is_missed(count):
    """X G G^+ = X P, P a projector on s random directions of N. For a row x, |x - x P|^2 / |x|^2 has the law
    Beta((N - s) / 2, s / 2): mean m = 1 - s/N, variance 2 m (1 - m) / (N + 2). A mean over rows varies no more, and one
    of 20 independent draws by sqrt(20) less; four deviations."""
    s, repeats, x = 40, 20, normal(count, 8)
    errors = []
    for key in range(repeats):
        uploads, g = sp.sketches([x], s, [key])
        projector = g @ sp.decoder(g)
        assert torch.allclose(projector @ projector, projector, atol=1e-9)
        assert float(projector.trace()) == pytest.approx(s)
        found = (uploads[0] @ sp.decoder(g)).T
        errors.append(float((found - x).square().sum() / x.square().sum()))
    m = 1 - s / count
    assert np.mean(errors) == pytest.approx(m, abs=4 * sqrt(2 * m * (1 - m) / (count + 2) / repeats))


def test_one_clients_draws_leave_the_others_as_noise():
    """A G_1^+ = X_1 + sum_j X_j G_j G_1^+. G_j is independent of G_1, so the noise has the energy
    sum_j |X_j|^2 E|G_1^+|^2 = (C - 1) n^2 d / (s - n - 1) for entries of mean square 1 (inverse Wishart): 1.5 of X_1's
    energy n d here. Single draws deviate by 0.4, the mean of 60 by 0.05, a thirtieth of it: three deviations."""
    n, d, s, clients = 10, 8, 31, 4
    errors = []
    for seed in range(60):
        images = [normal(n, d, seed=100 * seed + client) for client in range(clients)]
        uploads, g = sp.sketches(images, s, [rng.key(seed, client) for client in range(clients)])
        found = (uploads.sum(0) @ sp.decoder(g[:n])).T
        errors.append(float((found - images[0]).square().sum() / (n * d)))
    assert np.mean(errors) == pytest.approx((clients - 1) * n / (s - n - 1), rel=0.1)


@pytest.mark.parametrize("count", [5, 30])
def test_with_noise_the_decoder_is_the_best_linear_estimate(count):
    """For entries of X with variance 1: E[x^T a] E[a^T a]^-1 = G (G^T G + v I)^-1, for any N and s."""
    g, v = normal(count, 12), 0.7
    best = (g @ torch.linalg.inv(g.T @ g + v * torch.eye(12))).T
    assert torch.allclose(sp.decoder(g, v), best, atol=1e-12)


def test_the_range_of_values_finds_more_images_than_the_columns():
    """Entries -1 or 1 in s equations: a random subspace of dimension N - s meets the cone of directions into the box at
    a corner, of statistical dimension N/2, at 0 only if N - s + N/2 < N (Amelunxen et al., 2014): for s > N/2."""
    x = torch.cat([normal(60, 8).sign(), torch.ones(60, 1)], dim=1)
    found = {}
    for s in (20, 50):
        uploads, g = sp.sketches([x], s, [3])
        found[s] = sp.in_range(uploads[0], g, -1.0, 1.0, steps=1000)
        assert float(found[s].abs().max()) <= 1
    assert sp.missed(found[50], x) < 1e-6 and sp.missed(found[20], x) > 0.1
    uploads, g = sp.sketches([x], 50, [3])
    assert sp.missed((uploads[0] @ sp.decoder(g)).T, x) > 0.05  # 1 - 50/60 = 0.17


# -- unknown G: the second moments


def test_a_rotation_of_the_images_changes_no_sketch():
    """X and X Q have the same X X^T, of which L Z is drawn; eigenvectors are unique up to sign only."""
    x = normal(12, 6)
    rotation = torch.linalg.qr(normal(12, 12)).Q
    vectors = torch.linalg.eigh(x.T @ x).eigenvectors
    seen = [(vectors.T @ sp.unkeyed(images, 30, 5)).abs() for images in (x, rotation @ x)]
    assert torch.allclose(*seen, atol=1e-5)
    assert float((rotation @ x - x).abs().max()) > 0.5


def test_many_columns_tell_the_second_moments():
    """Each column of A is N(0, M), M = X X^T: an entry of A A^T / s has the variance (M_ij^2 + M_ii M_jj) / s."""
    x, s = normal(12, 6), 20_000
    moment = x.T @ x
    a = sp.unkeyed(x, s, 5)
    deviation = ((moment.square() + torch.outer(moment.diagonal(), moment.diagonal())) / s).sqrt()
    assert bool(((a @ a.T / s - moment).abs() < 4.5 * deviation).all())


def test_a_client_with_one_image_gives_it_away_whatever_is_drawn():
    """A = x z^T, and the constant 1 of x tells z."""
    members, _, _ = digits()
    found = sp.mean_image(sp.unkeyed(members[:1], 325, 9))
    assert torch.allclose(found, members[0], atol=1e-5)


@pytest.mark.parametrize("count", [1, 10, 35])
def test_fewer_images_than_dimensions_give_away_their_span(count):
    """Members lie in the span of the sketch to rounding, others do not."""
    members, others, _ = digits()
    a = sp.unkeyed(members[:count], 325, 9)
    left = torch.linalg.svd(a).U[:, :count]
    residuals = [(y - y @ left @ left.T).norm(dim=1) for y in (members[:count], others)]
    assert float(residuals[0].max()) < 1e-3 < 0.1 < float(residuals[1].min())
    assert sp.leverage_auc(a, members[:count], others) == 1.0


# -- scores


def test_matches_are_log_likelihood_ratios():
    """Column j is N(p x, p (1 - p) M) if x is image j, and N(0, p M) if another is; M = A A^T / |G|^2."""
    d, s, count = 4, 30, 50
    x, candidates = normal(count, d), normal(7, d, seed=1)
    uploads, g = sp.sketches([x], s, [2])
    a, h, p = uploads[0], sp.decoder(g), s / count
    moment = (a @ a.T / g.square().sum()).numpy()
    expected = [
        [
            multivariate_normal.logpdf(column, p * candidate, p * (1 - p) * moment)
            - multivariate_normal.logpdf(column, np.zeros(d), p * moment)
            for column in (a @ h).T.numpy()
        ]
        for candidate in candidates.numpy()
    ]
    found = sp.matches(a, h, g, candidates) * g.square().sum() / (2 * (1 - p)) - d / 2 * log(1 - p)
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_auc_counts_ties_by_half():
    members, others = torch.tensor([3.0, 2.0, 2.0, -1.0]), torch.tensor([2.0, 0.0, -5.0])
    assert sp.auc(members, others) == pytest.approx(roc_auc_score([1] * 4 + [0] * 3, torch.cat([members, others])))


def test_recovered_counts_images_within_their_radius():
    images = torch.tensor([[0.0, 0.0, 1.0], [4.0, 3.0, 1.0]])
    found = torch.tensor([[0.0, 1.0, 5.0], [4.0, 0.0, 1.0]])  # off by 1 and 3; the constant does not count
    assert sp.recovered(found, images, torch.tensor([2.0, 2.0])) == 0.5
    assert sp.missed(found, images) == pytest.approx((1 + 9) / 25)


def test_the_radius_is_half_the_way_to_the_nearest_other_image():
    members, others, radius = digits()
    images = torch.cat([members, others])
    distances = (images - images[17]).norm(dim=1)
    distances[17] = torch.inf
    assert members.shape == (1400, 65) and others.shape == (397, 65) and bool((images[:, -1] == 1).all())
    assert float(radius[17]) == pytest.approx(float(distances.min()) / 2)


def test_kept_is_the_share_of_energy_in_the_leading_directions():
    """Squared singular values 81, 16, 3: 90 % takes two directions, which hold 97 %; the last one with the first 84 %,
    the last two 19 %."""
    images = torch.diag(torch.tensor([9.0, 4.0, sqrt(3.0)], dtype=torch.float64))
    for a, share in (([3.0, 2.0, 1.0], 0.97), ([3.0, 1.0, 2.0], 0.84), ([1.0, 2.0, 3.0], 0.19)):
        assert sp.kept(torch.diag(torch.tensor(a, dtype=torch.float64)), images) == pytest.approx(share)


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 7.0318), (1, 3.7306), (2, 1.9938), (5, 0.8919), (8, 0.6002)])
def test_the_noise_is_the_analytic_gaussian_mechanisms(epsilon, sigma):
    """Published calibration of Balle and Wang (2018) at delta 1e-5, four digits."""
    assert sp.noise_multiplier(epsilon, 1e-5) == pytest.approx(sigma, abs=1e-4)


# -- on the digits: 70 images a client, s = 325. Margins are over five seeds of the stored results.


@pytest.mark.parametrize("clients", [1, 4])
def test_a_sum_of_fewer_vectors_than_columns_hides_nothing_from_who_knows_the_draws(clients):
    found = attacks(clients)
    assert found["error"] < 1e-8
    assert found["recovered"] == found["auc"] == found["linked"] == 1.0


def test_a_few_more_images_than_columns_fall_to_their_range_of_grey():
    """350 images in 325 columns: least squares misses 7 % (deviation at most 1.9 %, see above) and finds a fifth of the
    images."""
    found = attacks(5)
    assert 0.01 < found["error"] < 0.15 and found["recovered"] < 0.5
    assert found["range_error"] < 1e-3 and found["range_recovered"] > 0.99
    assert found["auc"] > 0.99


def test_many_images_are_hidden_but_membership_is_not_when_the_draws_are_known():
    """1,400 images in 325 columns: error 0.77 with a deviation of 0.016 at most; AUC 0.64, client named 41 % (chance
    5 %); the distance to the nearest find sees next to nothing of it (0.52)."""
    found = attacks(20)
    assert found["error"] == pytest.approx(1 - 325 / 1400, abs=0.064)
    assert found["recovered"] == found["range_recovered"] == 0 and found["range_error"] > 0.3
    assert found["auc"] > 0.58 and found["linked"] > 0.3 and found["nearest_auc"] < 0.56
    assert found["one_auc"] > 0.7


def test_without_the_draws_the_sum_hides_the_more_the_larger_it_is():
    """AUC 0.99 for one client, 0.65 for four, 0.54 for twenty; single seeds up to 0.04 off."""
    scores = [attacks(clients)["blind_auc"] for clients in (1, 4, 20)]
    assert scores[0] > 0.97 and 0.58 < scores[1] < 0.72 and scores[2] < 0.6


@pytest.mark.parametrize("clients", [1, 4, 20])
def test_noise_of_epsilon_5_hides_members_and_the_subspace_as_well(clients):
    """An AUC of scores that know nothing has the variance (m + n + 1) / (12 m n); four deviations, 0.15 at most. The
    right client by chance: 1/C, binomial. The signal is 0.008 to 0.035 of the noise: the basis is one of noise."""
    found, images = attacks(clients), 70 * clients
    assert abs(found["noise_auc"] - 0.5) < 4 * sqrt((images + 397 + 1) / (12 * images * 397))
    assert found["noise_recovered"] == 0 and found["noise_error"] > 0.95
    chance = 1 / clients
    assert found["noise_linked"] <= chance + 4 * sqrt(chance * (1 - chance) / images)
    assert found["signal_to_noise"] < 0.05
    assert found["noise_kept"] == pytest.approx(found["noise_alone_kept"], abs=0.05) and found["kept"] > 0.89


def test_without_noise_clipping_alone_hides_nothing():
    found = attacks(4, 1e-9)
    assert found["noise_auc"] == found["noise_linked"] == found["noise_recovered"] == 1.0


def test_clients_add_the_noise_of_one_norm_each():
    """Clipped to norm 1, C sketches with independent draws add up to about sqrt(C), against sigma sqrt(d s) of noise:
    the norm of d s = 21,125 normal numbers deviates by 0.5 %, the sum of the sketches by a few percent."""
    sigma = sp.noise_multiplier(5.0, 1e-5)
    for clients in (1, 4, 20):
        expected = sqrt(clients) / (sigma * sqrt(65 * 325))
        assert attacks(clients)["signal_to_noise"] == pytest.approx(expected, rel=0.1)


# -- the command


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["sketch_probe.py", *arguments])
    sp.main()


def test_the_probe_runs_from_the_command_line(tmp_path, capsys, monkeypatch):
    run(monkeypatch, "--clients", "5", "--seeds", "1", "--output", str(tmp_path / "new"))
    stored = json.loads((tmp_path / "new" / "probe.json").read_text())
    assert (stored["d"], stored["s"], stored["noise"]["releases"]) == (65, 325, 1)
    assert stored["command"].startswith("python sketch_probe.py --clients 5") and stored["machine"]["cores"] >= 1
    assert list(stored["sum"]) == ["1", "5"] and list(stored["one_client_no_g"]) == ["1", "10", "35", "64", "70"]
    assert stored["sum"]["1"]["auc"] == [1.0] and len(stored["sum"]["5"]["error"]) == 1
    assert (tmp_path / "new" / "probe.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "no G: AUC" in printed and "error of the mean image" in printed


@pytest.mark.parametrize("arguments", [("--clients", "21"), ("--clients", "0"), ("--seeds", "0")])
def test_what_cannot_be_dealt_is_refused(arguments, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments)
    assert stop.value.code == 2 and "--clients from 1 to 20" in capsys.readouterr().err
