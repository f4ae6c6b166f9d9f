"""A project's two apps without a network, and nodes with data of their own."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.cli.build import build

import cfl
from cfl.core import CheckpointError, ConfigError, DataError, plugins
from cfl.flower import answers, apps, node, own_data, project, wire
from cfl.flower.deployment import MemberPopulation
from cfl.flower.forward import client, send
from cfl.flower.in_process import InProcessGrid
from cfl.flower.link import Link
from cfl.runtime.population import Population
from tests import toy
from tests.flower.federation import signing_keys

OPTIONS = ("tasks=2", "rounds=2", "partition.clients=3", "cohort=3", "seed=1")
PRIVATE = ("dp.noise_multiplier=1", "agg.weights=uniform", "dp.noise_seed=system")
UNMEASURED = "strategy.measure_coverage=false"


def written(folder, *options, method="fot"):
    """The configuration of a small run, and the path of its project's config.yaml."""
    config = cfl.resolve("permuted-digits", method=method, overrides=[*OPTIONS, *options])
    return config, project.write(config, folder / "out") / project.PACKAGE / "config.yaml"


def served(path, folder, options):
    grid = InProcessGrid([client(path, lambda: apps.answer) for _ in options], options)
    return apps.serve(path, grid, folder / "out").metrics


def shares(config, path):
    """Each client's samples of each task, as the model sees them."""
    stream = cfl.streams.build("permuted-digits", tasks=2, seed=config.seed)
    dealt = Population(stream, config)
    for client_id in range(3):
        for task, one in enumerate(stream.tasks):
            yield client_id, task, *one.train.gather(dealt.deals[task].of(client_id))


def with_files(folder, config, path, without=()):
    """The options of three nodes with files of their own. without: clients and tasks that have no file."""
    for client_id, task, x, y in shares(config, path):
        (folder / str(client_id)).mkdir(exist_ok=True)
        if (client_id, task) not in without:
            np.savez(folder / str(client_id) / f"task{task}.npz", x=x.numpy(), y=y.numpy())
    return [
        {"clients": str(one), "folder": str(folder / f"node{one}"), "data": str(folder / str(one))} for one in range(3)
    ]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "out/rounds.jsonl").read_text().splitlines()]


