"""Counter-based randomness: every draw is keyed by what it is for, never by when it happens.

A key is a hash of (seed, path), so no draw depends on the order of execution, the number of workers or the device's
state. Nothing else in the package may seed a generator.
"""

import contextlib
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, *path: int | str) -> int:
    """A 63-bit key for the draw that `path` names, e.g. key(seed, "cohort", task, phase, round)."""
    text = "/".join((str(seed), *(f"{type(part).__name__[0]}{part}" for part in path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator that starts from `key`."""
    return torch.Generator(device=device).manual_seed(key)


def numpy_generator(key: int) -> np.random.Generator:
    """A NumPy generator that starts from `key`."""
    return np.random.Generator(np.random.PCG64(key))


@contextlib.contextmanager
def fork(key: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators from `key` inside the block, and put them back afterwards.

    Only for what takes no generator of its own: `nn.Dropout` and the initialisation of modules.
    """
    sources = [torch.default_generator]
    if torch.device(device).type == "cuda":
        torch.cuda.init()
        place = torch.device(device).index
        sources.append(torch.cuda.default_generators[torch.cuda.current_device() if place is None else place])
    before = [source.get_state() for source in sources]
    try:
        for source in sources:  # not torch.manual_seed and fork_rng: for small models, their time is that of a step
            source.manual_seed(key)
        yield
    finally:
        for source, state in zip(sources, before, strict=True):
            source.set_state(state)
