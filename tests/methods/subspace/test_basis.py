"""Orthonormal bases: projection, spectra, rank rules and expansion, against closed forms and NumPy."""

import math

import numpy as np
import pytest
import torch

from cfl.methods.subspace import basis as bases


def _random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _orthonormal(size, rank, seed=0):
    return torch.linalg.qr(_random(size, rank, seed=seed)).Q


# --- remove ---------------------------------------------------------------------------------------------------------


def test_remove_by_hand():
    # Rows (1, 2) and (3, 4); the basis is the unit vector (0.6, 0.8): inner products 2.2 and 5.
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    basis = torch.tensor([[0.6], [0.8]], dtype=torch.float64)
    expected = torch.tensor([[1 - 2.2 * 0.6, 2 - 2.2 * 0.8], [3 - 5 * 0.6, 4 - 5 * 0.8]], dtype=torch.float64)
    torch.testing.assert_close(bases.remove(x, basis), expected, atol=1e-15, rtol=0)


def test_remove_is_the_orthogonal_projection():
    x, other, basis = _random(4, 27), _random(4, 27, seed=1), _orthonormal(27, 5)
    rest = bases.remove(x, basis)
    assert (rest @ basis).abs().max() < 1e-14 * x.norm()
    torch.testing.assert_close(bases.remove(rest, basis), rest, atol=1e-12, rtol=0)  # idempotent
    left, right = (rest * other).sum(), (x * bases.remove(other, basis)).sum()
    torch.testing.assert_close(left, right, atol=1e-12, rtol=0)  # self-adjoint
    linear = bases.remove(2 * x - 3 * other, basis)
    torch.testing.assert_close(linear, 2 * rest - 3 * bases.remove(other, basis), atol=1e-12, rtol=0)
    assert rest.norm() <= x.norm()
    torch.testing.assert_close(x.square().sum(), rest.square().sum() + (x @ basis).square().sum())  # Pythagoras


def test_remove_works_on_the_input_side():
    # A square update could hide a transposed projection; the left-sided one leaves the component on the inputs.
    x, basis = _random(27, 27), _orthonormal(27, 5)
    left_sided = x - basis @ (basis.T @ x)
    assert (left_sided @ basis).abs().max() > 0.1
    assert (bases.remove(x, basis) @ basis).abs().max() < 1e-13


def test_remove_with_an_empty_and_a_full_basis():
    x = _random(4, 6)
    assert bases.remove(x, bases.empty(6)) is x
    assert bases.empty(6).shape == (6, 0) and bases.empty(6).dtype == torch.float64
    full = torch.eye(6, dtype=torch.float64)
    assert torch.equal(bases.remove(x, full), torch.zeros_like(x))


def test_remove_keeps_the_precision_of_its_input():
    x, basis = _random(4, 27).float(), _orthonormal(27, 5)
    rest = bases.remove(x, basis)
    assert rest.dtype == torch.float32
    assert (rest.double() @ basis).abs().max() < 27 * 1.2e-7 * float(x.norm())  # d roundings of float32


@pytest.mark.parametrize("size", [5, 128, 129, 300])  # blocks of 128 rows: none, one, and a last one that is smaller
def test_outer_is_the_whole_symmetric_product(size):
    a = _random(size, 40).float()
    product = bases.outer(a)
    assert product.dtype == torch.float64
    torch.testing.assert_close(product, a.double() @ a.double().T, atol=1e-11, rtol=0)


