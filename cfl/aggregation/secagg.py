"""Secure aggregation of Bonawitz et al. (CCS 2017) on the sparse graph of Bell et al. (CCS 2020), simulated in full.

Stage (round of Bonawitz et al., figure 4), for client i, its neighbours j, and x_i, y_i modulo 2^bits:
    keys   (0)  i advertises two X25519 public keys: one for ciphertexts, one for masks.
    shares (1)  i shares the seeds of its self-mask and of its mask key with its neighbours and itself, any t of whom
                rebuild them; each neighbour's shares travel through the server as one ciphertext.
    upload (2)  y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij),  s_ij agreed upon by X25519.
    unmask (4)  i reveals its shares of b_j where j uploaded, else those of j's mask key, and never both.
The server follows the protocol (semi-honest), so round 3, the consistency check, is left out. Clients that join it
learn nothing but the sum as long as they are fewer than t of any client's share holders.
Deviations: the mask key comes from a 16-byte seed, and that is what is shared; a hash of b_i goes up with the shares,
so that the server sees a false share; ciphertexts are bound to the public keys of both ends, so that a client sees a
swapped one. Keys, seeds and nonces are the operating system's, not the run's: no two runs share a mask.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from scipy.stats import hypergeom

from cfl.contract.rounds import STAGES
from cfl.core import rng
from cfl.core.errors import RoundAborted

MASK, SELF = "mask", "self"  # the two secrets of a client: the seed of its mask key, the seed of its self-mask
# sizes in bytes
ID, KIND, PUBLIC, SEED, NONCE, TAG, COMMITMENT = 4, 1, 32, 16, 12, 16, 32
CIPHERTEXT = NONCE + 2 * SEED + TAG
PLACES = {MASK: slice(SEED), SELF: slice(SEED, 2 * SEED)}  # of the shares in a ciphertext
CORRUPT = 0.1  # share of the clients that may work with the server
CHUNK = 2**18  # of a mask: a vector's part and the mask's stay in the cache


def needed(threshold: float, clients: int) -> int:
    """The fewest of `clients` that make up the fraction `threshold`, and at least two."""
    return max(2, math.ceil(threshold * clients - 1e-9))  # 0.55 * 100 is above 55 in floats


def accomplices(clients: int) -> int:
    """The most of `clients` that may work with the server."""
    return math.ceil(CORRUPT * clients - 1e-9)


def honest(threshold: float, clients: int) -> int:
    """Of the fewest of `clients` that must stay, those that do not work with the server, at least."""
    return max(1, needed(threshold, clients) - accomplices(clients))


@cache
def degree(clients: int, *, threshold: float, dropped: float = 0.1, corrupt: float = CORRUPT) -> int:
    """The fewest neighbours that keep a round safe and alive; those of the complete graph where no fewer do.

    dropped, corrupt: fractions of the clients. A client's t share holders are out of its neighbours and itself.
    Safe, but for 2^-40: no client has t corrupt holders, and the honest that stay are connected. Alive, but for
    2^-20: each client keeps t holders. Source: Bell et al., section 3, with hypergeometric tails in place of bounds.
    """
    n, lost, bad = clients, math.ceil(dropped * clients - 1e-9), math.ceil(corrupt * clients - 1e-9)
    for k in range(2, n - 1):
        if k * n % 2:
            continue  # no regular graph
        t = needed(threshold, k + 1)
        corrupted = hypergeom.sf(t - 1, n - 1, bad, k)
        cut = (dropped + corrupt) ** (k // 2)  # a Harary graph falls apart only where k / 2 in a row are gone
        # a client that dropped out itself is one holder less, with one other client less that did
        starved = max(hypergeom.sf(k + 1 - t, n - 1, lost, k), hypergeom.sf(k - t, n - 1, max(0, lost - 1), k))
        if n * (corrupted + cut) <= 2**-40 and n * starved <= 2**-20:
            return k
    return n - 1


def graph(ids: Iterable[int], neighbours: int, key: int) -> dict[int, tuple[int, ...]]:
    """Each client's neighbours, ascending: a Harary graph on the clients in an order drawn from `key`.

    All have `neighbours` of them and at least two (pairs would show the sum of each), or one more where no such graph
    exists (both numbers odd), or all the others.
    """
    ring = rng.numpy_generator(key).permutation(sorted(ids)).tolist()
    n = len(ring)
    k = max(2, neighbours)
    k = min(k + k * n % 2, n - 1)
    steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0), *([n // 2] if k % 2 else [])]
    return {ring[a]: tuple(sorted(ring[(a + step) % n] for step in steps)) for a in range(n)}


def _derive(secret: bytes, purpose: str, size: int = SEED) -> bytes:
    return HKDF(SHA256(), size, salt=None, info=purpose.encode()).derive(secret)


def _agree(own: X25519PrivateKey, other: bytes, purpose: str) -> bytes:
    return _derive(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def _mask_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derive(seed, "mask key", PUBLIC))


def _commitment(seed: bytes) -> bytes:
    return _derive(seed, "commitment", COMMITMENT)


def _apply(masks: Iterable[tuple[bytes, bool]], vector: np.ndarray) -> None:
    """Add the masks (key, True) to the vector and subtract the masks (key, False), in place, modulo its 2^bits."""
    streams: list[tuple[Callable, np.ufunc]] = [
        (Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into, np.add if plus else np.subtract)
        for key, plus in masks
    ]
    zeros, buffer = memoryview(bytes(CHUNK)), np.empty(CHUNK + 16, np.uint8)  # older versions ask for a block more
    words = buffer[:CHUNK].view(vector.dtype)
    for part in np.split(vector, range(len(words), len(vector), len(words))):
        for stream, combine in streams:
            stream(zeros[: part.nbytes], buffer)
            combine(part, words[: len(part)], out=part)


class Client:
    """One party of one round, with fresh keys; a method per stage. RoundAborted where a message is not as it must be.

    threshold: t, how many share holders rebuild a secret.
    """

    def __init__(self, id: int, threshold: int) -> None:
        self.id, self.threshold = id, threshold
        self._seeds = {MASK: os.urandom(SEED), SELF: os.urandom(SEED)}
        self._cipher_key, self._mask_key = X25519PrivateKey.generate(), _mask_key(self._seeds[MASK])
        self._boxes: dict[int, AESGCM] = {}
        self._held: dict[int, bytes] = {}  # owner -> the shares of both its secrets
        self._revealed = {id: SELF}  # owner -> the only kind that may go out; its own mask key never does
        self._masked = False

    def advertise(self) -> bytes:
        """Stage "keys": the public keys of ciphertexts and of masks."""
        return b"".join(key.public_key().public_bytes_raw() for key in (self._cipher_key, self._mask_key))

    def share(self, keys: Mapping[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """Stage "shares": its neighbours' advertised keys -> its commitment, and a ciphertext for each neighbour."""
        self._keys = {**keys, self.id: self.advertise()}
        split = [Shamir.split(self.threshold, len(self._keys), self._seeds[kind], ssss=False) for kind in PLACES]
        shares = {holder: mask + own for holder, (_, mask), (_, own) in zip(sorted(self._keys), *split, strict=True)}
        self._held[self.id] = shares[self.id]
        sealed = {}
        for other in keys:
            self._boxes[other] = AESGCM(_agree(self._cipher_key, keys[other][:PUBLIC], "shares"))
            nonce = os.urandom(NONCE)
            sealed[other] = nonce + self._boxes[other].encrypt(nonce, shares[other], self._route(self.id, other))
        return _commitment(self._seeds[SELF]), sealed

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """End of "shares": the ciphertexts of the neighbours that take part in the upload."""
        for other, text in sealed.items():
            try:
                self._held[other] = self._boxes[other].decrypt(text[:NONCE], text[NONCE:], self._route(other, self.id))
            except (InvalidTag, ValueError):  # ValueError: too short to hold a nonce
                raise RoundAborted(
                    f"client {self.id} cannot open the shares of client {other}: they or a public key were changed"
                ) from None

    def mask(self, vector: np.ndarray) -> np.ndarray:
        """Stage "upload": the vector (n,) plus all its masks; once, for the masks would cancel out of two."""
        if self._masked:
            raise RoundAborted(f"client {self.id} refuses to mask a second vector with the same keys")
        self._masked = True
        pairs = self._held.keys() - {self.id}
        masks = [(_agree(self._mask_key, self._keys[j][PUBLIC:], "mask"), self.id < j) for j in pairs]
        masks.append((_derive(self._seeds[SELF], "self-mask"), True))
        masked = vector.copy()
        _apply(masks, masked)
        return masked

    def reveal(self, wanted: Mapping[int, str]) -> dict[int, bytes]:
        """Stage "unmask": its share of the wanted secret (MASK or SELF) of each owner; never both of one owner."""
        for owner, kind in wanted.items():
            if self._revealed.setdefault(owner, kind) != kind:
                raise RoundAborted(f"client {self.id} refuses to reveal both secrets of client {owner}")
        return {owner: self._held[owner][PLACES[kind]] for owner, kind in wanted.items()}

    def _route(self, sender: int, receiver: int) -> bytes:
        """What a ciphertext is bound to: the ids and public keys of both ends."""
        return b"".join(id.to_bytes(ID, "little") + self._keys[id] for id in (sender, receiver))


