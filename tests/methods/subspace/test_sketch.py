"""Sketches and energies: distributions, partition invariance, planted subspaces and the bias of a Gaussian sketch."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.layer_inputs import some_patches
from cfl.methods.subspace.sketch import Direct, Energies, Gram, pack, unpack


def _random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _orthonormal(size, rank, seed=0):
    return torch.linalg.qr(_random(size, rank, seed=seed)).Q


def _fed(accumulator, inputs, ids=None, batch=64):
    """The accumulator after inputs (n, positions, d), a batch at a time."""
    ids = torch.arange(len(inputs)) if ids is None else ids
    for rows, part in zip(inputs.split(batch), ids.split(batch), strict=True):
        accumulator.add(rows, part)
    return accumulator


def _sine(a, b):
    """Sine of the largest principal angle between the spans of orthonormal a and b of the same width."""
    return torch.linalg.matrix_norm(a - b @ (b.T @ a), 2)


# --- energies, Gram matrix, packing ----------------------------------------------------------------------------------


def test_energies_by_hand():
    # The residuals of inputs (3, 4) and (1, 0) to the basis (1, 0) are (0, 4) and (0, 0).
    inputs = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    energies = _fed(Energies(torch.tensor([[1.0], [0.0]])), inputs, batch=1).energies
    assert energies.tolist() == [26.0, 16.0] and energies.dtype == torch.float64


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_gram_matrix_is_that_of_the_residual(batch):
    inputs, basis = _random(7, 5, 6), _orthonormal(6, 2)
    x = inputs.flatten(0, 1).T
    residual = x - basis @ (basis.T @ x)
    gram = _fed(Gram(basis, None, 0), inputs, batch=batch)
    torch.testing.assert_close(unpack(gram.release()), residual @ residual.T, atol=1e-11, rtol=0)
    expected = torch.stack([x.square().sum(), residual.square().sum()])
    torch.testing.assert_close(gram.energies, expected)


def test_pack_keeps_half_and_unpack_inverts_it():
    matrix = _random(7, 7)
    matrix = matrix + matrix.T
    packed = pack(matrix)
    assert packed.shape == (7 * 8 // 2,)
    assert torch.equal(unpack(packed), matrix)
    assert pack(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).tolist() == [1.0, 2.0, 3.0]


# --- the law of a sketch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", [5, 30])  # fewer than the 12 dimensions, and more
@pytest.mark.parametrize("rank", [0, 3])
def test_the_spectrum_of_few_vectors_is_that_of_their_gram_matrix(vectors, rank):
    x, basis = _random(vectors, 12), _orthonormal(12, rank)
    found, squared = _fed(Gram(basis, None, 0), x[:, None, :]).spectrum()
    residual = x - x @ basis @ basis.T
    sizes = torch.linalg.svdvals(residual).square()
    known = int((squared > 0).sum())
    assert known == min(vectors, 12 - rank)  # no direction is in the basis
    assert torch.allclose(squared[:known], sizes[:known], rtol=1e-10)
    found = found[:, :known]
    assert torch.allclose(found.T @ found, torch.eye(known).double(), atol=1e-10)
    assert torch.allclose((found * squared[:known]) @ found.T, residual.T @ residual, atol=1e-10)


def _draws(kind, x, basis, columns, count):
    """Independent sketches (count, d, s) of the inputs x (n, d) by one of the two routes."""
    if kind == "gram":
        made = (Gram(basis, columns, key) for key in range(count))
    else:
        made = (Direct(basis, columns, key, by_sample=kind == "sample") for key in range(count))
    return torch.stack([_fed(one, x[:, None, :]).release() for one in made])


@pytest.mark.parametrize("kind", ["gram", "client", "sample"])
def test_a_sketch_has_independent_normal_columns_with_the_gram_matrix_as_covariance(kind):
    count, size, columns = 200, 5, 8
    x, basis = _random(12, size), _orthonormal(size, 1, seed=1)
    residual = bases.remove(x, basis)
    cov = residual.T @ residual
    draws = _draws(kind, x, basis, columns, count)
    # A A^T is Wishart(cov, s): mean s cov, variance of an entry s (cov_ij^2 + cov_ii cov_jj).
    mean = (draws @ draws.transpose(1, 2)).mean(0)
    std = ((cov**2 + cov.diagonal()[:, None] * cov.diagonal()[None, :]) * columns / count).sqrt()
    assert ((mean - columns * cov).abs() < 4.5 * std + 1e-9).all()
    # Any fixed combination of the rows is normal with variance v^T cov v, independent from column to column.
    v = _random(size, seed=2)
    values = torch.einsum("d,nds->ns", v, draws) / (v @ cov @ v).sqrt()
    assert scipy.stats.kstest(values.flatten().numpy(), "norm").pvalue > 0.01
    between = (values[:, 0] * values[:, 1]).mean()
    assert abs(between) < 4.5 / math.sqrt(count)  # the product of two independent N(0, 1) has variance 1


@pytest.mark.parametrize("products", [torch.float64, torch.float32])
def test_a_sketch_in_float32_has_the_law_of_one_in_float64(products):
    """Sketches by a Cholesky factor: 600 dimensions in three blocks of rows, and vectors in a span of 20 dimensions."""
    x = (_random(700, 20) @ _random(20, 600, seed=1)).float()[:, None, :]
    for basis in (bases.empty(600), bases.empty(600).float(), _orthonormal(600, 5).float()):
        sums = _fed(Gram(basis, 1000, 7, products), x)
        assert sums.few is None and sums.release().dtype == basis.dtype
        residual = bases.remove(x[:, 0].double(), basis.double())
        cov, sketch = residual.T @ residual, sums.release().double()
        # A A^T / s is cov on average; for a unit vector v, v^T A A^T v / v^T cov v is chi^2 with 1000 degrees of
        # freedom over 1000: its standard deviation is sqrt(2 / 1000) = 0.045
        for seed in range(10):
            v = _random(600, seed=seed)
            seen = (v @ sketch).square().sum() / 1000 / (v @ cov @ v)
            assert abs(seen - 1) < 4.5 * 0.045
        if basis.dtype == products == torch.float32:  # sums of up to 700 squares, each rounded by 2^-24 at most
            squared = bases.spectrum(sums.release())[1]
            assert squared[20:].sum() < 1e-4 * squared.sum()
        elif basis.dtype == torch.float32:  # rounding of x leaves 1e-7 of it outside of the span
            assert int((bases.spectrum(sums.release())[1] > 0).sum()) == 20


def test_draws_in_float32_are_standard_normal_and_independent():
    # 3 x 50,001 draws in three blocks, the last with an odd number; rows of G are the sketch of unit vectors
    draws = _fed(Direct(bases.empty(3).float(), 50_001, 5, by_sample=False), torch.eye(3)[:, None, :]).release()
    assert scipy.stats.kstest(draws.flatten().numpy(), "norm").pvalue > 0.01
    half = 2**15  # draws i and i + half come from the same pair of uniform numbers
    first, second = draws.flatten()[:half], draws.flatten()[half : 2 * half]
    for one, two in ((first, second), (first**2 - 1, second**2 - 1)):  # means of products: 0, variances 1 and 4
        assert abs((one * two).mean()) < 4.5 * one.std() * two.std() / math.sqrt(half)
    assert len(draws.flatten().unique()) > 0.99 * draws.numel()  # float32 has about 2^24 numbers to draw from
    assert draws.isfinite().all() and draws.abs().max() < 5.8


def test_the_energy_of_the_residual_allows_for_the_rounding_of_the_basis():
    """|X|^2 - |O^T X|^2 is its energy only if O is orthonormal; rounded to float32 it is off by 1e-7 of |X|^2."""
    for seed in range(8):  # with either sign
        basis = _orthonormal(10, 4, seed)
        x = _random(30, 4) @ basis.T
        sums = _fed(Gram(basis.float(), None, 0), x[:, None, :])
        assert sums.few is None
        residual = bases.remove(x, basis.float().double()).square().sum()
        assert abs(sums.energies[1] - residual) < 1e-12 * x.square().sum()


def test_vectors_are_kept_until_they_are_twice_as_many_as_dimensions():
    inputs, basis = _random(19, 1, 10), _orthonormal(10, 2)
    few, many = (_fed(Gram(basis, None, 0), inputs, batch=4) for _ in range(2))
    assert len(few.few) == 19
    many.add(torch.zeros(1, 1, 10, dtype=torch.float64), torch.tensor([19]))  # the twentieth changes no sum
    assert many.few is None
    torch.testing.assert_close(many.matrix, few.matrix, atol=1e-12, rtol=0)
    torch.testing.assert_close(many.energies, few.energies)


def test_both_routes_give_the_same_law_of_singular_values():
    x, basis = _random(12, 5), bases.empty(5)
    largest, smallest = {}, {}
    for kind in ("gram", "client"):
        singular = torch.linalg.svdvals(_draws(kind, x, basis, 6, 300))
        largest[kind], smallest[kind] = singular[:, 0].numpy(), singular[:, -1].numpy()
    for values in (largest, smallest):
        assert scipy.stats.ks_2samp(values["gram"], values["client"]).pvalue > 0.01


def test_direct_is_x_times_its_own_draws():
    # With the unit vectors as inputs of one client, A = I G = G, so A must have the distribution of G.
    inputs = torch.eye(40, dtype=torch.float64)[:, None, :]
    normal = _fed(Direct(bases.empty(40), 100, 3, by_sample=True), inputs).release()
    assert scipy.stats.kstest(normal.flatten().numpy(), "norm").pvalue > 0.01
    uniform = _fed(Direct(bases.empty(40), 100, 3, by_sample=True, distribution="uniform"), inputs).release()
    assert scipy.stats.kstest(uniform.flatten().numpy(), "uniform", args=(-1, 2)).pvalue > 0.01
    assert len(normal.flatten().unique()) == normal.numel()  # no row of G is used twice
    # The same key gives the same G, so A is linear in X: inputs (1 + i) e_i scale the rows of G.
    scaled = inputs * torch.arange(1.0, 41)[:, None, None]
    again = _fed(Direct(bases.empty(40), 100, 3, by_sample=True), scaled).release()
    torch.testing.assert_close(again, normal * torch.arange(1.0, 41, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("by_sample", [False, True])
def test_patches_of_an_image_get_draws_of_their_own(by_sample):
    inputs = torch.eye(6, dtype=torch.float64)[None]  # one image with six patches
    g = _fed(Direct(bases.empty(6), 50, 0, by_sample=by_sample), inputs).release()
    assert torch.linalg.matrix_rank(g) == 6


@pytest.mark.parametrize("by_sample", [False, True])
def test_a_layer_that_is_called_twice_draws_anew(by_sample):
    # E[A A^T] = s X X^T. Inputs e1 and -e1 have energy 2; with the same draw for both they would cancel.
    inputs = torch.tensor([[[1.0, 0.0]]]).double()
    sums = Direct(bases.empty(2), 4000, 0, by_sample=by_sample)
    for call in (inputs, -inputs):
        sums.add(call, torch.tensor([7]))
    a = sums.release()
    # The mean of 4,000 squares of N(0, 2) has standard deviation 2 sqrt(2 / 4000) = 0.045; the bound is four of them.
    assert (a @ a.T / 4000)[0, 0].item() == pytest.approx(2.0, abs=0.18)


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_few_vectors_are_multiplied_at_once_however_they_come(distribution):
    inputs, basis = _random(20, 2, 50), _orthonormal(50, 3)
    sums = [Direct(basis, 30, 3, by_sample=False, distribution=distribution) for _ in range(2)]
    for one, batch in zip(sums, (3, 64), strict=True):
        _fed(one, inputs, batch=batch)
    expected = torch.stack([part.square().sum() for part in (inputs, bases.remove(inputs.flatten(0, 1), basis))])
    torch.testing.assert_close(sums[0].energies, expected)
    assert torch.equal(sums[0].release(), sums[1].release()) and torch.equal(sums[0].release(), sums[0].release())


def test_different_keys_and_clients_draw_differently():
    inputs = _random(4, 1, 6)
    for make in (
        lambda key: Gram(bases.empty(6), 9, key),
        lambda key: Direct(bases.empty(6), 9, key, by_sample=True),
        lambda key: Direct(bases.empty(6), 9, key, by_sample=False),
    ):
        first, same, other = (_fed(make(key), inputs).release() for key in (1, 1, 2))
        assert torch.equal(first, same)
        assert (first - other).abs().max() > 0.1


# --- partition invariance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 7, 50])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_keyed_sketch_does_not_depend_on_who_holds_the_samples(clients, sort, batch):
    inputs, basis, ids = _random(100, 3, 12), _orthonormal(12, 2), torch.arange(500, 600)
    whole = _fed(Direct(basis, 24, 9, by_sample=True), inputs, ids).release()
    order = inputs[:, 0, 0].argsort() if sort else torch.randperm(100, generator=torch.Generator().manual_seed(1))
    parts = [
        _fed(Direct(basis, 24, 9, by_sample=True), inputs[rows], ids[rows], batch).release()
        for rows in order.tensor_split(clients)
    ]
    total = torch.stack(parts[::-1]).sum(0)
    assert (total - whole).norm() < 1e-9 * whole.norm()
    spans = []
    for a in (whole, total):
        vectors, squared = bases.spectrum(a)
        new = bases.expand(basis, vectors[:, : bases.choose_rank(squared, 0.0, 0.6)])
        spans.append(new @ new.T)
    assert torch.linalg.matrix_norm(spans[0] - spans[1], 2) < 1e-8  # a different rank would give 1


def test_gram_matrices_add_up_over_clients():
    inputs, basis = _random(60, 2, 8), _orthonormal(8, 3)
    whole = _fed(Gram(basis, None, 0), inputs).release()
    total = sum(_fed(Gram(basis, None, client), part).release() for client, part in enumerate(inputs.split(9)))
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-10)


# --- what a sketch finds ---------------------------------------------------------------------------------------------

PLANTED_BOUNDS = [(100, 0.0, 1e-12), (500, 0.0, 1e-12), (100, 1e-3, 5e-3), (500, 1e-3, 2e-3)]


@pytest.mark.parametrize("columns,noise,bound", [*PLANTED_BOUNDS, (100, 1e-2, 5e-2), (500, 1e-2, 2e-2)])
def test_a_planted_subspace_is_found(columns, noise, bound):
    # X = U Z, U (100, 10), N = 1,000. Measured with noise 1e-3: a sine of 1.5e-3 (s = d) and 6.6e-4 (s = 5 d).
    truth = _orthonormal(100, 10)
    x = truth @ _random(10, 1000, seed=1) + noise * _random(100, 1000, seed=2)
    for accumulator in (Gram(bases.empty(100), columns, 0), Direct(bases.empty(100), columns, 0, by_sample=False)):
        vectors, squared = bases.spectrum(_fed(accumulator, x.T[:, None, :]).release())
        assert _sine(vectors[:, :10], truth) < bound
        if noise == 0.0:
            assert int((squared > 0).sum()) == 10


def test_a_gram_matrix_finds_the_planted_subspace():
    truth = _orthonormal(100, 10)
    x = truth @ _random(10, 1000, seed=1)
    vectors, squared = bases.spectrum(unpack(_fed(Gram(bases.empty(100), None, 0), x.T[:, None, :]).release()))
    assert int((squared > 0).sum()) == 10
    assert _sine(vectors[:, :10], truth) < 1e-12


def test_a_narrow_sketch_obeys_the_range_finder_bound():
    # Halko, Martinsson, Tropp (2011), theorem 10.5: E |(I - Q Q^T) X|^2 <= (1 + k / (s - k - 1)) sum_{j > k} sigma_j^2
    # for every k < s - 1, Q a basis of the range of X G with s columns.
    size, columns = 60, 15
    sigma = torch.arange(1, size + 1, dtype=torch.float64) ** -1.0
    x = (_orthonormal(size, size) * sigma) @ _orthonormal(200, size, seed=1).T
    lost = []
    for key in range(30):
        sketch = _fed(Gram(bases.empty(size), columns, key), x.T[:, None, :]).release()
        q = torch.linalg.qr(sketch).Q
        lost.append(float((x - q @ (q.T @ x)).square().sum()))
    tails = [float(sigma[k:].square().sum()) * (1 + k / (columns - k - 1)) for k in range(1, columns - 1)]
    assert np.mean(lost) <= min(tails)
    assert np.mean(lost) >= float(sigma[columns:].square().sum())  # no 15 directions do better (Eckart-Young)


def _marchenko_pastur_coverage(ratio, asked):
    """Share of the directions that hold the share `asked` of the energy of a sketch; flat spectrum, ratio = d / s."""
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    values = np.linspace(low, high, 200_001)[1:-1]
    density = np.sqrt((high - values) * (values - low)) / values
    density /= density.sum()
    energy = np.cumsum((density * values)[::-1])
    return float(np.cumsum(density[::-1])[np.searchsorted(energy, asked * energy[-1])])


def test_a_sketch_overstates_its_coverage_by_the_marchenko_pastur_law():
    size, asked, covered = 200, 0.94, []
    inputs = math.sqrt(4000 / size) * _orthonormal(size, size)[:, None, :]  # X X^T = 20 I: a flat spectrum
    for mult, measured in ((1, 0.59), (2, 0.76), (5, 0.87), (20, 0.92)):
        sketch = _fed(Gram(bases.empty(size), mult * size, mult), inputs).release()
        rank = bases.choose_rank(bases.spectrum(sketch)[1], 0.0, asked)
        covered.append(rank / size)  # every direction of a flat spectrum holds 1 / d of the energy
        assert covered[-1] == pytest.approx(_marchenko_pastur_coverage(1 / mult, asked), abs=0.02)
        assert covered[-1] == pytest.approx(measured, abs=0.02)
    assert covered == sorted(covered) and covered[-1] < asked


@pytest.mark.parametrize("power,expected", [(1, {1: 0.79, 5: 0.91}), (2, {1: 0.935, 5: 0.944})])
def test_the_overstatement_is_smaller_for_steep_spectra(power, expected):
    # Eigenvalues j^-power, d = 200, threshold 0.94; expected shares measured with 4,000 samples and 5 draws each.
    values = torch.arange(1, 201, dtype=torch.float64) ** -power
    inputs = values.sqrt().diag()[:, None, :]
    for mult, coverage in expected.items():
        vectors, squared = bases.spectrum(_fed(Gram(bases.empty(200), mult * 200, 1), inputs).release())
        chosen = vectors[:, : bases.choose_rank(squared, 0.0, 0.94)]
        real = float((chosen.square() * values[:, None]).sum() / values.sum())
        assert real == pytest.approx(coverage, abs=0.02)


# --- edge cases ------------------------------------------------------------------------------------------------------


def test_zero_inputs_and_a_single_sample():
    for make in (lambda: Gram(bases.empty(6), 9, 0), lambda: Direct(bases.empty(6), 9, 0, by_sample=True)):
        zero = _fed(make(), torch.zeros(4, 2, 6))
        assert torch.equal(zero.release(), torch.zeros(6, 9, dtype=torch.float64))
        assert zero.energies.tolist() == [0.0, 0.0]
        single = _fed(make(), _random(1, 1, 6)).release()
        assert int((bases.spectrum(single)[1] > 0).sum()) == 1
        copies = _fed(make(), _random(1, 1, 6).expand(5, 1, 6)).release()
        assert int((bases.spectrum(copies)[1] > 0).sum()) == 1


def test_some_patches_are_distinct_and_follow_the_sample():
    inputs = torch.arange(4.0)[:, None, None] * 100 + torch.arange(9.0)[None, :, None]  # 100 x sample + position
    ids = torch.tensor([7, 8, 9, 10])
    drawn = some_patches(inputs, ids, 4, key=5)
    assert drawn.shape == (4, 4, 1)
    for number, patches in enumerate(drawn[..., 0].tolist()):
        assert len(set(patches)) == 4 and all(100 * number <= value < 100 * number + 9 for value in patches)
    for number in range(4):  # alone or with other samples
        assert torch.equal(some_patches(inputs[[number]], ids[[number]], 4, key=5)[0], drawn[number])
    assert not torch.equal(some_patches(inputs, ids, 4, key=6), drawn)
    for most in (0, 9, 20):
        assert some_patches(inputs, ids, most, key=5) is inputs


def test_patches_are_drawn_uniformly():
    inputs = torch.arange(9.0)[None, :, None].expand(1800, 9, 1)
    counts = some_patches(inputs, torch.arange(1800), 3, key=0).long().flatten().bincount(minlength=9)
    # Each position is in 1800 * 3 / 9 = 600 draws, binomial with p = 1 / 3: std sqrt(1800 * 2 / 9) = 20
    assert (counts - 600).abs().max() < 4.5 * 20
