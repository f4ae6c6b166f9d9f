"""The `flower` engine: the nodes of a Flower grid compute the clients of a round."""

from collections.abc import Callable
from typing import Any

from cfl.aggregation.plain import UploadSum
from cfl.contract import Client, RoundInputs
from cfl.core import CflError, ConfigError, UpdateError, errors
from cfl.core.version import __version__
from cfl.engines import parts
from cfl.engines.base import Collected, Observe, Outcome, OuterEngine
from cfl.engines.loop import LoopEngine
from cfl.engines.vmapped import VmappedEngine
from cfl.flower.link import Answer, Link
from cfl.flower.messages import described
from cfl.flower.trees import Broadcast, with_fixed
from cfl.runtime.fingerprint import Fingerprint


class SimulationEngine(OuterEngine):
    """Clients without a home: their states travel with the messages, so any node can compute any of them.

    inner: the engine on each node, whose blocks are the units of work; link: to the nodes; end: ends the nodes on
    this machine and removes their folder.
    The nodes get equal numbers of blocks, and the server merges the results in the order of the blocks. So the number
    of nodes does not change a bit of the result.
    """

    inner: LoopEngine

    def __init__(self, inner: LoopEngine, link: Link, fingerprint: Fingerprint, end: Callable[[], None]) -> None:
        self.inner, self.link, self.fingerprint, self.end = inner, link, fingerprint, end
        self._nodes: list[int] = []

    def round(self, inputs: RoundInputs, observe: Observe | None = None) -> Outcome:
        outcome = super().round(inputs, observe)
        outcome.wire = self.link.spent()
        return outcome

    def collect(self, total: UploadSum, inputs: RoundInputs, observe: Observe | None) -> Collected:
        blocks, nodes = self._blocks(inputs), self._nodes or self._join()
        shares = {node: blocks[place :: len(nodes)] for place, node in enumerate(nodes[: len(blocks)])}
        known = {"info": described(inputs.info), "observed": observe is not None}
        requests = {
            node: {**known, "blocks": [{client.id: inputs.states[client.id] for client in block} for block in share]}
            for node, share in shares.items()
        }
        answers = self.link.ask("train", requests, Broadcast(with_fixed(inputs)))
        results: dict[int, Any] = {}
        for place, (node, answer) in enumerate(answers.items()):
            results.update(zip(range(place, len(blocks), len(nodes)), _results(node, answer, inputs), strict=True))
        found = Collected()
        for number in sorted(results):
            parts.merge(results[number], inputs.states, total, found, self.inner, observe)
        return found

    def close(self) -> None:
        self.end()
        self._nodes = []

    def _join(self) -> list[int]:
        """Return the ids of the nodes. Raises ConfigError if one would compute with other data or code."""
        self._nodes, own = sorted(node.node_id for node in self.link.grid.get_nodes()), self.fingerprint.parts
        remedy = "engine=flower rebuilds data, model and methods on its nodes by name, so register those of your own"
        for node, answer in self.link.ask("query.join", dict.fromkeys(self._nodes)).items():
            if answer.fault is not None:
                raise ConfigError(f"node {node} cannot take part: {answer.fault}; {remedy}")
            version, theirs = answer.value["version"], answer.value["parts"]
            if version != __version__:
                raise ConfigError(f"node {node} has cfl {version}, the run {__version__}; install the same version")
            if other := next((name for name in {**own, **theirs} if own.get(name) != theirs.get(name)), None):
                raise ConfigError(f"node {node} differs in {other}; {remedy}")
        return self._nodes

    def _blocks(self, inputs: RoundInputs) -> list[list[Client]]:
        if isinstance(self.inner, VmappedEngine):
            return self.inner.blocks(inputs.clients, inputs.states)
        return [[client] for client in inputs.clients]


def _results(node: int, answer: Answer, inputs: RoundInputs) -> Any:
    """The results of a node. Raises the error of the node."""
    if answer.fault is None:
        return answer.value
    kind = getattr(errors, answer.error, None)
    if isinstance(kind, type) and issubclass(kind, CflError):
        raise kind(answer.fault)
    raise UpdateError(f"node {node} of the simulation failed ({inputs.info.place}): {answer.fault}")
