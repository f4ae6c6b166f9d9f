"""The engine of a deployment: each client has a node, which keeps its data and state; the server sees sums alone."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from cfl.aggregation.plain import UploadSum
from cfl.aggregation.protected import UploadProtection
from cfl.config.schema import RunConfig
from cfl.contract import Client, Gathers, RoundInfo, RoundInputs, TreesByOwner
from cfl.core import ConfigError, RoundAborted, Tree
from cfl.engines.base import Collected, Engine, Observe, Outcome, OuterEngine
from cfl.flower.client_states import reference, stored_bytes, version
from cfl.flower.link import Answer, printable
from cfl.flower.members import Members
from cfl.flower.messages import described, told
from cfl.flower.parties import RemoteParties
from cfl.flower.results import Expected, NodeResult, Outlines
from cfl.flower.trees import Broadcast, with_fixed
from cfl.runtime.population import Population
from cfl.runtime.rounds import Rounds
from cfl.streams import Stream


class RemoteRounds(Rounds):
    """Rounds whose clients are elsewhere: the server has neither their data nor their states, but references."""

    def of_clients(
        self,
        ids: Sequence[int],
        info: RoundInfo,
        shared: TreesByOwner,
        stored: Mapping[int, Tree],
        last_task: Mapping[int, int],
    ) -> RoundInputs:
        clients = [Client(id, {}, info.task, self.sees(info.task)) for id in ids]
        return RoundInputs(info, shared, clients, {id: stored.get(id, {}) for id in ids})

    def stored_bytes(self, state: Tree) -> int:
        return stored_bytes(state)


class MemberPopulation(Population):
    """The clients of nodes. If nodes have data of their own, clients without a node hold none."""

    def __init__(self, stream: Stream, config: RunConfig, members: Members) -> None:
        super().__init__(stream, config)
        self.members = members
        self.owners, self._weights = self._owners, self._weights_of_all  # type: ignore[assignment]  # they change

    def notes(self) -> list[str]:
        return [] if self.members.samples else super().notes()  # they are about the parts of the benchmark

    def _samples(self, tasks: tuple[int, ...]) -> np.ndarray:
        if not self.members.samples:
            return super()._samples(tasks)
        found = np.zeros(self.config.partition.clients, dtype=np.int64)
        for client, samples in self.members.samples.items():
            found[client] = sum(samples[task] for task in tasks)
        return found


class DeploymentEngine(OuterEngine):
    """Rounds on the nodes that have joined. A node that fails is named, and its clients are left out of the round.

    inner: for the rules of sums; multiplier: of the run's noise; oldest: returns the oldest round to which the run may
    return, from a checkpoint; run: id of the run, by which nodes keep its states apart from those of other runs.
    """

    def __init__(
        self, inner: Engine, rounds: Rounds, members: Members, multiplier: float, oldest: Callable[[], int], run: str
    ) -> None:
        self.inner, self.rounds, self.members, self.oldest, self.run = inner, rounds, members, oldest, run
        self._usual: dict[str, Outlines] = {}
        self.config, self.multiplier = rounds.config, multiplier
        self._parties: RemoteParties | None = None
        self._missing: dict[int, str] = {}

    def sums(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> UploadSum:
        """Return an empty sum, whose secure aggregation speaks with the nodes."""
        self._parties = RemoteParties(self.members, self.rounds.positions[info.key])
        return UploadProtection(self.config, self.multiplier, self._parties).sum(info, gathers)

    def round(self, inputs: RoundInputs, observe: Observe | None = None) -> Outcome:
        if observe is not None:
            raise ConfigError("local models stay on their nodes; set eval_local=0, and run without observe")
        self._missing = {}
        self.members.refresh()
        outcome = super().round(inputs) if inputs.info.owners else Outcome(aborted=self._without_data(inputs.info))
        outcome.missing = dict(sorted({**self._missing, **(self._parties.missing if self._parties else {})}.items()))
        outcome.wire = self.members.link.spent()
        return outcome

    def collect(self, total: UploadSum, inputs: RoundInputs, observe: Observe | None) -> Collected:
        info, position = inputs.info, self.rounds.positions[inputs.info.key]
        asked = [client.id for client in inputs.clients]
        sealed = self._parties.sealed if self._parties and self._secure(info) else None
        if sealed is not None:
            asked = [id for id in asked if id in sealed]  # the others dropped out at an earlier stage
        homes, absent = self.members.of(asked)
        self._missing |= dict.fromkeys(absent, "its node is not connected")
        known = {"info": described(info), "round": position, "kept": self.oldest(), "run": self.run}
        requests = {
            node: {
                **known,
                "clients": {id: version(inputs.states[id]) for id in ids},
                "sealed": None if sealed is None else {id: sealed[id] for id in ids},
            }
            for node, ids in homes.items()
        }
        broadcast = Broadcast(with_fixed(inputs))
        if self._parties is not None:
            self._parties.told = told(known, broadcast.names)
        answers = self.members.link.ask("train", requests, broadcast)
        results, found = self._valid(answers, homes, Expected.of(total, inputs, self.config)), Collected()
        for node, result in self._alike(results, homes, info).items():
            try:
                total.merge(result.part)
            except Exception as error:  # the sum may hold a half of it, so the round cannot go on without it
                text = f"the sum of {self.members.name(node)} cannot be added ({printable(repr(error))})"
                raise RoundAborted(f"{text}; ask its owner for what it runs") from error
            for id in result.done:
                found.states[id] = reference(position + 1, info.task, result.sizes[id]) if id in result.sizes else {}
            found.losses |= result.losses
            found.excluded += result.excluded
        if found.excluded and not found.states:
            raise RoundAborted("all updates that arrived in time have NaN or infinity; lower local.lr")
        self._check_quorum(info, len(found.states))
        return found

    def _without_data(self, info: RoundInfo) -> str:
        files = " or ".join(f"task{task}.npz" for task in self.rounds.sees(info.task))
        return f"no node has data to train on; a node with data of its own has them in {files}"

    def _secure(self, info: RoundInfo) -> bool:
        return self.config.secagg == "full" and info.phase.protected

    def _leave_out(self, node: int, ids: Sequence[int], why: str) -> None:
        self._missing |= dict.fromkeys(ids, f"{self.members.name(node)}: {printable(why)}")

    def _valid(
        self, answers: Mapping[int, Answer], homes: Mapping[int, Sequence[int]], expected: Expected
    ) -> dict[int, NodeResult]:
        """Return the answers that can be results, by node, and leave the others out."""
        results = {}
        for node, answer in answers.items():
            try:
                if answer.fault is not None:
                    raise ValueError(answer.fault)
                results[node] = NodeResult(answer.value, homes[node], expected)
            except ValueError as error:
                self._leave_out(node, homes[node], str(error))
            except Exception as error:  # whatever an answer of other kinds leads to
                self._leave_out(node, homes[node], f"its answer is not one of cfl's ({type(error).__name__}: {error})")
        return results

    def _alike(
        self, results: dict[int, NodeResult], homes: Mapping[int, Sequence[int]], info: RoundInfo
    ) -> dict[int, NodeResult]:
        """Return the results with the shapes that most clients sent, in their order, which is that of the clients.

        Among equal numbers those of the last round of the phase count. Raises RoundAborted without such a round.
        """
        results = dict(results)
        votes = Counter[Outlines]()
        for node, result in results.items():
            votes[result.outlines] += len(homes[node])
        most = [outlines for outlines in votes if votes[outlines] == max(votes.values())]
        last = self._usual.get(info.phase.name)
        if len(most) > 1 and last not in most:
            raise RoundAborted("equal numbers of clients sent uploads of different shapes, so none can be told right")
        usual = last if last in most else next(iter(most), frozenset())
        self._usual[info.phase.name] = usual
        for node in [node for node, result in results.items() if result.outlines != usual]:
            own = results.pop(node).outlines
            owner, name, shape, dtype = min(own - usual or usual - own, key=repr)
            what = f"its '{owner}/{name}' of shape {shape} and type {dtype}"
            self._leave_out(node, homes[node], f"{what} is not what other nodes sent")
        return results

    def _check_quorum(self, info: RoundInfo, clients: int) -> None:
        """Raise RoundAborted if too few clients have answered; secure aggregation has a quorum of its own."""
        least = math.ceil(Fraction(str(self.config.flower.quorum)) * len(info.uploading))  # not its nearest float
        if not self._secure(info) and clients < least:
            raise RoundAborted(
                f"{clients} of {len(info.uploading)} clients answered, {least} are needed; lower flower.quorum, or "
                "raise flower.deadline"
            )
