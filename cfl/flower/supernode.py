"""`cfl-run join`: a SuperNode, and the process that answers its messages."""

import math
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cfl.core import CflError, ConfigError, files
from cfl.flower import answers, apps, own_data, programs

AGAIN = 5.0  # seconds until a node joins again
PATIENCE = 30.0  # seconds without the SuperLink after which a node says so
UNKNOWN_KEY = "[code: 2004]"  # in Flower's error, if a node's key is not registered, or not yet
CONNECTED = "SuperNode ID: "  # in Flower's output, once the SuperLink has taken the node in
LOST = "has ended, or does not know this node"
UNKNOWN = "does not know this node's key, or still counts its last start"
LOG = "supernode.log"


def join(
    address: str,
    folder: Path,
    clients: str,
    *,
    name: str | None = None,
    data: str | None = None,
    data_root: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    signing_keys: Path | None = None,
) -> None:
    """Run a node until it is interrupted; if the SuperLink ends or forgets it, it joins again. address: host:port.

    folder: of the states of its clients; clients: their ids, such as "0-3"; name: for messages, else the folder's;
    data: a folder or a benchmark, see `own_data.read`; certificate: of the authority that signed the server's, None: no
    TLS; key: the node's private key, where the server knows its nodes by their keys; signing_keys: folder, see
    `SigningKeys`.
    """
    host, port = programs.split(address)
    apps.numbers(clients)
    if signing_keys is not None and not signing_keys.is_dir():
        raise ConfigError(f"there is no folder '{signing_keys}' with the keys of clients")
    if data:
        own_data.check(data)
        data = str(Path(data).absolute()) if Path(data).is_dir() else data
    given = {
        "clients": clients, "folder": folder.absolute(), "name": name or folder.absolute().name,
        "data": data, "data-root": data_root and data_root.absolute(),
        "signing-keys": signing_keys and signing_keys.absolute(),
    }  # fmt: skip
    options = {option: str(value) for option, value in given.items() if value}
    command = [programs.program("flower-supernode"), "--superlink", f"{host}:{port}", *_security(certificate, key)]
    home = folder / "flower"
    files.make_folder(home, folder, "--folder")
    print(f"node '{options['name']}': joining {address}; Flower's output is in {home / LOG}", flush=True)
    programs.exit_when_terminated()
    while True:
        why = _supernode(address, command, options, home)
        if why is not None and UNKNOWN_KEY not in why:
            raise CflError(f"the SuperNode ended: {why} (all of it in {home / LOG})")
        said = LOST if why is None else UNKNOWN
        print(f"the SuperLink at {address} {said}; joining again in {AGAIN:.0f} s", flush=True)
        time.sleep(AGAIN)


def _security(certificate: Path | None, key: Path | None) -> list[str]:
    """Options of the SuperNode for TLS and the node's key. Raises ConfigError for files that do not serve."""
    if key is not None and not key.exists():
        raise ConfigError(f"there is no private key '{key}'; make one with: ssh-keygen -t ecdsa -b 384 -N '' -f {key}")
    if certificate is None and key is not None:
        raise ConfigError("nodes sign with their keys over TLS only; give --certificate, too")
    if certificate is None:
        return ["--insecure"]
    programs.check_certificate(certificate)
    return ["--root-certificates", str(certificate), *(["--auth-supernode-private-key", str(key)] if key else [])]


def _supernode(address: str, command: Sequence[str], options: Mapping[str, str], home: Path) -> str | None:
    """Run a SuperNode, and answer its messages, until it ends. Returns why it could not connect, None if it could.

    options: of the node.
    """
    environment = programs.environment(home)
    with tempfile.TemporaryDirectory(prefix="cfl-node-") as place, (home / LOG).open("w+b") as log:
        options = {**options, "socket": str(Path(place, "node"))}  # short, as addresses of sockets have to be
        config = " ".join(f"{name}={programs.quoted(value)}" for name, value in options.items())
        own = ["--host", "127.0.0.1", "--port", str(_free_port()), "--node-config", config]
        process = subprocess.Popen(
            [*command, *own], env=environment, stdout=log, stderr=log, preexec_fn=programs.ends_with_parent()
        )
        try:
            answers.serve(options["socket"], options, _ended(process, home / LOG, address))
        finally:
            programs.end(process)
        log.seek(0)
        said = log.read().decode(errors="replace")
    if not process.returncode or CONNECTED in said:  # once connected, it ends with any status when the SuperLink ends
        return None
    reason = said.partition("Exit Code: ")[2].splitlines()[1:3]
    return " ".join(line for line in reason if line) or f"its status is {process.returncode}"


def _ended(process: subprocess.Popen[bytes], log: Path, address: str) -> Callable[[], int | None]:
    """Return the process's `poll`, which also prints once if the SuperNode does not reach the SuperLink."""
    late = time.monotonic() + PATIENCE

    def poll() -> int | None:
        nonlocal late
        status = process.poll()
        if status is None and time.monotonic() >= late:
            late = math.inf
            if CONNECTED not in log.read_text(errors="replace"):
                print(
                    f"the SuperLink at {address} has not answered for {PATIENCE:.0f} s; still trying: check that "
                    "cfl-run serve runs there, and that both use TLS (--certificates, --certificate) or neither does",
                    flush=True,
                )
        return status

    return poll


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
