"""Keys and generators: every draw is decided by its path alone, and the global state is never left changed."""

import functools
import operator
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cfl.core import rng

PATHS = st.lists(st.one_of(st.integers(-3, 10**6), st.text("ab/1i", max_size=3)), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), PATHS)
def test_key_is_a_pure_63_bit_function(seed, path):
    assert rng.key(seed, *path) == rng.key(seed, *path)
    assert 0 <= rng.key(seed, *path) < 2**63


def test_keys_of_a_large_grid_are_distinct():
    # 63-bit hashes: the chance that any two of 20,000 agree is about 20000^2 / 2^64 = 2e-11.
    paths = [
        (seed, purpose, task, round, client)
        for seed in range(2)
        for purpose in ("order", "step", "local", "cohort")
        for task in range(5)
        for round in range(25)
        for client in range(20)
    ]
    assert len({rng.key(*path) for path in paths}) == len(paths) == 20_000


def test_key_tells_numbers_from_text_and_where_a_part_ends():
    assert rng.key(0, 1) != rng.key(0, "1")
    assert rng.key(0, 1, 23) != rng.key(0, 12, 3)
    assert rng.key(0, "a") != rng.key(0, "a", "a")
    assert rng.key(0, "a", 1) != rng.key(0, 1, "a")


def test_generators_start_from_the_key_alone():
    first = torch.randn(3, generator=rng.generator(5))
    torch.randn(100)
    assert torch.equal(first, torch.randn(3, generator=rng.generator(5)))
    assert not torch.equal(first, torch.randn(3, generator=rng.generator(6)))
    assert rng.numpy_generator(5).integers(0, 1000, 5).tolist() == rng.numpy_generator(5).integers(0, 1000, 5).tolist()


def test_generators_take_the_largest_key():
    assert torch.rand(1, generator=rng.generator(2**63 - 1)).shape == (1,)
    assert 0 <= rng.numpy_generator(2**63 - 1).random() < 1


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 127])
def test_private_draws_take_every_bit_of_the_seed_and_of_the_path(bit):
    def draw(*path):
        return rng.private_generator(*path).random(4).tolist()

    assert draw(1 << 127, "a", 5) == draw(1 << 127, "a", 5)
    assert draw(2**128 - 1, "a") != draw((2**128 - 1) ^ 1 << bit, "a")
    assert draw(0, "a", 2**128 - 1) != draw(0, "a", (2**128 - 1) ^ 1 << bit)


def test_private_draws_of_the_systems_entropy_never_repeat():
    assert rng.private_generator(None, "a").random() != rng.private_generator(None, "a").random()


def test_the_key_of_private_draws_has_128_bits():
    keys = [rng.long_key(seed, "a") for seed in range(1000)]
    union = functools.reduce(operator.or_, keys)
    assert max(keys) < 2**128 and union == 2**128 - 1  # a bit is 0 in all of 1,000 keys with probability 2^-1000


def test_draws_leave_the_global_states_alone():
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    torch.randn(4, generator=rng.generator(rng.key(1, "a")))
    rng.numpy_generator(3).normal(size=4)
    with rng.fork(7):
        torch.randn(4)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert random.getstate() == python_state


def test_fork_decides_initialisation_and_dropout():
    def draw(key):
        with rng.fork(key):
            return nn.Linear(3, 2).weight.detach(), nn.functional.dropout(torch.ones(64))

    (weight, kept), (weight_again, kept_again), (other, _) = draw(1), draw(1), draw(2)
    assert torch.equal(weight, weight_again) and torch.equal(kept, kept_again)
    assert not torch.equal(weight, other)


def test_fork_puts_the_state_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="inside"), rng.fork(1):
        torch.rand(1)
        raise KeyError("inside")
    assert torch.equal(torch.get_rng_state(), before)