# --- spectrum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 40), (8, 8), (8, 3), (1, 5)])
def test_spectrum_is_that_of_the_svd(shape):
    a = _random(*shape)
    vectors, squared = bases.spectrum(a)
    expected = np.zeros(shape[0])
    singular = np.linalg.svd(a.numpy(), compute_uv=False)
    expected[: len(singular)] = singular**2
    np.testing.assert_allclose(squared.numpy(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(shape[0], dtype=torch.float64), atol=1e-13, rtol=0)
    torch.testing.assert_close((vectors * squared) @ vectors.T, a @ a.T, atol=1e-12, rtol=0)


def test_spectrum_of_a_gram_matrix_is_that_of_its_factor():
    a = _random(8, 40)
    for from_a, from_gram in zip(bases.spectrum(a), bases.spectrum(a @ a.T, gram=True), strict=True):
        torch.testing.assert_close(from_a.abs(), from_gram.abs(), atol=1e-12, rtol=1e-12)  # vectors up to sign


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gram", [False, True])
def test_spectrum_counts_small_directions_but_no_rounding_noise(dtype, gram):
    left, values, right = torch.linalg.svd(_random(30, 4) @ _random(4, 100, seed=1), full_matrices=False)
    values[4] = 1e-3 * values[0]  # 1e-6 of the energy; float32 rounds a Gram matrix by 1e-7, and a sketch by far less
    a = left * values @ right
    a = (a @ a.T if gram else a).to(dtype)
    assert int((bases.spectrum(a, gram=gram)[1] > 0).sum()) == 5


@pytest.mark.parametrize(
    "values,threshold,rank",
    [
        # one large value, as for inputs with a large mean, and many small values with 2.8 % of the energy in total:
        # 1 + 5e-5 (r - 1) >= 0.99 (1 + 575 5e-5) = 1.0184625, so r >= 370.25
        ([1.0] + [5e-5] * 575, 0.99, 371),
        # 1 / j^2: the sum of the first 100 is 1.634984, of the first 99 it is 1.634884, and 0.995 of all is 1.634983
        ([j**-2.0 for j in range(1, 577)], 0.995, 100),
    ],
    ids=["one large", "1 / j^2"],
)
def test_a_gram_matrix_in_float32_has_the_rank_of_its_spectrum(values, threshold, rank):
    turn = torch.linalg.qr(_random(576, 576)).Q
    gram = turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T
    assert min(r for r in range(577) if sum(values[:r]) >= threshold * sum(values)) == rank
    for dtype in (torch.float64, torch.float32):
        _, squared = bases.spectrum(gram.to(dtype), gram=True)
        assert bases.choose_rank(squared, 0.0, threshold) == rank


def test_rounding_of_a_sum_of_many_gram_matrices_is_no_rank():
    """1,400 clients with one sample each: each Gram matrix is rounded and added to a sum of the same precision."""
    d, rank = 32, 8
    x = _random(1400, rank) @ _random(rank, d, seed=1)
    total = torch.zeros(d, d)
    for row in x:
        total += torch.outer(row, row).float()
    ranks = [
        int((bases.residual_spectrum(total, bases.empty(d), gram=True, terms=terms).squared > 0).sum())
        for terms in (1, 1400)
    ]
    assert ranks[0] > ranks[1] == rank  # with terms=1, rounding errors count as directions


def test_spectrum_of_zero_is_zero_and_of_nan_an_error():
    vectors, squared = bases.spectrum(torch.zeros(5, 9))
    assert torch.equal(squared, torch.zeros(5, dtype=torch.float64)) and torch.isfinite(vectors).all()
    for bad in (math.nan, math.inf):
        a = torch.zeros(5, 9)
        a[2, 3] = bad
        with pytest.raises(ValueError, match="NaN or an infinity"):
            bases.spectrum(a)


@pytest.mark.parametrize("gram", [False, True])
def test_residual_spectrum_is_the_spectrum_of_the_projected_sketch(gram):
    a, basis = _random(9, 30), _orthonormal(9, 3, seed=1)
    projector = torch.eye(9, dtype=torch.float64) - basis @ basis.T
    rest = projector @ a
    vectors, squared, _, remaining = bases.residual_spectrum(a @ a.T if gram else a, basis, gram=gram)
    expected = np.linalg.svd(rest.numpy(), compute_uv=False) ** 2
    np.testing.assert_allclose(squared.numpy()[:6], expected[:6], rtol=1e-11)
    assert torch.equal(squared[6:], torch.zeros(3, dtype=torch.float64))  # 9 - 3 directions remain
    assert (basis.T @ vectors[:, :6]).abs().max() < 1e-13
    assert remaining == pytest.approx(float(rest.square().sum() / a.square().sum()), rel=1e-12)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])  # up to three blocks
