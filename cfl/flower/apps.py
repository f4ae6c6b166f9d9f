"""The ServerApp of a project, and what its nodes answer; `forward.py` is its ClientApp."""

import os
import secrets
import sys
import time
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from cfl.aggregation import scope
from cfl.assembly import methods, resolve
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.core import ConfigError
from cfl.engines import Engine
from cfl.engines.choose import undecided
from cfl.flower import faults, link, node, own_data
from cfl.flower.deployment import DeploymentEngine, MemberPopulation, RemoteRounds
from cfl.flower.home import HomeNode
from cfl.flower.members import Members
from cfl.flower.signing import SigningKeys
from cfl.runtime import checkpoint
from cfl.runtime.builder import EngineParts, Place, build_session
from cfl.runtime.fingerprint import Fingerprint, decisive
from cfl.runtime.result import Result
from cfl.runtime.rounds import Rounds
from cfl.runtime.runner import carry_out, stream_of
from cfl.runtime.sinks import console_sink

STREAM = "stream.json"  # file beside config.yaml: the tasks of the run, for nodes with data of their own
ON_NODES = "on nodes"  # where a served run keeps the states of clients
LOOK = 1.0  # seconds between looks for new nodes, before the run begins
PATIENCE = 0.2  # seconds between looks for answers, each a call over the network


def server(config: Path) -> ServerApp:
    """Return the ServerApp of a run. config: its resolved config.yaml.

    Of the project's options, `output` is the run's folder, `data-root` that of the data sets, and `wait-for` the number
    of clients that have to be there before the first round.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = {name: str(value) for name, value in context.run_config.items()}
        with faults.told(output := Path(given["output"])):
            serve(config, grid, output, _folder(given["data-root"]), int(given["wait-for"]))

    return app


def serve(config: Path, grid: link.Grid, output: Path, data_root: Path | None = None, wait_for: int = 0) -> Result:
    """Run a configuration on the nodes of a grid. wait_for: clients before the first round, 0 for all of them.

    A run that `output` holds already is continued.
    """
    settings = loaded(config, wait_for)
    strategies = methods.build(settings)
    stream = stream_of(settings, data_root, False, public=methods.need_public(strategies))
    sink = console_sink(quiet=False)
    fingerprint = build_session(settings, stream, strategies).recorder.fingerprint
    members = Members(link.Link(grid, settings.flower.deadline, PATIENCE), fingerprint, hash_of(settings), sink.note)
    await_members(members, wait_for or settings.partition.clients)
    resume = (output / "config.yaml").exists()
    place = place_of(members, run_id(output))
    return carry_out(settings, stream, strategies, None, output, resume, sink, data_root, place=place)


def answer(action: str, config: Path, records: RecordDict, context: Context) -> RecordDict:
    """Return the answer of a node to the records of a message. config: the run's resolved config.yaml.

    Of the node's options, `clients` names its clients, such as "0-3,7", `folder` is where it keeps their states, `name`
    stands in messages, `data-root` is the folder of the data sets, `data` is data of its own, and `signing-keys` the
    folder of the keys for `secure.consistency`. Without them, as in a simulation, the clients are divided among the
    nodes.
    """
    return node.answer(partial(_node, config, context), action, records, context)


def loaded(config: Path, wait_for: int = 0) -> RunConfig:
    """Load a resolved configuration, and raise ConfigError if it cannot run on nodes. wait_for: as in `check`."""
    settings = resolve.load(read_yaml(config))
    check(settings, wait_for)
    return settings


def check(settings: RunConfig, wait_for: int = 0) -> None:
    """Raise ConfigError if a configuration cannot run on nodes. wait_for: clients before the first round, 0 for all."""
    if settings.engine == "flower" or undecided(settings.engine, settings.block):
        engine = f"engine={settings.engine} without a block" if settings.engine == "vmapped" else settings.engine
        raise ConfigError(f"{engine} does not name an engine for the nodes; use loop, pool, or vmapped with a block")
    if settings.device != "cpu":
        raise ConfigError(f"nodes compute on CPU cores only, not on device={settings.device}; set device=cpu")
    if settings.secagg == "sum":
        raise ConfigError("secagg=sum only simulates secure aggregation; use full or none")
    if settings.attack.name != "none":
        raise ConfigError(f"attack.name={settings.attack.name} simulates hostile clients, and nodes are real; set none")
    if settings.eval_local:
        raise ConfigError("local models stay on their nodes; set eval_local=0")
    if settings.dp.level != "none" and settings.dp.noise_seed != "system":
        raise ConfigError("the server knows the run's seed, and so the nodes' noise; set dp.noise_seed=system")
    _check_plan(settings)
    if wait_for > settings.partition.clients:
        raise ConfigError(f"the run has {settings.partition.clients} clients, so {wait_for} cannot be waited for")
    if wait_for and settings.dp.level == "client" and settings.dp.amplify:
        raise ConfigError("dp.amplify counts on a population that is known; wait for all clients, or set it to false")


def _check_plan(settings: RunConfig) -> None:
    """Raise ConfigError if nodes would undo the protection of uploads in a phase of the strategy."""
    plan = methods.phases(methods.build(settings)["strategy"])
    measured = [phase.name for phase in plan if phase.diagnostic]
    if measured and (settings.secagg, settings.dp.level) != ("none", "none"):
        raise ConfigError(
            f"nothing protects phase '{measured[0]}', a measurement, so the server would see what each node sends; "
            "leave it out of the strategy's plan (for FOT: strategy.measure_coverage=false)"
        )
    part = settings.cohort < settings.partition.clients
    privacy = [scope.privacy(phase, part and phase.cohort == "sampled", settings) for phase in plan]
    if any(own.hidden for own in privacy if own):
        raise ConfigError("nodes know the run's seed, and so all cohorts, which dp.amplify takes for secret; set "
                          "dp.amplify=false")  # fmt: skip


def place_of(members: Members, run: str) -> Place:
    """Return the place of a run whose clients are those of nodes. run: its id."""

    def engine(parts: EngineParts) -> DeploymentEngine:
        folder = parts.checkpoints
        return DeploymentEngine(
            parts.inner, parts.rounds, members, parts.multiplier,
            oldest=lambda: checkpoint.oldest(folder) if folder else sys.maxsize, run=run,
        )  # fmt: skip

    return Place(RemoteRounds, partial(MemberPopulation, members=members), engine, ON_NODES)


def run_id(output: Path) -> str:
    """Return the id of the run in a folder, 32 hex digits; a run that begins gets a new one."""
    path = output / "run-id"
    if not (output / "config.yaml").exists() or not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(16))
    return path.read_text()


def hash_of(config: RunConfig) -> str:
    """Hash what decides the results of a resolved configuration."""
    return checkpoint.fingerprint(decisive(resolve.dump(config)))


def await_members(members: Members, clients: int) -> None:
    """Wait until so many clients are there."""
    said = -1
    while (there := sum(len(member.clients) for member in members.joined.values())) < clients:
        if there != said:
            print(f"{there} of {clients} clients are there; waiting for the others", flush=True)
            said = there
        members.refresh()
        time.sleep(LOOK)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as "0-3,7". Raises ConfigError for another text."""
    try:
        ends = [[int(end) for end in part.split("-", 1)] for part in text.split(",")]
        found = [range(pair[0], pair[-1] + 1) for pair in ends]
    except ValueError:
        found = []
    if not all(found) or not found:
        raise ConfigError(f"clients must be numbers such as 0-3,7, not '{text}'")
    return tuple(sorted({number for part in found for number in part}))