def test_nodes_with_a_part_of_the_benchmark_have_the_figures_of_one_machine(tmp_path):
    config, path = written(tmp_path)
    nodes = [{"clients": ids, "folder": str(tmp_path / ids)} for ids in ("0,2", "1")]
    found, expected = served(path, tmp_path, nodes), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    assert (found["bytes_up"], found["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])


def test_clients_of_nodes_sign_with_the_keys_in_a_folder(tmp_path):
    config, path = written(tmp_path, "secagg=full", UNMEASURED, "secure.consistency=true", "secure.quorum=0.9")
    keys = signing_keys(tmp_path / "keys", 3)
    nodes = [{"clients": ids, "folder": str(tmp_path / ids), "signing-keys": str(keys)} for ids in ("0,2", "1")]
    found, expected = served(path, tmp_path, nodes), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    assert (found["bytes_up"], found["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])
    del nodes[1]["signing-keys"]
    grid = InProcessGrid([client(path, lambda: apps.answer) for _ in nodes], nodes)
    answers = Link(grid, deadline=5.0).ask("query.join", {1: None, 2: None})
    assert answers[1].fault is None
    assert answers[2].fault == (
        "secure.consistency=true needs keys to sign with; start the node with --signing-keys FOLDER"
    )


@pytest.mark.parametrize("options", [("secagg=full", UNMEASURED), ("secagg=none",)])
def test_a_node_with_signing_keys_joins_no_run_without_the_check(options, tmp_path):
    _, path = written(tmp_path, *options)
    nodes = [{"clients": "0-2", "folder": str(tmp_path / "n"), "signing-keys": str(signing_keys(tmp_path / "keys", 3))}]
    grid = InProcessGrid([client(path, lambda: apps.answer)], nodes)
    fault = Link(grid, deadline=5.0).ask("query.join", {1: None})[1].fault
    assert fault.startswith("this node has --signing-keys, and the server's config.yaml no consistency check; set ")


LOCAL = [(f"engine={name}", secagg) for name in ("pool", "vmapped", "pool+vmapped") for secagg in ("none", "full")]


@pytest.mark.parametrize(("engine", "secagg"), toy.quick(("engine=pool+vmapped", "full"), of=LOCAL))
def test_nodes_compute_by_the_local_engines(engine, secagg, tmp_path):
    config, path = written(tmp_path, f"secagg={secagg}", UNMEASURED, engine, "block=2", "workers=2")
    found = served(path, tmp_path, [{"clients": "0-2", "folder": str(tmp_path / "n")}])["accuracy_matrix"]
    alone = cfl.run(config).metrics["accuracy_matrix"]
    assert np.allclose(np.array(found, dtype=float), np.array(alone, dtype=float), equal_nan=True)


def test_a_node_without_a_compiler_traces_its_steps_and_says_so(monkeypatch, capsys):
    """As a run on one machine does; the server, or other nodes, may have a compiler."""
    monkeypatch.setattr("cfl.runtime.runner.obstacle", lambda device: "no C++ compiler is found")
    config = cfl.resolve("permuted-digits", overrides=[*OPTIONS, "engine=vmapped", "block=3", "compile=true"])
    engine, _, _ = node.built(config, None)
    assert not engine.compile
    assert "no C++ compiler is found; the steps are traced instead" in capsys.readouterr().err


def test_a_run_is_continued_where_the_states_of_its_clients_are(tmp_path):
    config, path = written(tmp_path, method="er")
    nodes = [{"clients": "0-2", "folder": str(tmp_path / "n")}]
    served(path, tmp_path, nodes)
    later, out = config.model_copy(update={"tasks": 3}), tmp_path / "out"
    with pytest.raises(CheckpointError) as found:
        cfl.run(later, output=out, resume=True)
    assert str(found.value) == (
        f"'{out}' holds a finished run that keeps the states of clients on nodes, so it cannot go on with later tasks; "
        f"start another run from its model (option start, --from '{out}')"
    )
    (out / "metrics.json").unlink()
    with pytest.raises(CheckpointError, match="keeps the states of clients on nodes, not in its checkpoints; continue"):
        cfl.run(config, output=out, resume=True)
    cfl.run(config, output=tmp_path / "alone")
    with pytest.raises(CheckpointError, match="in its checkpoints, not on nodes; continue it with the command"):
        apps.serve(path, InProcessGrid([client(path, lambda: apps.answer)], nodes), tmp_path / "alone")


def test_what_changes_no_result_changes_no_hash():
    config = cfl.resolve("permuted-digits", overrides=OPTIONS)
    other, slower = (
        config.model_copy(update={name: value})
        for name, value in {"flower": config.flower.model_copy(update={"deadline": 5.0}), "rounds": 3}.items()
    )
    assert apps.hash_of(other) == apps.hash_of(config) != apps.hash_of(slower)


def test_a_run_that_begins_has_an_id_of_its_own_and_keeps_it(tmp_path):
    ids = [apps.run_id(tmp_path / name) for name in "ab"]
    for name in "ab":
        (tmp_path / name / "config.yaml").touch()
    assert [apps.run_id(tmp_path / name) for name in "ab"] == ids and ids[0] != ids[1]


def test_clients_whose_nodes_have_left_keep_their_weight():
    """Client 0 has 30 samples of task 0, client 1 has 10; client 2 never joined. Shares: 30 / 40 and 10 / 40."""
    config = cfl.resolve("permuted-digits", overrides=OPTIONS)
    stream = cfl.streams.build("permuted-digits", tasks=2, seed=config.seed)
    members = SimpleNamespace(samples={0: (30, 0), 1: (10, 5)}, joined={})
    population = MemberPopulation(stream, config, members)
    assert population.owners((0,)) == (0, 1) and population.owners((1,)) == (1,)
    assert (population.fraction((0,), (0,)), population.fraction((1,), (0,))) == (0.75, 0.25)


def test_notes_on_the_parts_of_the_benchmark_are_not_about_data_of_nodes():
    """With alpha = 0.05, some of 200 clients get no part of a task."""
    options = ("partition.name=dirichlet", "partition.alpha=0.05", "partition.clients=200")
    config = cfl.resolve("permuted-digits", overrides=[*OPTIONS, *options])
    stream = cfl.streams.build("permuted-digits", tasks=2, seed=config.seed)
    for samples, expected in (({}, Population(stream, config).notes()), ({0: (30, 0)}, [])):
        assert MemberPopulation(stream, config, SimpleNamespace(samples=samples)).notes() == expected
    assert Population(stream, config).notes()[0].startswith("clients without data are never sampled: task 0: ")


@pytest.mark.slow
def test_nodes_of_a_simulation_share_the_clients(tmp_path):
    config, path = written(tmp_path)
    nodes = [{"partition-id": str(place), "num-partitions": "2"} for place in range(2)]
    assert served(path, tmp_path, nodes)["accuracy_matrix"] == cfl.run(config).metrics["accuracy_matrix"]


def test_nodes_with_files_have_the_figures_of_the_same_data_on_one_machine(tmp_path):
    config, path = written(tmp_path)
    found, expected = served(path, tmp_path, with_files(tmp_path, config, path)), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    assert found["bytes_up"] == expected["bytes_up"]


@pytest.mark.slow
def test_nodes_hold_the_same_samples_of_the_benchmark_out(tmp_path):
    config, path = written(tmp_path, "validation=0.1")
    found = served(path, tmp_path, [{"clients": "0-2", "folder": str(tmp_path / "n")}])
    expected = cfl.run(config).metrics
    assert [found[name] for name in ("accuracy_matrix", "validation_matrix")] == [
        expected[name] for name in ("accuracy_matrix", "validation_matrix")
    ]


@pytest.mark.parametrize(
    ("method", "options", "fault"),
    [
        ("fot", "validation=0.1", "validation=0.1 holds samples of the benchmark out, and this node has"),
        ("feddf", "public.name=stream", "feddf reads public data, which a node with data of its own lacks"),
    ],
)
def test_a_node_with_data_of_its_own_may_not_join_a_run_that_needs_those_of_the_benchmark(
    method, options, fault, tmp_path
):
    _, path = written(tmp_path, options, method=method)
    node = {"clients": "0", "folder": str(tmp_path / "n"), "data": "permuted-digits"}
    link = Link(InProcessGrid([client(path, lambda: apps.answer)], [node]), deadline=60.0)
    (answer,) = link.ask("query.join", {1: None}).values()
    assert fault in answer.fault
    assert answer.error == "ConfigError"  # so that the server refuses the node


def test_a_node_without_data_of_a_task_is_not_asked(tmp_path):
    config, path = written(tmp_path, method="fedavg")
    served(path, tmp_path, with_files(tmp_path, config, path, without={(2, 0)}))
    assert [row["clients"] for row in rows_of(tmp_path)] == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("method", "options", "task"),
    [("fedavg", (), 0), ("er", (), 1), ("fot", ("agg.weights=samples",), 0)],
)
def test_rounds_of_a_task_of_which_no_node_has_data_are_aborted(method, options, task, tmp_path, capsys):
    config, path = written(tmp_path, *options, method=method)
    served(path, tmp_path, with_files(tmp_path, config, path, without={(one, task) for one in range(3)}))
    rows = rows_of(tmp_path)
    assert {row["task"] for row in rows} == {0, 1}
    for row in rows:
        assert row["clients"] == (0 if row["task"] == task else 3)
        assert bool(row["aborted"]) == (row["task"] == task)
    why = f"no node has data to train on; a node with data of its own has them in task{task}.npz"
    assert {row["aborted"] for row in rows} == {None, why}
    assert f"round aborted, nothing is changed (task {task}, " in capsys.readouterr().err


def test_a_secure_sum_without_clients_is_refused_before_the_first_round(tmp_path):
    config, path = written(tmp_path, "secagg=full", method="fedavg")
    nodes = with_files(tmp_path, config, path, without={(one, 1) for one in range(3)})
    with pytest.raises(ConfigError, match=r"no node has data of task 1, .* give two nodes or more a file task1\.npz"):
        served(path, tmp_path, nodes)
    assert not (tmp_path / "out/rounds.jsonl").exists()


@pytest.mark.parametrize("options", [("seed=1",), ("seed=2", "class_order=natural", "tasks=3", "scenario=class")])
def test_a_registered_benchmark_is_data_too(options, tmp_path):
    """A client that has all of it computes what it computes with the only part of the run's benchmark."""
    overrides = ["partition.clients=1", "cohort=1", "rounds=2", *options]
    config = cfl.resolve("split-digits", method="fedavg", overrides=overrides)
    found = []
    for name, more in {"own": {"data": "split-digits"}, "part": {}}.items():
        made = project.write(config, tmp_path / name / "out")
        node = {"clients": "0", "folder": str(tmp_path / name / "node"), **more}
        found.append(served(made / project.PACKAGE / "config.yaml", tmp_path / name, [node]))
    assert found[0]["accuracy_matrix"] == found[1]["accuracy_matrix"] and found[0]["accuracy_matrix"][0][0] > 0.8


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("split-digits", ("tasks=2",), "task 0 .* is 'classes . .' of 2 .*, that of the run is 'permutation 0' of 10"),
        ("iris", ("tasks=1",), "task 0 of benchmark 'iris' is 'iris' of 3 classes, .*give a benchmark with the run's"),
    ],
)
def test_a_benchmark_of_other_tasks_is_refused(source, options, message, tmp_path):
    _, path = written(tmp_path, *options)
    with pytest.raises(DataError, match=message):
        own_data.read(source, path.with_name(apps.STREAM).read_text(), None)


def disjoint():
    """Two tasks of three labels each, 0 to 2 and 3 to 5, under one head: axis y is on in the samples of label y."""
    y = torch.arange(3).repeat(20)
    return cfl.from_tensors([(torch.eye(6)[y + start], y + start) * 2 for start in (0, 3)], name="disjoint")


def growing():
    return cfl.streams.with_scenario(disjoint(), "class")


@pytest.mark.parametrize(
    ("build", "scenario", "of_task_0", "of_task_1"),
    [
        (disjoint, None, {0: 0, 2: 2, 4: 4}, {3: 3, 5: 5, 1: 1}),
        (disjoint, "domain", {0: 0, 2: 2}, {3: 3, 5: 5}),
        (disjoint, "task", {0: 0, 2: 2}, {3: 0, 5: 2}),
        (disjoint, "class", {0: 0, 2: 2}, {3: 3, 5: 5}),
        (growing, None, {0: 0, 2: 2}, {3: 3, 5: 5}),
        (growing, "class", {0: 0, 2: 2}, {3: 3, 5: 5}),
        (lambda: cfl.streams.build("split-digits", tasks=2), "class", {0: 0, 1: 1}, {0: 2, 1: 3}),
        (lambda: cfl.streams.build("split-digits", tasks=2), "domain", {1: 1}, {1: 1}),
    ],
)
def test_labels_of_files_are_those_of_the_benchmark_under_any_scenario(build, scenario, of_task_0, of_task_1, tmp_path):
    """They are found without the samples of all labels. of_task_0, of_task_1: label in a file to label in the run."""
    run = build()
    for number, labels in enumerate((of_task_0, of_task_1)):
        np.savez(tmp_path / f"task{number}.npz", x=np.zeros((len(labels), *run.input_shape)), y=np.array([*labels]))
    config = cfl.resolve("split-digits", overrides=[f"scenario={scenario or 'null'}"])
    own = own_data.read(str(tmp_path), own_data.described(run, config), None)
    expected = cfl.streams.with_scenario(run, scenario)
    assert (own.scenario, own.heads) == (expected.scenario, expected.heads)
    assert [task.train.targets.tolist() for task in own.tasks] == [[*of_task_0.values()], [*of_task_1.values()]]
    assert cfl.streams.with_scenario(own, scenario) is own


@pytest.mark.parametrize(("build", "scenario"), [(disjoint, "task"), (disjoint, "class"), (growing, None)])
def test_a_label_of_another_task_is_refused(build, scenario, tmp_path):
    np.savez(tmp_path / "task1.npz", x=np.zeros((2, 6)), y=np.array([3, 2]))
    described = own_data.described(build(), cfl.resolve("iris", overrides=[f"scenario={scenario or 'null'}"]))
    with pytest.raises(DataError, match=r"labels of task 'task 1' in .* must be 3, 4, 5, as .* benchmark, not 2"):
        own_data.read(str(tmp_path), described, None)


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_nodes_with_files_have_the_figures_of_one_machine_under_scenarios(scenario, tmp_path):
    options = ("partition.clients=1", "cohort=1", f"scenario={scenario}")
    config = cfl.resolve("split-digits", method="fedavg", overrides=[*OPTIONS, *options])
    made = project.write(config, tmp_path / "out")
    for number, task in enumerate(cfl.streams.build("split-digits", tasks=2, seed=config.seed).tasks):
        x, y = task.train.gather(torch.arange(len(task.train)))
        np.savez(tmp_path / f"task{number}.npz", x=x.numpy(), y=y.numpy())
    node = {"clients": "0", "folder": str(tmp_path / "node"), "data": str(tmp_path)}
    found = served(made / project.PACKAGE / "config.yaml", tmp_path, [node])
    assert found["accuracy_matrix"] == cfl.run(config).metrics["accuracy_matrix"]


def test_bytes_alone_are_scaled_and_normalised_as_the_images_of_the_benchmark(tmp_path):
    """255 becomes (255 / 255 - 0.5) / 0.25 = 2, and 0 becomes -2."""
    x, y = torch.tensor([[255, 0], [0, 255]], dtype=torch.uint8), torch.arange(2)
    run = cfl.from_tensors([(x, y, x, y)])
    pool = replace(run.tasks[0].train.pool, mean=torch.tensor([0.5]), std=torch.tensor([0.25]))
    parts = {name: replace(getattr(run.tasks[0], name), pool=pool) for name in ("train", "test")}
    described = own_data.described(replace(run, tasks=(replace(run.tasks[0], **parts),)), cfl.resolve("iris"))
    for inputs, expected in ((x, [[2.0, -2.0], [-2.0, 2.0]]), (x.float() / 255, [[1.0, 0.0], [0.0, 1.0]])):
        np.savez(tmp_path / "task0.npz", x=inputs.numpy(), y=y.numpy())
        found, _ = own_data.read(str(tmp_path), described, None).tasks[0].train.gather(torch.arange(2))
        assert found.tolist() == expected


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no data of the run's tasks"),
        ({"x": np.zeros((4, 64))}, "has no array y; it must hold x, y, not x"),
        ({"x": np.zeros((4, 63)), "y": np.zeros(4)}, r"have shape \(63,\), those of the run \(64,\)"),
        (
            {"x": np.zeros((4, 64)), "y": np.full(4, 10)},
            "must be 0, 1, 2, 3, 4 and 5 more, .* benchmark, not 10",
        ),
        ({"x": np.full((4, 64), np.nan), "y": np.zeros(4)}, "NaN"),
    ],
)
def test_data_that_do_not_fit_the_run_are_refused(tmp_path, arrays, message):
    _, path = written(tmp_path)
    (tmp_path / "data").mkdir()
    if arrays:
        np.savez(tmp_path / "data/task0.npz", **arrays)
    with pytest.raises(DataError, match=message):
        own_data.read(str(tmp_path / "data"), path.with_name(apps.STREAM).read_text(), None)


