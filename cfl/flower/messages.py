"""The description of a round as plain data, for messages."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from typing import Any

from cfl.contract import Phase, Privacy, RoundInfo
from cfl.flower import wire
from cfl.flower.trees import Names
from cfl.flower.wire import WireError
from cfl.models import Model
from cfl.streams.store import TaskSamples

_REBUILT = ("model", "public")  # each node has its own


def described(info: RoundInfo) -> dict[str, Any]:
    """Return a round as plain data, without the model and the public inputs."""
    named = {field.name: getattr(info, field.name) for field in fields(info) if field.name not in _REBUILT}
    privacy = None if info.privacy is None else info.privacy._asdict()
    return {**named, "phase": asdict(info.phase), "frozen": sorted(info.frozen), "privacy": privacy}


def rebuilt(data: Mapping[str, Any], model: Model, public: TaskSamples | None) -> RoundInfo:
    """Return the round that `described` gave. Raises WireError if the data are not one."""
    try:
        privacy = data["privacy"] and Privacy(**data["privacy"])
        known = {**data, "phase": Phase(**data["phase"]), "frozen": frozenset(data["frozen"]), "privacy": privacy}
        return RoundInfo(**known, model=model, public=public)
    except (KeyError, TypeError) as error:
        raise WireError(f"a message does not describe a round: {error}") from error


def told(request: Mapping[str, Any], names: Names) -> bytes:
    """Hash what the server has to tell all nodes alike when it asks for updates.

    names: of the trees of the broadcast, which hold their hashes.
    """
    packed = wire.pack([request["info"], request["round"], request["run"], names])
    body = str(packed.config_records[wire.BODY][wire.BODY]).encode()
    tensors = packed.array_records[wire.TENSORS][wire.TENSORS].data
    return sha256(len(body).to_bytes(8, "little") + body + tensors).digest()