def test_the_cholesky_factor_is_that_of_lapack(size):
    x = _random(size, 2 * size)
    gram = x @ x.T
    before, factor = gram.clone(), bases.cholesky(gram, 0.5)
    assert torch.equal(gram, before)
    torch.testing.assert_close(factor, torch.linalg.cholesky(gram + 0.5 * torch.eye(size)), rtol=0, atol=1e-10)
    lowest = float(torch.linalg.eigvalsh(gram)[0])
    assert bases.cholesky(gram, -1.01 * lowest) is None  # an eigenvalue is negative


def test_residual_share_at_its_ends():
    basis = _orthonormal(9, 3)
    assert bases.residual_spectrum(torch.zeros(9, 4), basis).share == 0.0
    assert bases.residual_spectrum(_random(9, 4), bases.empty(9)).share == 1.0
    # Removing the basis from the Gram matrix rounds each of its 9 x 9 entries by up to eps times its norm.
    assert bases.residual_spectrum(basis @ _random(3, 4), basis).share < 9 * 2.3e-16


# --- residual_spectrum of what has noise on it -----------------------------------------------------------------------


def _noisy(a, std, seed, gram):
    """A sketch with noise, or a Gram matrix with noise on and above the diagonal, mirrored below it."""
    z = std * _random(*a.shape, seed=10_000 + seed)
    return a + (z.triu() + z.triu(1).T if gram else z)


def test_without_noise_nothing_changes_by_a_bit():
    for shape, rank, seed in (((9, 30), 3, 0), ((9, 4), 0, 1), ((6, 6), 2, 2)):
        a, basis = _random(*shape, seed=seed), _orthonormal(shape[0], rank, seed=seed + 5) if rank else bases.empty(9)
        for x, gram in ((a, False), (a @ a.T, True)):
            whole = x if gram else x @ x.T
            rest = bases.remove(bases.remove(whole, basis).T, basis)
            values, vectors = torch.linalg.eigh(rest)  # the definition without noise
            found, squared, _, share = bases.residual_spectrum(x, basis, gram=gram, noise=0.0)
            assert torch.equal(found, vectors.flip(1))
            kept = squared > 0
            assert torch.equal(squared[kept], values.flip(0)[kept]) and int(kept.sum()) == min(
                shape[0] - rank, shape[1]
            )
            assert share == min(1.0, float(rest.trace() / whole.trace()))


@pytest.mark.parametrize("known", [0, 4])
@pytest.mark.parametrize("gram", [False, True])
def test_what_noise_adds_comes_off_each_value_with_the_tail(gram, known):
    """Singular values 3, 2, 1 and 0.25 in 5 dimensions outside of the basis, and 9 columns.

    A singular value loses std (sqrt(5) + 3 + 3); its square, an eigenvalue, loses std (2 sqrt(5) + 3 sqrt(2)).
    """
    values, d, std = torch.tensor([3.0, 2.0, 1.0, 0.25], dtype=torch.float64), 5 + known, 0.1
    a = torch.zeros(d, 9, dtype=torch.float64)
    a[known : known + 4, :4] = values.diag()
    basis = torch.eye(d, dtype=torch.float64)[:, :known]
    squared = bases.residual_spectrum(a @ a.T if gram else a, basis, gram=gram, noise=std).squared
    if gram:  # 9, 4, 1 and 0.0625 lose 0.871
        expected = (values**2 - std * (2 * 5**0.5 + 3 * 2**0.5)).clamp(min=0)
    else:  # 3, 2, 1 and 0.25 lose 0.824
        expected = (values - std * (5**0.5 + 9**0.5 + 3)).clamp(min=0) ** 2
    assert [value > 0 for value in expected] == [True, True, True, False]
    np.testing.assert_allclose(squared[:4], expected, rtol=1e-12)
    assert not squared[4:].any()


