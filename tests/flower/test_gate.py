"""The SuperLink of `cfl-run serve` takes only the messages of nodes from others than its own user and machine."""

import asyncio
import os
import socket
import subprocess
import sys

import psutil
import pytest

from cfl.flower import gate, programs, superlink
from tests.flower.terminals import free_address

START, NODE = "/v1/control/start-run", "/v1/fleet/register-node"


def table(path, *rows):
    """A file as Linux shows connections; rows: caller, here, state, user."""
    lines = [f"{n}: {a} {b} {state} 0:0 0:0 0 {user} 0 1" for n, (a, b, state, user) in enumerate(rows)]
    path.write_text("\n".join(["sl local_address rem_address st ...", *lines, ""]))
    return path


@pytest.fixture
def connections(tmp_path, monkeypatch):
    """Let a table show one connection, from port 8080 to 9092 (1F90 and 2384 in base 16) of 127.0.0.1."""

    def show(caller="0100007F:1F90", here="0100007F:2384", state="01", user=None, name="tcp"):
        own = os.getuid() if user is None else user
        monkeypatch.setattr(gate, "CONNECTIONS", (table(tmp_path / name, (caller, here, state, own)),))

    return show


LOOPBACK = (("127.0.0.1", 8080), ("127.0.0.1", 9092))
little = pytest.mark.skipif(sys.byteorder != "little", reason="the tables of these tests are those of a little-endian")


@little
@pytest.mark.parametrize(
    ("shown", "own"),
    [
        ({}, True),
        ({"user": os.getuid() + 1}, False),
        ({"state": "06"}, False),  # closed by its caller, and then shown as root's
        ({"caller": "0100007F:1F91"}, False),
        ({"here": "0100007F:2385"}, False),
        ({"caller": "0200007F:1F90"}, False),
    ],
)
def test_a_connection_is_own_if_a_program_of_this_user_holds_its_other_end(shown, own, connections):
    connections(**shown)
    assert gate.is_own(*LOOPBACK) is own


@little
@pytest.mark.parametrize(
    ("shown", "caller", "here"),
    [
        (("0400000A:1F90", "0400000A:2384"), "10.0.0.4", "10.0.0.4"),
        (("0400000A:1F90", "0400000A:2384"), "::ffff:10.0.0.4", "::ffff:10.0.0.4"),
        (("00" * 12 + "01000000:1F90", "00" * 12 + "01000000:2384"), "::1", "::1"),
        (("000000FD00000000000000000200" + "0000:1F90", "000000FD000000000000000002000000:2384"), "fd00::2", "fd00::2"),
    ],
)
def test_addresses_of_either_kind_are_found_in_the_tables(shown, caller, here, connections):
    connections(*shown)
    assert gate.is_own((caller, 8080), (here, 9092))


@pytest.mark.parametrize(
    ("caller", "here", "own"),
    [
        ("10.0.0.5", "10.0.0.4", False),
        ("::ffff:10.0.0.5", "::ffff:10.0.0.4", False),
        ("fe80::1%eth0", "fd00::2", False),
        ("10.0.0.4", "10.0.0.4", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
    ],
)
def test_without_tables_whoever_calls_from_the_machine_is_own(caller, here, own, monkeypatch):
    monkeypatch.setattr(gate, "CONNECTIONS", ())
    assert gate.is_own((caller, 8080), (here, 9092)) is own


@pytest.mark.parametrize(
    ("scope", "passes"),
    [
        ({"type": "lifespan"}, True),
        ({"type": "http", "path": NODE}, True),
        ({"type": "http", "path": START}, False),
        ({"type": "http", "path": "/v1/runtime/acquire-task"}, False),
        ({"type": "http", "path": "/v1/fleeting"}, False),
        ({"type": "websocket", "path": START}, False),
        ({"type": "http", "path": START, "client": None}, False),
    ],
)
def test_another_machine_may_call_what_nodes_call(scope, passes, monkeypatch):
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope)

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    scope = {"client": ("10.0.0.5", 8080), "server": ("10.0.0.4", 9092), **scope}
    asyncio.run(gate.Gate(app)(scope, None, send))
    refusal = [] if passes else [1008] if scope["type"] == "websocket" else [403, None]
    assert (passed, sent) == ([scope] if passes else [], refusal)


OUTSIDE = [  # addresses of this machine that others reach
    one.address
    for ones in psutil.net_if_addrs().values()
    for one in ones
    if one.family == socket.AF_INET and not one.address.startswith("127.")
]
STATUS = """
import encodings.idna, http.client, os, sys
os.setuid(int(sys.argv[3]))
for path in sys.argv[4:]:
    there = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
    there.request("POST", path, headers={"X-Forwarded-For": "127.0.0.1"})
    print(there.getresponse().status)
"""


def statuses(host, port, user):
    """What a program of a user gets that calls as a starter of runs, as a ServerApp, and as a node."""
    words = [host, str(port), str(user), START, "/v1/runtime/acquire-task", NODE]
    done = subprocess.run([sys.executable, "-I", "-c", STATUS, *words], capture_output=True, check=True)
    return [*map(int, done.stdout.split())]


@pytest.mark.deployment
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can call as another user")
@pytest.mark.parametrize("host", ["::1", next(iter(OUTSIDE), "127.0.0.1")])
def test_another_user_of_the_machine_reaches_only_what_nodes_call(host, tmp_path):
    port = int(free_address().rpartition(":")[2])
    with superlink._superlink(host, port, {}, None, tmp_path, programs.environment(tmp_path)):
        own, others = statuses(host, port, os.getuid()), statuses(host, port, 65534)
    assert 403 not in own and others == [403, 403, own[2]]
