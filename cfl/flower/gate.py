"""The SuperLink of `cfl-run serve`: Flower's, which takes only the messages of nodes from other users and machines.

At the address of the nodes, Flower also serves the calls that register keys of nodes, start and stop runs, and take the
place of a ServerApp. It asks nobody who calls. `python -P -m cfl.flower.gate` takes the options of `flower-superlink`.
"""

import os
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import uvicorn
from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
from flwr.superlink.cli import flower_superlink
from starlette.types import ASGIApp, Receive, Scope, Send

NODES = "/v1/fleet/"  # paths of the calls of nodes
CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # of this machine, on Linux
OPEN = "01"  # state of a connection; one that its caller has closed seems to be root's
REFUSAL = b"only the user of the SuperLink may call this, on the SuperLink's machine; see docs/federation.md of cfl\n"

End = tuple[str, int]  # of a connection: host, port


class Gate:
    """Passes calls of nodes, and of programs of this user on this machine, to an application; refuses others."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(NODES) or _is_own(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})  # a violation of policy


def is_own(caller: End, here: End) -> bool:
    """Return whether a program of this user on this machine has made a connection.

    caller, here: its ends. Where the system does not tell whose a connection is, any user of this machine counts.
    """
    host = _host(caller[0])
    if not host.is_loopback and host != _host(here[0]):  # who calls an address of the machine calls from that address
        return False
    tables = [path for path in CONNECTIONS if path.exists()]
    return not tables or os.getuid() in {owner for path in tables for owner in _owners(path, caller, here)}


def main() -> None:
    """Run Flower's SuperLink behind the gate."""
    load = uvicorn.Config.load

    def load_behind_gate(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = Gate(config.loaded_app)  # outermost: it has to see the caller, not what a header claims

    uvicorn.Config.load = load_behind_gate  # type: ignore[assignment]
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # they would open Flower's older servers, at addresses without a gate
    flower_superlink()


def _is_own(scope: Scope) -> bool:
    caller, here = scope.get("client"), scope.get("server")
    return caller is not None and here is not None and is_own(tuple(caller), tuple(here))


def _host(text: str) -> IPv4Address | IPv6Address:
    """Read an address; one of IPv4 that is written as one of IPv6 is returned as the former."""
    host = ip_address(text.partition("%")[0])  # without the scope, as in fe80::1%eth0
    return getattr(host, "ipv4_mapped", None) or host


def _owners(table: Path, caller: End, here: End) -> list[int]:
    """Return the users who have a connection from `caller` to `here`, by a table of Linux."""
    ends = [(_host(host), port) for host, port in (caller, here)]
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    near = [row for row in rows if row[1].endswith(f":{caller[1]:04X}") and row[3] == OPEN]  # few, and then in full
    return [int(row[7]) for row in near if [_end(row[1]), _end(row[2])] == ends]


def _end(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Read an end such as 0100007F:1F90, whose address is hexadecimal words of 32 bits in the machine's byte order."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8]) for at in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _host(str(ip_address(packed))), int(port, 16)


if __name__ == "__main__":
    main()