@pytest.mark.parametrize("known", [0, 4])
@pytest.mark.parametrize("gram", [False, True])
def test_noise_alone_is_seldom_taken_for_a_direction(gram, known):
    """Largest singular values of noise (Davidson and Szarek, 2001, theorem 2.13).

    The largest singular value of a standard normal matrix (n, s) exceeds sqrt(n) + sqrt(s) + t with a probability below
    exp(-t^2 / 2). For the largest eigenvalue of a symmetric one the bound is 2 sqrt(n) + sqrt(2) t: the eigenvalue
    changes by sqrt(2) at most if the vector of the entries on and above the diagonal changes by 1.

    For t = 3 the probability is 1.1 %: 2.2 of 200 draws on average, and 9 or more with a probability below 1 in 1000. A
    value beyond t = 5 is as rare in 200 draws, so a value exceeds the bound by at most 2 std, or 2 sqrt(2) std.
    """
    d, seeds, basis, std = 20, 200, _orthonormal(20, known) if known else bases.empty(20), 0.3
    zero, found, largest = torch.zeros(d, d if gram else 5 * d, dtype=torch.float64), 0, 0.0
    for seed in range(seeds):
        squared = bases.residual_spectrum(_noisy(zero, std, seed, gram), basis, gram=gram, noise=std).squared
        found += bool((squared > 0).any())
        largest = max(largest, float(squared[0]))
    assert found <= 8
    assert largest <= (2 * 2**0.5 * std if gram else (2 * std) ** 2)


@pytest.mark.parametrize("gram", [False, True])
def test_a_strong_signal_is_found_through_the_noise(gram):
    d, s, rank, beyond = 20, 100, 3, 0
    span = _orthonormal(d, rank, seed=3)
    x = span @ _random(rank, s, seed=4)  # singular values near sqrt(s) = 10; eigenvalues of the Gram matrix near 100
    std = 2.0 if gram else 0.1  # subtracted: std (2 sqrt(d) + 3 sqrt(2)) = 26, or std (sqrt(d) + sqrt(s) + 3) = 1.7
    for seed in range(30):
        a = _noisy(x @ x.T if gram else x, std, seed, gram)
        vectors, squared, _, share = bases.residual_spectrum(a, bases.empty(d), gram=gram, noise=std)
        assert int((squared > 0).sum()) >= rank
        beyond += int((squared > 0).sum()) > rank
        found = vectors[:, :rank]
        # angles to the span: noise over signal, std sqrt(d) / 10 = 0.04 or std sqrt(d) / 60 = 0.15, squared and doubled
        assert torch.linalg.svdvals(found.T @ span).min() > 1 - 2 * (0.15 if gram else 0.04) ** 2
        assert squared[rank] < 0.1 * squared[rank - 1]
        assert share == 1.0
    # the fourth value is at most the largest of noise (Weyl), which exceeds the bound in 1.1 % of draws: 0.3 of 30
    assert beyond <= 3


@pytest.mark.parametrize("gram", [False, True])
def test_the_share_that_remains_is_right_on_average(gram):
    """The basis covers 70 % of the energy, so 30 % remain; with the energy of the noise it would be 63 %."""
    d, s, std = 20, 100, 2.0
    basis = torch.eye(d, dtype=torch.float64)[:, :1]
    x = torch.zeros(d, s, dtype=torch.float64)
    x[0, 0], x[1, 0] = math.sqrt(5600), math.sqrt(2400)  # energy 8000; a sketch's noise has d s std^2 = 8000
    whole = x @ x.T if gram else x
    shares = [
        bases.residual_spectrum(_noisy(whole, std, seed, gram), basis, gram=gram, noise=std).share
        for seed in range(300)
    ]
    spread = float(np.std(shares)) / math.sqrt(len(shares))
    assert np.mean(shares) == pytest.approx(0.3, abs=4 * spread + 0.002)  # a ratio is slightly biased
    assert spread < 0.005
    if not gram:
        naive = bases.residual_spectrum(_noisy(whole, std, 0, gram), basis).share
        assert naive == pytest.approx((2400 + 19 * 100 * std**2) / 16000, abs=0.05)


@pytest.mark.parametrize("gram", [False, True])
def test_where_noise_hides_all_nothing_is_known_to_be_covered(gram):
    basis, zero = _orthonormal(9, 3), torch.zeros(9, 9, dtype=torch.float64)
    _, squared, _, share = bases.residual_spectrum(zero, basis, gram=gram, noise=1.0)
    assert not squared.any() and share == 1.0
    assert bases.residual_spectrum(zero, basis, gram=gram).share == 0.0


