"""The clients of secure aggregation on their nodes: their keys and secrets never reach the server."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cfl.aggregation.consistency import SIGNATURE
from cfl.aggregation.secagg_client import CIPHERTEXT, COMMITMENT, PUBLIC, SEED, Shares
from cfl.flower.link import printable
from cfl.flower.members import Members


class RemoteParties:
    """The clients of one round. round: names it to the nodes; missing: client to the reason why it did not answer.

    told: hash of the round's request for updates, set before that is sent.
    sealed: for each client, the ciphertexts of its neighbours, which travel with the next request.
    """

    def __init__(self, members: Members, round: int) -> None:
        self.members, self.round = members, round
        self.missing: dict[int, str] = {}
        self.told = b""
        self.sealed: dict[int, dict[int, bytes]] = {}

    def advertise(self, ids: Iterable[int], threshold: int, signed: bool) -> dict[int, bytes]:
        asked, size = dict.fromkeys(ids, threshold), 2 * PUBLIC + SIGNATURE * signed
        return self._ask("query.keys", asked, lambda id, answer: _bytes(answer, size))

    def share(self, keys: Mapping[int, Mapping[int, bytes]]) -> dict[int, Shares]:
        def read(id: int, answer: Any) -> Shares:
            sent, sealed = answer
            if sealed.keys() != keys[id].keys():
                raise ValueError("it sent shares to others than its neighbours")
            return Shares(_bytes(sent, COMMITMENT), {other: _bytes(text, CIPHERTEXT) for other, text in sealed.items()})

        return self._ask("query.shares", keys, read)

    def receive(self, sealed: Mapping[int, Mapping[int, bytes]]) -> None:
        self.sealed = {id: dict(texts) for id, texts in sealed.items()}

    def mask(self, id: int, vector: np.ndarray) -> np.ndarray:
        return vector  # the node has masked it

    def confirm(self, uploaded: Mapping[int, Sequence[int]]) -> dict[int, bytes]:
        return self._ask("query.confirm", uploaded, lambda id, answer: _bytes(answer, SIGNATURE))

    def reveal(
        self, wanted: Mapping[int, Mapping[int, str]], signatures: Mapping[int, bytes] | None
    ) -> dict[int, dict[int, bytes]]:
        def read(id: int, answer: Any) -> dict[int, bytes]:
            if answer.keys() != wanted[id].keys():
                raise ValueError("it revealed other shares than asked for")
            return {owner: _bytes(share, SEED) for owner, share in answer.items()}

        return self._ask("query.unmask", wanted, read, signatures=signatures)

    def _ask(
        self, kind: str, asked: Mapping[int, Any], read: Callable[[int, Any], Any], **for_all: Any
    ) -> dict[int, Any]:
        """Send each client's node what it is asked, and return the answers of those that answer properly.

        for_all: what each request holds beside that.
        """
        homes, absent = self.members.of(asked)
        self.missing |= dict.fromkeys(absent, "its node is not connected")
        requests = {
            node: {"round": self.round, "clients": {id: asked[id] for id in ids}, **for_all}
            for node, ids in homes.items()
        }
        found = {}
        for node, answer in self.members.link.ask(kind, requests).items():
            for id in homes[node]:
                try:
                    if answer.fault is not None:
                        raise ValueError(answer.fault)
                    found[id] = read(id, answer.value[id])
                except Exception as error:  # whatever an answer of another kind leads to
                    text = f"its answer is invalid ({error})" if answer.fault is None else answer.fault
                    self.missing[id] = f"{self.members.name(node)}: {printable(text)}"
        return {id: found[id] for id in asked if id in found}


def _bytes(value: Any, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        raise ValueError(f"{size} bytes are expected")
    return value
