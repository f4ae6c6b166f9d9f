"""The choice of an engine: candidates, growing blocks, memory; trials change no result. Time is simulated."""

import itertools
import math
import time

import pytest
import torch
import yaml

import cfl
from cfl import RunConfig
from cfl.contract import Client, RoundInputs, Share
from cfl.core import UpdateError, machine
from cfl.engines import choose as module
from cfl.engines.choose import Choice, _Trials, choose, undecided
from tests import toy
from tests.engines.test_loop import info_of
from tests.engines.test_vmapped import model_of, samples_of

CPU = torch.device("cpu")


class Trials:
    """Builds engines whose rounds take `seconds(name, block, number of clients)` on a simulated clock.

    rounds: (name, block) of the engine and the clients of every round; bytes: growth that each engine reports.
    """

    def __init__(self, monkeypatch, seconds, bytes=0, compiling=0.0):
        self.now, self.rounds, self.engines, self.compiling = 0.0, [], [], compiling
        self.seconds, self.bytes = seconds, bytes
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(machine, "peak_bytes", lambda device: 0)
        monkeypatch.setattr(machine, "synchronize", lambda device: None)

    def build(self, name, block, compile=False):
        self.engines.append(Trial(self, name, block, compile))
        return self.engines[-1]

    def choose(self, engine, clients=20, device=CPU, batch_size=2, shares=None, rounds=1, **options):
        config = RunConfig(benchmark="toy", engine=engine, local={"batch_size": batch_size}, **{"workers": 1} | options)
        info = info_of(model_of(), range(clients))
        shares = shares or {0: Share(samples_of(9), torch.arange(9))}
        members = [Client(id, shares, 0, (0,)) for id in range(clients)]
        found = choose(config, device, self.build, RoundInputs(info, {}, members, {}), rounds)
        assert all(trial.closed for trial in self.engines)
        return found


class Trial:
    gathers = {}

    def __init__(self, trials, name, block, compile):
        self.trials, self.place, self.grown, self.closed = trials, (name, block), trials.bytes, False
        self.faster, self.compiling = (0.5, trials.compiling) if compile else (1.0, 0.0)

    def collect(self, total, inputs, observe):
        self.trials.rounds.append((self.place, inputs.clients))
        self.trials.now += self.faster * self.trials.seconds(*self.place, len(inputs.clients)) + self.compiling
        self.compiling = 0.0  # the first round compiles

    def close(self):
        self.closed = True


def chosen(monkeypatch, engine, times, bytes=0, free=1000, **options):
    """Return the choice and the tried candidates. times: (name, block) to seconds with one thread, or an error."""

    def seconds(name, block, clients):
        if isinstance(times[name, block], Exception):
            raise times[name, block]
        return times[name, block] / torch.get_num_threads()

    monkeypatch.setattr(module, "SECONDS", math.inf)  # keeps all clients
    monkeypatch.setattr(machine, "free_bytes", lambda device: free)
    trials = Trials(monkeypatch, seconds, bytes)
    return trials.choose(engine, **options), list(dict.fromkeys(place for place, _ in trials.rounds))


LOOP = {("loop", None): 10.0}


def vmapped(*times, name="vmapped", last=20):
    return {(name, min(2**power, last)): time for power, time in enumerate(times, 1)}


@pytest.mark.parametrize(
    ("times", "expected", "most"),
    [
        ((12, 13), ("loop", None), 4),  # no block is faster than the loop
        ((8, 8.2), ("vmapped", 2), 4),  # a doubled block is slower
        ((8, 8.1), ("vmapped", 4), 4),  # within the noise: the larger block
        ((12, 8, 5, 5.2), ("vmapped", 8), 16),  # small blocks are slower than the loop, larger ones faster
        ((8, 6, 4, 3, 2), ("vmapped", 20), 20),  # all clients at once
        ((9.9, 9.85), ("loop", None), 4),  # within the noise: the simpler engine
    ],
)
def test_blocks_double_while_that_saves_time(monkeypatch, times, expected, most):
    found, tried = chosen(monkeypatch, "auto", LOOP | vmapped(*times))
    assert found == Choice(*expected, 1) and tried[0] == ("loop", None) and tried[-1] == ("vmapped", most)


