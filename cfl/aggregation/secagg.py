"""Secure aggregation of Bonawitz et al. (CCS 2017) on the sparse graph of Bell et al. (CCS 2020), simulated in full.

Stages (with the round of Bonawitz et al., figure 4) of client i with neighbours j; x_i and y_i are modulo 2^bits:
    keys   (0)  i advertises two X25519 public keys: one for ciphertexts, one for masks.
    shares (1)  i splits the seeds of its self-mask and of its mask key among its neighbours and itself, so that any t
                of them rebuild the seeds; the server forwards each neighbour's shares as one ciphertext.
    upload (2)  y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij),  s_ij agreed upon by X25519.
    unmask (4)  i reveals its share of b_j if j uploaded, else its share of j's mask key, and never both.
The server follows the protocol (semi-honest), so round 3, the consistency check, is left out. The server and the
clients that collude with it learn nothing but the sum if fewer than t of any client's share holders collude.
Deviations: the mask key is derived from a 16-byte seed, and the seed is shared; each client uploads a hash of b_i with
its shares, so that the server detects a false share; ciphertexts are bound to the public keys of both clients, so that
a client detects a swapped key. Keys, seeds and nonces come from the operating system, not from the run's seed: no two
runs share a mask.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cfl.aggregation.mask_graph import connected, degree, graph, honest, needed
from cfl.contract import STAGES
from cfl.core import RoundAborted

MASK, SELF = "mask", "self"  # the two secrets of a client: the seed of its mask key, the seed of its self-mask
# Sizes of the parts of messages in bytes.
ID, KIND, PUBLIC, SEED, NONCE, TAG, COMMITMENT = 4, 1, 32, 16, 12, 16, 32
CIPHERTEXT = NONCE + 2 * SEED + TAG
SHARE_OF = {MASK: slice(SEED), SELF: slice(SEED, 2 * SEED)}  # position of each secret's share in a ciphertext
CHUNK = 2**18  # bytes of a vector that are masked at a time: they and their mask fit into the cache


def _derive(secret: bytes, purpose: str, size: int = SEED) -> bytes:
    return HKDF(SHA256(), size, salt=None, info=purpose.encode()).derive(secret)


def _agree(own: X25519PrivateKey, other: bytes, purpose: str) -> bytes:
    return _derive(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def _mask_key_of(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derive(seed, "mask key", PUBLIC))


def _commitment(seed: bytes) -> bytes:
    return _derive(seed, "commitment", COMMITMENT)


def _apply(masks: Iterable[tuple[bytes, bool]], vector: np.ndarray) -> None:
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


class Client:
    """Client of one round, with fresh keys and a method per stage; invalid messages raise RoundAborted.

    threshold: t, the number of share holders that rebuild a secret.
    seeds: seed of each of its two secrets; held: owner to that owner's shares of both secrets.
    """

    def __init__(self, id: int, threshold: int) -> None:
        self.id, self.threshold = id, threshold
        self.seeds = {MASK: os.urandom(SEED), SELF: os.urandom(SEED)}
        self._cipher_key, self._mask_key = X25519PrivateKey.generate(), _mask_key_of(self.seeds[MASK])
        self._boxes: dict[int, AESGCM] = {}
        self.held: dict[int, bytes] = {}
        self._revealed = {id: SELF}  # owner -> the only secret to reveal; never its own mask key
        self._masked = False

    def advertise(self) -> bytes:
        """Stage "keys": return the public keys for ciphertexts and for masks."""
        return b"".join(key.public_key().public_bytes_raw() for key in (self._cipher_key, self._mask_key))

    def share(self, keys: Mapping[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """Stage "shares": return a commitment, and a ciphertext for each neighbour. keys: as neighbours advertised."""
        self._keys = {**keys, self.id: self.advertise()}
        split = [Shamir.split(self.threshold, len(self._keys), self.seeds[kind], ssss=False) for kind in SHARE_OF]
        shares = {holder: mask + own for holder, (_, mask), (_, own) in zip(sorted(self._keys), *split, strict=True)}
        self.held[self.id] = shares[self.id]
        sealed = {}
        for other in keys:
            self._boxes[other] = AESGCM(_agree(self._cipher_key, keys[other][:PUBLIC], "shares"))
            nonce = os.urandom(NONCE)
            sealed[other] = nonce + self._boxes[other].encrypt(nonce, shares[other], self._route(self.id, other))
        return _commitment(self.seeds[SELF]), sealed

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """End of "shares": decrypt the ciphertexts of the neighbours that take part in the upload."""
        for other, text in sealed.items():
            try:
                self.held[other] = self._boxes[other].decrypt(text[:NONCE], text[NONCE:], self._route(other, self.id))
            except (InvalidTag, ValueError):  # ValueError: shorter than a nonce
                raise RoundAborted(
                    f"client {self.id} cannot decrypt the shares of client {other}: they or a public key were changed"
                ) from None

    def mask(self, vector: np.ndarray) -> np.ndarray:
        """Stage "upload": return the vector (n,) plus all masks; only once, as two uploads reveal their difference."""
        if self._masked:
            raise RoundAborted(f"client {self.id} refuses to mask a second vector with the same keys")
        self._masked = True
        pairs = self.held.keys() - {self.id}
        masks = [(_agree(self._mask_key, self._keys[j][PUBLIC:], "mask"), self.id < j) for j in pairs]
        masks.append((_derive(self.seeds[SELF], "self-mask"), True))
        masked = vector.copy()
        _apply(masks, masked)
        return masked

    def reveal(self, wanted: Mapping[int, str]) -> dict[int, bytes]:
        """Stage "unmask": return a share of each owner's wanted secret (MASK or SELF); never both of one owner."""
        for owner, kind in wanted.items():
            if self._revealed.setdefault(owner, kind) != kind:
                raise RoundAborted(f"client {self.id} refuses to reveal both secrets of client {owner}")
        return {owner: self.held[owner][SHARE_OF[kind]] for owner, kind in wanted.items()}

    def _route(self, sender: int, receiver: int) -> bytes:
        """Ids and public keys of both clients, to which a ciphertext is bound."""
        return b"".join(id.to_bytes(ID, "little") + self._keys[id] for id in (sender, receiver))


