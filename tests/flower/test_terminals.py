"""Federations of real processes on loopback: a SuperLink, and SuperNodes with TLS and keys."""

import contextlib
import signal
import socket

import pytest

import cfl
from cfl.flower import project
from cfl.flower.programs import VARIABLES
from cfl.runtime.run_folder import RunFolder
from tests.flower.federation import signing_keys
from tests.flower.terminals import Machines, await_, write_certificates, write_keys

pytestmark = pytest.mark.deployment
SMALL = ("tasks=2", "rounds=1", "partition.clients=4", "cohort=4", "secagg=full", "engine=loop", "seed=1")


@pytest.fixture
def machines(tmp_path):
    with contextlib.closing(Machines(tmp_path, "abcd")) as found:
        yield found


def test_a_federation_whose_server_is_killed_and_resumed_has_the_figures_of_one_machine(machines):
    options = (*SMALL, "secure.consistency=true", "secure.quorum=0.9", "strategy.measure_coverage=false")
    config = cfl.resolve("permuted-digits", method="fot", overrides=options)
    keys = signing_keys(machines.folder / "clients", 4)
    written = machines.write(config)
    server = machines.serve(written)
    for name, clients in {"a": "0-1", "b": "2-3"}.items():
        machines.join(name, clients, signing_keys=keys)
    server.until(lambda: len(machines.rows()) >= 2)
    server.kill()
    assert not (machines.output / "metrics.json").exists()
    resumed = machines.serve(written, "--resume")
    assert resumed.ends() == 0, resumed.all_said()
    found, expected = machines.metrics(), cfl.run(config).metrics
    for name in ("accuracy_matrix", "acc", "fgt", "bytes_up", "bytes_down"):
        assert found[name] == expected[name], name
    assert f"ACC {100 * found['acc']:.1f}%, FGT {100 * found['fgt']:.1f}%; results in " in resumed.said


def test_a_run_goes_on_without_nodes_that_are_refused_killed_or_late(machines):
    options = (*SMALL, "tasks=1", "rounds=3", "partition.clients=5", "cohort=5", "secagg=none", "flower.deadline=20")
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=options)
    server = machines.serve(machines.write(config), "--wait-for", 4)
    server.says("0 of 4 clients are there")
    refused(machines)
    machines.join("a", "0-2")
    killed = machines.join("b", "3")
    server.until(lambda: machines.rows())
    killed.kill()
    machines.join("c", "4")
    assert server.ends() == 0, server.all_said()
    missing = [set(row["missing"]) for row in machines.rows()]
    assert [len(missing), missing[0], missing[-1]] == [3, {"4"}, {"3"}]
    assert "3" in missing[1], "the round in which its node was killed"
    for text in ("node 'c' (client 4) has joined", "client 3 is missing (task 0, phase train, round 1): node 'b'"):
        assert text in server.said


def refused(machines):
    """Nodes with an unknown key, with the certificate of another authority, and without a key."""
    other_key = write_keys(machines.folder / "others", "a") / "a.key"
    other_authority = write_certificates(machines.folder / "theirs") / "ca.crt"
    stranger = machines.join("stranger", "0", key=other_key)
    misled = machines.join("misled", "1", key=machines.keys / "a.key", certificate=other_authority)
    keyless = machines.join("keyless", "2", key=None)
    assert misled.ends() == keyless.ends() == 1
    assert "CERTIFICATE_VERIFY_FAILED" in misled.said and "must be registered" in keyless.said
    stranger.says("does not know this node's key")
    stranger.kill()


def test_an_interrupted_run_at_a_running_superlink_is_stopped_and_can_go_on(machines):
    """It is terminated, not interrupted, as a shell may let its background programs ignore the latter."""
    options = (*SMALL, "tasks=1", "rounds=4", "secagg=none")
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=options)
    written, (host, _, port) = machines.write(config), machines.address.rpartition(":")
    home = {"FLWR_HOME": str(machines.folder / "home"), **VARIABLES}
    own = ("--insecure", "--host", host, "--port", port, "--disable-runtime-dependency-installation")
    machines.run("superlink", "python", "-P", "-m", "cfl.flower.gate", *own, **home)
    machines.run("node", "cfl-run", "join", machines.address, "--clients", "0-3", "--folder", machines.folder / "node")
    words = ("serve", written, "--output", machines.output, "--address", machines.address, "--running")
    await_(lambda: listens(host, int(port)), machines.terminals[0].all_said)
    server = machines.run("server", "cfl-run", *words)
    server.until(lambda: machines.rows())
    server.process.terminate()
    assert server.ends() == 128 + signal.SIGTERM and "stopping the run" in server.said
    await_(lambda: not RunFolder.busy(machines.output), server.all_said)
    assert 1 <= len(machines.rows()) < 4
    resumed = machines.run("resumed", "cfl-run", *words, "--resume")
    assert resumed.ends() == 0, resumed.all_said()
    assert machines.metrics()["accuracy_matrix"] == cfl.run(config).metrics["accuracy_matrix"]


def listens(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True


def test_flower_runs_the_project_in_a_simulation(machines):
    """`flwr run`, on Flower's SuperLink for simulations, which it starts."""
    config = cfl.resolve("permuted-digits", method="fot", overrides=[*SMALL, "strategy.measure_coverage=false"])
    made = project.write(config, machines.output)
    (machines.folder / "home").mkdir()
    (machines.folder / "home" / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = ":local-in-memory:"\n'
    )
    nodes = "num-supernodes=2 client-resources-num-cpus=1"
    command = ("flwr", "run", str(made), "--stream", "--federation-config", nodes)
    ran = machines.run("flower", *command, FLWR_HOME=str(machines.folder / "home"), **VARIABLES)
    assert ran.ends() == 0, ran.all_said()
    found, expected = machines.metrics(), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"], ran.said
