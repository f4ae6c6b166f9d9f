"""The pilot study of FedProj (2025), section 3: on Iris, projected clients do not forget the classes that they lack.

The paper's 64 % for FedAvg and 93.33 % for FedProj do not follow from the settings that it prints, see the preset. What
it means to show is seen before averaging: what training on a class of its own does to a client's other classes.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch

import cfl
from cfl import cli
from cfl.config.overrides import read_yaml

METHODS, SEEDS = ("fedavg", "fedproj"), (0, 1, 2)


@cache
def local(method, seed):
    """Accuracy (3,) of the clients' models on all 150 samples after local training in the last round."""
    found = []
    config = cfl.resolve("iris", method=method, seed=seed, overrides=["engine=vmapped", "block=3"])
    result = cfl.run(config, observe=lambda info, id, params: found.append((info.round, id, params)))
    assert [(round, id) for round, id, _ in found[-3:]] == [(19, 0), (19, 1), (19, 2)]
    return np.array(result.metrics["local_accuracy"]), result, [params for _, _, params in found[-3:]]


@pytest.mark.slow
def test_projection_keeps_the_classes_that_a_client_lacks():
    """Over ten seeds FedAvg has 76.0 % (deviation 2.2) and FedProj 94.0 % (1.1) of the mean of the clients."""
    fedavg, fedproj = (np.array([local(method, seed)[0] for seed in SEEDS]) for method in METHODS)
    assert fedavg.shape == fedproj.shape == (3, 3)
    assert fedproj.mean() - fedavg.mean() >= 0.10
    assert fedproj.min() >= 0.80


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_without_projection_the_client_of_the_middle_class_forgets_a_neighbour(seed):
    """Along the first component the classes lie in a row, the first one apart. The client that holds the second takes
    all of the third for its own, while the first stays what it was: 100 of 150 are right."""
    accuracy, result, models = local("fedavg", seed)
    assert accuracy.argmin() == 1 and accuracy[1] == pytest.approx(2 / 3, abs=0.02)
    train = cfl.streams.build("iris").tasks[0].train
    x, y = train.gather(torch.arange(150))
    means = [float(x[y == label, 0].mean()) for label in range(3)]
    assert means == sorted(means) and means[1] - means[0] > 1.5 * (means[2] - means[1])
    with result.model.evaluation():
        found = result.model.logits(models[1], x, 0).argmax(1)
    right = [float((found[y == label] == label).float().mean()) for label in range(3)]
    assert right[0] > 0.95 and right[1] > 0.95 and right[2] < 0.1


def test_the_stored_command_is_the_one_that_ran(script, monkeypatch, tmp_path):
    pilot_study = script("pilot_study")
    monkeypatch.setattr(pilot_study, "METHODS", ())
    monkeypatch.setattr(pilot_study, "draw", lambda found, output: None)
    path = str(tmp_path / "with space.json")
    monkeypatch.setattr("sys.argv", ["pilot_study.py", "--seeds", "2", "--json", path])
    pilot_study.main()
    stored = json.loads((tmp_path / "with space.json").read_text())
    assert stored["command"] == f"python pilot_study.py --seeds 2 --json '{path}'" and stored["methods"] == {}


@pytest.mark.slow
def test_the_global_model_does_not_lose_by_projection():
    """The averages are nearer to each other than the local models: 87.7 % and 95.9 % over ten seeds."""
    fedavg, fedproj = (np.mean([local(method, seed)[1].metrics["acc"] for seed in SEEDS]) for method in METHODS)
    assert fedproj >= 0.9 and fedproj > fedavg


@pytest.mark.slow
def test_the_study_runs_from_the_command_line(tmp_path, capsys):
    folder, short = tmp_path / "run", ("--set", "rounds=3")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "iris", "--method", "fedproj", *short, "--output", str(folder), "--seed", "1"])
    assert stop.value.code == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert f"ACC {metrics['acc']:.1%}" in capsys.readouterr().out
    assert (metrics["method"], metrics["benchmark"], metrics["seed"]) == ("fedproj", "iris", 1)
    assert len(metrics["local_accuracy"]) == 3 and all(0.3 < value <= 1 for value in metrics["local_accuracy"])
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    # MLP 2-32-32-3: (2 + 1) 32 + (32 + 1) 32 + (32 + 1) 3 = 1251 float32 parameters each way. Up go 150 x 3 logits and
    # a count of one; down, from the second round on, 150 places of 8 bytes and 150 x 3 logits.
    up, down = 4 * 1251 + 4 * 150 * 3 + 4, 4 * 1251 + 150 * (8 + 4 * 3)
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [
        (3 * up, 3 * 4 * 1251), (3 * up, 3 * down), (3 * up, 3 * down),
    ]  # fmt: skip
    kept = read_yaml(folder / "config.yaml")
    assert kept["method"] == "fedavg" and kept["regularizers"] == ["fedproj"] and kept["public"]["name"] == "stream"
    assert kept["regularizer"]["fedproj"]["memory_batch"] == 150
