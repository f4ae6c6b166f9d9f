"""The clients of secure aggregation, as the server sees them: their messages at each stage."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cfl.aggregation.consistency import Witness
from cfl.aggregation.secagg_client import Client, Shares


class Parties(Protocol):
    """The clients of a round. A client that drops out at a stage is not in the answer.

    told: hash of what the server told all of them, see `secagg_client.mask_of`; empty in a simulation, which tells one
    thing to all.
    """

    told: bytes

    def advertise(self, ids: Iterable[int], threshold: int, signed: bool) -> dict[int, bytes]:
        """Stage "keys": public keys by id. threshold: number of share holders that rebuild a secret.

        signed: whether the clients sign their keys, and check the consistency of the round.
        """
        ...

    def share(self, keys: Mapping[int, Mapping[int, bytes]]) -> dict[int, Shares]:
        """Stage "shares". keys: for each client, the keys of its neighbours."""
        ...

    def receive(self, sealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """End of "shares": pass each client the ciphertexts of its neighbours."""
        ...

    def mask(self, id: int, vector: np.ndarray) -> np.ndarray:
        """Stage "upload": a client's masked vector."""
        ...

    def confirm(self, uploaded: Mapping[int, Sequence[int]]) -> dict[int, bytes]:
        """Consistency check: each client's signature of the list of clients that uploaded."""
        ...

    def reveal(
        self, wanted: Mapping[int, Mapping[int, str]], signatures: Mapping[int, bytes] | None
    ) -> dict[int, dict[int, bytes]]:
        """Stage "unmask": each client's share of a secret of each owner. signatures: of `confirm`, if it was asked."""
        ...


class LocalParties:
    """Clients in this process, for a simulation. clients: by id."""

    told = b""

    def __init__(self) -> None:
        self.clients: dict[int, Client] = {}

    def advertise(self, ids: Iterable[int], threshold: int, signed: bool) -> dict[int, bytes]:
        ids = tuple(ids)
        keys = {i: Ed25519PrivateKey.generate() for i in ids if signed}
        known = {i: key.public_key().public_bytes_raw() for i, key in keys.items()}
        witnesses = {i: Witness(i, key, known, b"") for i, key in keys.items()}
        self.clients = {i: Client(i, threshold, witnesses.get(i)) for i in ids}
        return {i: client.advertise() for i, client in self.clients.items()}

    def share(self, keys: Mapping[int, Mapping[int, bytes]]) -> dict[int, Shares]:
        return {i: self.clients[i].share(near) for i, near in keys.items()}

    def receive(self, sealed: Mapping[int, Mapping[int, bytes]]) -> None:
        for i, texts in sealed.items():
            self.clients[i].receive(texts)

    def mask(self, id: int, vector: np.ndarray) -> np.ndarray:
        return self.clients[id].mask(vector)

    def confirm(self, uploaded: Mapping[int, Sequence[int]]) -> dict[int, bytes]:
        return {i: self.clients[i].confirm(listed) for i, listed in uploaded.items()}

    def reveal(
        self, wanted: Mapping[int, Mapping[int, str]], signatures: Mapping[int, bytes] | None
    ) -> dict[int, dict[int, bytes]]:
        return {i: self.clients[i].reveal(owners, signatures) for i, owners in wanted.items()}