def test_data_that_are_nowhere_are_refused(tmp_path):
    with pytest.raises(DataError, match="neither a folder nor a benchmark"):
        own_data.read(str(tmp_path / "nowhere"), json.dumps({"tasks": [], "input_shape": []}), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["engine=auto"], "auto does not name an engine for the nodes"),
        (["engine=vmapped"], "engine=vmapped without a block does not name an engine"),
        (["secagg=sum"], "only simulates"),
        (["eval_local=1"], "local models stay"),
        (["attack.name=label_flip"], "simulates hostile clients, and nodes are real"),
        (["dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false"], "dp.noise_seed=system"),
        ([*PRIVATE, "sampling=poisson", "cohort=2"], "nodes know the run's seed.*set dp.amplify=false"),
    ],
)
def test_what_cannot_run_on_nodes_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, *options, method="fedavg")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_nodes_on_a_gpu_are_refused(device, tmp_path):
    """The tensors of messages are in CPU memory, and model and data would not be."""
    with pytest.raises(ConfigError, match=f"nodes compute on CPU cores only, not on device={device}; set device=cpu"):
        written(tmp_path, f"device={device}")


def test_secret_cohorts_are_no_matter_where_all_clients_take_part(tmp_path):
    assert written(tmp_path, *PRIVATE, method="fedavg")[0].dp.amplify


