"""A node of a deployment: it has clients of its own, with their data, states and secrets."""

import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from cfl.aggregation.consistency import Witness
from cfl.aggregation.mask_graph import accomplices, binds, needed
from cfl.aggregation.secagg_client import Client as Party
from cfl.contract import RoundInfo
from cfl.core import ConfigError
from cfl.core.errors import FEW_NAMES, few
from cfl.engines import Engine, parts
from cfl.flower import client_states, link, wire
from cfl.flower.client_states import ClientStates
from cfl.flower.messages import described, rebuilt, told
from cfl.flower.node import Node
from cfl.flower.signing import SigningKeys
from cfl.runtime.fingerprint import Fingerprint
from cfl.runtime.rounds import Rounds


class HomeNode(Node):
    """A node whose folder holds the states of its clients. name: for messages; clients: their ids.

    options: hash of the resolved configuration; own_data: whether the data are the node's own, not the benchmark's;
    signing: keys of the consistency check, None without it.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: Rounds,
        fingerprint: Fingerprint,
        folder: Path,
        *,
        name: str,
        clients: tuple[int, ...],
        options: str,
        own_data: bool = False,
        signing: SigningKeys | None = None,
    ) -> None:
        super().__init__(engine, rounds, fingerprint, folder / "trees")
        self.name, self.clients, self.options, self.own_data = name, clients, options, own_data
        self.signing, self.folder, self._token = signing, folder, folder / "token"
        self._warned = set[str]()

    def join(self, request: Any, records: RecordDict, context: Context) -> dict[str, Any]:
        if not self._token.exists():
            self._token.parent.mkdir(parents=True, exist_ok=True)
            self._token.write_text(secrets.token_hex(16))
        mine: dict[str, Any] = {"name": self.name, "token": self._token.read_text(), "clients": self.clients}
        if self.own_data:
            tasks = self.rounds.population.stream.tasks
            mine |= {"samples": [len(task.train) for task in tasks], "parts": self.fingerprint.without_data}
        return {**super().join(request, records, context), "samples": None, **mine, "options": self.options}

    def train(self, request: Any, records: RecordDict, context: Context) -> dict[str, Any]:
        """Compute the node's clients of a round, and keep their new states. Returns what the server may see.

        request: "clients" maps ids to version and task of their states; "sealed" has the ciphertexts of neighbours
        under secure aggregation, and is None without; "kept" is the oldest version to which the run may return; "run"
        is the id of the run.
        """
        info, states_of_run = self._round(request), self.states(request["run"])
        shared = self._shared(request, records)
        versions = {id: (int(version), int(task)) for id, (version, task) in self._own(request["clients"]).items()}
        stored = {id: states_of_run.load(id, version) for id, (version, _) in versions.items() if version}
        inputs = self.rounds.of_clients(list(versions), info, shared, stored, {id: versions[id][1] for id in stored})
        result = parts.compute(self.engine, inputs, observed=False)
        for _, text in result["warnings"]:  # the server does not get them, as they depend on the clients' data
            if text not in self._warned:
                print(f"warning: {text}", flush=True)
                self._warned.add(text)
        states = {
            id: {name: inputs.states[id][name] if leaf is None else leaf for name, leaf in state.items()}
            for id, state in result["states"].items()
        }
        states = {id: state for id, state in states.items() if state or id in stored}
        current = {id: version for id, (version, _) in versions.items()}
        states_of_run.store(request["round"] + 1, states, current, request["kept"])
        sizes = {
            id: [self.rounds.stored_bytes(part) for part in client_states.parts(state)] for id, state in states.items()
        }
        seen = {name: result[name] for name in ("part", "losses", "excluded")}
        return {**self._protected(seen, request, info, context), "done": list(result["states"]), "sizes": sizes}

    def keys(self, request: Any, records: RecordDict, context: Context) -> dict[int, bytes]:
        """Stage "keys" of secure aggregation, with fresh secrets. request: clients to thresholds."""
        asked, round = self._own(request["clients"]), request["round"]
        parties = {id: Party(id, int(threshold), self._witness(id, round)) for id, threshold in asked.items()}
        self._remember(context, round, parties)
        return {id: party.advertise() for id, party in parties.items()}

    def shares(self, request: Any, records: RecordDict, context: Context) -> dict[int, Any]:
        """Stage "shares". request: clients to the public keys of their neighbours."""
        asked, parties = self._own(request["clients"]), self._recalled(context, request["round"])
        # Of nodes with data of their own, the cohort depends on the data of all.
        known = self.signing is not None and not self.own_data
        cohort = self.rounds.info(request["round"]).clients if known else None
        for id, keys in asked.items():
            self._check_group(id, parties[id].threshold, keys, cohort)
        found = {id: parties[id].share(keys) for id, keys in asked.items()}
        self._remember(context, request["round"], parties)
        return found

    def confirm(self, request: Any, records: RecordDict, context: Context) -> dict[int, bytes]:
        """The consistency check. request: clients to the list of clients that uploaded. Returns signatures."""
        if self.signing is None:
            raise ConfigError("the run has secure.consistency=false, so its clients sign nothing")
        asked, parties = self._own(request["clients"]), self._recalled(context, request["round"])
        found = {id: parties[id].confirm(listed) for id, listed in asked.items()}
        self._remember(context, request["round"], parties)
        return found

    def unmask(self, request: Any, records: RecordDict, context: Context) -> dict[int, dict[int, bytes]]:
        """Stage "unmask". request: clients to the secret that is wanted of each owner; signatures of `confirm`."""
        asked, parties = self._own(request["clients"]), self._recalled(context, request["round"])
        found = {id: parties[id].reveal(wanted, request["signatures"]) for id, wanted in asked.items()}
        self._remember(context, request["round"], parties)
        return found

    def states(self, run: str) -> ClientStates:
        """Return the states of a run. run: its id, 32 hex digits. Raises ConfigError for another text."""
        if not re.fullmatch("[0-9a-f]{32}", str(run)):
            raise ConfigError(f"the id of a run has 32 hex digits, unlike '{run}'")
        return ClientStates(self.folder / "states" / run)

    def _round(self, request: Any) -> RoundInfo:
        """Return the round of a request. Raises ConfigError if it is not the round that the run has at this place."""
        info, position = rebuilt(request["info"], self.rounds.model, self.rounds.public), request["round"]
        known = dict(enumerate(self.rounds.schedule)).get(position)
        if known != (info.task, info.phase, info.round) or self.rounds.positions.get(info.key) != position:
            raise ConfigError(f"the server asks for another round {position} than the run has ({info.place})")
        if not self.own_data:  # else the cohort depends on the data of others
            told, own = described(info), described(self.rounds.info(position))
            if other := next((name for name in own if name != "pixels_of" and told[name] != own[name]), None):
                raise ConfigError(
                    f"the server describes the round otherwise than the run has it: {other} ({info.place})"
                )
        if self._masks(info) and request["sealed"] is None:
            raise ConfigError(f"the server asks for uploads without masks ({info.place}), but the run has secagg=full")
        return info

    def _masks(self, info: RoundInfo) -> bool:
        """Whether the uploads of a round are masked, by the node's own configuration."""
        return self.rounds.config.secagg == "full" and info.phase.protected

    def _protected(self, seen: dict[str, Any], request: Any, info: RoundInfo, context: Context) -> dict[str, Any]:
        """Mask the integers of secure sums, and leave out what depends on the data of single clients."""
        config, part = self.rounds.config, seen["part"]
        if (config.secagg, config.dp.level) != ("none", "none"):
            seen["losses"] = {}
        if config.dp.level != "none":
            part |= {"zeroed": [], "shortened": 0, "clipped": 0}
        if self._masks(info):
            parties = self._recalled(context, request["round"])
            heard = told(request, request[link.SHARED])
            for id, vector in part["_integers"].items():
                parties[id].receive(request["sealed"][id])
                part["_integers"][id] = parties[id].mask(vector, heard)
            self._remember(context, request["round"], parties)
        return seen

    def _own(self, asked: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return `asked` if all of its clients are this node's, else raise ConfigError."""
        if strangers := [str(id) for id in asked if id not in self.clients]:
            raise ConfigError(f"node '{self.name}' has no client {few(strangers, FEW_NAMES)}")
        return asked

    def _remember(self, context: Context, round: int, parties: Mapping[int, Party]) -> None:
        """Keep the secrets of a round in the memory of the node; they are never on disk."""
        saved = {id: party.saved() for id, party in parties.items()}
        context.state.update(wire.pack({"round": round, "parties": saved}))

    def _recalled(self, context: Context, round: int) -> dict[int, Party]:
        if wire.BODY not in context.state:
            raise ConfigError(f"node '{self.name}' has lost its keys of this round, for example by a restart")
        saved = wire.unpack(context.state)
        if saved["round"] != round:
            raise ConfigError(f"node '{self.name}' has keys of another round")
        return {id: Party.restored(one, self._witness(id, round)) for id, one in saved["parties"].items()}

    def _check_group(self, id: int, threshold: int, others: Collection[int], cohort: Collection[int] | None) -> None:
        """Raise ConfigError if the server could learn too much from a sum over a client and others.

        cohort: of the round, None if the node cannot know it.
        """
        least, clients = self.rounds.config.secure.quorum, len(others) + 1
        if threshold < needed(least, clients):
            raise ConfigError(f"the server asks client {id} for a lower threshold than secure.quorum={least} gives")
        if self.signing is None:
            return
        if cohort is not None and (threshold < needed(least, len(cohort)) or not set(others) <= set(cohort)):
            raise ConfigError(f"the server asks client {id} for a sum over others than the cohort of the round")
        if not binds(threshold, clients, accomplices(clients, self.rounds.config.partition.clients)):
            raise ConfigError(f"two lists of {clients} clients could be signed by the {threshold} that client {id} is "
                              "to ask for; raise secure.quorum")  # fmt: skip

    def _witness(self, id: int, round: int) -> Witness | None:
        """What signs for a client in a round, if the run has the consistency check."""
        return self.signing.witness(id, f"{self.options} {round}") if self.signing else None
