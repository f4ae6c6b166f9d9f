"""A project's two apps without a network, and nodes with data of their own."""

import json

import numpy as np
import pytest

import cfl
from cfl.core import ConfigError, DataError
from cfl.flower import apps, own_data, project
from cfl.flower.forward import client
from cfl.flower.in_process import InProcessGrid
from cfl.runtime.population import Population

OPTIONS = ("tasks=2", "rounds=2", "partition.clients=3", "cohort=3", "seed=1")


def written(folder, *options, method="fot"):
    """The configuration of a small run, and the path of its project's config.yaml."""
    config = cfl.resolve("permuted-digits", method=method, overrides=[*OPTIONS, *options])
    project.write(folder / "project", config, folder / "out")
    return config, folder / "project" / project.PACKAGE / "config.yaml"


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


def test_nodes_with_a_part_of_the_benchmark_have_the_figures_of_one_machine(tmp_path):
    config, path = written(tmp_path)
    nodes = [{"clients": ids, "folder": str(tmp_path / ids)} for ids in ("0,2", "1")]
    found, expected = served(path, tmp_path, nodes), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    assert (found["bytes_up"], found["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])


def test_nodes_of_a_simulation_share_the_clients(tmp_path):
    config, path = written(tmp_path)
    nodes = [{"partition-id": str(place), "num-partitions": "2"} for place in range(2)]
    assert served(path, tmp_path, nodes)["accuracy_matrix"] == cfl.run(config).metrics["accuracy_matrix"]


def test_nodes_with_files_have_the_figures_of_the_same_data_on_one_machine(tmp_path):
    config, path = written(tmp_path)
    for client_id, task, x, y in shares(config, path):
        (tmp_path / str(client_id)).mkdir(exist_ok=True)
        np.savez(tmp_path / str(client_id) / f"task{task}.npz", x=x.numpy(), y=y.numpy())
    nodes = [
        {"clients": str(one), "folder": str(tmp_path / f"node{one}"), "data": str(tmp_path / str(one))}
        for one in range(3)
    ]
    found, expected = served(path, tmp_path, nodes), cfl.run(config).metrics
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    assert found["bytes_up"] == expected["bytes_up"]


def test_a_node_without_data_of_a_task_is_not_asked(tmp_path):
    config, path = written(tmp_path, method="fedavg")
    for client_id, task, x, y in shares(config, path):
        (tmp_path / str(client_id)).mkdir(exist_ok=True)
        if (client_id, task) != (2, 0):
            np.savez(tmp_path / str(client_id) / f"task{task}.npz", x=x.numpy(), y=y.numpy())
    nodes = [
        {"clients": str(one), "folder": str(tmp_path / f"node{one}"), "data": str(tmp_path / str(one))}
        for one in range(3)
    ]
    served(path, tmp_path, nodes)
    rows = [json.loads(line) for line in (tmp_path / "out/rounds.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [2, 2, 3, 3]


def test_a_registered_benchmark_is_data_too(tmp_path):
    config, path = written(tmp_path, "partition.clients=1", "cohort=1", method="fedavg")
    found = served(path, tmp_path, [{"clients": "0", "folder": str(tmp_path / "n"), "data": "permuted-digits"}])
    assert found["acc"] > 0.2  # ten classes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no data of the run's tasks"),
        ({"x": np.zeros((4, 64))}, "with arrays x and y"),
        ({"x": np.zeros((4, 63)), "y": np.zeros(4)}, r"have shape \(63,\), those of the run \(64,\)"),
        ({"x": np.zeros((4, 64)), "y": np.full(4, 10)}, "must be 0 to 9"),
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
        (["engine=auto"], "does not name an engine for the nodes"),
        (["secagg=sum"], "only simulates"),
        (["eval_local=1"], "local models stay"),
        (["dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false"], "dp.noise_seed=system"),
    ],
)
def test_what_cannot_run_on_nodes_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, *options, method="fedavg")


@pytest.mark.parametrize("text", ["", "a", "1-", "3:4", "5-2", "0-1-2"])
def test_clients_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match="clients must be numbers such as 0-3,7"):
        apps.numbers(text)


def test_a_project_does_not_replace_another_folder(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        written(tmp_path)