@pytest.mark.parametrize("protection", [("secagg=full",), (*PRIVATE, "strategy.sketch=gram")])
def test_a_measurement_that_nothing_protects_is_refused_on_nodes(protection, tmp_path):
    """FOT measures coverage by the energies of each client's inputs, without masks and noise."""
    with pytest.raises(ConfigError, match=r"nothing protects phase 'coverage'.*strategy\.measure_coverage=false"):
        written(tmp_path, *protection)
    written(tmp_path, *protection, UNMEASURED)
    written(tmp_path)


@pytest.mark.parametrize("text", ["", "a", "1-", "3:4", "5-2", "0-1-2"])
def test_clients_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match="clients must be numbers such as 0-3,7"):
        apps.numbers(text)


def test_clients_that_cannot_be_waited_for_are_refused():
    with pytest.raises(ConfigError, match="the run has 3 clients, so 4 cannot be waited for"):
        apps.check(cfl.resolve("permuted-digits", overrides=OPTIONS), wait_for=4)


@pytest.mark.parametrize("options", [{}, {"clients": "0-2"}, {"folder": "node"}])
def test_a_node_without_its_options_is_told_how_to_start(options, tmp_path):
    _, path = written(tmp_path)
    grid = InProcessGrid([client(path, lambda: apps.answer)], [options])
    found = Link(grid, deadline=5.0).ask("query.join", {1: None})[1]
    assert "start it with cfl-run join" in found.fault


