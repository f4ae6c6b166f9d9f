"""Keyed randomness: a draw depends on its purpose, never on when it happens.

A key is a hash of (seed, path). No draw depends on the order of execution, the number of workers or the state of a
device. Only this module seeds generators.

torch's generator on a CPU uses only the lower 32 bits of a seed. That is enough where privacy does not depend on
the draws: order of batches, dropout, augmentation, initial weights, samples of a memory. Draws that privacy depends on
(noise, Poisson batches, sketches) come from `private_generator`, whose key has 128 bits.
"""

import contextlib
import secrets
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, *path: int | str) -> int:
    """Hash a seed and a path to a 63-bit key, for example key(seed, "cohort", task, phase, round)."""
    return _hash(8, seed, *path) >> 1


def long_key(seed: int, *path: int | str) -> int:
    """Hash a seed and a path to a 128-bit key."""
    return _hash(16, seed, *path)


def _hash(size: int, *path: int | str) -> int:
    """Hash a path to an integer of `size` bytes."""
    text = "/".join((str(path[0]), *(f"{type(part).__name__[0]}{part}" for part in path[1:])))
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "little")


def generator(key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a torch generator seeded with `key`; on a CPU with its lower 32 bits."""
    return torch.Generator(device=device).manual_seed(key)


def numpy_generator(key: int) -> np.random.Generator:
    """Make a NumPy generator seeded with `key`."""
    return np.random.Generator(np.random.PCG64(key))


def legacy_generator(seed: int) -> np.random.RandomState:
    """Make NumPy's old generator: it draws what the functions of `np.random` draw after `np.random.seed(seed)`."""
    return np.random.RandomState(seed)


def private_generator(seed: int | None, *path: int | str) -> np.random.Generator:
    """Make a generator for draws that privacy depends on. Its key of 128 bits is the `long_key` of seed and path.

    seed: None for a key from the system's entropy, which never repeats.
    """
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128) if seed is None else long_key(seed, *path)))


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
