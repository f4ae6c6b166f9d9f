"""A client of secure aggregation: its secrets, and its message at each stage; the protocol is in `secagg.py`."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cfl.aggregation.consistency import Witness
from cfl.core import RoundAborted

MASK, SELF = "mask", "self"  # the two secrets of a client: the seed of its mask key, the seed of its self-mask
# Sizes of the parts of messages in bytes.
ID, KIND, PUBLIC, SEED, NONCE, TAG, COMMITMENT = 4, 1, 32, 16, 12, 16, 32
CIPHERTEXT = NONCE + 2 * SEED + TAG
SHARE_OF = {MASK: slice(SEED), SELF: slice(SEED, 2 * SEED)}  # position of each secret's share in a ciphertext
CHUNK = 2**18  # bytes of a vector that are masked at a time: they and their mask fit into the cache


def derive(secret: bytes, purpose: str, size: int = SEED) -> bytes:
    return HKDF(SHA256(), size, salt=None, info=purpose.encode()).derive(secret)


def agree(own: X25519PrivateKey, other: bytes, purpose: str) -> bytes:
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # another length, or a point of low order
        raise RoundAborted("a public key of secure aggregation is not a key of X25519") from None
    return derive(shared, purpose)


def mask_of(own: X25519PrivateKey, other: bytes, told: bytes) -> bytes:
    """Return the key of the mask that two clients share.

    told: hash of what the server told the clients in the round. The masks of clients that were told different things,
    such as different models, do not cancel. So no server learns a sum over them (Pasquini et al., CCS 2022).
    """
    return agree(own, other, "mask" + told.hex())


def mask_key_of(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(seed, "mask key", PUBLIC))


def commitment(seed: bytes) -> bytes:
    return derive(seed, "commitment", COMMITMENT)


def apply_masks(masks: Iterable[tuple[bytes, bool]], vector: np.ndarray) -> None:
    """Add masks to the vector in place, modulo its 2^bits. masks: pairs of a key and False to subtract its mask."""
    streams: list[tuple[Callable, np.ufunc]] = [
        (Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into, np.add if plus else np.subtract)
        for key, plus in masks
    ]
    zeros, buffer = memoryview(bytes(CHUNK)), np.empty(CHUNK + 16, np.uint8)  # old versions need one block more
    words = buffer[:CHUNK].view(vector.dtype)
    for part in np.split(vector, range(len(words), len(vector), len(words))):
        for stream, combine in streams:
            stream(zeros[: part.nbytes], buffer)
            combine(part, words[: len(part)], out=part)


class Shares(NamedTuple):
    """Message of the stage "shares": the hash of the self-mask's seed, and a ciphertext for each neighbour."""

    commitment: bytes
    sealed: dict[int, bytes]