@pytest.mark.parametrize("how", ["its folder is gone", "it was killed", "it ends before it answers"])
def test_a_node_whose_join_has_ended_is_named_in_words(how, tmp_path):
    address = tmp_path / "node"
    with socket.socket(socket.AF_UNIX) as listening:
        if how != "its folder is gone":
            listening.bind(str(address))
        if how == "it ends before it answers":
            listening.listen()
            threading.Thread(target=lambda: listening.accept()[0].close()).start()
        grid = InProcessGrid([client(tmp_path / "config.yaml", lambda: apps.answer)], [{"socket": str(address)}])
        found = Link(grid, deadline=5.0).ask("query.join", {1: None})[1]
    assert found.fault == "its 'cfl-run join' has ended; start it again with the same --folder"
    assert found.error == ""  # so that the server asks again


@contextmanager
def answering(address, options):
    """A process of `cfl-run join`, as a thread, which ends with the context. Yields the options of its SuperNode."""
    ended = threading.Event()
    node = threading.Thread(target=answers.serve, args=(address, options, lambda: ended.is_set() or None))
    node.start()
    while not address.exists() or address.stat().st_mode & 0o777 != 0o600:  # its mode changes once it listens
        assert node.is_alive()
        time.sleep(0.01)
    yield {"socket": str(address)}
    ended.set()
    node.join()


