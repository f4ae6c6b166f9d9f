"""How uploads become a sum that hides and protects them: clip, noise, integers, masks; then the way back.

Client: weigh, clip to dp.clip, add a share of the noise, round to integers modulo 2^bits, mask.
Server: unmask the sum, read it as signed numbers, add the noise (without secure aggregation), divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.gaussian import SampleNoise, clipped, noise
from cfl.aggregation.plain import UploadSum
from cfl.aggregation.quantize import FixedPoint
from cfl.config.schema import RunConfig
from cfl.contract.regularizer import Gathers
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import rng, tree
from cfl.core.errors import ConfigError, RoundAborted, UpdateError

if TYPE_CHECKING:
    from cfl.aggregation.secagg import SecureSum

DEVIATIONS = 6  # of normal noise, beyond which are 2e-9 of the draws


@dataclass(frozen=True)
class UploadProtection:
    """What protects the uploads of a run. multiplier: standard deviation of the noise over dp.clip.

    Raises ConfigError for integers too coarse or too small for the noise.
    """

    config: RunConfig
    multiplier: float

    def __post_init__(self) -> None:
        bits, dp = self.config.secure.fraction_bits, self.config.dp
        shares = self.config.partition.clients if dp.level == "client" else 1
        least = dp.clip * self.multiplier / math.sqrt(shares)  # of what one client adds
        if self.config.secagg != "none" and 0 < least < 4 * 2.0**-bits:
            raise ConfigError(f"secure.fraction_bits={bits} rounds away noise as small as {least:.2g}; raise it")
        if self.config.secagg != "none" and self.multiplier:
            self._check_range()

    def _check_range(self) -> None:
        """Raise ConfigError where integers may cut off a client's noise."""
        from cfl.aggregation.secagg import honest

        secure, dp, clients = self.config.secure, self.config.dp, self.config.partition.clients
        # What an entry may be falls with the number of clients, and faster than the noise of each.
        largest = FixedPoint(secure.bits, secure.fraction_bits, clients).largest
        std = dp.clip * self.multiplier / (honest(secure.quorum, clients) if dp.level == "client" else 1) ** 0.5
        if dp.clip + DEVIATIONS * std > largest:
            raise ConfigError(
                f"secure.bits={secure.bits} with secure.fraction_bits={secure.fraction_bits} reach {largest:.3g} in a "
                f"sum of {clients} clients, and cut off noise: dp.clip={dp.clip:g} and {DEVIATIONS} deviations of what "
                f"a client adds are {dp.clip + DEVIATIONS * std:.3g}; raise the first or lower the second"
            )

    @property
    def samples(self) -> SampleNoise | None:
        """What protects single samples in local training, if that is asked for."""
        dp = self.config.dp
        protected = (dp.level, dp.protect) == ("example", "all")
        return SampleNoise(dp.clip, self.multiplier, self.config.local.batch_size) if protected else None

    def sum(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> UploadSum:
        """The sum of a round's uploads; a diagnostic of the simulator and what is only stored need no protection."""
        if info.phase.diagnostic or info.phase.stores or (self.config.secagg, self.config.dp.level) == ("none", "none"):
            return UploadSum(info, gathers)
        return ProtectedSum(self, info, gathers)


class ProtectedSum(UploadSum):
    """A sum of one vector a client: its floating-point uploads end to end, those of `work` last.

    Counters of normalisation layers, the only integers, stay on the clients.
    """

    def __init__(self, protection: UploadProtection, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        super().__init__(info, gathers)
        config, self._dp = protection.config, protection.config.dp
        self._weighted, self._std = config.agg.weights == "samples", self._dp.clip * protection.multiplier
        self._clients, self._vector = 0, torch.zeros(0, dtype=torch.float64)
        self._secure: SecureSum | None = None
        self._opened = False
        self._integers: dict[int, np.ndarray] = {}  # where it was never opened: others have the masks
        if config.secagg != "none":
            from cfl.aggregation.secagg import (
                SecureSum,  # brings scipy.stats and cryptography, which other runs do without
            )

            self._fixed = FixedPoint(config.secure.bits, config.secure.fraction_bits, max(1, len(info.clients)))
            self._secure = SecureSum(
                info.clients,
                bits=config.secure.bits,
                threshold=config.secure.quorum,
                neighbours=config.secure.neighbours,
                dropped=info.dropped,
                drop_rate=config.drop_rate,
                key=rng.key(info.key, "graph"),
                masked=config.secagg == "full",
            )

    def open(self) -> None:
        self._opened = True
        if self._secure is not None:
            self._secure.setup()

    def traffic(self) -> tuple[int, int]:
        return super().traffic() if self._secure is None else (self._secure.bytes_up, self._secure.bytes_down)

    def add(self, client: int, uploads: TreesByOwner, weight: float) -> bool:
        if self._secure is None and client in self.info.uploading:
            self._bytes_up += sum(map(tree.nbytes, uploads.values()))
        shown = client not in self.info.uploading  # nobody is: this one shows the shape of the noise
        if not shown and not all(map(tree.all_finite, uploads.values())):
            return False
        self._look(client, uploads)
        vector = self._flat(uploads, weight)
        if shown:
            self._vector = torch.zeros_like(vector)
            return True
        self._clients += 1
        if self._dp.level == "client":
            self._clip(vector[self._start :])
            if self._secure is not None:  # as many shares as honest clients must be there give the noise
                self._share(vector[self._start :], client, self._secure.honest)
        elif self._dp.level == "example":  # samples are protected from the server too: each client adds it all
            self._share(vector[self._work :], client, 1)
        if self._secure is None:
            self._vector = self._vector + vector if len(self._vector) else vector
            return True
        if self._weighted and weight > self._fixed.largest:  # a clipped weight would spoil the whole mean
            raise ConfigError(
                f"client {client} weighs {weight:g}, and secure.bits={self._fixed.bits} with secure.fraction_bits="
                f"{self._fixed.fraction_bits} reach {self._fixed.largest:.3g}; lower the second or set "
                "agg.weights=uniform"
            )
        integers, beyond = self._fixed.encode(vector)
        self.clipped += beyond
        if self._opened:
            self._secure.add(client, integers)
        else:
            self._integers[client] = integers
        return True

    def part(self) -> dict[str, Any]:
        names = ("_clients", "_vector", "_integers")
        return super().part() | {name: getattr(self, name) for name in names}

    def merge(self, part: Mapping[str, Any]) -> None:
        super().merge(part)
        self._clients += part["_clients"]
        if len(part["_vector"]):
            self._vector = self._vector + part["_vector"] if len(self._vector) else part["_vector"].clone()
        for client, integers in part["_integers"].items():
            assert self._secure is not None
            self._secure.add(client, integers)

    def close(self) -> TreesByOwner:
        if self._first < 0:
            raise RoundAborted("no client of the cohort has answered")
        total = self._vector if self._secure is None else self._fixed.decode(self._secure.close())
        if self._dp.level == "client":
            if self._secure is None:
                total[self._start :] += noise(total[self._start :], self._std, rng.key(self.info.key, "noise"))
            self.noise = self._std * (1 if self._secure is None else (self._clients / self._secure.honest) ** 0.5)
        elif self._dp.level == "example":
            self.noise = self._std * self._clients**0.5
        hidden = self.info.privacy is not None and self.info.privacy.hidden
        divisor = float(total[0]) if self._weighted else self.info.expected if hidden else self._clients
        return self._parts(total[int(self._weighted) :], divisor or 1.0)

    @cached_property
    def _work(self) -> int:
        """Where in the vector the uploads of `work` begin."""
        return int(self._weighted) + sum(leaf.numel() for owner, _, leaf in self._places if owner != "work")

    @cached_property
    def _start(self) -> int:
        """Where in the vector begins what differential privacy protects; no weight is sent where it protects all."""
        return 0 if self._dp.protect == "all" else self._work

    def _clip(self, part: Tensor) -> None:
        """Clip the part of a vector to dp.clip, in place; what rounding to integers may add is taken off before."""
        rounding = 0.0 if self._secure is None else len(part) ** 0.5 * 2.0 ** -(self._fixed.fraction_bits + 1)
        if self._dp.clip <= rounding:
            raise ConfigError(
                f"secure.fraction_bits={self._fixed.fraction_bits} rounds uploads of {len(part)} entries by more than "
                f"dp.clip={self._dp.clip:g}; raise it"
            )
        short = clipped(part, self._dp.clip - rounding)
        self.shortened += short is not part
        part.copy_(short)

    def _share(self, part: Tensor, client: int, shares: int) -> None:
        """Add to the part of a vector, in place, a client's share of the noise."""
        part += noise(part, self._std / shares**0.5, rng.key(self.info.key, "noise", client))

    @cached_property
    def _places(self) -> list[tuple[str, str, Tensor]]:
        """Owner, name and leaf, as the first client sent it, of all that is summed: those of `work` last.

        The order is the same whoever is first: that of the owners and of the model's names, then by the alphabet.
        """
        every = [(owner, name, leaf) for owner, leaves in self._like.items() for name, leaf in leaves.items()]
        for owner, name, leaf in every:
            if not leaf.is_floating_point() and name not in self.info.model.buffers(self.info.task):
                raise UpdateError(
                    f"'{owner}' sends '{name}' as {leaf.dtype}; a secure or private sum takes floats only"
                )
        owners, names = list(self.gathers), {name: number for number, name in enumerate(self.info.names)}

        def rank(place: tuple[str, str, Tensor]) -> tuple[int, int, str]:
            owner, name, _ = place
            return owners.index(owner), names.get(name, len(names)), name

        return sorted((place for place in every if place[2].is_floating_point()), key=rank)

    def _flat(self, uploads: TreesByOwner, weight: float) -> Tensor:
        """All of a client's uploads as a vector (n,) in float64, its weight first where clients have one."""
        leaves = [
            uploads[owner][name].double().flatten().cpu() * (weight if self.gathers[owner] == "mean" else 1.0)
            for owner, name, _ in self._places
        ]
        first = [torch.tensor([weight], dtype=torch.float64)] if self._weighted else []
        return torch.cat([*first, *leaves, torch.zeros(0, dtype=torch.float64)])

    def _parts(self, vector: Tensor, divisor: float) -> TreesByOwner:
        """The inverse of `_flat` for a sum; means are divided."""
        parts: TreesByOwner = {owner: tree.map(torch.zeros_like, leaves) for owner, leaves in self._like.items()}
        places = self._places
        for (owner, name, leaf), values in zip(
            places, vector.split([leaf.numel() for *_, leaf in places]), strict=True
        ):
            divided = values / divisor if self.gathers[owner] == "mean" else values
            parts[owner][name] = divided.reshape(leaf.shape).to(leaf)
        return parts