class SecureSum:
    """One round: the server, and its messages with the clients. Call `setup`, `add` for each client, then `close`.

    population: number of clients of which `ids` are all or a uniform sample; a tenth of them may collude with the
    server. threshold: fraction of the clients, and of each client's share holders, that must stay to the end.
    neighbours: of each client in the graph; None takes `degree`; drop_rate: probability that a client drops out.
    dropped: client to the stage from which on it is silent; key: of the graph's random draw.
    masked: False leaves out all cryptography; sums, byte counts and aborts are the same.
    Attributes: uploading: clients that have to upload, ascending; needed: number of clients that must stay; honest:
    lower bound of the honest clients among these; bytes_up, bytes_down: bytes of all clients' messages so far, also
    after a RoundAborted; clients: the parties by id, after `setup` with `masked`.
    """

    def __init__(
        self,
        ids: Sequence[int],
        *,
        population: int,
        bits: int,
        threshold: float,
        neighbours: int | None,
        dropped: Mapping[int, str],
        drop_rate: float,
        key: int,
        masked: bool,
    ) -> None:
        if neighbours is None:
            neighbours = degree(len(ids), population, threshold=threshold, dropped=drop_rate)
        self.graph = graph(ids, neighbours, key)
        self.ids = tuple(sorted(self.graph))
        self.dtype, self.masked = np.dtype(f"<u{bits // 8}"), masked
        self.needed = needed(threshold, len(self.ids))
        self.honest = honest(threshold, len(self.ids), population)
        self.holders_needed = needed(threshold, 1 + max(map(len, self.graph.values()), default=0))
        self.uploading: tuple[int, ...] = ()
        self.bytes_up = self.bytes_down = 0
        self._silent_from = {id: STAGES.index(stage) for id, stage in dropped.items()}
        self._near = self.graph  # links between clients that still take part
        self.clients: dict[int, Client] = {}
        self._total: np.ndarray | None = None
        self._awaited: set[int] = set()

    def setup(self) -> None:
        """Run the stages "keys" and "shares". Raises RoundAborted if too few clients are left."""
        advertised = self._remaining("keys", self.ids)
        self.bytes_up += len(advertised) * 2 * PUBLIC
        self._check_quorum("keys", advertised, advertised)
        self.bytes_down += self._keep_links(advertised) * (ID + 2 * PUBLIC)
        shared = self._remaining("shares", advertised)
        links = sum(len(self._near[i]) for i in shared)
        self.bytes_up += len(shared) * COMMITMENT + links * (ID + CIPHERTEXT)
        self._holders = {i: sorted((*self._near[i], i)) for i in shared}  # in the order of the shares
        self._check_quorum("shares", shared, shared)
        self.bytes_down += self._keep_links(shared) * (ID + CIPHERTEXT)
        if self.masked:
            self._exchange(advertised, shared)
        self.uploading = self._remaining("upload", shared)
        self._awaited = set(self.uploading)

    def add(self, id: int, vector: np.ndarray) -> None:
        """Stage "upload" of one client: mask its vector (n,), unsigned with `bits` bits, and add it to the sum.

        Raises ValueError for a client outside `uploading`, a second upload, and another dtype or length.
        """
        if id not in self._awaited:
            raise ValueError(f"client {id} is not expected to upload; add each client of `uploading` once")
        shape = (vector.size,) if self._total is None else self._total.shape
        if vector.dtype != self.dtype or vector.shape != shape:
            raise ValueError(f"client {id} adds {vector.dtype} {vector.shape}, not {self.dtype} {shape}")
        self._awaited.remove(id)
        self.bytes_up += vector.nbytes
        if self._total is None:
            self._total = np.zeros_like(vector)
        self._total += self.clients[id].mask(vector) if self.masked else vector

    def close(self) -> np.ndarray:
        """Stage "unmask": return the sum (n,) of the added vectors modulo 2^bits.

        A client of `uploading` that was not added counts as dropped at "upload". Raises RoundAborted as `setup` does,
        and if drop-outs cut the graph: no mask joins the parts, so the server would learn the sum of each.
        """
        uploaded = tuple(i for i in self.uploading if i not in self._awaited)
        wanted = dict.fromkeys(uploaded, SELF)
        for i in uploaded:
            wanted |= {j: MASK for j in self._near[i] if j not in wanted}
        self._check_quorum("upload", uploaded, wanted)
        if not connected({i: self._near[i] for i in uploaded}):
            raise RoundAborted(
                f"the {len(uploaded)} clients left after stage upload share masks in separate groups only, so the "
                "server would learn the sum of each group; raise secure.neighbours"
            )
        asked = {i: {owner: wanted[owner] for owner in (*self._near[i], i)} for i in uploaded}
        self.bytes_down += sum(map(len, asked.values())) * (ID + KIND)
        answering = self._remaining("unmask", uploaded)
        self.bytes_up += sum(len(asked[i]) for i in answering) * (ID + SEED)
        self._check_quorum("unmask", answering, wanted)
        assert self._total is not None
        if self.masked:
            self._unmask({i: self.clients[i].reveal(asked[i]) for i in answering}, wanted)
        return self._total

    def _remaining(self, stage: str, ids: Iterable[int]) -> tuple[int, ...]:
        """Clients among `ids` that have not dropped out by the end of the stage."""
        return tuple(i for i in ids if self._silent_from.get(i, len(STAGES)) > STAGES.index(stage))

    def _keep_links(self, ids: Collection[int]) -> int:
        """Keep only links between clients of `ids`; return their number, both directions counted."""
        self._near = {i: tuple(j for j in self.graph[i] if j in ids) for i in sorted(ids)}
        return sum(map(len, self._near.values()))

    def _check_quorum(self, stage: str, left: Collection[int], owners: Iterable[int]) -> None:
        """Raise RoundAborted if too few clients are left after the stage, or too few share holders of an owner."""
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
        """Create the clients, and forward their keys and ciphertexts."""
        self.clients = {i: Client(i, self.holders_needed) for i in advertised}
        self._keys = {i: client.advertise() for i, client in self.clients.items()}
        self._commitments, ciphertexts = {}, {}
        for i in shared:
            keys = {j: self._keys[j] for j in self._holders[i] if j != i}
            self._commitments[i], ciphertexts[i] = self.clients[i].share(keys)
        for i in shared:
            self.clients[i].receive({j: ciphertexts[j][i] for j in self._near[i]})

    def _unmask(self, revealed: Mapping[int, Mapping[int, bytes]], wanted: Mapping[int, str]) -> None:
        """Rebuild and check the wanted secrets, and subtract their masks. revealed: holder to owner to share."""
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
                key = _mask_key_of(seed)
                false = key.public_key().public_bytes_raw() != self._keys[owner][PUBLIC:]
                masks += [  # of client j, with the opposite sign
                    (_agree(key, self._keys[j][PUBLIC:], "mask"), j > owner)
                    for j in self._near[owner]
                    if wanted.get(j) == SELF  # j uploaded; `wanted` may lack other neighbours
                ]
            if false:
                raise RoundAborted(f"the revealed shares do not rebuild client {owner}'s {kind} seed")
        assert self._total is not None
        _apply(masks, self._total)
