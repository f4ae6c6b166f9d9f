"""The registered keys of a federation's clients, with which they sign in the consistency check of secure sums."""

from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from cfl.aggregation.consistency import Witness
from cfl.core import ConfigError
from cfl.core.errors import FEW_NAMES, few


class SigningKeys:
    """Keys in a folder: `3` is the private key of client 3, `3.pub` its public key, Ed25519 in OpenSSH's format.

    own: clients whose private keys the folder must have; population: number of clients, all of whose public keys it
    must have. Raises ConfigError for keys that are missing, unreadable or do not fit.
    """

    def __init__(self, folder: Path, own: Sequence[int], population: int) -> None:
        if absent := [str(id) for id in own if not (folder / str(id)).exists()]:
            raise ConfigError(
                f"'{folder}' lacks private keys of this node's clients: {few(absent, FEW_NAMES)}; make one with: "
                f"ssh-keygen -t ed25519 -N '' -f {folder / absent[0]}"
            )
        if absent := [f"{id}.pub" for id in range(population) if not (folder / f"{id}.pub").exists()]:
            raise ConfigError(
                f"'{folder}' lacks public keys: {few(absent, FEW_NAMES)}; a node needs those of all clients, from "
                "those who made them"
            )
        self._registered = {id: _public(folder / f"{id}.pub") for id in range(population)}
        self._own = {id: _private(folder / str(id)) for id in own}
        for id, key in self._own.items():
            if key.public_key().public_bytes_raw() != self._registered[id]:
                raise ConfigError(f"'{folder / f'{id}.pub'}' is not the public key of '{folder / str(id)}'")
        owners: dict[bytes, int] = {}
        for id, public in self._registered.items():
            if (other := owners.setdefault(public, id)) != id:
                raise ConfigError(f"clients {other} and {id} have the same key in '{folder}'; each needs its own")

    def witness(self, id: int, label: str) -> Witness:
        """Return what signs and checks for a client of this node. label: names the round."""
        return Witness(id, self._own[id], self._registered, label.encode())


def _public(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"'{path}' is not a public key ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"'{path}' is not an Ed25519 key; make one with: ssh-keygen -t ed25519")
    return key.public_bytes_raw()


def _private(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a passphrase
        raise ConfigError(f"'{path}' is not a private key without a passphrase ({error})") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"'{path}' is not an Ed25519 key; make one with: ssh-keygen -t ed25519")
    return key
