"""The choice of an engine: candidates, doubling, memory; a measurement changes nothing. No test waits for a clock."""

import math
import time

import pytest
import torch
import yaml

import cfl
from cfl.contract.data import Client, Share
from cfl.core import machine
from cfl.core.errors import UpdateError
from cfl.engines import choose as module
from cfl.engines.choose import Choice, choose, undecided
from tests import toy
from tests.engines.test_loop import info_of
from tests.engines.test_vmapped import model_of, samples_of

CPU = torch.device("cpu")


class Trial:
    grown = 0

    def __init__(self, name, block):
        self.name, self.block, self.closed = name, block, False

    def round(self, *args):
        raise AssertionError("nothing is computed here")

    def close(self):
        self.closed = True


def chosen(monkeypatch, engine, times, block=None, workers=1, threads=1, clients=20, bytes=0, free=1000, device=CPU):
    """The choice where candidates (name, block) take so many seconds a thread, or raise; and those that were tried."""
    tried = []

    def build(name, block):
        tried.append(Trial(name, block))
        return tried[-1]

    def seconds(engine, device, work, most):
        time = times[engine.name, engine.block]
        if isinstance(time, Exception):
            raise time
        return time / torch.get_num_threads(), bytes

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "SECONDS", math.inf)  # of all clients
    monkeypatch.setattr(machine, "free_bytes", lambda device: free)
    info, samples = info_of(model_of(), range(clients)), samples_of(9)
    members = [Client(id, {0: Share(samples, torch.arange(9))}, 0, (0,)) for id in range(clients)]
    found = choose(engine, block, workers, threads, device, build, (info, {}, members, {}), 2)
    assert all(trial.closed for trial in tried)
    return found, list(dict.fromkeys((trial.name, trial.block) for trial in tried))


LOOP = {("loop", None): 10.0}


def vmapped(*times, name="vmapped", last=20):
    return {(name, min(2**power, last)): time for power, time in enumerate(times, 1)}


@pytest.mark.parametrize(
    ("times", "expected", "most"),
    [
        ((12, 13), ("loop", None), 4),  # blocks do not pay
        ((8, 8), ("vmapped", 2), 4),  # doubling does not
        ((12, 8, 5, 4.9), ("vmapped", 8), 16),  # the smallest blocks lose to the loop, larger ones win
        ((8, 6, 4, 3, 2), ("vmapped", 20), 20),  # all clients at once
        ((9.8, 9.7), ("loop", None), 4),  # within the noise: the simpler one
    ],
)
def test_blocks_double_as_long_as_that_saves_time(monkeypatch, times, expected, most):
    found, tried = chosen(monkeypatch, "auto", LOOP | vmapped(*times))
    assert found == Choice(*expected, 1) and tried[0] == ("loop", None) and tried[-1] == ("vmapped", most)


@pytest.mark.parametrize(("free", "most"), [(1000, 20), (250, 20), (249, 2)])
def test_blocks_double_as_long_as_memory_lasts(monkeypatch, free, most):
    """A block grew the process by 100 bytes; one twice as large takes 200, at most 80 % of what is free: 250."""
    found, _ = chosen(monkeypatch, "vmapped", vmapped(8, 6, 4, 3, 2), bytes=100, free=free)
    assert found == Choice("vmapped", most, 1)


