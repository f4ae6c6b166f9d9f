"""Sum of a round's uploads under secure aggregation and differential privacy.

Client: weight, clip to dp.clip, add a share of the noise, round to integers modulo 2^bits, mask.
Server: unmask the sum, read it as signed numbers, add the noise (without secure aggregation), divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.gaussian import SampleNoise, clipped, noise
from cfl.aggregation.mask_graph import honest, unsafe
from cfl.aggregation.plain import UploadSum
from cfl.aggregation.quantize import FixedPoint
from cfl.config.schema import RunConfig
from cfl.contract import Gathers, RoundInfo, TreesByOwner
from cfl.core import ConfigError, RoundAborted, UpdateError, rng, tree

if TYPE_CHECKING:
    from cfl.aggregation.parties import Parties
    from cfl.aggregation.secagg import SecureSum

DEVIATIONS = 6  # standard deviations of the noise that must fit; a normal draw exceeds them with probability 2e-9


@dataclass(frozen=True)
class UploadProtection:
    """Protection of a run's uploads. multiplier: standard deviation of the noise over dp.clip.

    parties: the clients of secure aggregation; None simulates them.

    Raises ConfigError if the integers of secure aggregation are too coarse or their range is too small for the noise.
    """

    config: RunConfig
    multiplier: float
    parties: Parties | None = None

    def __post_init__(self) -> None:
        secure, dp, clients = self.config.secure, self.config.dp, self.config.partition.clients
        if self.config.secagg == "none" or not self.multiplier:
            return
        bits = secure.fraction_bits
        shared = dp.level == "client"  # the clients share the noise; else each one adds all of it
        least = dp.clip * self.multiplier / math.sqrt(clients if shared else 1)
        if least < 4 * 2.0**-bits:
            raise ConfigError(f"secure.fraction_bits={bits} rounds away noise as small as {least:.2g}; raise it")
        for cohort in (clients, min(self.config.cohort, clients)):
            if fault := self._cut_off(cohort, clients):
                raise ConfigError(fault)

    def fault(self, info: RoundInfo) -> str | None:
        """Return why a secure sum over the cohort of a round protects less than promised, None if it does not.

        Only cohorts of Poisson sampling can be at fault: other sizes are known, and checked, before the run.
        """
        clients = len(info.clients)
        cut_off = self._cut_off(clients, info.owners) if clients and self.multiplier else None
        return cut_off or unsafe(clients, info.owners, self.config)

    def _cut_off(self, clients: int, population: int) -> str | None:
        """Return why the integers of a sum over `clients` are too small for a client's noise, or None."""
        secure, dp = self.config.secure, self.config.dp
        largest = FixedPoint(secure.bits, secure.fraction_bits, clients).largest
        shares = honest(secure.quorum, clients, population) if dp.level == "client" else 1
        most = dp.clip + DEVIATIONS * dp.clip * self.multiplier / shares**0.5
        if most <= largest:
            return None
        return (
            f"secure.bits={secure.bits} with secure.fraction_bits={secure.fraction_bits} limit entries to "
            f"{largest:.3g} in sums of {clients} clients and cut off noise: dp.clip={dp.clip:g} plus {DEVIATIONS} "
            f"standard deviations of a client's noise is {most:.3g}; raise secure.bits or lower "
            "secure.fraction_bits"
        )

    @property
    def samples(self) -> SampleNoise | None:
        """DP-SGD for local training, or None if local training does not protect single samples."""
        dp = self.config.dp
        protected = (dp.level, dp.protect) == ("example", "all")
        size = self.config.local.batch_size
        return SampleNoise(dp.clip, self.multiplier, size, self.config.noise_seed) if protected else None

    def sum(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> UploadSum:
        """Return an empty sum for a round; diagnostic phases and phases that only store need no protection."""
        if not info.phase.protected or (self.config.secagg, self.config.dp.level) == ("none", "none"):
            return UploadSum(info, gathers)
        return ProtectedSum(self, info, gathers)


class ProtectedSum(UploadSum):
    """Sum of one vector per client: its floating-point uploads concatenated, those of `work` last.

    The only integer leaves, counters of normalisation layers, stay on the clients.
    """

    _exported: ClassVar = [*UploadSum._exported, "_count", "_vector", "_integers"]

    def __init__(self, protection: UploadProtection, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        super().__init__(info, gathers)
        self._protection = protection
        config, self._dp = protection.config, protection.config.dp
        self._noise_seed = config.noise_seed
        self._weighted, self._std = config.agg.weights == "samples", self._dp.clip * protection.multiplier
        self._count, self._vector = 0, torch.zeros(0, dtype=torch.float64)
        self._secure: SecureSum | None = None
        self._opened = False
        self._integers: dict[int, np.ndarray] = {}  # of a partial sum; the combined sum masks them
        if config.secagg != "none":
            from cfl.aggregation.secagg import SecureSum  # loads cryptography

            self._fixed = FixedPoint(config.secure.bits, config.secure.fraction_bits, max(1, len(info.clients)))
            self._secure = SecureSum(
                info.clients,
                population=info.owners,
                bits=config.secure.bits,
                threshold=config.secure.quorum,
                neighbours=config.secure.neighbours,
                dropped=info.dropped,
                drop_rate=config.drop_rate,
                key=rng.key(info.key, "graph"),
                masked=config.secagg == "full",
                consistency=config.secure.consistency,
                parties=protection.parties,
            )

    def open(self) -> None:
        self._opened = True
        if self._secure is not None:
            if fault := self._protection.fault(self.info):
                raise RoundAborted(fault)
            self._secure.setup()

    def traffic(self) -> tuple[int, int]:
        return super().traffic() if self._secure is None else (self._secure.bytes_up, self._secure.bytes_down)

    def add(self, client: int, uploads: TreesByOwner, weight: float) -> bool:
        """Add a client's uploads as `UploadSum` does, but a protected part that is not finite as zero.

        To exclude such a client, or to stop, would depend on its data, so it stays in the sum, the count and the noise.
        An unprotected part that is not finite excludes the client, since nothing protects that part. At example level
        `work` counts as zero, and an update, which is noisy already, excludes the client.
        """
        uploading = client in self.info.uploading  # False: the cohort is empty, and the client only shows the shapes
        if self._secure is None and uploading:
            self._bytes_up += sum(map(tree.nbytes, uploads.values()))
        broken = {owner for owner, upload in uploads.items() if uploading and not tree.all_finite(upload)}
        whole = (self._dp.level, self._dp.protect) == ("client", "all")
        protected = broken if whole else {"work"} if self._dp.level != "none" else set()
        if broken - protected:
            return False
        self._match(client, uploads)
        vector = self._to_vector(uploads, weight)
        if not uploading:
            self._vector = torch.zeros_like(vector)
            return True
        if broken:
            vector[0 if whole else self._work_from :] = 0.0
            self.zeroed.append(client)
            self.shortened += 1
        self._count += 1
        self._protect(client, vector)
        if self._secure is None:
            self._add_vector(vector)
        elif self._opened:
            self._secure.add(client, self._encode(client, vector, weight))
        else:
            self._integers[client] = self._encode(client, vector, weight)
        return True

    def merge(self, part: Mapping[str, Any]) -> None:
        super().merge(part)
        self._count += part["_count"]
        if len(part["_vector"]):
            self._add_vector(part["_vector"])
        for client, integers in part["_integers"].items():
            if self._opened:
                assert self._secure is not None
                self._secure.add(client, integers)
            else:
                self._integers[client] = integers.copy()  # as a part has no lasting memory

    def close(self) -> TreesByOwner:
        if self._lowest < 0:
            raise RoundAborted("no client of the cohort has answered")
        total = self._vector if self._secure is None else self._fixed.decode(self._secure.close())
        if self._dp.level == "client":
            if self._secure is None:
                protected = total[self._protected_from :]
                protected += noise(protected, self._std, self._noise_seed, "noise", self.info.key)
            self.noise = self._std * (1 if self._secure is None else (self._count / self._secure.honest) ** 0.5)
        elif self._dp.level == "example":
            self.noise = self._std * self._count**0.5
        hidden = self.info.privacy is not None and self.info.privacy.hidden
        divisor = float(total[0]) if self._weighted else self.info.expected if hidden else self._count
        return self._from_vector(total[int(self._weighted) :], divisor or 1.0)

    def _match(self, client: int, uploads: TreesByOwner) -> None:
        """Keep outlines as `UploadSum` does, with 0 for counters: nodes send outlines without a mask."""
        super()._match(client, {owner: tree.map(_uncounted, leaves) for owner, leaves in uploads.items()})

    def _protect(self, client: int, vector: Tensor) -> None:
        """Clip a client's vector and add its share of the noise, in place, as dp.level asks for."""
        if self._dp.level == "client":
            protected = vector[self._protected_from :]
            self._clip(protected)
            if self._secure is not None:  # the shares of the honest clients that must stay make up the whole noise
                self._add_noise(protected, client, self._secure.honest)
        elif self._dp.level == "example":  # protects from the server too: each client adds the whole noise
            self._add_noise(vector[self._work_from :], client, 1)

    def _clip(self, protected: Tensor) -> None:
        """Clip the protected part of a vector in place, to dp.clip less a bound on the rounding error of integers."""
        rounding = 0.0 if self._secure is None else len(protected) ** 0.5 * 2.0 ** -(self._fixed.fraction_bits + 1)
        if self._dp.clip <= rounding:
            raise ConfigError(
                f"secure.fraction_bits={self._fixed.fraction_bits} is too coarse: rounding may change the norm of "
                f"{len(protected)} entries by {rounding:.3g}, and dp.clip={self._dp.clip:g}; raise it"
            )
        short = clipped(protected, self._dp.clip - rounding)
        self.shortened += short is not protected
        protected.copy_(short)

    def _add_noise(self, protected: Tensor, client: int, shares: int) -> None:
        """Add a client's noise, one of `shares` shares, to the protected part of its vector in place."""
        protected += noise(protected, self._std / shares**0.5, self._noise_seed, "noise", self.info.key, client)

    def _add_vector(self, vector: Tensor) -> None:
        self._vector = self._vector + vector if len(self._vector) else vector.clone()

    def _encode(self, client: int, vector: Tensor, weight: float) -> np.ndarray:
        """Round a vector to integers. Raises ConfigError if they clip the weight, which would distort the mean."""
        if self._weighted and weight > self._fixed.largest:
            raise ConfigError(
                f"client {client} has weight {weight:g}, but secure.bits={self._fixed.bits} with secure.fraction_bits="
                f"{self._fixed.fraction_bits} allow at most {self._fixed.largest:.3g}; lower secure.fraction_bits or "
                "set agg.weights=uniform"
            )
        integers, beyond = self._fixed.encode(vector)
        self.clipped += beyond
        return integers

    @cached_property
    def _layout(self) -> list[tuple[str, str, Tensor]]:
        """Owner, name and outline of each leaf in the vector, those of `work` last.

        Leaves are sorted by owner, then in the order of the model's names, then by name, whichever client is first.
        Raises UpdateError for integer leaves other than counters of normalisation layers.
        """
        leaves = [(owner, name, leaf) for owner, upload in self._outlines.items() for name, leaf in upload.items()]
        for owner, name, leaf in leaves:
            if not leaf.is_floating_point() and name not in self.info.model.buffers(self.info.task):
                raise UpdateError(f"'{owner}' sends '{name}' as {leaf.dtype}; protected sums take floats only")
        owners, names = list(self.gathers), {name: number for number, name in enumerate(self.info.names)}

        def rank(entry: tuple[str, str, Tensor]) -> tuple[int, int, str]:
            owner, name, _ = entry
            return owners.index(owner), names.get(name, len(names)), name

        return sorted((entry for entry in leaves if entry[2].is_floating_point()), key=rank)

    @cached_property
    def _work_from(self) -> int:
        """Index in the vector at which the uploads of `work` begin."""
        return int(self._weighted) + sum(leaf.numel() for owner, _, leaf in self._layout if owner != "work")

    @cached_property
    def _protected_from(self) -> int:
        """Index in the vector at which client-level protection begins; vectors have no weight with dp.protect=all."""
        return 0 if self._dp.protect == "all" else self._work_from

    def _to_vector(self, uploads: TreesByOwner, weight: float) -> Tensor:
        """Concatenate a client's uploads to a float64 vector (n,), behind its weight if clients are weighted."""
        leaves = [
            uploads[owner][name].double().flatten().cpu() * (weight if self.gathers[owner] == "mean" else 1.0)
            for owner, name, _ in self._layout
        ]
        first = [torch.tensor([weight], dtype=torch.float64)] if self._weighted else []
        return torch.cat([*first, *leaves, torch.zeros(0, dtype=torch.float64)])

    def _from_vector(self, vector: Tensor, divisor: float) -> TreesByOwner:
        """Split a sum into the trees of its owners, the inverse of `_to_vector`, and divide the means."""
        trees: TreesByOwner = {owner: tree.map(torch.zeros_like, leaves) for owner, leaves in self._outlines.items()}
        sizes = [leaf.numel() for *_, leaf in self._layout]
        for (owner, name, leaf), values in zip(self._layout, vector.split(sizes), strict=True):
            divided = values / divisor if self.gathers[owner] == "mean" else values
            trees[owner][name] = divided.reshape(leaf.shape).to(leaf)
        return trees


def _uncounted(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else torch.zeros_like(leaf)
