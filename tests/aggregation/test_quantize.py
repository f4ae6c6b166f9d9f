"""Fixed-point numbers: rounding, clipping, extremes that do not wrap, and sums independent of their order."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfl.aggregation.quantize import FixedPoint
from cfl.core import ConfigError

FORMATS = [
    FixedPoint(16, 6, 1),
    FixedPoint(16, 4, 30),
    FixedPoint(32, 16, 7),
    FixedPoint(64, 24, 1),
    FixedPoint(64, 40, 99),
]
formats = st.builds(
    FixedPoint, bits=st.sampled_from([16, 32, 64]), fraction_bits=st.integers(0, 15), clients=st.integers(1, 1000)
)


def _tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    # f = 2: 0.75 -> 3; -0.75 -> -3 = 2^16 - 3; 0.125 = half a unit rounds to even, 0; 0.375 = 1.5 units -> 2.
    fixed = FixedPoint(16, 2, 1)
    integers, clipped = fixed.encode(_tensor(0.75, -0.75, 0.125, 0.375))
    assert integers.tolist() == [3, 65533, 0, 2] and integers.dtype == np.uint16 and clipped == 0
    assert fixed.decode(integers).tolist() == [0.75, -0.75, 0.0, 0.5]


@given(formats, st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_there_and_back_is_off_by_half_a_unit(fixed, values):
    x = _tensor(*values).clamp(-fixed.largest, fixed.largest)
    integers, clipped = fixed.encode(x)
    assert clipped == 0 and integers.dtype == np.dtype(f"u{fixed.bits // 8}")
    assert (fixed.decode(integers) - x).abs().max() <= 2.0 ** -(fixed.fraction_bits + 1)


@given(st.integers(1, 50), st.sampled_from([(32, 12), (64, 24), (64, 30)]), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_sum_is_off_by_half_a_unit_a_client(clients, size, seed):
    fixed = FixedPoint(*size, clients)
    x = 10 * torch.randn(clients, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    total = sum(fixed.encode(row)[0] for row in x)
    exact = [sum(map(Fraction, column)) for column in x.T.tolist()]
    errors = [abs(Fraction(a) - b) for a, b in zip(fixed.decode(total).tolist(), exact, strict=True)]
    assert max(errors) <= Fraction(clients, 2 ** (fixed.fraction_bits + 1))


@pytest.mark.parametrize("fixed", FORMATS)
def test_the_extremes_are_not_clipped_and_do_not_wrap(fixed):
    integers, clipped = fixed.encode(_tensor(fixed.largest, -fixed.largest))
    assert clipped == 0
    total = np.zeros(2, integers.dtype)
    for _ in range(fixed.clients):
        total += integers
    # each entry is a whole number of at most 53 bits, so the exact sum is known; float64 rounds it once
    exact = fixed.clients * Fraction(fixed.largest)
    assert fixed.decode(total).tolist() == [float(exact), -float(exact)]
    assert exact * 2**fixed.fraction_bits < 2 ** (fixed.bits - 1)


@pytest.mark.parametrize("fixed", FORMATS)
def test_little_room_is_given_away(fixed):
    # With one more unit of the last of 53 bits, the sum of `clients` entries might not fit.
    units = Fraction(fixed.largest) * 2**fixed.fraction_bits
    step = max(1, 2 ** (int(units).bit_length() - 53)) if units >= 2**53 else 1
    assert (units + step) * fixed.clients > 2 ** (fixed.bits - 1) - 1


@given(formats, st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_clipped_entries_are_counted(fixed, values):
    integers, clipped = fixed.encode(_tensor(*values))
    limit = Fraction(fixed.largest) * 2**fixed.fraction_bits
    exact = [round(Fraction(value) * 2**fixed.fraction_bits) for value in values]  # half to even, as rint
    assert clipped == sum(abs(q) > limit for q in exact)
    assert integers.tolist() == [int(max(-limit, min(limit, q))) % 2**fixed.bits for q in exact]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(ValueError, match="1 of 3 entries"):
        FixedPoint(32, 16, 2).encode(_tensor(0.0, value, 1.0))


def test_a_range_without_room_for_the_clients_is_refused():
    with pytest.raises(ConfigError, match="a sum of 40000 clients does not fit in 16 bits; use more bits"):
        FixedPoint(16, 8, 40_000)


def test_single_precision_is_widened_before_it_is_scaled():
    # 1 + 2^-20 has 21 bits, so 2^40 times it is exact in both types; float32 0.1 is not 0.1.
    x = torch.tensor([1 + 2**-20, 0.1], dtype=torch.float32)
    assert FixedPoint(64, 40, 2).encode(x)[0].tolist() == [2**40 + 2**20, round(Fraction(x[1].item()) * 2**40)]