class Client:
    """Client of one round, with fresh keys and a method per stage; invalid messages raise RoundAborted.

    threshold: t, the number of share holders that rebuild a secret; witness: signs and checks, see `consistency`.
    seeds: seed of each of its two secrets; held: owner to that owner's shares of both secrets.
    """

    def __init__(self, id: int, threshold: int, witness: Witness | None = None) -> None:
        self.id, self.threshold, self.witness = id, threshold, witness
        self.seeds = {MASK: os.urandom(SEED), SELF: os.urandom(SEED)}
        self._cipher_key, self._mask_key = X25519PrivateKey.generate(), mask_key_of(self.seeds[MASK])
        self._boxes: dict[int, AESGCM] = {}
        self.held: dict[int, bytes] = {}
        self._keys: dict[int, bytes] = {}
        self._revealed = {id: SELF}  # owner -> the only secret to reveal; never its own mask key
        self._masked = False
        self._listed: tuple[int, ...] | None = None  # the list of clients that it has signed

    def saved(self) -> dict[str, Any]:
        """Return all that the client knows, its secrets included, as plain data for `restored`."""
        return {
            "id": self.id, "threshold": self.threshold, "cipher": self._cipher_key.private_bytes_raw(),
            "seeds": self.seeds, "held": self.held, "keys": self._keys, "revealed": self._revealed,
            "masked": self._masked, "listed": self._listed,
        }  # fmt: skip

    @classmethod
    def restored(cls, saved: Mapping[str, Any], witness: Witness | None = None) -> Self:
        """Return the client of `saved`, between two stages."""
        client = cls(saved["id"], saved["threshold"], witness)
        client._cipher_key = X25519PrivateKey.from_private_bytes(saved["cipher"])
        client.seeds, client._mask_key = saved["seeds"], mask_key_of(saved["seeds"][MASK])
        client.held, client._keys = saved["held"], saved["keys"]
        client._revealed, client._masked = saved["revealed"], saved["masked"]
        client._listed = None if saved["listed"] is None else tuple(saved["listed"])
        return client

    def advertise(self) -> bytes:
        """Stage "keys": return the public keys for ciphertexts and for masks, signed if there is a witness."""
        return self._public if self.witness is None else self.witness.sign_keys(self._public)

    def share(self, keys: Mapping[int, bytes]) -> Shares:
        """Stage "shares". keys: as neighbours advertised."""
        if self.witness is not None:
            keys = {other: self.witness.keys_of(other, message) for other, message in keys.items()}
        if self._keys:  # shares of the same secrets among others would make two groups, each with a list of its own
            raise RoundAborted(f"client {self.id} refuses to share its secrets a second time")
        self._keys = {**keys, self.id: self._public}
        split = [Shamir.split(self.threshold, len(self._keys), self.seeds[kind], ssss=False) for kind in SHARE_OF]
        shares = {holder: mask + own for holder, (_, mask), (_, own) in zip(sorted(self._keys), *split, strict=True)}
        self.held[self.id] = shares[self.id]
        sealed = {}
        for other in keys:
            nonce = os.urandom(NONCE)
            sealed[other] = nonce + self._box(other).encrypt(nonce, shares[other], self._route(self.id, other))
        return Shares(commitment(self.seeds[SELF]), sealed)

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """End of "shares": decrypt the ciphertexts of the neighbours that take part in the upload."""
        for other, text in sealed.items():
            try:
                self.held[other] = self._box(other).decrypt(text[:NONCE], text[NONCE:], self._route(other, self.id))
            except (InvalidTag, ValueError, KeyError):  # ValueError: shorter than a nonce; KeyError: of no neighbour
                raise RoundAborted(
                    f"client {self.id} cannot decrypt the shares of client {other}: they or a public key were changed"
                ) from None

    def mask(self, vector: np.ndarray, told: bytes = b"") -> np.ndarray:
        """Stage "upload": return the vector (n,) plus all masks; only once, as two uploads reveal their difference.

        told: see `mask_of`.
        """
        if self._masked:
            raise RoundAborted(f"client {self.id} refuses to mask a second vector with the same keys")
        if len(self.held) < self.threshold:
            raise RoundAborted(f"client {self.id} holds shares of {len(self.held)} clients, it needs {self.threshold}")
        self._masked = True
        pairs = self.held.keys() - {self.id}
        masks = [(mask_of(self._mask_key, self._keys[j][PUBLIC:], told), self.id < j) for j in pairs]
        masks.append((derive(self.seeds[SELF], "self-mask"), True))
        masked = vector.copy()
        apply_masks(masks, masked)
        return masked

    def confirm(self, uploaded: Iterable[int]) -> bytes:
        """Stage "consistency": return the signature of the list of clients that uploaded; of one list only."""
        assert self.witness is not None
        listed = tuple(sorted(set(uploaded)))
        if self._listed not in (None, listed):
            raise RoundAborted(f"client {self.id} refuses to sign a second list of clients that uploaded")
        if self.id not in listed or len(listed) < self.threshold or not self.held.keys() >= set(listed):
            raise RoundAborted(f"client {self.id} refuses to sign a list of {len(listed)} clients that cannot be right")
        self._listed = listed
        return self.witness.sign_list(listed, self._keys)

    def reveal(self, wanted: Mapping[int, str], signatures: Mapping[int, bytes] | None = None) -> dict[int, bytes]:
        """Stage "unmask": return a share of each owner's wanted secret (MASK or SELF); never both of one owner.

        signatures: of the list of clients that uploaded, by client, if there is a witness.
        """
        if self.witness is not None:
            listed = self._listed or ()
            self.witness.check_list(listed, self._keys, signatures or {}, self.threshold)
            if false := [owner for owner, kind in wanted.items() if (kind == SELF) != (owner in listed)]:
                raise RoundAborted(f"client {self.id} is asked for a secret of client {false[0]} against the list")
        if strangers := wanted.keys() - self.held.keys():
            raise RoundAborted(f"client {self.id} holds no share of client {min(strangers)}")
        for owner, kind in wanted.items():
            if self._revealed.setdefault(owner, kind) != kind:
                raise RoundAborted(f"client {self.id} refuses to reveal both secrets of client {owner}")
        return {owner: self.held[owner][SHARE_OF[kind]] for owner, kind in wanted.items()}

    @property
    def _public(self) -> bytes:
        """The public keys for ciphertexts and for masks."""
        return b"".join(key.public_key().public_bytes_raw() for key in (self._cipher_key, self._mask_key))

    def _box(self, other: int) -> AESGCM:
        """The cipher for messages from and to a neighbour."""
        if other not in self._boxes:
            self._boxes[other] = AESGCM(agree(self._cipher_key, self._keys[other][:PUBLIC], "shares"))
        return self._boxes[other]

    def _route(self, sender: int, receiver: int) -> bytes:
        """Ids and public keys of both clients, to which a ciphertext is bound."""
        return b"".join(id.to_bytes(ID, "little") + self._keys[id] for id in (sender, receiver))