def test_the_share_is_a_fraction_whatever_the_noise():
    """One column in nine dimensions, six of them outside of the basis: the noise has a mean energy of 6 there."""
    basis = _orthonormal(9, 3)
    outside = torch.nn.functional.normalize(bases.remove(_random(1, 9, seed=1), basis)).T
    assert bases.residual_spectrum(100 * basis[:, :1], basis, noise=1.0).share == 0.0  # of -6 / (10000 - 9)
    assert bases.residual_spectrum(10 * outside, basis, noise=1.0).share == 1.0  # of (100 - 6) / (100 - 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_basis_covers_leaves_no_direction(dtype):
    """The residual is of rounding errors alone. The first input is 0, like a pixel in a corner of MNIST's images."""
    basis = torch.cat([torch.zeros(1, 5, dtype=torch.float64), _orthonormal(12, 5)])
    assert not bases.residual_spectrum((basis @ _random(5, 40)).to(dtype), basis).squared.any()


# --- choose_rank ----------------------------------------------------------------------------------------------------

# Ranks for squared singular values exp(-j / 10), j = 0..99, and threshold 0.9, by the rules' formulas (checked below).
RANKS = {
    0.0: (24, 24, 0),
    0.25: (21, 22, 1),
    0.5: (17, 20, 1),
    0.75: (10, 17, 2),
    0.87: (3, 13, 4),
    0.9: (0, 12, 5),
    0.95: (0, 9, 7),
    0.99: (0, 1, 11),
}


@pytest.mark.parametrize("share", RANKS)
@pytest.mark.filterwarnings("ignore:FOT's eq. 12")
def test_rank_rules_on_a_geometric_spectrum(share):
    squared = torch.exp(-torch.arange(100, dtype=torch.float64) / 10)
    rho = math.sqrt(1 - share)  # |X*| / |X| where the basis covers `share` of the energy
    found = tuple(
        bases.choose_rank(squared, covered, 0.9, criterion)
        for criterion, covered in (("energy", share), ("norm_ratio", rho), ("eq12", rho))
    )
    assert found == RANKS[share]


@pytest.mark.parametrize("share", RANKS)
def test_energy_ranks_from_the_closed_form(share):
    # The geometric series gives f_r = (1 - q^r) / (1 - q^100), q = exp(-1 / 10): solve c + (1 - c) f_r >= 0.9 for r.
    q, wanted = math.exp(-0.1), (0.9 - share) / (1 - share)
    rank = 0 if wanted <= 1e-12 else math.ceil(math.log(1 - wanted * (1 - q**100)) / math.log(q))
    assert RANKS[share][0] == rank


