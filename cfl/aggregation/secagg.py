"""Secure aggregation of Bonawitz et al. (CCS 2017) on the sparse graph of Bell et al. (CCS 2020), simulated in full.

Stages (with the round of Bonawitz et al., figure 4) of client i with neighbours j; x_i and y_i are modulo 2^bits:
    keys   (0)  i advertises two X25519 public keys: one for ciphertexts, one for masks.
    shares (1)  i splits the seeds of its self-mask and of its mask key among its neighbours and itself, so that any t
                of them rebuild the seeds; the server forwards each neighbour's shares as one ciphertext.
    upload (2)  y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij),  s_ij agreed upon by X25519.
    unmask (4)  i reveals its share of b_j if j uploaded, else its share of j's mask key, and never both.
The server and the clients that collude with it learn nothing but the sum if the server follows the protocol and fewer
than t of any client's share holders collude. Against a server that does not follow it, round 3, the consistency check,
comes before the stage "unmask"; see `consistency`. It is an option, since it takes a message more, all clients as
neighbours, and registered keys.
Deviations: the mask key is derived from a 16-byte seed, and the seed is shared; each client uploads a hash of b_i with
its shares, so that the server detects a false share; s_ij depends on what the server told the client in the round, see
`secagg_client.mask_of`; ciphertexts are bound to the public keys of both clients, so that a client detects a swapped
key. Keys, seeds and nonces come from the operating system, not from the run's seed: no two runs share a mask.
"""

import hmac
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir

from cfl.aggregation.consistency import SIGNATURE
from cfl.aggregation.mask_graph import connected, degree, graph, honest, needed
from cfl.aggregation.parties import LocalParties, Parties
from cfl.aggregation.secagg_client import (
    CIPHERTEXT,
    COMMITMENT,
    ID,
    KIND,
    MASK,
    PUBLIC,
    SEED,
    SELF,
    apply_masks,
    commitment,
    derive,
    mask_key_of,
    mask_of,
)
from cfl.contract import STAGES
from cfl.core import RoundAborted


