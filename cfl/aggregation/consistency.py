"""Signatures against an active server: the consistency check of Bonawitz et al. (CCS 2017), round 3 of figure 4.

A server that breaks the protocol could swap public keys. Or it could tell some share holders of a client that the
client uploaded, and others that it dropped out, and so rebuild both of its secrets. Therefore each client signs the
keys that it advertises, and later the list of the clients that uploaded. It reveals shares only if enough clients have
signed the same list, and only those that the list asks for. An honest client signs one list for the keys of an
exchange, so two lists cannot both have more than (clients + accomplices) / 2 signatures.
Two things do not come from the server: the verification keys of all clients, and the choice of neighbours, since all
clients are neighbours.
"""

from collections.abc import Iterable, Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from cfl.core import RoundAborted

SIGNATURE = 64  # bytes


class Witness:
    """A client's signing key in one round. registered: verification keys by client, known before the run.

    label: names the round, for the signatures of keys. Signatures of lists are bound to the keys that all clients
    advertised, which are fresh.
    """

    def __init__(self, id: int, key: Ed25519PrivateKey, registered: Mapping[int, bytes], label: bytes) -> None:
        self.id, self.label = id, label
        self._key, self._registered = key, registered

    def sign_keys(self, keys: bytes) -> bytes:
        """Return this client's public keys, followed by their signature."""
        return keys + self._key.sign(self._keys_text(self.id, keys))

    def keys_of(self, other: int, message: bytes) -> bytes:
        """Return the public keys in a message of `sign_keys`. Raises RoundAborted unless client `other` signed them."""
        keys, signature = message[:-SIGNATURE], message[-SIGNATURE:]
        if not self._signed(other, signature, self._keys_text(other, keys)):
            raise RoundAborted(
                f"client {self.id} got public keys that client {other} did not sign in this round: the server changed "
                f"them, or client {other} signs with another key than is registered"
            )
        return keys

    def sign_list(self, uploaded: Iterable[int], keys: Mapping[int, bytes]) -> bytes:
        """Return the signature of a list of clients. keys: all public keys of the round."""
        return self._key.sign(_list_text(uploaded, keys))

    def check_list(
        self, uploaded: Iterable[int], keys: Mapping[int, bytes], signatures: Mapping[int, bytes], least: int
    ) -> None:
        """Raise RoundAborted unless `least` clients of the list have signed it.

        False signatures do not count. In the paper one of them ends the round, so that any client could end it.
        """
        text = _list_text(uploaded, keys)
        valid = [id for id in uploaded if id in signatures and self._signed(id, signatures[id], text)]
        if len(valid) < least:
            raise RoundAborted(
                f"{len(valid)} clients signed the list of clients that uploaded, client {self.id} needs {least}: too "
                "few answered, or the server told them different things"
            )

    def _keys_text(self, id: int, keys: bytes) -> bytes:
        return b"keys" + len(self.label).to_bytes(4, "little") + self.label + id.to_bytes(8, "little") + keys

    def _signed(self, other: int, signature: bytes, text: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self._registered[other]).verify(signature, text)
        except (KeyError, ValueError, TypeError, InvalidSignature):  # a client or a key that is not registered
            return False
        return True


def _list_text(uploaded: Iterable[int], keys: Mapping[int, bytes]) -> bytes:
    """Return what is signed: the ids of the list, and a hash of all public keys with their ids."""
    hashed = Hash(SHA256())
    for id in sorted(keys):
        hashed.update(id.to_bytes(8, "little") + keys[id])
    return b"list" + hashed.finalize() + b"".join(id.to_bytes(8, "little") for id in sorted(uploaded))
