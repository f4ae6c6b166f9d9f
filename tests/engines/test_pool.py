"""Worker processes: the same bits for any number of workers, and after the death of a worker."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import cfl
from cfl.assembly import methods
from cfl.core import ConfigError, UpdateError, machine
from cfl.engines import pool
from cfl.engines.shared_memory import Arena
from cfl.runtime import checkpoint
from cfl.runtime.builder import build_session
from cfl.runtime.run_folder import RunFolder
from tests import toy
from tests.engines.test_vmapped import ROWS, a_round, engine_of, model_of, samples_of

ROOT = Path(__file__).resolve().parents[2]


def alike(one, other):
    """Return True if two outcomes are equal to the bit."""
    return all(
        torch.equal(leaf, other.mean[owner][name])
        for owner, leaves in one.mean.items()
        for name, leaf in leaves.items()
    ) and (one.loss, one.bytes_up, list(one.states)) == (other.loss, other.bytes_up, list(other.states))


def pooled(rule=None, workers=2, block=1, name="pool", **options):
    return engine_of(name, model_of(), rules={"rule": rule} if rule else None, block=block, workers=workers, **options)


@dataclass(frozen=True)
class Trips(cfl.LocalRegularizer):
    """Fails at client 7 in a worker: at every attempt, or once if `flag` names a file that records the failure."""

    act: str = "kill"
    flag: str = ""
    parent: int = 0

    def finish(self, params, ctx, steps):
        if ctx.client == 7 and os.getpid() != self.parent and not (self.flag and Path(self.flag).exists()):
            if self.flag:
                Path(self.flag).touch()
            if self.act == "raise":
                raise KeyError("no such leaf")
            if self.act == "strange":
                raise Strange(1, 2)
            if self.act == "warn":
                warnings.warn("odd", stacklevel=1)
            if self.act == "half an answer":  # dies in the middle of its next message
                Connection._send = lambda self, buffer: (os.write(self.fileno(), bytes(buffer)[:3]), die())
            if self.act == "kill":
                die()
        return {}, ctx.state


@dataclass(frozen=True)
class Counts(cfl.LocalRegularizer):
    """A state with a leaf that counts the rounds, an unchanged leaf, and a leaf that is dropped."""

    def finish(self, params, ctx, steps):
        return {}, {"rounds": ctx.state["rounds"] + 1, "kept": ctx.state["kept"]}


@dataclass(frozen=True)
class Overwrites(cfl.LocalRegularizer):
    """Client 4 adds to its state, or to the broadcast, in place."""

    what: str = "state"

    def finish(self, params, ctx, steps):
        given = ctx.state["n"] if self.what == "state" else ctx.shared["params"]["0.bias"]
        return {}, {"n": ctx.state["n"], "m": given.add_(1.0) if ctx.client == 4 else given + 1.0}


class Strange(Exception):
    """Unpickling fails: the constructor takes other arguments than those that are stored."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", ["pool", "pool+vmapped"])
def test_any_number_of_workers_gives_the_same_bits(name):
    first, *others = (a_round(pooled(workers=count, block=2, name=name), samples_of(30), ROWS) for count in (1, 2, 3))
    assert all(alike(first, other) for other in others)


@pytest.mark.parametrize("name", ["loop", "pool", "pool+vmapped"])
def test_unchanged_leaves_of_a_state_are_neither_copied_nor_sent(name):
    def start(id):
        return {"rule/rounds": torch.ones(2), "rule/kept": torch.full((3,), float(id)), "rule/lost": torch.zeros(1)}

    states = {id: start(id) for id in ROWS}
    engine = engine_of(name, model_of(), rules={"rule": Counts()}, block=2)
    found = a_round(engine, samples_of(30), ROWS, states=states)
    for id, state in found.states.items():
        assert list(state) == ["rule/rounds", "rule/kept"]
        assert state["rule/kept"] is states[id]["rule/kept"]
        assert state["rule/kept"].tolist() == [id] * 3 and state["rule/rounds"].tolist() == [2, 2]
        assert states[id]["rule/rounds"].tolist() == [1, 1]