class SecureSum:
    """One round: the server, and its messages with the clients. Call `setup`, `add` for each client, then `close`.

    population: number of clients of which `ids` are all or a uniform sample; a tenth of them may collude with the
    server. threshold: fraction of the clients, and of each client's share holders, that must stay to the end.
    neighbours: of each client in the graph; None takes `degree`; drop_rate: probability that a client drops out.
    consistency: whether the clients check that the server tells all of them the same; then all are neighbours.
    dropped: client to the stage from which on it is silent; key: of the graph's random draw.
    masked: False leaves out all cryptography; sums, byte counts and aborts are the same. parties: the clients; None
    simulates them here.
    Attributes: uploading: clients that have to upload, ascending; needed: number of clients that must stay; honest:
    lower bound of the honest clients among these; bytes_up, bytes_down: bytes of all clients' messages so far, also
    after a RoundAborted.
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
        consistency: bool = False,
        parties: Parties | None = None,
    ) -> None:
        if consistency:
            neighbours = len(ids) - 1
        elif neighbours is None:
            neighbours = degree(len(ids), population, threshold=threshold, dropped=drop_rate)
        self.graph = graph(ids, neighbours, key)
        self.ids = tuple(sorted(self.graph))
        self.dtype, self.masked = np.dtype(f"<u{bits // 8}"), masked
        self.consistency, self._public = consistency, 2 * PUBLIC + (SIGNATURE if consistency else 0)
        self.needed = needed(threshold, len(self.ids))
        self.honest = honest(threshold, len(self.ids), population)
        self.holders_needed = needed(threshold, 1 + max(map(len, self.graph.values()), default=0))
        self.uploading: tuple[int, ...] = ()
        self.bytes_up = self.bytes_down = 0
        self._silent_from = {id: STAGES.index(stage) for id, stage in dropped.items()}
        self._near = self.graph  # links between clients that still take part
        self.parties = parties or LocalParties()
        self._total: np.ndarray | None = None
        self._awaited: set[int] = set()

    def setup(self) -> None:
        """Run the stages "keys" and "shares". Raises RoundAborted if too few clients are left."""
        advertised = self._advertised()
        self.bytes_up += len(advertised) * self._public
        self._check_quorum("keys", advertised, advertised)
        self.bytes_down += self._keep_links(advertised) * (ID + self._public)
        self._holders = {i: sorted((*near, i)) for i, near in self._near.items()}  # in the order of the shares
        shared = self._shared(advertised)
        self.bytes_up += len(shared) * COMMITMENT + sum(len(self._near[i]) for i in shared) * (ID + CIPHERTEXT)
        self._check_quorum("shares", shared, shared)
        self.bytes_down += self._keep_links(shared) * (ID + CIPHERTEXT)
        if self.masked:
            self.parties.receive({i: {j: self._sent[j].sealed[i] for j in self._near[i]} for i in shared})
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
        self._total += self.parties.mask(id, vector) if self.masked else vector

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
        confirming, signatures = self._confirmed(uploaded)
        asked = {i: {owner: wanted[owner] for owner in (*self._near[i], i)} for i in confirming}
        self.bytes_down += sum(map(len, asked.values())) * (ID + KIND)
        answering = self._remaining("unmask", confirming)
        revealed = self.parties.reveal({i: asked[i] for i in answering}, signatures) if self.masked else {}
        answering = tuple(i for i in answering if i in revealed or not self.masked)
        self.bytes_up += sum(len(asked[i]) for i in answering) * (ID + SEED)
        self._check_quorum("unmask", answering, wanted)
        assert self._total is not None
        if self.masked:
            self._unmask(revealed, wanted)
        return self._total

    def _advertised(self) -> tuple[int, ...]:
        """Run the stage "keys"; return the clients that advertised theirs."""
        asked = self._remaining("keys", self.ids)
        if not self.masked:
            return asked
        self._keys = self.parties.advertise(asked, self.holders_needed, self.consistency)
        return tuple(i for i in asked if i in self._keys)

    def _shared(self, advertised: Iterable[int]) -> tuple[int, ...]:
        """Run the stage "shares"; return the clients that sent theirs."""
        asked = self._remaining("shares", advertised)
        if not self.masked:
            return asked
        self._sent = self.parties.share({i: {j: self._keys[j] for j in self._near[i]} for i in asked})
        return tuple(i for i in asked if i in self._sent)

    def _confirmed(self, uploaded: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, bytes] | None]:
        """Run the consistency check, if any; return the clients that signed, and their signatures."""
        if not self.consistency:
            return uploaded, None
        self.bytes_down += len(uploaded) ** 2 * ID
        signatures = self.parties.confirm(dict.fromkeys(uploaded, uploaded)) if self.masked else {}
        signed = tuple(i for i in uploaded if i in signatures or not self.masked)
        self.bytes_up += len(signed) * SIGNATURE
        self._check_quorum("consistency", signed, signed)
        self.bytes_down += len(signed) ** 2 * (ID + SIGNATURE)
        return signed, signatures

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
                false = not hmac.compare_digest(commitment(seed), self._sent[owner].commitment)
                masks.append((derive(seed, "self-mask"), False))
            else:
                key = mask_key_of(seed)
                false = key.public_key().public_bytes_raw() != self._keys[owner][PUBLIC : 2 * PUBLIC]
                masks += [  # of client j, with the opposite sign
                    (mask_of(key, self._keys[j][PUBLIC : 2 * PUBLIC], self.parties.told), j > owner)
                    for j in self._near[owner]
                    if wanted.get(j) == SELF  # j uploaded; `wanted` may lack other neighbours
                ]
            if false:
                raise RoundAborted(f"the revealed shares do not rebuild client {owner}'s {kind} seed")
        assert self._total is not None
        apply_masks(masks, self._total)