def _node(config: Path, context: Context) -> HomeNode:
    given = context.node_config
    if {"clients", "folder"} <= given.keys():
        clients, folder = numbers(str(given["clients"])), str(given["folder"])
        name = str(given.get("name", folder))
    elif "partition-id" not in given:
        raise ConfigError("this node does not know its clients and its folder; start it with cfl-run join, or give "
                          "--node-config 'clients=\"0-2\" folder=\"FOLDER\"'")  # fmt: skip
    else:
        number, count = int(given["partition-id"]), int(given["num-partitions"])
        clients, name = tuple(range(loaded(config).partition.clients)[number::count]), f"partition {number}"
        folder = str(Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"), "cfl-nodes", str(number)))
    data, data_root = str(given.get("data", "")), _folder(given.get("data-root"))
    if data and len(clients) != 1:
        raise ConfigError(f"a node with data of its own has one client, not {len(clients)}; start a node for each")
    settings, made = _built(config, data, clients[0] if data else None, data_root)
    options, signing = hash_of(settings), _signing(settings, str(given.get("signing-keys", "")), clients)
    return HomeNode(
        *made, Path(folder), name=name, clients=clients, options=options, own_data=bool(data), signing=signing
    )


def _signing(settings: RunConfig, folder: str, clients: tuple[int, ...]) -> SigningKeys | None:
    """Return the keys of the consistency check. Raises ConfigError if only the run has the check, or only the node."""
    checked = settings.secagg == "full" and settings.secure.consistency
    if checked and not folder:
        raise ConfigError("secure.consistency=true needs keys to sign with; start the node with --signing-keys FOLDER")
    if folder and not checked:
        raise ConfigError("this node has --signing-keys, and the server's config.yaml no consistency check; set "
                          "secagg=full and secure.consistency=true, or leave --signing-keys out")  # fmt: skip
    return _signing_keys(Path(folder), clients, settings.partition.clients) if checked else None


_signing_keys = lru_cache(maxsize=1)(SigningKeys)


@lru_cache(maxsize=1)  # a node has one run at a time; the virtual nodes of a process share theirs
def _built(
    config: Path, data: str, client: int | None, data_root: Path | None
) -> tuple[RunConfig, tuple[Engine, Rounds, Fingerprint]]:
    """Build a run on a node. client: the owner of `data`, None for parts of the benchmark."""
    settings = loaded(config)
    if client is None:
        return settings, node.built(settings, data_root)
    if settings.validation:
        raise ConfigError(f"validation={settings.validation:g} holds samples of the benchmark out, and this node has "
                          "data of its own; set validation=0")  # fmt: skip
    if methods.need_public(methods.build(settings)):
        raise ConfigError(f"{settings.label} reads public data, which a node with data of its own lacks; omit --data")
    stream = own_data.read(data, config.with_name(STREAM).read_text(encoding="utf-8"), data_root)
    place = Place(population=partial(own_data.OwnPopulation, client=client))
    return settings, node.built(settings, data_root, stream, place)


def _folder(given: object) -> Path | None:
    return Path(str(given)) if given else None
