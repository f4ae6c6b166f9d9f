"""Small real runs, made once for all tests of reports."""

import pytest

import cfl
from tests import toy

SMALL = ("tasks=2", "rounds=1", "model.hidden=[8]", "partition.clients=4")


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """A folder with runs of two methods and two seeds at different depths, and one unfinished run."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fot"):
        for seed in (0, 1):
            config = cfl.resolve("permuted-digits", method=method, seed=seed, overrides=SMALL)
            cfl.run(config, output=folder / "a" / f"{method}-seed{seed}" if method == "fot" else folder / f"seed{seed}")
    (folder / "killed").mkdir()
    (folder / "killed" / "config.yaml").write_text((folder / "seed0" / "config.yaml").read_text())
    return folder


@pytest.fixture(scope="session")
def painted(tmp_path_factory):
    """A folder with two runs that made images in tasks 1 and 2 of three."""
    folder = tmp_path_factory.mktemp("painted")
    for seed in (0, 1):
        config = toy.config("tasks=3", "rounds=1", method="fedavg", seed=seed)
        cfl.run(config, stream=toy.stream(), strategy=toy.Paints, output=folder / f"paints-seed{seed}")
    return folder