@pytest.mark.parametrize(("free", "most"), [(1000, 20), (250, 20), (249, 2)])
def test_blocks_double_while_memory_lasts(monkeypatch, free, most):
    """A block takes 100 bytes, the next one 200: it is tried if that is at most 80 % of the free memory, 250."""
    found, _ = chosen(monkeypatch, "vmapped", vmapped(8, 6, 4, 3, 2), bytes=100, free=free)
    assert found == Choice("vmapped", most, 1)


def test_a_cpu_with_several_cores_runs_processes(monkeypatch):
    """With 3 workers, a worker's share of 20 clients is 7, and each worker takes the memory of a block."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    times = {("pool", None): 10.0} | vmapped(8, 6, 4, name="pool+vmapped", last=7) | vmapped(12, 13)
    found, tried = chosen(monkeypatch, "auto", times, workers=3)
    assert found == Choice("pool+vmapped", 7, 1) and {name for name, _ in tried} == {"pool", "pool+vmapped", "vmapped"}
    found, _ = chosen(monkeypatch, "auto", times | vmapped(5, 3, 3.2), workers=3)
    assert found == Choice("vmapped", 4, 3)  # a small model: threads are faster than processes
    found, _ = chosen(monkeypatch, "auto", times, workers=3, threads=3, bytes=100, free=700)  # 2 x 100 x 3 > 80 %
    assert found == Choice("pool+vmapped", 2, 3)
    found, tried = chosen(monkeypatch, "auto", LOOP | vmapped(12, 13), workers=3, device=torch.device("cuda"))
    assert found == Choice("loop", None, 1) and "pool" not in dict(tried)  # one process on a GPU


def test_slow_steps_are_timed_with_few_clients(monkeypatch):
    """A client takes 3/32 s alone: 4 clients fit into the 0.4 s of a round. Each worker gets 2 or more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for workers, clients in ((1, 4), (3, 6), (5, 10)):
        trials = Trials(monkeypatch, lambda name, block, clients: 3 / 32 * clients)
        trials.choose("auto", workers=workers)
        seen = [len(given) for _, given in trials.rounds]
        assert seen[0] == 1 and set(seen[3:]) == {clients}


def test_a_hopeless_trial_is_short(monkeypatch):
    """A slow engine has the warm-up and one timed round; the loop is fast enough for the most rounds."""
    trials = Trials(monkeypatch, lambda name, block, clients: 2**-10 if name == "loop" else 1.0)
    assert trials.choose("auto") == Choice("loop", None, 1)
    places = [place for place, clients in trials.rounds if len(clients) > 1]
    hopeless = [("vmapped", block) for block in (2, 4) for _ in range(module.WARM + 1)]
    assert places == [("loop", None)] * (module.WARM + module.MOST) + hopeless


def test_close_choices_go_by_the_median_of_three_timings(monkeypatch):
    """A block is as slow as the loop but for its first trial, as if another process had slept during that one."""
    trials = Trials(monkeypatch, lambda name, block, clients: next(own[name, block]))
    rounds = module.WARM + module.MOST
    own = {place: itertools.repeat(0.004) for place in (("loop", None), ("vmapped", 4))}
    own["vmapped", 2] = itertools.chain(itertools.repeat(0.0035, rounds), itertools.repeat(0.004))
    assert trials.choose("auto") == Choice("loop", None, 1)
    own["vmapped", 2] = itertools.repeat(0.0035)
    assert trials.choose("auto") == Choice("vmapped", 2, 1)


