"""Flower's programs: where they are, what they need around them, and how they end."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cryptography import x509

from cfl.core import ConfigError

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds, of 1 by default, until the answer to a message is begun
}
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when the one that started it has ended


def program(name: str) -> str:
    """Path of a program beside this Python, or else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs, which find each other by the PATH. home: for their files."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**VARIABLES, **os.environ, "FLWR_HOME": str(home.absolute()), "PATH": path}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program, by force if it does not within ten seconds."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_when_terminated() -> None:
    """Let this process end by an exception when it is terminated, so that it ends the programs that it has started."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def ends_with_parent(how: signal.Signals = signal.SIGTERM) -> Callable[[], object] | None:
    """A `preexec_fn` by which a program gets a signal when this process is killed, too; None where it needs Linux."""
    linux = sys.platform == "linux"
    return partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(how)) if linux else None


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ConfigError for another text."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"an address is host:port, such as 127.0.0.1:9092, not '{address}'")
    return host, int(port)


def quoted(text: str) -> str:
    """Return a text as a TOML string. Flower ends an option at the next quotation mark, also after a backslash."""
    plain = (char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text)
    return f'"{"".join(plain)}"'


def check_certificate(path: Path) -> None:
    """Raise ConfigError if a file is no certificate, or none that is valid now."""
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