class SecureSum:
    """One round: the server's half, and the messages between it and the clients. `setup`, `add` each, `close`.

    threshold: the fraction of the clients, and of each client's share holders, that must stay to the end.
    neighbours: of each client in the graph; None asks `degree`, with `drop_rate` as the fraction that drops out.
    dropped: client -> the stage from which on it is silent. key: of the graph.
    masked: False leaves out all cryptography; sums, byte counts and aborts are the same.
    Attributes: uploading, the clients that are to upload, ascending; needed, how many clients must stay; honest, how
    many of these do not work with the server, at least; bytes_up, bytes_down, all clients' messages so far, also after
    a RoundAborted.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        bits: int,
        threshold: float,
        neighbours: int | None,
        dropped: Mapping[int, str],
        drop_rate: float,
        key: int,
        masked: bool,
    ) -> None:
        if neighbours is None:
            neighbours = degree(len(ids), threshold=threshold, dropped=drop_rate)
        self.graph = graph(ids, neighbours, key)
        self.ids = tuple(sorted(self.graph))
        self.dtype, self.masked = np.dtype(f"<u{bits // 8}"), masked
        self.needed = needed(threshold, len(self.ids))
        self.honest = honest(threshold, len(self.ids))
        self.holders_needed = needed(threshold, 1 + max(map(len, self.graph.values()), default=0))
        self.uploading: tuple[int, ...] = ()
        self.bytes_up = self.bytes_down = 0
        self._silent_from = {id: STAGES.index(stage) for id, stage in dropped.items()}
        self._near = self.graph  # neighbours that take part
        self._clients: dict[int, Client] = {}
        self._total: np.ndarray | None = None
        self._due: set[int] = set()

    def setup(self) -> None:
        """The stages "keys" and "shares"; RoundAborted where too few are left."""
        advertised = self._taking_part("keys", self.ids)
        self.bytes_up += len(advertised) * 2 * PUBLIC
        self._check("keys", advertised, advertised)
        self.bytes_down += self._among(advertised) * (ID + 2 * PUBLIC)
        shared = self._taking_part("shares", advertised)
        links = sum(len(self._near[i]) for i in shared)
        self.bytes_up += len(shared) * COMMITMENT + links * (ID + CIPHERTEXT)
        self._holders = {i: sorted((*self._near[i], i)) for i in shared}  # in the order of the shares
        self._check("shares", shared, shared)
        self.bytes_down += self._among(shared) * (ID + CIPHERTEXT)
        if self.masked:
            self._exchange(advertised, shared)
        self.uploading = self._taking_part("upload", shared)
        self._due = set(self.uploading)

    def add(self, id: int, vector: np.ndarray) -> None:
        """Stage "upload" of one client: its vector (n,), unsigned of `bits` bits, masked and added to the sum.

        ValueError: a client that is not to upload or did before, a vector of another type or length.
        """
        if id not in self._due:
            raise ValueError(f"client {id} is not to upload, or did before; add each of `uploading` once")
        shape = (vector.size,) if self._total is None else self._total.shape
        if vector.dtype != self.dtype or vector.shape != shape:
            raise ValueError(f"client {id} adds {vector.dtype} {vector.shape}, not {self.dtype} {shape}")
        self._due.remove(id)
        self.bytes_up += vector.nbytes
        if self._total is None:
            self._total = np.zeros_like(vector)
        self._total += self._clients[id].mask(vector) if self.masked else vector

    def close(self) -> np.ndarray:
        """The stage "unmask" -> the sum (n,) of the added vectors modulo 2^bits; RoundAborted where too few are left.

        A client that was to upload and did not counts as dropped at "upload".
        """
        uploaded = tuple(i for i in self.uploading if i not in self._due)
        wanted = dict.fromkeys(uploaded, SELF)
        for i in uploaded:
            wanted |= {j: MASK for j in self._near[i] if j not in wanted}
        self._check("upload", uploaded, wanted)
        asked = {i: {owner: wanted[owner] for owner in (*self._near[i], i)} for i in uploaded}
        self.bytes_down += sum(map(len, asked.values())) * (ID + KIND)
        answering = self._taking_part("unmask", uploaded)
        self.bytes_up += sum(len(asked[i]) for i in answering) * (ID + SEED)
        self._check("unmask", answering, wanted)
        assert self._total is not None
        if self.masked:
            self._unmask({i: self._clients[i].reveal(asked[i]) for i in answering}, wanted)
        return self._total

    def _taking_part(self, stage: str, ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for i in ids if self._silent_from.get(i, len(STAGES)) > STAGES.index(stage))

    def _among(self, ids: Collection[int]) -> int:
        """Keep only links among `ids`; their number, one of each direction."""
        self._near = {i: tuple(j for j in self.graph[i] if j in ids) for i in sorted(ids)}
        return sum(map(len, self._near.values()))

    def _check(self, stage: str, left: Collection[int], owners: Iterable[int]) -> None:
        """RoundAborted where too few clients are left after the stage, or too few share holders of an owner."""
        if len(left) < self.needed:
            raise RoundAborted(
                f"{len(left)} of {len(self.ids)} clients are left after stage {stage}, {self.needed} are needed; "
                "lower secure.quorum or raise cohort"
            )
        present = set(left)
        for owner in owners:
            holders = len(present.intersection((*self.graph[owner], owner)))
            if holders < self.holders_needed:
                raise RoundAborted(
                    f"client {owner} has {holders} of {len(self.graph[owner]) + 1} share holders left after stage "
                    f"{stage}, {self.holders_needed} are needed; lower secure.quorum or raise secure.neighbours"
                )

    def _exchange(self, advertised: Iterable[int], shared: Iterable[int]) -> None:
        """Carry keys, then ciphertexts, from client to client."""
        self._clients = {i: Client(i, self.holders_needed) for i in advertised}
        self._keys = {i: client.advertise() for i, client in self._clients.items()}
        self._commitments, letters = {}, {}
        for i in shared:
            keys = {j: self._keys[j] for j in self._holders[i] if j != i}
            self._commitments[i], letters[i] = self._clients[i].share(keys)
        for i in shared:
            self._clients[i].receive({j: letters[j][i] for j in self._near[i]})

    def _unmask(self, revealed: Mapping[int, Mapping[int, bytes]], wanted: Mapping[int, str]) -> None:
        """Rebuild the wanted secrets from holder -> owner -> share, check them, take their masks off the sum."""
        shares = defaultdict(list)
        for holder, parts in revealed.items():
            for owner, share in parts.items():
                shares[owner].append((self._holders[owner].index(holder) + 1, share))
        masks = []
        for owner, kind in wanted.items():
            seed = Shamir.combine(shares[owner][: self.holders_needed], ssss=False)
            if kind == SELF:
                false = _commitment(seed) != self._commitments[owner]
                masks.append((_derive(seed, "self-mask"), False))
            else:
                key = _mask_key(seed)
                false = key.public_key().public_bytes_raw() != self._keys[owner][PUBLIC:]
                masks += [  # as client j applied them, with the opposite sign
                    (_agree(key, self._keys[j][PUBLIC:], "mask"), j > owner)
                    for j in self._near[owner]
                    if wanted.get(j) == SELF  # one that no uploader is next to is not wanted
                ]
            if false:
                raise RoundAborted(f"the revealed shares of client {owner}'s {kind} seed do not rebuild it")
        assert self._total is not None
        _apply(masks, self._total)