def test_several_cores_are_for_processes(monkeypatch):
    """With 3 workers a worker's share of 20 clients is 7, and each of them takes the memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    times = {("pool", None): 10.0} | vmapped(8, 6, 4, name="pool+vmapped", last=7) | vmapped(12, 13)
    found, tried = chosen(monkeypatch, "auto", times, workers=3)
    assert found == Choice("pool+vmapped", 7, 1) and {name for name, _ in tried} == {"pool", "pool+vmapped", "vmapped"}
    found, _ = chosen(monkeypatch, "auto", times | vmapped(5, 3, 3), workers=3)  # so small that processes do not pay,
    assert found == Choice("vmapped", 4, 3)  # but threads do
    found, _ = chosen(monkeypatch, "auto", times, workers=3, threads=3, bytes=100, free=700)  # 2 x 100 x 3 > 80 % of it
    assert found == Choice("pool+vmapped", 2, 3)
    found, tried = chosen(monkeypatch, "auto", LOOP | vmapped(12, 13), workers=3, device=torch.device("cuda"))
    assert found == Choice("loop", None, 1) and "pool" not in dict(tried)  # a GPU is for one process


def test_slow_steps_are_tried_with_few_clients(monkeypatch):
    """A client takes 0.1 s by itself: 4 of them take the 0.4 s of a trial; each of 3 workers gets at least 2."""
    seen = []

    def seconds(engine, device, work, most):
        seen.append(len(work.args[-1]))
        return 0.1 * seen[-1], 0

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    info, samples = info_of(model_of(), range(20)), samples_of(9)
    members = [Client(id, {0: Share(samples, torch.arange(9))}, 0, (0,)) for id in range(20)]
    for workers, clients in ((1, 4), (3, 6)):
        seen.clear()
        choose("auto", None, workers, 1, CPU, Trial, (info, {}, members, {}), 2)
        assert seen[0] == 1 and set(seen[1:]) == {clients}


def test_a_trial_without_hope_is_short():
    """Rounds of 10 ms where 4 ms were hoped for: two to warm up, and one that shows it."""
    rounds = []
    engine = Trial("loop", None)
    module._seconds(engine, CPU, lambda: (rounds.append(0), time.sleep(0.01)), 0.004)
    assert len(rounds) == module.WARM + 1
    module._seconds(engine, CPU, lambda: rounds.append(0), math.inf)
    assert len(rounds) == 2 * module.WARM + 1 + module.MOST  # so fast that time is no bound


def test_a_block_that_is_given_stays(monkeypatch):
    found, tried = chosen(monkeypatch, "auto", {("loop", 5): 10.0, ("vmapped", 5): 3.0}, block=5)
    assert found == Choice("vmapped", 5, 1) and tried == [("loop", 5), ("vmapped", 5)]  # the loop has no use for it


@pytest.mark.parametrize("error", [UpdateError("vmap"), torch.OutOfMemoryError("much"), TypeError("a tensor")])
def test_what_fails_is_not_chosen(monkeypatch, error):
    found, _ = chosen(monkeypatch, "auto", LOOP | vmapped(error))
    assert found == Choice("loop", None, 1)
    found, _ = chosen(monkeypatch, "auto", LOOP | vmapped(8, error))
    assert found == Choice("vmapped", 2, 1)
    with pytest.raises(type(error)):  # nothing else was asked for
        chosen(monkeypatch, "vmapped", vmapped(error))
    found, _ = chosen(monkeypatch, "vmapped", vmapped(8, error))
    assert found == Choice("vmapped", 2, 1)


@pytest.mark.parametrize(
    ("engine", "block", "expected"),
    [("auto", None, True), ("auto", 4, True), ("vmapped", None, True), ("pool+vmapped", None, True)]
    + [("vmapped", 4, False), ("loop", None, False), ("pool", None, False)],
)
def test_what_has_to_be_measured(engine, block, expected):
    assert undecided(engine, block) == expected


def test_trials_are_short():
    share = Share(samples_of(50), torch.arange(50))
    short = module._shortened(Client(3, {0: share, 1: share}, 1, (1,)), 4)
    assert len(short) == 16 and short.steps(4) == module.STEPS and set(short.shares) == {0, 1}


@pytest.mark.parametrize("options", [(), ("secagg=full",), ("sampling=poisson", "cohort=1")])
def test_a_measurement_changes_nothing_and_is_written_down(options, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CLIENTS", 2)
    monkeypatch.setattr(module, "_CLOSE", math.inf)
    monkeypatch.setattr(module, "_BETTER", math.inf)  # the last candidate wins
    common = ("tasks=1", "workers=1", *options)
    found = cfl.run(toy.config("engine=auto", *common, method="fedavg"), stream=toy.stream(1), output=tmp_path)
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["engine"] == "vmapped" and stored["block"] >= 2
    own = toy.config("engine=vmapped", f"block={stored['block']}", *common, method="fedavg")
    plain = cfl.run(own, stream=toy.stream(1))
    assert all(torch.equal(leaf, plain.params[name]) for name, leaf in found.params.items())
    assert found.metrics["bytes_up"] == plain.metrics["bytes_up"]
