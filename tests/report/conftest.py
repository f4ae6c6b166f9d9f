"""Small real runs, made once for all tests of reports."""

import pytest

import cfl

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
