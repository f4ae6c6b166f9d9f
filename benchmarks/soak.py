"""Kill runs, let their writes fail, and watch their memory: whether every run ends with the bytes of a calm one.

    python benchmarks/soak.py [--minutes 5] [--parts kills faults workers folder memory] [--json FILE]

kills: runs of several engines and of `cfl-run compare` are killed (SIGKILL) at random moments and resumed, for the
    given minutes in all. After every other kill all files are dated a day ahead, as if the clock had been set back.
faults: a run, a run with a pool and a comparison are cut at each write of their main process: killed before or after,
    or in the middle of the data; then full disks and flushes that fail, which must end in an error of cfl. Each is
    resumed. The runs of a comparison write in processes of their own, as a run does.
workers: the workers of a pool are killed at random moments; the run must go on.
folder: two comparisons and a report work on one folder at once.
memory: memory (MiB) and open files of a process after each of ten tasks of many rounds.

A run is FOT on permuted digits with dropout, momentum, unequal clients and drop-outs. Processes are forked from this
one, so that a kill does not cost an import. The exit status is 1 if a run ended otherwise than it has to.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from host import store
from soak_faults import CUTS, KINDS, ONLY, Writes, faulty

import cfl
from cfl.core import CflError
from cfl.core.errors import UpdateError
from cfl.runtime import checkpoint, tree_file
from cfl.runtime.callbacks import View

SHORT = ("tasks=2", "rounds=3", "cohort=6", "partition.clients=8", "partition.name=shards", "drop_rate=0.2")
NOISY = ("local.momentum=0.9", "model.dropout=[0.2,0.2]", "local.epochs=1")
ENGINES = {
    "loop": (),
    "vmapped": ("engine=vmapped", "block=3"),
    "pool": ("engine=pool", "block=2", "workers=2"),
    "pool+vmapped": ("engine=pool+vmapped", "block=2", "workers=2"),
}
COMPARE = "compare permuted-digits --methods fedavg,er --seeds 0,1 --jobs 2 --quiet --no-plot".split()
GROWTH = 5.0  # MiB from the second task to the last: accuracies, and the stored samples of more tasks
PARTS = ("kills", "faults", "workers", "folder", "memory")
OK, REFUSED, BROKEN = 0, 3, 4  # exit status of a child: finished, an error of cfl, any other error


def run(folder: Path, engine: str, *, method: str = "fot", more: Sequence[str] = (), **options: Any) -> None:
    """Train in this process, into a folder, which may hold the beginning of the run."""
    overrides = [*SHORT, *NOISY, *ENGINES[engine], *more]
    config = cfl.resolve("permuted-digits", method=method, overrides=overrides)
    cfl.run(config, output=folder, resume=folder.exists(), progress=False, **options)


def forked(work: Callable[..., None], *args: Any, **options: Any) -> int:
    """Start a process that calls `work`, with its own group, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = BROKEN
    try:
        os.setsid()
        work(*args, **options)
        status = OK
    except CflError as error:
        print(f"    {error}", file=sys.stderr)
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> int:
    """Wait for a process and return its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(pid: int, after: float) -> int | None:
    """Kill a process group after some seconds; return None, or the exit status if the process had ended by then."""
    time.sleep(after)
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        return os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError):  # before it has a group of its own
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    status = ended(pid)
    return None if status == -signal.SIGKILL else status


def digest(folder: Path) -> dict[str, bytes]:
    """What the runs below a folder have computed: their files without seconds, and the trees of the last checkpoint."""
    seconds = re.compile(rb'"(seconds|wire_bytes_up|wire_bytes_down)": [\d.e-]+')
    names = ("metrics.json", "rounds.jsonl", "config.yaml")
    paths = sorted(path for name in names for path in folder.rglob(name))
    found = {str(path.relative_to(folder)): seconds.sub(b"", path.read_bytes()) for path in paths}
    for place in folder.rglob("checkpoints"):
        trees, _ = checkpoint.load_latest(place, None, warnings.warn) or ({}, {})
        found[str(place.relative_to(folder))] = bytes(tree_file.encode(trees))
    return found


def set_clock_back(folder: Path) -> None:
    """Let all files of a run be from tomorrow, as if the clock had been set back by a day."""
    tomorrow = time.time() + 24 * 3600
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a process of a comparison that was killed may still end
            os.utime(path, (tomorrow, tomorrow))


class Soak:
    """The parts. failures: what ended otherwise than it has to, as text."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draws = folder, random.Random(seed)
        self.failures: list[str] = []

    def kills(self, seconds: float) -> dict[str, Any]:
        """Kill runs of all engines, and comparisons, in turns."""
        works = {name: partial(run, engine=name) for name in ENGINES} | {"compare": _compare}
        calm, kills, runs, clocks = {}, dict.fromkeys(works, 0), dict.fromkeys(works, 0), 0
        lasted = {}
        for name, work in works.items():
            began = time.monotonic()
            if ended(forked(work, self.folder / f"calm-{name}")) != OK:
                raise SystemExit(f"the calm run of {name} failed")
            lasted[name], calm[name] = time.monotonic() - began, digest(self.folder / f"calm-{name}")
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            name = min(works, key=lambda name: runs[name] * lasted[name])
            target = self.folder / f"{name}-{runs[name]}"
            # The longer a run lasts, the longer the pauses: a comparison that never gets past its start never ends.
            while (status := killed(forked(works[name], target), self._pause(lasted[name]))) is None:
                kills[name] += 1
                if sum(kills.values()) % 2:
                    set_clock_back(target)
                    clocks += 1
            self._expect(status == OK, f"{name}: the resumed run ended with status {status} ({target.name})")
            self._expect(digest(target) == calm[name], f"{name}: other bytes after kills ({target.name})")
            shutil.rmtree(target)
            runs[name] += 1
        return {"kills": kills, "runs": runs, "all": sum(kills.values()), "clock_set_back": clocks}

    def _pause(self, lasted: float) -> float:
        """Draw the seconds until a kill. lasted: seconds of a calm run."""
        return self.draws.uniform(0.0, 1.2) ** 2 * lasted

    def faults(self, every: int = 1) -> dict[str, Any]:
        """Let each write fail in each way. every: only each so many."""
        works = {name: partial(run, engine=name) for name in ("loop", "pool")} | {"compare": _compare}
        return {name: self._faults_of(name, work, every) for name, work in works.items()}

    def _faults_of(self, name: str, work: Callable[[Path], None], every: int) -> dict[str, int]:
        calm, listed = self.folder / f"faults-calm-{name}", self.folder / f"writes-{name}.json"
        self._expect(ended(forked(_counted, work, calm, listed)) == OK, f"{name}: the calm run failed")
        made = Writes(calm, made=json.loads(listed.read_text()))
        expected, counts = digest(calm), dict.fromkeys(KINDS, 0)
        for kind in KINDS:
            for at in range(0, replace(made, kind=kind).met, every):
                target = self.folder / "faults"
                shutil.rmtree(target, ignore_errors=True)
                status = ended(forked(_faulty, work, target, at, kind))
                what = f"{name}: {kind} at {ONLY.get(kind, 'write')} {at}"
                self._expect(status == 137 if kind in CUTS else status in (OK, REFUSED), f"{what}: status {status}")
                self._expect(ended(forked(work, target)) == OK, f"{what}: cannot be resumed")
                self._expect(digest(target) == expected, f"{what}: other bytes")
                counts[kind] += 1
        return {"writes": len(made.made), **counts}

    def workers(self, seconds: float, every: float = 10.0) -> dict[str, Any]:
        """Kill a worker of a pool every so many seconds: three deaths at one chunk would end the run."""
        target, killed = self.folder / "workers", 0
        pid = forked(run, target, "pool", more=["rounds=100000"])
        stop = time.monotonic() + seconds
        while time.monotonic() < stop and not os.waitpid(pid, os.WNOHANG)[0]:
            time.sleep(min(every, max(0.0, stop - time.monotonic())))
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(pid).children()
                if children:
                    self.draws.choice(children).kill()
                    killed += 1
        alive = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        self._expect(alive, "workers: the run ended")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        rows = (target / "rounds.jsonl").read_text().count("\n")
        return {"killed": killed, "rounds": rows}

    def folder_of_two(self) -> dict[str, Any]:
        """Let two comparisons and a report work on one folder at once."""
        target = self.folder / "shared"
        target.mkdir()
        both = [forked(_compare, target) for _ in range(2)]
        reports = 0
        while any(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in both):
            command = [sys.executable, "-c", "from cfl.cli import main; main()", "report", str(target)]
            done = subprocess.run([*command, "-o", str(self.folder / "r.html")], capture_output=True, text=True)
            self._expect("Traceback" not in done.stderr, f"report: {done.stderr}")
            reports += 1
        self._expect([ended(pid) for pid in both] == [OK, OK], "folder: a comparison failed")
        alone = self.folder / "alone"
        self._expect(ended(forked(_compare, alone)) == OK, "folder: the comparison alone failed")
        self._expect(digest(target) == digest(alone), "folder: other bytes than alone")
        return {"comparisons": 2, "reports": reports}

    def memory(self, rounds: int) -> dict[str, Any]:
        """Follow the memory and the open files of a run over so many rounds, in ten tasks."""
        watch = Watch()
        more = ["tasks=10", f"rounds={rounds // 10}", "cohort=2", "checkpoint_every=10", "drop_rate=0",
                "local.momentum=0"]  # with momentum, so many rounds on so few samples diverge  # fmt: skip
        run(self.folder / "memory", "loop", more=more, method="er", callbacks=[watch])
        early, late = watch.seen[1], watch.seen[-1]  # the first task fills caches
        self._expect(late["files"] <= early["files"], f"memory: open files grew from {early} to {late}")
        self._expect(late["mib"] <= early["mib"] + GROWTH, f"memory: it grew from {early} to {late}")
        return {"rounds": rounds, "seen": watch.seen}

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            print(f"FAILED {text}", flush=True)
            self.failures.append(text)