def test_threshold_of_one_and_zero_and_minimum():
    squared = torch.tensor([4.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    assert bases.choose_rank(squared, 0.0, 1.0) == 3  # the numerical rank
    assert bases.choose_rank(torch.tensor([1.0, 1e-14, 0.0], dtype=torch.float64), 0.0, 1.0) == 2  # however small
    assert bases.choose_rank(squared, 0.5, 1.0, "norm_ratio") == 3  # no f_r exceeds (0.5 - 0) / 0.5 = 1
    assert bases.choose_rank(squared, 0.0, 0.0) == 0
    assert bases.choose_rank(squared, 0.95, 0.9) == 0
    assert bases.choose_rank(squared, 0.95, 0.9, min_rank=2) == 2
    assert bases.choose_rank(squared, 0.95, 0.9, min_rank=9) == 3  # there are no more directions
    assert bases.choose_rank(torch.zeros(4, dtype=torch.float64), 0.0, 0.9, min_rank=1) == 0
    assert bases.choose_rank(squared, 1.0, 1.0) == 0  # everything is covered: only rounding noise remains
    assert bases.choose_rank(squared, 1 - 1e-13, 1.0) == 0  # likewise: a thousand roundings of 1


def test_energy_rule_meets_its_threshold_exactly_at_a_tie():
    squared = torch.tensor([5.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    assert bases.choose_rank(squared, 0.0, 0.8) == 2  # (5 + 3) / 10, whatever the rounding of 0.8
    assert bases.choose_rank(squared, 0.5, 0.9) == 2  # 0.5 + 0.5 * 0.8
    assert bases.choose_rank(torch.ones(2).double(), 0.3, 0.65) == 1  # 0.3 + 0.7 * 0.5 = 0.6499999999999999


def test_the_printed_rule_warns_and_unknown_rules_fail():
    squared = torch.ones(3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="protects nothing in the first task"):
        assert bases.choose_rank(squared, 1.0, 0.9, "eq12") == 0
    with pytest.raises(ValueError, match="energy, norm_ratio or eq12"):
        bases.choose_rank(squared, 0.0, 0.9, "no such rule")


# --- expand ---------------------------------------------------------------------------------------------------------


def test_twenty_expansions_stay_orthonormal_and_keep_old_columns():
    basis = bases.empty(100)
    for number in range(20):
        # As from a residual spectrum: orthogonal to the basis up to rounding, here to float32.
        directions = torch.linalg.qr(bases.remove(_random(4, 100, seed=number), basis).T).Q.float().double()
        new = bases.expand(basis, directions)
        assert torch.equal(new[:, : basis.shape[1]], basis)  # to the bit
        assert (bases.remove(directions.T, new)).abs().max() < 1e-6  # and the new directions are in the span
        basis = new
    assert basis.shape == (100, 80)
    assert (basis.T @ basis - torch.eye(80, dtype=torch.float64)).abs().max() < 1e-12


def test_a_dependent_direction_is_dropped_not_replaced():
    basis = _orthonormal(10, 3)
    inside = basis @ torch.tensor([[0.6], [0.8], [0.0]], dtype=torch.float64)
    assert torch.equal(bases.expand(basis, inside), basis)
    fresh = torch.nn.functional.normalize(_random(10, 1, seed=5), dim=0)
    new = bases.expand(basis, torch.cat([fresh, inside, fresh], dim=1))
    assert new.shape == (10, 4)  # one of three directions is new, in any order
    assert bases.remove(fresh.T, new).abs().max() < 1e-13


def test_a_nearly_dependent_direction_does_not_spoil_orthogonality():
    basis = _orthonormal(50, 10)
    outside = bases.remove(_random(1, 50, seed=3), basis).T
    mixed = basis[:, :1] + 1.5 * outside / outside.norm()  # keeps 1.5 / sqrt(3.25) = 0.83 of its length
    new = bases.expand(basis, mixed / mixed.norm())
    assert new.shape == (50, 11)
    assert (new.T @ new - torch.eye(11, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize(("left", "columns"), [(0.4, 2), (0.6, 3)])
def test_a_direction_that_loses_more_than_half_of_its_length_is_dropped(left, columns):
    """Alone, and with one that loses all."""
    axes = torch.eye(4, dtype=torch.float64)
    mixed = math.sqrt(1 - left**2) * axes[:, :1] + left * axes[:, 2:3]
    assert bases.expand(axes[:, :2], mixed).shape == (4, columns)
    assert bases.expand(axes[:, :2], torch.cat([axes[:, 1:2], mixed], dim=1)).shape == (4, columns)


def test_a_basis_never_outgrows_its_space():
    basis = bases.expand(bases.empty(5), _orthonormal(5, 5))
    assert basis.shape == (5, 5)
    more = torch.nn.functional.normalize(_random(5, 3), dim=0)
    assert torch.equal(bases.expand(basis, more), basis)
    assert torch.equal(bases.expand(basis, torch.zeros(5, 0)), basis)
    assert bases.expand(bases.empty(1), torch.ones(1, 1)).abs().item() == 1.0


def test_float32_directions_join_in_float64():
    basis = bases.expand(bases.empty(20), _orthonormal(20, 4).float())
    assert basis.dtype == torch.float64
    assert (basis.T @ basis - torch.eye(4, dtype=torch.float64)).abs().max() < 1e-14