def test_a_node_says_who_decides_whether_it_joins(tmp_path, capsys):
    _, path = written(tmp_path)
    with answering(tmp_path / "node", {"clients": "0-1", "folder": str(tmp_path / "n")}) as given:
        grid = InProcessGrid([client(path, lambda: apps.answer)], [given])
        assert Link(grid, deadline=5.0).ask("query.join", {1: None})[1].fault is None
    assert "asked to join; the server decides, and prints the reason if it refuses\n" in capsys.readouterr().out


def test_a_node_prints_why_it_cannot_answer(tmp_path, capsys):
    _, path = written(tmp_path)
    options = {"clients": "0-1", "folder": str(tmp_path / "n"), "data": "permuted-digits"}
    with answering(tmp_path / "node", options) as given:
        grid = InProcessGrid([client(path, lambda: apps.answer)], [given])
        found = Link(grid, deadline=5.0).ask("query.join", {1: None})[1]
    assert found.fault == "a node with data of its own has one client, not 2; start a node for each"
    assert capsys.readouterr().out == f"cannot answer join: {found.fault}\n"


@pytest.mark.parametrize("how", ["within its message", "before the answer"])
def test_a_node_says_in_a_line_that_the_process_with_a_message_has_ended(how, tmp_path, capsys, monkeypatch):
    asked, gone = threading.Event(), threading.Event()

    def answer(*message):
        asked.set()
        assert gone.wait(10)
        return wire.pack("an answer")

    monkeypatch.setattr(apps, "answer", answer)
    head = {"action": "train", "config": "config.yaml", "node": 1, "run": 1}
    with answering(tmp_path / "node", {}) as given:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(given["socket"])
            with link.makefile("rwb") as stream:
                if how == "within its message":
                    stream.write(b"12")  # of 8 bytes
                else:
                    send(stream, head, wire.pack(None))
                    assert asked.wait(10)
        gone.set()
        grid = InProcessGrid([client(tmp_path / "config.yaml", lambda: apps.answer)], [given])
        assert Link(grid, deadline=5.0).ask("train", {1: None})[1].value == "an answer"  # the node goes on
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "Flower's process ended before it had the answer to its message"
    assert printed.err == ""


@pytest.mark.parametrize("name", ["my_benchmark", "a benchmark of more than 32 letters", 'a"""b', "c:\\new\\"])
def test_flower_takes_the_project_of_a_benchmark_of_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins.benchmarks, "_items", dict(plugins.benchmarks._items))
    plugins.benchmarks.register(name)(plugins.benchmarks.get("permuted-digits"))
    made = project.write(cfl.resolve(name, overrides=OPTIONS), tmp_path / "out")
    monkeypatch.chdir(tmp_path)  # where Flower puts the built project
    build(made)
    assert len(list(tmp_path.glob("*.fab"))) == 1
    compile((made / project.PACKAGE / "__init__.py").read_text("utf-8"), "__init__.py", "exec")


def test_a_project_does_not_replace_another_folder(tmp_path):
    (tmp_path / "out/flower/project").mkdir(parents=True)
    (tmp_path / "out/flower/project/thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        written(tmp_path)
