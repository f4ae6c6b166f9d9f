"""Simulations on Flower, without Ray: the figures of engine=loop, for any number of workers, killed or not."""

import math
import threading
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import cfl
from cfl.core import ConfigError, UpdateError, plugins, rng
from cfl.core.version import __version__
from cfl.flower import simulation
from cfl.flower.in_process import InProcessGrid
from cfl.flower.node import Node
from cfl.runtime.builder import EngineParts
from tests import toy
from tests.flower.federation import PUBLIC, Log, figures, unlike
from tests.runtime.test_resume import Killed, finished

IN_PROCESS = ("engine=flower", "flower.address=in-process", "workers=3")
METHODS = [*plugins.strategies.names(), *plugins.local.names()]
SMALL = ("tasks=2", "rounds=2", "cohort=3", "partition.clients=12")
PRIVATE = ("dp.noise_multiplier=1", "dp.clip=1", "agg.weights=uniform", "dp.amplify=false", "dp.accountant=rdp")


def of_digits(*options, method="fedavg"):
    """Metrics of a run on Permuted Digits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same with any engine
        return cfl.run(cfl.resolve("permuted-digits", overrides=[*SMALL, *options], method=method)).metrics


def of_toys(*options, method="fedavg", model=None, **more):
    """A run of two tasks on the toy stream, in float64."""
    log, public = Log(), ("public.name=stream",) * (method in PUBLIC)
    config = toy.config("tasks=2", *public, *options, method=method)
    return cfl.run(config, stream=toy.stream(2), model=model or toy.mlp(8, 6, 6, 2), sink=log, **more), log


@pytest.mark.parametrize("method", toy.quick("fot", of=[name for name in METHODS if name not in PUBLIC]))
def test_every_method_has_the_figures_of_the_loop(method):
    loop, flower = of_digits(method=method), of_digits(*IN_PROCESS, method=method)
    assert list(unlike(loop, flower, 1e-6)) == []


@pytest.mark.parametrize("method", toy.quick("er", "scaffold", of=METHODS))
def test_in_float64_every_method_has_the_weights_of_the_loop(method):
    loop, flower = of_toys(method=method), of_toys(*IN_PROCESS, method=method)
    assert list(unlike(figures(*loop), figures(*flower), 1e-10)) == []
    assert all(leaf.dtype == torch.float64 for leaf in flower[0].params.values())


OPTIONS = {
    "secure sums": ("secagg=full",),
    "drop-outs": ("drop_rate=0.3", "partition.clients=8", "cohort=6"),
    "drop-outs of secure sums": ("secagg=full", "drop_rate=0.3", "partition.clients=8", "cohort=6"),
    "privacy of clients": PRIVATE,
    "privacy of clients by secure sums": (*PRIVATE, "secagg=full"),
    "privacy of samples": ("dp.level=example", *PRIVATE),
    "cohorts by chance": (*PRIVATE[:3], "dp.accountant=rdp", "sampling=poisson", "cohort=1"),
    "blocks": ("block=2", "cohort=4"),
    "local models": ("eval_local=1",),
}


@pytest.mark.parametrize("name", toy.quick("drop-outs of secure sums", "local models", of=OPTIONS))
def test_options_change_the_figures_as_under_the_loop(name):
    options = OPTIONS[name]
    method = "fedavg" if "privacy" in name or "chance" in name else "scaffold"
    loop, flower = of_toys(*options, method=method), of_toys(*options, *IN_PROCESS, method=method)
    assert list(unlike(figures(*loop), figures(*flower), 1e-10)) == []
    assert loop[1].warnings == flower[1].warnings
    if "dp.noise_multiplier=1" in options:
        assert 0 < flower[0].metrics["epsilon"] < math.inf


@pytest.mark.parametrize(("workers", "used"), [(1, {1}), (2, {1, 2}), (5, {1, 2, 3})])
def test_every_node_gets_blocks_as_long_as_there_are_some(workers, used, monkeypatch):
    """The three clients of a round are three blocks."""
    asked, push = [], InProcessGrid.push_messages

    def counted(grid, messages):
        asked.extend(one.metadata.dst_node_id for one in messages if one.metadata.message_type == "train")
        return push(grid, messages)

    monkeypatch.setattr(InProcessGrid, "push_messages", counted)
    of_toys(*IN_PROCESS[:2], f"workers={workers}")
    assert set(asked) == used and len(asked) == 2 * 2 * len(used)  # tasks, rounds, nodes


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.slow), pytest.param(("secagg=full",), marks=pytest.mark.slow), ("block=2",)],
    ids=["plain", "secagg", "block"],
)
def test_the_number_of_workers_changes_no_bit(options):
    runs = [of_toys(*options, *IN_PROCESS[:2], f"workers={count}", method="scaffold") for count in (1, 2, 3, 5)]
    first, *others = (figures(*run) for run in runs)
    assert [list(unlike(first, other, 0.0)) for other in others] == [[], [], []]


def test_killed_and_resumed_it_ends_with_the_same_bytes(tmp_path):
    def dies():
        raise Killed

    whole, part = tmp_path / "whole", tmp_path / "part"
    of_toys(*IN_PROCESS, method="scaffold", output=whole)
    with pytest.raises(Killed):
        config = toy.config("tasks=2", *IN_PROCESS, method="scaffold")
        cfl.run(config, stream=toy.stream(2), model=toy.mlp(8, 6, 6, 2), output=part, sink=Log({3: dies}))
    of_toys(*IN_PROCESS, method="scaffold", output=part, resume=True)
    assert finished(whole) == finished(part)


def test_observers_see_every_local_model():
    def seen(*options):
        found = {}
        of_toys(*options, observe=lambda info, id, params: found.update({(info.place, id): dict(params)}))
        return found

    loop, flower = seen(), seen(*IN_PROCESS)
    assert list(loop) == list(flower) and len(loop) == 2 * 2 * 3  # tasks, rounds, clients
    assert list(unlike(list(loop.values()), list(flower.values()), 1e-12)) == []


# --- errors ----------------------------------------------------------------------------------------------------------


class Strange(Exception):
    pass


ERRORS = {
    "KeyError": KeyError("no such leaf"),
    "ValueError": ValueError("not so"),
    "ConfigError": ConfigError("set another option"),
}


@dataclass(frozen=True)
class Trips(cfl.LocalRegularizer):
    """Raises at client 2, or warns."""

    error: str = ""

    def finish(self, params, ctx, steps):
        if self.error == "Strange" and int(ctx.client) == 2:
            raise Strange("why")
        if self.error in ERRORS and int(ctx.client) == 2:
            raise ERRORS[self.error]
        if self.error == "warn":
            warnings.warn("odd", stacklevel=1)
        return {}, ctx.state


@dataclass(frozen=True)
class Explodes(cfl.Strategy):
    """Client 2's update is not finite."""

    def loss(self, logits, ctx):
        return super().loss(logits, ctx) * torch.where(ctx.client == 2, math.inf, 1.0)


