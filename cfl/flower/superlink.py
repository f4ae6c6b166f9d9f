"""`cfl-run serve`: the SuperLink and the ServerApp of a run, as programs of Flower's."""

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cfl.assembly import resolve
from cfl.config.overrides import change, without
from cfl.config.schema import RunConfig
from cfl.core import CflError, ConfigError
from cfl.flower import apps, faults, programs, project
from cfl.runtime.fingerprint import decisive
from cfl.runtime.run_folder import has_rounds, read_config, read_made_of

CONNECTION = "cfl"  # name of the SuperLink in Flower's configuration
SUPERLINK = (sys.executable, "-P", "-m", "cfl.flower.gate")  # -P: no module of the folder where `serve` is called
START = 60.0  # seconds in which a SuperLink has to listen
REGISTERED = "already in use"  # in Flower's error, if a SuperLink that runs on has the key of a node
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
    Raises ConfigError for what does not fit, CflError if the run stops before its last round.
    """
    host, port = programs.split(address)
    if (output / "metrics.json").exists():
        raise ConfigError(f"the run in '{output}' is finished; choose another --output")
    _check_place(output)
    if (output / "rounds.jsonl").exists() and not resume:
        raise ConfigError(f"'{output}' already holds a run; use --resume to continue it, or another --output")
    _check_same(config, output)
    apps.check(config, wait_for)
    if node_keys is not None and certificates is None:
        raise ConfigError("nodes are recognised by their keys over TLS only; give --certificates, too")
    if node_keys is not None and not any(node_keys.glob("*.pub")):
        raise ConfigError(f"'{node_keys}' has no public key, *.pub, so no node could join")
    if not running:
        _check_free(host, port)
    home = (output / "flower").absolute()
    files = _checked(certificates, [CA] if running else [CA, CERTIFICATE, KEY])
    made = project.write(config, output, data_root, wait_for).absolute()
    security = f"root-certificates = {programs.quoted(str(files[CA]))}" if files else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{host}:{port}"\n{security}\n',
        encoding="utf-8",
    )
    environment = programs.environment(home)
    programs.exit_when_terminated()
    with contextlib.nullcontext() if running else _superlink(host, port, files, node_keys, home, environment):
        for key in sorted(node_keys.glob("*.pub")) if node_keys else []:
            _call(["flwr", "supernode", "register", str(key), CONNECTION], environment, unless=REGISTERED)
        faults.forget(output)
        _follow(_start(made, environment), environment, stop=running)
    if not (output / "metrics.json").exists():
        raise faults.found(output)


@contextlib.contextmanager
def _superlink(
    host: str, port: int, files: dict[str, Path], node_keys: Path | None, home: Path, environment: dict[str, str]
) -> Iterator[None]:
    """Run a SuperLink as long as the context lasts; its output goes to superlink.log."""
    security = ["--insecure"]
    if files:
        security = ["--ssl-ca-certfile", str(files[CA]), "--ssl-certfile", str(files[CERTIFICATE])]
        security += ["--ssl-keyfile", str(files[KEY])]
    security += ["--enable-supernode-auth"] if node_keys else []
    command = [*SUPERLINK, "--host", host, "--port", str(port), *security]
    command += ["--disable-runtime-dependency-installation"]  # cfl is there; Flower would make an environment a run
    with (home / "superlink.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True,
            # By force: else it waits for readers of its logs, and its SuperExec takes the run of the next SuperLink.
            preexec_fn=programs.ends_with_parent(signal.SIGKILL),
        )  # fmt: skip
    try:
        _await_port(host, port, process, home / "superlink.log")
        yield
    finally:
        programs.end(process)


def _check_place(output: Path) -> None:
    """Raise ConfigError if a folder holds a run of `cfl-run train`, which --resume could not continue."""
    place = read_made_of(output).get("place", {}).get("states", apps.ON_NODES)
    if place != apps.ON_NODES:
        raise ConfigError(
            f"'{output}' holds a run of `cfl-run train`, which keeps the states of clients {place}, so a federation "
            "cannot continue it; choose another --output"
        )


def _check_same(config: RunConfig, output: Path) -> None:
    """Raise ConfigError if a folder has rounds with other options. Data and code are compared once nodes are there."""
    both = read_config(output), resolve.dump(config)
    there, here = (without(decisive(own), "compile") for own in both)  # where nothing compiles, the run changes it
    if has_rounds(output) and there and (text := change(there, here)):
        raise ConfigError(
            f"'{output}' holds a run with another configuration; choose another --output, or repeat the options of "
            f"that run: {text}"
        )


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if nothing can listen at an address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port} ({error.strerror}); choose another --address") from None


def _await_port(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise CflError(f"the SuperLink did not start: {_last_line(log)} (all of it in {log})")


def _start(made: Path, environment: dict[str, str]) -> str:
    """Start the run of a project, and return its id."""
    said = _call(["flwr", "run", str(made), CONNECTION], environment)
    if not (match := re.search(r"started run (\d+)", said)):
        raise CflError(f"flwr run names no run: {said}")
    return match[1]


def _follow(run: str, environment: dict[str, str], stop: bool) -> None:
    """Print what a run prints, until it ends. stop: stop the run if this process is interrupted or terminated."""
    try:
        _call(["flwr", "log", run, CONNECTION], environment, quiet=False)
    except (KeyboardInterrupt, SystemExit):
        if stop:
            print("stopping the run; its ServerApp ends within a minute", flush=True)
            _stop(run, environment)
        raise


def _stop(run: str, environment: dict[str, str]) -> None:
    """Stop a run. Raises CflError that names the command to repeat, if that fails."""
    try:
        _call(["flwr", "stop", run, CONNECTION], environment)
    except CflError as error:
        command = f"FLWR_HOME={shlex.quote(environment['FLWR_HOME'])} flwr stop {run} {CONNECTION}"
        raise CflError(f"the run goes on at the SuperLink ({error}); stop it with: {command}") from None


def _call(command: Sequence[str], environment: dict[str, str], quiet: bool = True, unless: str = "\0") -> str:
    """Run one of Flower's programs to its end; return what it says, if `quiet`.

    Raises CflError with its last line if it fails without `unless`.
    """
    done = subprocess.run(
        [programs.program(command[0]), *command[1:]], env=environment, check=False,
        stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT if quiet else None,
    )  # fmt: skip
    text = (done.stdout or b"").decode(errors="replace").strip()
    if done.returncode and unless not in text:
        said = text.splitlines()[-1:] or ["see above"]
        raise CflError(f"{command[0]} ended with status {done.returncode}: {said[0]}")
    return text


def _checked(folder: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Paths of the files in a folder of certificates. Raises ConfigError if one is missing or not valid now."""
    found = {name: folder / name for name in names} if folder else {}
    for name, path in found.items():
        if not path.exists():
            raise ConfigError(f"'{folder}' lacks {name}; it needs {', '.join(names)}")
        if name != KEY:
            programs.check_certificate(path)
    return {name: path.absolute() for name, path in found.items()}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