@pytest.mark.parametrize("what", ["state", "broadcast"])
@pytest.mark.parametrize("name", ["loop", "vmapped", "pool", "pool+vmapped"])
def test_every_engine_refuses_hooks_that_write_in_place(name, what):
    """A pool would lose the write. A worker's leaves share one version counter, so the message names its chunk."""
    engine = engine_of(name, model_of(), rules={"rule": Overwrites(what)}, block=1 if name == "pool" else 2)
    states = {id: {"rule/n": torch.zeros(2)} for id in ROWS}
    place = {"state": "the state of client 4", "broadcast": "the broadcast"}[what]
    with pytest.raises(UpdateError, match=rf"a hook writes in place to .*{place}.* \(task 0, phase train, round 0\); "):
        a_round(engine, samples_of(30), ROWS, states=states)


@pytest.mark.parametrize("act", ["kill", "half an answer"])
def test_a_worker_that_dies_is_replaced_and_changes_no_bit(act, tmp_path):
    flag = tmp_path / "died"
    whole = a_round(pooled(Trips("nothing", parent=os.getpid()), block=2), samples_of(30), ROWS)
    found = a_round(pooled(Trips(act, str(flag), os.getpid()), block=2), samples_of(30), ROWS)
    assert flag.exists() and alike(whole, found)


def test_an_error_names_clients_at_which_every_worker_dies():
    engine = pooled(Trips(parent=os.getpid()), block=2)
    message = (
        r"3 worker processes died at clients 6, 7 \(task 0, phase train, round 0\), the last with exit code -9; .*"
    )
    with pytest.raises(UpdateError, match=message + "lower workers or block"):
        a_round(engine, samples_of(30), ROWS)
    assert multiprocessing.active_children() == []


def test_an_error_reaches_the_caller_as_from_the_loop():
    for engine in (engine_of("loop", model_of(), rules={"rule": Trips("raise")}), pooled(Trips("raise"))):
        text = r"^finish failed at client 7 \(.*\): Trips\.finish raises KeyError: 'no such leaf'"
        with pytest.raises(UpdateError, match=text) as caught:
            a_round(engine, samples_of(30), ROWS)
    assert "in finish" in caught.value.__notes__[-1]  # the traceback of the other process


def test_an_error_that_cannot_be_pickled_keeps_its_name():
    with pytest.raises(RuntimeError, match="^Strange: 1 and 2"):
        a_round(pooled(Trips("strange")), samples_of(30), ROWS)


def test_after_an_error_the_same_engine_computes_the_next_round(tmp_path):
    flag = tmp_path / "raised"
    engine = pooled(Trips("raise", str(flag)))
    with pytest.raises(UpdateError, match="no such leaf"):
        a_round(engine, samples_of(30), ROWS)
    assert alike(a_round(engine, samples_of(30), ROWS), a_round(pooled(), samples_of(30), ROWS))


def test_too_small_arenas_grow(monkeypatch):
    whole = a_round(pooled(workers=2), samples_of(30), ROWS)
    sizes = []

    class Small(Arena):
        def __init__(self, bytes):
            sizes.append(bytes)
            super().__init__(bytes)

    monkeypatch.setattr(pool, "Arena", Small)
    monkeypatch.setattr(pool, "SPARE", -(10**9))  # arenas of one page, with negative `bytes`
    engine = pooled(workers=2)
    assert alike(a_round(engine, samples_of(30), ROWS), whole)
    assert min(sizes) < 0 and max(sizes) > 0
    grown = len(sizes)
    assert alike(a_round(engine, samples_of(30), ROWS), whole) and len(sizes) > grown  # `a_round` has closed the engine


def test_close_ends_the_workers_of_a_round():
    started, before = set(), multiprocessing.active_children()

    def look(client, params):
        started.update(child.pid for child in multiprocessing.active_children())

    a_round(pooled(workers=2), samples_of(30), ROWS, observe=look)  # closes the engine
    assert len(started) == 2 and multiprocessing.active_children() == before == []
    for pid in started:
        with pytest.raises(ChildProcessError):  # already reaped: not a zombie
            os.waitpid(pid, os.WNOHANG)


