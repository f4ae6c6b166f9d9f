"""The search of a noise's seed finds that of torch's generator, and not that of cfl."""

import torch

from cfl.aggregation.gaussian import noise
from cfl.core import rng


def test_the_search_finds_32_bits_and_not_128(script):
    seed_search = script("seed_search")
    key = rng.long_key(seed_search.SEED, *seed_search.PLACE)
    assert key >> 32  # the control's generator drops these bits
    weak = seed_search.of_torch(key)
    assert seed_search.search(weak, seed_search.of_torch, key, bits=8) == key & 0xFFFFFFFF
    ours = noise(torch.zeros(16, dtype=torch.float64), 1.0, seed_search.SEED, *seed_search.PLACE)
    assert torch.equal(ours, seed_search.of_philox(key))  # the attacker who knew the whole key would succeed
    for draw in (seed_search.of_torch, seed_search.of_philox):
        assert seed_search.search(ours, draw, key, bits=8) is None
