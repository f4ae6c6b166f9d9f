"""Smoke runs of the papers' benchmarks, with the papers' models, on real data."""

import pytest

import cfl
from tests.toy import need_data

pytestmark = pytest.mark.data


@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark, parameters, layers, options",
    [
        ("permuted-mnist", 638_810, 4, ()),  # FOT, Table 8: all four layers of the MLP are projected, its head too
        # two of the ten heads
        pytest.param("split-cifar100", 6_704_128 - 8 * 2048 * 10, 5, ("eval_batch_size=250",), marks=pytest.mark.slow),
    ],
)
def test_two_tasks_train_for_a_few_rounds(benchmark: str, parameters: int, layers: int, options: tuple) -> None:
    need_data(benchmark.partition("-")[2])
    overrides = ["tasks=2", "rounds=1", "cohort=3", "strategy.measure_coverage=false", *options]
    result = cfl.run(cfl.resolve(benchmark, method="fot", overrides=overrides))
    assert sum(leaf.numel() for leaf in result.params.values()) == parameters
    use = result.metrics["subspace_use"]
    assert len(use) == layers and all(0 < share <= 1 for share in use.values())
    # ten classes a task; chance is 0.1, and one round is too few for more than a sign of learning
    assert result.accuracy_matrix.shape == (2, 2) and 0.05 < result.metrics["acc"] < 1


@pytest.mark.parametrize(
    "benchmark, data, sizes",
    [
        # of notMNIST the part that tests have, and MNIST
        pytest.param("five-datasets", ["notmnist", "mnist"], [(8000, 2000), (60000, 10000)], marks=pytest.mark.slow),
        # five classes of 100 and 30 images
        ("split-tiny-imagenet100", ["tiny-imagenet100"], [(500, 150), (500, 150)]),
    ],
)
def test_smoke_scale_runs(benchmark: str, data: list[str], sizes: list) -> None:
    need_data(*data)
    config = cfl.resolve(benchmark, method="fot", scale="smoke", overrides=["eval_batch_size=500"])
    stream = cfl.streams.build(benchmark, tasks=config.tasks, class_order=config.class_order)
    if len(stream.tasks[0].train) != 16851:  # not the whole of notMNIST
        assert [(len(task.train), len(task.test)) for task in stream.tasks] == sizes
    result = cfl.run(config, stream=stream)
    assert (
        len(result.metrics["subspace_use"]) == 20
        and result.accuracy_matrix.shape == (2, 2)
        and 0 <= result.metrics["acc"] < 1
    )