def test_warnings_of_clients_reach_the_caller():
    with pytest.warns(UserWarning, match="^odd$") as said:
        a_round(pooled(Trips("warn")), samples_of(30), ROWS)
    odd = [each for each in said if each.category is UserWarning]  # Python 3.12 adds a warning of its own on forks
    assert odd[0].filename == a_round.__code__.co_filename  # the line that calls cfl


def gone(pids, seconds=20.0):
    """Return True if all processes end within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SCRIPT = """
import multiprocessing, os, signal, sys, time
import cfl
from tests import toy
def show(info, client, params):
    if info.task == 0 and info.round == 1 and client == max(info.clients):
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        {action}
config = toy.config("tasks=1", "engine=pool", "block=1", "workers=3", method="fedavg")
try:
    cfl.run(config, stream=toy.stream(1), observe=show)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def started(action):
    signals = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore SIGINT
    )
    return subprocess.run(
        [sys.executable, "-c", signals + SCRIPT.format(action=action)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the table of processes")
def test_a_killed_parent_leaves_no_workers():
    """The death of the parent closes each worker's pipe, because no other worker inherits the parent's end."""
    done = started("os.kill(os.getpid(), signal.SIGKILL)")
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 3
    assert gone(pids)


def test_the_parent_handles_ctrl_c():
    """The signal goes to all processes of the group. The round ends without a loss, then the run ends."""
    done = started("os.killpg(0, signal.SIGINT)")
    assert done.stdout.splitlines()[-1] == "interrupted" and len(done.stdout.split()) == 4, done.stderr
    assert done.stderr.count("Traceback") == 0


def test_a_gpu_is_refused_before_any_fork():
    engine = pooled()
    engine.inner.model.params["0.weight"] = engine.inner.model.params["0.weight"].to("meta")
    with pytest.raises(ConfigError, match="on a GPU use engine=vmapped"):
        pool.PoolEngine(engine.inner, 1, 1, [])


def test_model_and_data_are_not_sent():
    """Known objects are sent as numbers: a message of a round has the numbers of samples and no sample."""
    config = toy.config("tasks=1", "engine=pool", "block=1", "workers=1", method="fedavg")
    sent = []

    class Counting(Arena):
        def write(self, value, known=MappingProxyType({})):
            pickled = super().write(value, known)
            sent.append(len(pickled))
            return pickled

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "Arena", Counting)
        cfl.run(config, stream=toy.stream(1), model=toy.mlp(8, 600, 2))
    assert sent and max(sent) < 4000  # bytes, of a model of 53 kB


def test_no_checkpoint_is_being_written_while_workers_are_forked(monkeypatch, tmp_path):
    """The second round starts new workers, while the checkpoint of the first takes longer than the rest."""
    alive, fork, save = [], os.fork, checkpoint.save

    def forking():
        alive.append([thread.name for thread in threading.enumerate() if thread.name == machine.WRITER])
        return fork()

    monkeypatch.setattr(os, "fork", forking)
    monkeypatch.setattr(checkpoint, "save", lambda *given: (time.sleep(0.3), save(*given)))
    config = toy.config("engine=pool", "workers=1", "checkpoint_every=1")
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        session = build_session(config, toy.stream(), methods.build(config), folder=folder)
        with contextlib.closing(session), session.recorder.writer:
            session.start(resume=False)
            for position in range(2):
                session.round(position)
                session.close()
    assert alive == [[], []]


@pytest.mark.parametrize(
    "options",
    [
        ("attack.name=sign_flip", "attack.clients=3"),
        ("dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false"),
    ],
    ids=["attack", "private"],
)
def test_a_worker_of_several_chunks_overwrites_no_sum(options):
    """A worker's next result overwrites the memory of the one before, so what a sum keeps has to be a copy."""
    common = ("tasks=1", "rounds=1", "cohort=4", *options)
    runs = [
        cfl.run(toy.config(*common, *engine, method="fedavg"), stream=toy.stream(1))
        for engine in (("engine=loop",), ("engine=pool", "workers=1", "block=1"))
    ]
    for name, leaf in runs[0].params.items():
        assert torch.allclose(leaf, runs[1].params[name], atol=1e-5), name