def raised(*options, **own):
    config = toy.config("cohort=4", *options, method="fedavg")
    with pytest.raises(Exception) as caught:  # noqa: B017 its class is compared
        cfl.run(config, stream=toy.stream(1), **own)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_hook_is_raised_as_under_the_loop(name):
    own = {"regularizers": {"trips": Trips(name)}}
    assert raised(*IN_PROCESS, **own) == raised(**own)


def test_an_update_that_is_not_finite_is_raised_as_under_the_loop():
    kind, text = raised(*IN_PROCESS, strategy=Explodes())
    assert (kind, text) == raised(strategy=Explodes())
    assert kind is UpdateError and text.startswith("client 2 sent an update with NaN or infinity (task 0, ")


def test_an_error_that_is_not_one_of_cfl_names_the_node_and_the_round():
    found = raised(*IN_PROCESS, regularizers={"trips": Trips("Strange")})
    assert found == (
        UpdateError, "node 3 of the simulation failed (task 0, phase train, round 0): Strange: why"
    )  # fmt: skip


def test_bad_updates_are_excluded_as_under_the_loop():
    options, stream = ("on_bad_update=exclude", "cohort=4"), toy.stream(1)
    runs = []
    for more in ((), IN_PROCESS):
        log = Log()
        config = toy.config(*options, *more, method="fedavg")
        runs.append((cfl.run(config, stream=stream, strategy=Explodes(), model=toy.mlp(8, 6, 2), sink=log), log))
    assert list(unlike(*(figures(*each) for each in runs), 1e-10)) == []
    assert [row["excluded"] for row in runs[1][1].rows] == [[2], [2]] and runs[0][1].warnings == runs[1][1].warnings


def test_warnings_of_hooks_reach_the_caller():
    config = toy.config(*IN_PROCESS, method="fedavg")
    with pytest.warns(UserWarning, match="^odd$"):
        cfl.run(config, stream=toy.stream(1), regularizers={"trips": Trips("warn")})


def test_after_an_error_the_nodes_leave_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raised(*IN_PROCESS, regularizers={"trips": Trips("KeyError")})
    of_toys(*IN_PROCESS)
    assert list(tmp_path.iterdir()) == []


# --- nodes of another make, and Flower's own simulation --------------------------------------------------------------


