"""Search the seed of differentially private noise, as an attacker who knows 16 entries of a release without noise.

    python benchmarks/seed_search.py [--slice 18]

torch's generator on a CPU keeps 32 bits of a seed, so noise drawn from it is found in hours by trying all of them; a
slice of 2^18 that contains the seed takes seconds. `cfl` draws noise from Philox with a key of 128 bits. The same slice
is searched three times: for noise of torch's generator (found), for noise of `cfl`, once with torch's generator and
once with Philox and keys of 32 bits (not found).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.gaussian import noise
from cfl.core import rng

KNOWN, CLOSE = 16, 1e-6  # entries that the attacker knows; largest error of a match
PLACE = "noise", rng.key(0, "round", 0, "train", 0)
SEED = 0x5EED


def of_torch(key: int) -> Tensor:
    """Noise (KNOWN,) of torch's generator for the lower 32 bits of a key; it would drop the others itself."""
    return torch.randn(KNOWN, dtype=torch.float64, generator=rng.generator(key & 0xFFFFFFFF))


def of_philox(key: int) -> Tensor:
    """Noise (KNOWN,) of Philox for a key."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).standard_normal(KNOWN))


def search(release: Tensor, draw: Callable[[int], Tensor], near: int, bits: int) -> int | None:
    """Try the 2^bits keys of 32 bits around `near`; return the key whose noise equals the release (KNOWN,), or None."""
    first = (near & 0xFFFFFFFF) >> bits << bits
    return next((key for key in range(first, first + 2**bits) if (draw(key) - release).abs().max() < CLOSE), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search the seed of the noise in a release.")
    parser.add_argument("--slice", type=int, default=18, help="log2 of the number of keys to try")
    bits = parser.parse_args().slice
    key = rng.long_key(SEED, *PLACE)
    ours = noise(torch.zeros(KNOWN, dtype=torch.float64), 1.0, SEED, *PLACE)
    for name, release, draw in (
        ("noise of torch's generator, tried with torch's generator", of_torch(key), of_torch),
        ("noise of cfl, tried with torch's generator", ours, of_torch),
        ("noise of cfl, tried with Philox and keys of 32 bits", ours, of_philox),
    ):
        start = time.perf_counter()
        found = search(release, draw, key, bits)
        seconds = time.perf_counter() - start
        left = "" if found is None else f", {float((draw(found) - release).abs().max()):.0e} of the noise is left"
        print(f"{name}: {'not found' if found is None else f'found {found}'} in {seconds:.1f} s{left}")


if __name__ == "__main__":
    main()
