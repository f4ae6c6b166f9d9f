"""Keyed randomness: a draw depends on its purpose, never on when it happens.

A key is a hash of (seed, path). No draw depends on the order of execution, the number of workers or the state of a
device. Only this module seeds generators.
"""

import contextlib
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, *path: int | str) -> int:
    """Hash a seed and a path to a 63-bit key, for example key(seed, "cohort", task, phase, round)."""
    text = "/".join((str(seed), *(f"{type(part).__name__[0]}{part}" for part in path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a torch generator seeded with `key`."""
    return torch.Generator(device=device).manual_seed(key)


def numpy_generator(key: int) -> np.random.Generator:
    """Make a NumPy generator seeded with `key`."""
    return np.random.Generator(np.random.PCG64(key))


@contextlib.contextmanager
def fork(key: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators with `key` inside the block, and restore them afterwards.

    Only for code that takes no generator: `nn.Dropout` and the initialisation of modules.
    """
    sources = [torch.default_generator]
    if torch.device(device).type == "cuda":
        torch.cuda.init()
        place = torch.device(device).index
        sources.append(torch.cuda.default_generators[torch.cuda.current_device() if place is None else place])
    before = [source.get_state() for source in sources]
    try:
        for source in sources:  # torch.manual_seed and fork_rng would take as long as a step of a small model
            source.manual_seed(key)
        yield
    finally:
        for source, state in zip(sources, before, strict=True):
            source.set_state(state)