def _others(node, *request):
    return {"version": __version__, "parts": {**node.fingerprint.parts, "the code of method 'fedavg'": "0"}}


def _is_old(node, *request):
    return {"version": "0.0.1", "parts": node.fingerprint.parts}


def _fails(node, *request):
    raise ValueError("no data here")


REMEDY = "; engine=flower rebuilds data, model and methods on its nodes by name, so register those of your own"
JOINS = {
    _others: f"node 1 differs in the code of method 'fedavg'{REMEDY}",
    _fails: f"node 1 cannot take part: no data here{REMEDY}",
    _is_old: f"node 1 has cfl 0.0.1, the run {__version__}; install the same version",
}


@pytest.mark.parametrize("join", JOINS)
def test_a_node_that_would_compute_something_else_ends_the_run(join, monkeypatch):
    monkeypatch.setattr(Node, "join", join)
    assert raised(*IN_PROCESS) == (ConfigError, JOINS[join])


def test_a_simulation_on_a_gpu_is_refused():
    """The tensors of messages are in CPU memory, and model and data would not be."""
    rounds = SimpleNamespace(config=toy.config("device=cuda", *IN_PROCESS, method="fedavg"))
    with pytest.raises(ConfigError, match="CPU cores only; set device=cpu, or engine=vmapped for a GPU"):
        simulation.engine(EngineParts(None, rounds, None, 0.0, None, None))


def test_a_simulation_that_cannot_start_is_an_error(monkeypatch):
    def fails(*given, **options):
        raise OSError from RuntimeError("no cluster")

    monkeypatch.setattr(simulation, "run_simulation", fails)
    assert raised(*IN_PROCESS[:1], "workers=1") == (UpdateError, "Flower's simulation ended: no cluster")


def test_nodes_of_other_processes_rebuild_the_run_from_its_options(monkeypatch):
    """Flower's simulation, but that all nodes are in this process."""
    ended, before = [], threading.active_count()

    def simulated(server, app, nodes, backend_config):
        assert nodes == backend_config["init_args"]["num_cpus"] == 2
        grid = InProcessGrid([app] * nodes)
        server(grid, grid.contexts[1])
        ended.append(nodes)

    monkeypatch.setattr(simulation, "run_simulation", simulated)
    monkeypatch.setattr(simulation.machine, "keep_memory", lambda: None)  # is for a process of its own
    options = ("partition.clients=24", "cohort=4", "block=2", "eval_local=2")
    found = of_digits(*options, "engine=flower", "workers=2", method="scaffold")
    simulation._rebuilt.cache_clear()
    assert list(unlike(of_digits(*options, "engine=vmapped", method="scaffold"), found, 1e-6)) == []
    assert ended == [2] and threading.active_count() == before


# --- objects of the user's own ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(cfl.Strategy):
    """FedAvg under another name."""

    scale: float = 1.0

    def loss(self, logits, ctx):
        return self.scale * super().loss(logits, ctx)


@dataclass(frozen=True)
class Fixed(cfl.Strategy):
    """Its broadcast has a tree with the name that nodes have for frozen parameters."""

    def broadcast(self, server, info):
        return {**super().broadcast(server, info), "fixed": {"scale": torch.tensor(0.5)}}

    def loss(self, logits, ctx):
        return ctx.shared["fixed"]["scale"] * super().loss(logits, ctx)


class OwnNet(torch.nn.Sequential):
    pass


def own_net():
    with rng.fork(5):
        return OwnNet(torch.nn.Linear(8, 2))


def frozen_net():
    model = toy.mlp(8, 6, 2)
    model[0].requires_grad_(False)
    return model


OBJECTS = {
    "stream": lambda: {"stream": toy.stream(2)},
    "model": lambda: {"stream": toy.stream(2), "model": own_net()},
    "strategy": lambda: {"stream": toy.stream(2), "strategy": Own(0.5)},
    "a tree 'fixed'": lambda: {"stream": toy.stream(2), "strategy": Fixed()},
    "a tree 'fixed' beside frozen parameters": lambda: {
        "stream": toy.stream(2),
        "strategy": Fixed(),
        "model": frozen_net(),
    },
    "regularizer": lambda: {"stream": toy.stream(2), "regularizers": {"own": Trips()}},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_in_process_a_run_takes_objects_of_the_users_own(name):
    runs = [cfl.run(toy.config(*options, method="fedavg"), **OBJECTS[name]()) for options in ((), IN_PROCESS)]
    assert list(unlike(runs[0].metrics, runs[1].metrics, 1e-6)) == []
    assert list(unlike(runs[0].params, runs[1].params, 1e-6)) == []
