"""Flower's own programs as `cfl-run serve` and `cfl-run join` start them: SuperLink, SuperNode, `flwr run`."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from cfl.config.schema import RunConfig
from cfl.core import CflError, ConfigError
from cfl.flower import answers, project

CONNECTION = "cfl"  # name of the SuperLink in Flower's configuration
START = 60.0  # seconds in which a SuperLink has to listen
AGAIN = 5.0  # seconds until a node joins again
UNKNOWN_KEY = "[code: 2004]"  # in Flower's error, if a node's key is not registered, or not yet
LOG = "supernode.log"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # variables of Flower's programs
CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"


def serve(
    config: RunConfig,
    output: Path,
    address: str,
    *,
    certificates: Path | None = None,
    node_keys: Path | None = None,
    running: bool = False,
    wait_for: int = 0,
    data_root: Path | None = None,
    resume: bool = False,
) -> None:
    """Run the server of a federation to the end of the run; results are in `output`.

    address: host:port of the SuperLink, which is started unless it is `running`; certificates: folder with ca.crt,
    server.crt and server.key, of which a running SuperLink needs ca.crt alone; None: no TLS; node_keys: folder with the
    public keys (*.pub) of the nodes that may join, None for any; wait_for: clients before the first round, 0 for all.
    Raises ConfigError for what does not fit, CflError if the run ends before its end.
    """
    host, port = _split(address)
    if (output / "metrics.json").exists() or ((output / "rounds.jsonl").exists() and not resume):
        raise ConfigError(f"'{output}' already holds a run; use --resume to continue it, or another --output")
    if node_keys is not None and certificates is None:
        raise ConfigError("nodes are recognised by their keys over TLS only; give --certificates, too")
    home = (output / "flower").absolute()
    home.mkdir(parents=True, exist_ok=True)
    files = _checked(certificates, [CA] if running else [CA, CERTIFICATE, KEY])
    security = f'root-certificates = "{files[CA]}"' if files else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{host}:{port}"\n{security}\n'
    )
    project.write(home / "project", config, output, data_root, wait_for)
    environment = _environment(home)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that the SuperLink ends, too
    with contextlib.nullcontext() if running else _superlink(host, port, files, node_keys, home, environment):
        for key in sorted(node_keys.glob("*.pub")) if node_keys else ():
            _call(["flwr", "supernode", "register", str(key), CONNECTION], environment)
        _call(["flwr", "run", str(home / "project"), CONNECTION, "--stream"], environment, quiet=False)
    if not (output / "metrics.json").exists():
        raise CflError(f"the run in '{output}' ended before its end, see above; continue it with --resume")


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
) -> None:
    """Run a node until it is interrupted; if the SuperLink ends or forgets it, it joins again. address: host:port.

    folder: of the states of its clients; clients: their ids, such as "0-3"; name: for messages, else the folder's;
    data: a folder or a benchmark, see `own_data.read`; certificate: of the authority that signed the server's, None: no
    TLS; key: the node's private key, where the server knows its nodes by their keys.
    """
    host, port = _split(address)
    folder.mkdir(parents=True, exist_ok=True)
    given: dict[str, Path | str] = {"clients": clients, "folder": folder.absolute(), "name": name or folder.name}
    if data:
        given["data"] = Path(data).absolute() if Path(data).is_dir() else data
    if data_root:
        given["data-root"] = data_root.absolute()
    print(f"node '{given['name']}': joining {address}; Flower's output is in {folder / 'flower' / LOG}", flush=True)
    if key is not None and not key.exists():
        raise ConfigError(f"there is no private key '{key}'; make one with: ssh-keygen -t ecdsa -b 384 -m PEM -f {key}")
    security = ["--insecure"]
    if certificate is not None:
        _check_certificate(certificate)
        security = ["--root-certificates", str(certificate)]
        security += ["--auth-supernode-private-key", str(key)] if key else []
    command = ["flower-supernode", "--superlink", f"{host}:{port}", *security]
    command += ["--host", "127.0.0.1", "--port", str(_free_port())]
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that the SuperNode ends, too
    while True:
        why = _supernode(command, given, folder / "flower")
        if why is not None and UNKNOWN_KEY not in why:
            raise CflError(f"the SuperNode ended: {why} (all of it in {folder / 'flower' / LOG})")
        why = "has ended, or does not know this node" if why is None else "does not know this node's key"
        print(f"the SuperLink at {address} {why}; joining again in {AGAIN:.0f} s", flush=True)
        time.sleep(AGAIN)


def _supernode(command: Sequence[str], given: Mapping[str, Path | str], home: Path) -> str | None:
    """Run a SuperNode, and answer its messages, until it ends; return why it failed. given: options of the node."""
    environment = _environment(home)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cfl-node-") as place, (home / LOG).open("w+b") as log:
        options = {name: str(value) for name, value in given.items()}
        options["socket"] = str(Path(place, "node"))  # short, as addresses of sockets have to be
        config = " ".join(f'{name}="{value}"' for name, value in options.items())
        process = subprocess.Popen(
            [_program(command[0]), *command[1:], "--node-config", config], env=environment, stdout=log, stderr=log
        )
        try:
            answers.serve(options["socket"], options, process.poll)
        finally:
            _end(process)
        log.seek(0)
        said = log.read().decode(errors="replace").partition("Exit Code: ")[2].splitlines()
    return " ".join(line for line in said[1:3] if line) if process.returncode else None


@contextlib.contextmanager
def _superlink(
    host: str, port: int, files: dict[str, Path], node_keys: Path | None, home: Path, environment: dict[str, str]
) -> Iterator[None]:
    """Run a SuperLink as long as the context lasts; its output goes to superlink.log."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port} ({error.strerror}); choose another --address") from None
    security = ["--insecure"]
    if files:
        security = ["--ssl-ca-certfile", str(files[CA]), "--ssl-certfile", str(files[CERTIFICATE])]
        security += ["--ssl-keyfile", str(files[KEY])]
    security += ["--enable-supernode-auth"] if node_keys else []
    command = [_program("flower-superlink"), "--host", host, "--port", str(port), *security]
    command += ["--disable-runtime-dependency-installation"]  # cfl is there; Flower would make an environment a run
    with (home / "superlink.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _await_port(host, port, process, home / "superlink.log")
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_port(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise CflError(f"the SuperLink did not start: {_last_line(log)} (all of it in {log})")


def _call(command: Sequence[str], environment: dict[str, str], quiet: bool = True) -> None:
    """Run one of Flower's programs to its end. Raises CflError with its last line if it fails."""
    done = subprocess.run(
        [_program(command[0]), *command[1:]], env=environment, check=False,
        stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT if quiet else None,
    )  # fmt: skip
    if done.returncode:
        said = (done.stdout or b"").decode(errors="replace").strip().splitlines()
        raise CflError(f"{command[0]} ended with status {done.returncode}: {said[-1] if said else 'see above'}")


def _program(name: str) -> str:
    """Path of a program beside this Python, or else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def _environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs, which find each other by the PATH. home: for their files."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**QUIET, **os.environ, "FLWR_HOME": str(home.absolute()), "PATH": path}


def _checked(folder: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Paths of the files in a folder of certificates. Raises ConfigError if one is missing or not valid now."""
    found = {name: folder / name for name in names} if folder else {}
    for name, path in found.items():
        if not path.exists():
            raise ConfigError(f"'{folder}' lacks {name}; it needs {', '.join(names)}")
        if name != KEY:
            _check_certificate(path)
    return {name: path.absolute() for name, path in found.items()}


def _check_certificate(path: Path) -> None:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' is not a certificate ({error}); give one in PEM format") from None
    now = datetime.now(UTC)
    if now > found.not_valid_after_utc:
        raise ConfigError(f"the certificate '{path}' expired on {found.not_valid_after_utc:%Y-%m-%d}; renew it")
    if now < found.not_valid_before_utc:
        raise ConfigError(f"the certificate '{path}' is valid from {found.not_valid_before_utc:%Y-%m-%d} on; wait, or "
                          "check the clock")  # fmt: skip


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"an address is host:port, such as 127.0.0.1:9092, not '{address}'")
    return host, int(port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
