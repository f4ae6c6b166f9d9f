"""`cfl-run serve` and `cfl-run join`: what they refuse before they start a program, and what they start."""

import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

import cfl
from cfl.assembly import resolve
from cfl.cli import app
from cfl.core import CflError, ConfigError, DataError, packages
from cfl.flower import programs, superlink, supernode
from cfl.runtime.sinks import NullSink
from tests import toy
from tests.flower.terminals import free_address, write_certificates, write_keys

HERE = "127.0.0.1:9092"
CONFIG = cfl.resolve("permuted-digits", overrides=["engine=loop"])


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(command, **options):
        raise AssertionError(f"{command} was started")

    starts(monkeypatch, start)


def starts(monkeypatch, start):
    """Let programs be started by a function."""
    for module in (superlink, supernode):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=start, run=start, PIPE=None, STDOUT=None))


def serve(folder, address=HERE, **options):
    superlink.serve(CONFIG, folder / "out", address, **options)


def join(folder, address=HERE, clients="0", **options):
    supernode.join(address, folder / "node", clients, **options)


def certificates(folder, *lacking, days=1.0):
    """A folder of certificates, of which some are lacking."""
    found = write_certificates(folder / "tls", days)
    for name in lacking:
        (found / name).unlink()
    return found


def written(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def key(folder):
    return write_keys(folder / "keys", ["a"]) / "a.key"


def at_a_taken_port(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        serve(folder, f"127.0.0.1:{other.getsockname()[1]}")


def over_another_run(folder, rounds="{}\n", **options):
    written(folder / "out" / "rounds.jsonl", rounds)
    other = {**resolve.dump(CONFIG), "seed": 3, "compile": False, "workers": 2}  # the last two are no other run
    written(folder / "out" / "config.yaml", yaml.safe_dump(other))
    serve(folder, resume=True, **options)


def over_a_run(folder, name, **options):
    written(folder / "out" / name)
    serve(folder, **options)


def over_a_run_of_train(folder, **options):
    """It is killed in its first round."""

    class Killed(NullSink):
        def round(self, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cfl.run(toy.config(), stream=toy.stream(), output=folder / "out", sink=Killed())
    serve(folder, **options)


REFUSED = {
    "serve: no address": (lambda folder: serve(folder, "9092"), "host:port, such as 127.0.0.1:9092, not '9092'"),
    "serve: a port in use": (at_a_taken_port, r"cannot listen at 127.0.0.1:\d+ \(Address already in use\); choose"),
    "serve: a folder with a run": (lambda folder: over_a_run(folder, "rounds.jsonl"), "out' already holds a run; use"),
    "serve: a run of train": (
        lambda folder: over_a_run_of_train(folder), "out' holds a run of `cfl-run train`, .* in its checkpoints",
    ),
    "serve: a run of train, with --resume": (
        lambda folder: over_a_run_of_train(folder, resume=True), "a federation cannot continue it; choose another",
    ),
    "serve: a finished run": (
        lambda folder: over_a_run(folder, "metrics.json", resume=True), "the run in '.*out' is finished; choose",
    ),
    "serve: a run with other options": (
        over_another_run, "out' holds a run with another configuration; .*: seed=3 there, seed=0 here$",
    ),
    "serve: other options for a run without rounds, as train allows": (  # so that the next option is looked at
        lambda folder: over_another_run(folder, "", node_keys=folder), "over TLS only; give --certificates, too",
    ),
    "serve: a file in place of the folder": (
        lambda folder: serve(written(folder / "out")), r"folder '.*out/out' cannot be written \(Not a dir.*--output",
    ),
    "serve: a certificate is missing": (
        lambda folder: serve(folder, certificates=certificates(folder, "server.crt")),
        "tls' lacks server.crt; it needs ca.crt, server.crt, server.key",
    ),
    "serve: a certificate has expired": (
        lambda folder: serve(folder, certificates=certificates(folder, days=-1)),
        r"ca.crt' expired on \d{4}-\d\d-\d\d; renew it",
    ),
    "serve: a running SuperLink without its authority": (
        lambda folder: serve(folder, running=True, certificates=certificates(folder, "ca.crt")),
        "tls' lacks ca.crt; it needs ca.crt",
    ),
    "serve: keys without TLS": (
        lambda folder: serve(folder, node_keys=write_keys(folder / "keys", ["a"])),
        "over TLS only; give --certificates, too",
    ),
    "serve: no keys": (
        lambda folder: serve(folder, certificates=certificates(folder), node_keys=folder / "tls"),
        "tls' has no public key, ",
    ),
    "join: no address": (lambda folder: join(folder, "here:there"), "host:port, .*, not 'here:there'"),
    "join: clients that are no numbers": (lambda folder: join(folder, clients="0,x"), "such as 0-3,7, not '0,x'"),
    "join: data that are nowhere": (
        lambda folder: join(folder, data="nowhere"), "'nowhere' is neither a folder nor a benchmark",
    ),
    "join: a file in place of the folder": (
        lambda folder: join(written(folder / "file")), r"folder '.*file/node' cannot be written \(Not a dir.*--folder",
    ),
    "join: no certificate": (
        lambda folder: join(folder, certificate=folder / "ca.crt"), "ca.crt' is not a certificate .*No such file",
    ),
    "join: another file": (
        lambda folder: join(folder, certificate=written(folder / "ca.crt", "hello")), "is not a certificate .*PEM",
    ),
    "join: a certificate has expired": (
        lambda folder: join(folder, certificate=certificates(folder, days=-1) / "ca.crt"), "ca.crt' expired on",
    ),
    "join: no key": (
        lambda folder: join(folder, key=folder / "none.key"), "no private key '.*none.key'; make one with: ssh-keygen",
    ),
    "join: a key without TLS": (lambda folder: join(folder, key=key(folder)), "over TLS only; give --certificate, too"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_options_are_refused_before_anything_is_started(name, tmp_path):
    call, message = REFUSED[name]
    with pytest.raises((ConfigError, DataError), match=message) as found:
        call(tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (CONFIG.model_copy(update={"benchmark": "digitz"}), {}, "unknown benchmark 'digitz'"),
        (cfl.resolve("mnist", overrides=["engine=loop"]), {"data_root": Path("nowhere")}, "nowhere"),
        (CONFIG, {"certificates": Path("nowhere")}, "'nowhere' lacks ca.crt"),
    ],
)
def test_what_cannot_be_served_leaves_no_folder(config, options, message, tmp_path):
    with pytest.raises((ConfigError, DataError), match=message):
        superlink.serve(config, tmp_path / "out", HERE, running=True, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", ["serve config.yaml", f"join {HERE} --clients 0", "train permuted-digits --engine flower"]
)
def test_without_flower_the_command_names_the_extra(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.startswith("cfl.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cfl, "flower")
    Path("config.yaml").write_text(yaml.safe_dump(resolve.dump(CONFIG)))
    found = CliRunner().invoke(app, command.split())
    wanted = "serve, join) needs flwr, cryptography, Crypto; install it with: pip install 'cfl[flower]'"
    assert wanted in str(found.exception), found.output


class Ended:
    """A SuperNode that says something, and ends at the second look. said: of each of them, and its status."""

    def __init__(self, *said):
        self.said, self.commands = iter(said), []

    def __call__(self, command, *, stdout, **options):
        text, self.returncode = next(self.said)
        stdout.write(text.encode())
        stdout.flush()
        self.commands.append(command)
        self.looks = iter([None])
        return self

    def poll(self):
        return next(self.looks, self.returncode)

    def terminate(self):
        pass

    def wait(self, timeout=None):
        return self.returncode


def exit_code(reason):
    """What a SuperNode says when it cannot connect."""
    head = "Failed to initialize the connection to the SuperLink."
    return f"Starting\nExit Code: 305\n{head}\n{reason}\n\nThe SuperNode could not ...\n", 1


def test_a_node_joins_again_until_it_is_refused_for_good(tmp_path, monkeypatch, capsys):
    slept = []
    unknown_key, interrupted = "[code: 2004] Failed to activate SuperNode.", ("SuperNode ID: 7\nKeyboardInterrupt", -2)
    ended = Ended(("", 0), exit_code(unknown_key), interrupted, exit_code("[SSL] wrong authority"))
    starts(monkeypatch, ended)
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    reason = r"the SuperNode ended: Failed to initialize .* SuperLink\. \[SSL\] wrong authority \(all of it in "
    with pytest.raises(CflError, match=reason):
        join(tmp_path, certificate=certificates(tmp_path) / "ca.crt", key=key(tmp_path))
    assert slept == [supernode.AGAIN] * 3
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"node 'node': joining {HERE}; Flower's output is in ")
    assert said[1] == f"the SuperLink at {HERE} has ended, or does not know this node; joining again in 5 s"
    unknown = "does not know this node's key, or still counts its last start"
    assert said[2] == f"the SuperLink at {HERE} {unknown}; joining again in 5 s"
    assert said[3] == said[1]
    for command in ended.commands:
        assert "--root-certificates" in command and "--auth-supernode-private-key" in command
        assert "--insecure" not in command


def test_a_node_says_that_it_does_not_reach_the_server(tmp_path, monkeypatch, capsys):
    """As without TLS at a server with it: Flower tries for ever without a word."""
    starts(monkeypatch, Ended(("Starting", 0), ("SuperNode ID: 7", 0), exit_code("no more")))
    monkeypatch.setattr(supernode.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(supernode, "PATIENCE", 0.0)
    with pytest.raises(CflError, match="no more"):
        join(tmp_path)
    said = [line.split(";")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    silent = f"the SuperLink at {HERE} has not answered for 0 s"
    ended = f"the SuperLink at {HERE} has ended, or does not know this node"
    assert said == [silent, ended, ended, silent]


PARENTS = {  # what starts each program; sys.argv: the program, and an address
    "flower-supernode": """
import sys
from pathlib import Path
from cfl.flower import programs, supernode

programs.program = lambda name: sys.argv[1]
supernode.join(sys.argv[2], Path("node"), "0")
""",
    "flower-superlink": """
import sys
from pathlib import Path
import cfl
from cfl.flower import superlink

superlink.SUPERLINK = (sys.argv[1],)
superlink.serve(cfl.resolve("permuted-digits", overrides=["engine=loop"]), Path("out"), sys.argv[2])
""",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("name", PARENTS)
def test_a_program_ends_with_what_started_it_even_if_that_is_killed(name, tmp_path):
    # A SuperLink that is asked to end waits for readers of its logs; meanwhile its SuperExec takes the next run.
    waits = "trap '' TERM; " if name == "flower-superlink" else ""
    program = written(tmp_path / name, f"#!/bin/sh\n{waits}echo $$ > pid.new; mv pid.new pid; exec sleep 300\n")
    program.chmod(0o755)
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(Path(cfl.__file__).parents[1])}}
    parent = subprocess.Popen([sys.executable, "-c", PARENTS[name], program, free_address()], **place)
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert parent.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([started], timeout=20)
    for process in alive:
        process.kill()
    assert not alive


NAMES = ["plain name=1", 'a "b" c', "c:\\new\\", "two\nlines\ttab", "\x7f é 樹 😀 \u00a0", "'"]


@pytest.mark.parametrize("name", NAMES)
def test_flower_reads_the_options_of_a_node_as_they_are(name, tmp_path, monkeypatch):
    ended = Ended(exit_code("no such SuperLink"))
    starts(monkeypatch, ended)
    with pytest.raises(CflError, match="no such SuperLink"):
        join(tmp_path, name=name)
    (command,) = ended.commands
    found = parse_config_args([command[command.index("--node-config") + 1]])
    assert (found["name"], found["folder"], found["clients"]) == (name, str(tmp_path / "node"), "0")
    assert found.keys() == {"name", "folder", "clients", "socket"}


@pytest.mark.parametrize("name", NAMES)
def test_flower_reads_the_folders_of_a_server_as_they_are(name, tmp_path, monkeypatch):
    starts(monkeypatch, lambda command, **options: SimpleNamespace(returncode=1, stdout=b"no such SuperLink"))
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(CflError, match="flwr ended with status 1"):
        serve(folder, running=True, certificates=certificates(folder))
    home = folder / "out/flower"
    connection = tomllib.loads((home / "config.toml").read_text("utf-8"))["superlink"][superlink.CONNECTION]
    assert connection == {"address": HERE, "root-certificates": str(folder / "tls/ca.crt")}
    made = tomllib.loads((home / "project/pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    assert made["output"] == str(folder / "out")


def test_a_served_run_ends_with_its_results(tmp_path, monkeypatch):
    config = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=1", "engine=loop"])
    result, folder = cfl.run(config, output=tmp_path / "alone"), tmp_path / "out"

    def finishes(command, **options):
        if command[1] == "log":
            shutil.copy(tmp_path / "alone" / "metrics.json", folder)
        return SimpleNamespace(returncode=0, stdout=b"Successfully started run 7")

    starts(monkeypatch, finishes)
    words = ["serve", tmp_path / "alone" / "config.yaml", "--output", folder, "--running"]
    found = CliRunner().invoke(app, [str(word) for word in words])
    acc, fgt = (f"{100 * result.metrics[name]:.1f}%" for name in ("acc", "fgt"))
    assert found.exit_code == 0, found.output
    assert f"Accuracy: {config.title}" in " ".join(found.output.split())  # of the table with the accuracy matrix
    assert found.output.splitlines()[-1] == f"ACC {acc}, FGT {fgt}; results in {folder}"


@pytest.mark.parametrize(("rounds", "more"), [(0, ""), (1, " and --resume")])
def test_an_interrupted_server_says_how_to_go_on(rounds, more, tmp_path, monkeypatch):
    def is_interrupted(command, **options):
        if rounds:
            (tmp_path / "rounds.jsonl").touch()
        raise KeyboardInterrupt

    starts(monkeypatch, is_interrupted)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolve.dump(CONFIG)))
    words = ["serve", str(tmp_path / "config.yaml"), "--output", str(tmp_path), "--running"]
    assert f"interrupted; continue with the same command{more}\n" in CliRunner().invoke(app, words).output


def test_flower_keeps_its_files_in_the_run_and_says_nothing_to_its_makers(tmp_path, monkeypatch):
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    found = programs.environment(tmp_path)
    assert found["FLWR_HOME"] == str(tmp_path) and found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert programs.environment(tmp_path)["FLWR_TELEMETRY_ENABLED"] == "1"