def test_the_largest_block_within_the_noise_of_the_fastest_is_chosen(monkeypatch):
    """Each block takes 1.5 % longer than the one before, so only that of 4 is within 2 % of that of 2."""
    monkeypatch.setattr(module, "BETTER", 0.98)
    trials = _Trials(None, CPU, 1, None)
    trials.seconds = {Choice("vmapped", block, 1): 1.015**power for power, block in enumerate((2, 4, 8))}
    monkeypatch.setattr(trials, "measure", lambda choice, inputs: (trials.seconds[choice], 0))
    assert trials.best() == Choice("vmapped", 4, 1)
    trials.seconds[Choice("vmapped", 2, 2)] = 0.985  # 1.5 % faster than the fastest, 3 % faster than the chosen one
    assert trials.best() == Choice("vmapped", 4, 1)
    trials.seconds[Choice("vmapped", 2, 2)] = 0.975
    assert trials.best() == Choice("vmapped", 2, 2)


def test_a_given_block_is_kept(monkeypatch):
    found, tried = chosen(monkeypatch, "auto", {("loop", 5): 10.0, ("vmapped", 5): 3.0}, block=5)
    assert found == Choice("vmapped", 5, 1) and tried == [("loop", 5), ("vmapped", 5)]  # the loop ignores it


@pytest.mark.parametrize("error", [UpdateError("vmap"), torch.OutOfMemoryError("much"), TypeError("a tensor")])
def test_a_failing_choice_is_left_out(monkeypatch, error):
    found, _ = chosen(monkeypatch, "auto", LOOP | vmapped(error))
    assert found == Choice("loop", None, 1)
    found, _ = chosen(monkeypatch, "auto", LOOP | vmapped(8, error))
    assert found == Choice("vmapped", 2, 1)
    with pytest.raises(type(error)):  # no other engine was requested
        chosen(monkeypatch, "vmapped", vmapped(error))
    found, _ = chosen(monkeypatch, "vmapped", vmapped(8, error))
    assert found == Choice("vmapped", 2, 1)


@pytest.mark.parametrize(
    ("engine", "block", "expected"),
    [("auto", None, True), ("auto", 4, True), ("vmapped", None, True), ("pool+vmapped", None, True)]
    + [("vmapped", 4, False), ("loop", None, False), ("pool", None, False)],
)
def test_undecided_configurations(engine, block, expected):
    assert undecided(engine, block) == expected