@dataclass
class Watch(cfl.callbacks.Callback):
    """Notes the memory and the open files of this process after each task."""

    seen: list[dict[str, float]] = field(default_factory=list)

    def on_task(self, view: View) -> None:
        me = psutil.Process()
        self.seen.append({"mib": round(me.memory_info().rss / 2**20, 1), "files": me.num_fds()})


def _compare(folder: Path) -> None:
    """`cfl-run compare`, into a folder."""
    from cfl.cli import main

    sets = [word for text in SHORT for word in ("--set", text)]
    sys.argv = ["cfl-run", *COMPARE, *sets, "--output", str(folder)]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise UpdateError(f"cfl-run compare ended with status {end.code}") from None


def _faulty(work: Callable[[Path], None], folder: Path, at: int, kind: str) -> None:
    with faulty(Writes(folder, at, kind)):
        work(folder)


def _counted(work: Callable[[Path], None], folder: Path, listed: Path) -> None:
    """Work, and list the writes in a file."""
    with faulty(Writes(folder)) as writes:
        work(folder)
    listed.write_text(json.dumps(writes.made))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the runs, removed at the end."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of `kills`, and of `workers`")
    parser.add_argument("--rounds", type=int, default=20_000, help="of `memory`")
    parser.add_argument("--every", type=int, default=1, help="`faults` takes each so many of the writes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, Any] = {}
    with scratch() as folder:
        soak = Soak(folder, options.seed)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: soak.kills(60 * options.minutes),
            "faults": lambda: soak.faults(options.every),
            "workers": lambda: soak.workers(60 * options.minutes),
            "folder": soak.folder_of_two,
            "memory": lambda: soak.memory(options.rounds),
        }
        for name in options.parts:
            began = time.monotonic()
            figures[name] = {**parts[name](), "took_seconds": round(time.monotonic() - began)}
            print(name, figures[name], flush=True)
            store(options.json, {**figures, "failures": soak.failures}, "torch")
    print(f"{len(soak.failures)} failures")
    return bool(soak.failures)


if __name__ == "__main__":
    sys.exit(main())
