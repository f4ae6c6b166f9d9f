"""Terminals in which a test runs `cfl-run serve` and `cfl-run join`, and certificates for them."""

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import EllipsisType
from typing import Any

import psutil
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import cfl
from cfl.assembly import resolve

PATIENCE = 180.0  # seconds that a test waits for anything; a busy machine needs minutes for what takes seconds


class Terminal:
    """A command that runs beside the test. log: file for its output; more: variables of its environment.

    Where it fails, the test shows the output of all terminals whose logs are in the same folder.
    """

    def __init__(self, log: Path, program: str, *arguments: object, **more: str) -> None:
        self.log = log
        programs = Path(sys.executable).parent
        own = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NO_COLOR": "1",
        }  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [programs / program, *map(str, arguments)],
                stdout=file, stderr=file, cwd=log.parent, env={**os.environ, **own, **more},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())  # lines may be wrapped

    def all_said(self) -> str:
        """The output of all terminals, and the end of what Flower says at each node."""
        logs = [*sorted(self.log.parent.glob("*.log")), *sorted(self.log.parent.glob("*/flower/supernode.log"))]
        return "\n".join(
            f"{log.relative_to(self.log.parent)}: {log.read_text(errors='replace')[-2000:]}" for log in logs
        )

    def kill(self) -> None:
        """Kill the command with all that it has started, as when its machine loses power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid)
            for process in [family, *family.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def until(self, true: Callable[[], Any]) -> None:
        """Wait until something holds. Fails with the output if the command ends before."""
        await_(lambda: true() or self.process.poll() is not None, self.all_said)
        assert true(), self.all_said()

    def says(self, text: str) -> None:
        """Wait until the command has printed a text."""
        self.until(lambda: text in self.said)

    def ends(self) -> int:
        """Wait for the end; return the status."""
        await_(lambda: self.process.poll() is not None, self.all_said)
        return self.process.returncode


class Machines:
    """The terminals of a federation, with TLS and keys. folder: for its files; names: of the nodes that may join."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder, self.output, self.address = folder, folder / "out", free_address()
        self.terminals: list[Terminal] = []
        self.tls, self.keys = write_certificates(folder / "tls"), write_keys(folder / "keys", names)

    def write(self, config: cfl.RunConfig) -> Path:
        """Write the configuration of a run."""
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(resolve.dump(config)))
        return path

    def serve(self, config: Path, *options: object, **more: str) -> Terminal:
        return self.run(
            "server", "cfl-run", "serve", config, "--output", self.output, "--address", self.address,
            "--certificates", self.tls, "--node-keys", self.keys, *options, **more,
        )  # fmt: skip

    def join(
        self,
        name: str,
        clients: str,
        key: Path | None | EllipsisType = ...,
        certificate: Path | None = None,
        signing_keys: Path | None = None,
        **more: str,
    ) -> Terminal:
        """Start a node. key: ... for its own, None for none; certificate: None for that of the server's authority."""
        own = ("--key", self.keys / f"{name}.key" if key is ... else key) if key else ()
        own += ("--signing-keys", signing_keys) if signing_keys else ()
        return self.run(
            name, "cfl-run", "join", self.address, "--clients", clients, "--folder", self.folder / name,
            "--certificate", certificate or self.tls / "ca.crt", *own, **more,
        )  # fmt: skip

    def run(self, name: str, program: str, *arguments: object, **more: str) -> Terminal:
        """Open a terminal. name: of its log."""
        self.terminals.append(Terminal(self.folder / f"{name}.log", program, *arguments, **more))
        return self.terminals[-1]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of rounds.jsonl so far."""
        file = self.output / "rounds.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half written
        return [json.loads(line) for line in lines]

    def metrics(self) -> dict[str, Any]:
        return json.loads((self.output / "metrics.json").read_text())

    def close(self) -> None:
        for terminal in reversed(self.terminals):
            terminal.kill()
        end_all(self.folder)


def await_(true: Callable[[], Any], said: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} seconds: {said()}"
        time.sleep(0.1)


def end_all(home: Path) -> None:
    """Kill all programs of Flower's whose files are below a folder, also those that outlive what started them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME", "").startswith(str(home)):
                process.kill()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def write_certificates(folder: Path, days: float = 1) -> Path:
    """Write ca.crt, server.crt and server.key for 127.0.0.1, valid from two days ago until in `days`."""
    folder.mkdir()
    now = datetime.now(UTC)
    authority, own = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, "test authority")]
        return x509.CertificateBuilder(
            issuer_name=names[1], subject_name=names[0], public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(days=2), not_valid_after=now + timedelta(days=days),
        )  # fmt: skip

    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = {
        "ca": builder("test authority", authority).add_extension(x509.BasicConstraints(True, None), critical=True),
        "server": builder("server", own).add_extension(here, critical=False),
    }
    for name, certificate in signed.items():
        data = certificate.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.crt").write_bytes(data)
    (folder / "server.key").write_bytes(_private(own, serialization.PrivateFormat.TraditionalOpenSSL))
    return folder


def write_keys(folder: Path, names: Sequence[str]) -> Path:
    """Write a private key NAME.key and a public key NAME.pub for each name."""
    folder.mkdir()
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{name}.key").write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
        (folder / f"{name}.pub").write_bytes(public)
    return folder


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