def test_trials_take_few_steps(monkeypatch):
    share = Share(samples_of(50), torch.arange(50))
    trials = Trials(monkeypatch, lambda name, block, clients: 1.0)
    trials.choose("vmapped", shares={0: share, 1: share}, batch_size=4)
    for short in trials.rounds[0][1]:
        assert len(short) == 16 and short.steps(4) == module.STEPS and set(short.shares) == {0, 1}


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("secagg=full",), marks=pytest.mark.slow),
        pytest.param(("sampling=poisson", "cohort=1"), marks=pytest.mark.slow),
    ],
)
def test_a_measurement_changes_nothing_and_is_written_down(options, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CLIENTS", 2)
    monkeypatch.setattr(_Trials, "best", lambda self: list(self.seconds)[-1])
    common = ("tasks=1", "workers=1", *options)
    found = cfl.run(toy.config("engine=auto", *common, method="fedavg"), stream=toy.stream(1), output=tmp_path)
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["engine"] == "vmapped" and stored["block"] >= 2
    own = toy.config("engine=vmapped", f"block={stored['block']}", *common, method="fedavg")
    plain = cfl.run(own, stream=toy.stream(1))
    assert all(torch.equal(leaf, plain.params[name]) for name, leaf in found.params.items())
    assert found.metrics["bytes_up"] == plain.metrics["bytes_up"]


@pytest.mark.parametrize(
    ("rounds", "compiling", "compile", "tried", "found"),
    [
        # A trial has 4 of the 5 steps of a round and takes 0.1 s, compiled 0.05 s; so 4,000 rounds take 500 s, or 250.
        (4000, 200.0, None, True, True),
        (4000, 300.0, None, True, False),
        (1000, 1.0, None, False, False),  # 125 s are not long enough for a try
        (4000, 1.0, False, False, False),
        (10, 300.0, True, False, True),  # as configured
    ],
)
def test_compiled_steps_are_chosen_where_they_pay(monkeypatch, rounds, compiling, compile, tried, found):
    monkeypatch.setattr(module, "obstacle", lambda device: "")
    trials = Trials(monkeypatch, lambda name, block, clients: 1.0 if name == "loop" else 0.1, compiling=compiling)
    monkeypatch.setattr(module, "SECONDS", math.inf)  # keeps all clients
    choice = trials.choose("auto", block=4, rounds=rounds, compile=compile)
    assert choice[:3] == ("vmapped", 4, 1) and bool(choice.compile) == found
    assert any(trial.faster < 1 for trial in trials.engines) == tried


def test_compiled_blocks_may_beat_an_engine_without_blocks(monkeypatch):
    monkeypatch.setattr(module, "obstacle", lambda device: "")
    monkeypatch.setattr(module, "SECONDS", math.inf)
    trials = Trials(monkeypatch, lambda name, block, clients: 0.1 if name == "loop" else 0.12)
    assert trials.choose("auto", block=4, rounds=4000, compile=None) == Choice("vmapped", 4, 1, True)


@pytest.mark.parametrize(("workers", "name"), [(1, "vmapped"), (2, "pool+vmapped")])
def test_single_clients_are_compiled_where_blocks_are_slow(monkeypatch, workers, name):
    """As for convolutions: a block of two takes far longer than two clients one after another."""
    monkeypatch.setattr(module, "obstacle", lambda device: "")
    monkeypatch.setattr(module, "SECONDS", math.inf)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trials = Trials(monkeypatch, lambda name, block, clients: 0.1 if "vmapped" not in name or block == 1 else 1.0)
    assert trials.choose("auto", workers=workers, rounds=4000, compile=None) == Choice(name, 1, 1, True)


def test_compiled_steps_are_not_tried_without_a_compiler_or_with_another_engine(monkeypatch):
    monkeypatch.setattr(module, "obstacle", lambda device: "no compiler")
    trials = Trials(monkeypatch, lambda name, block, clients: 1.0 if name == "loop" else 0.1)
    assert trials.choose("auto", block=4, rounds=10**6, compile=None) == Choice("vmapped", 4, 1)
    monkeypatch.setattr(module, "obstacle", lambda device: "")
    trials = Trials(monkeypatch, lambda name, block, clients: 0.1 if name == "loop" else 1.0)
    assert trials.choose("auto", block=4, rounds=10**6, compile=None) == Choice("loop", 4, 1)
    assert trials.choose("vmapped", rounds=10**6, compile=None).compile is None  # a named engine stays as it is
    assert all(trial.faster == 1 for trial in trials.engines)


def test_a_first_choice_that_fails_is_left_out(monkeypatch):
    found, _ = chosen(monkeypatch, "auto", {("loop", None): OSError("no processes")} | vmapped(8, 9))
    assert found == Choice("vmapped", 2, 1)
    with pytest.raises(OSError, match="no processes"):  # no other choice works either
        chosen(monkeypatch, "auto", {("loop", None): OSError("no processes")} | vmapped(ValueError("neither")))


def test_a_choice_that_fails_when_it_is_timed_again_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "BETTER", 0.98)
    trials = _Trials(None, CPU, 1, None)
    trials.seconds = {Choice("vmapped", 2, 1): 1.0, Choice("vmapped", 4, 1): 0.9}

    def measure(choice, inputs):
        if choice.block == 4:
            raise MemoryError
        return trials.seconds[choice], 0

    monkeypatch.setattr(trials, "measure", measure)
    assert trials.best() == Choice("vmapped", 2, 1)


def test_with_compiled_steps_only_engines_that_compile_are_tried(monkeypatch):
    found, tried = chosen(monkeypatch, "auto", LOOP | vmapped(12, 13), compile=True)
    assert found == Choice("vmapped", 2, 1, True) and ("loop", None) not in tried
