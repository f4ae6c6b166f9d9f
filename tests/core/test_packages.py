"""Packages that `cfl` runs without, and torchvision beside a CPU build of torch."""

import configparser
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cfl
from cfl import streams
from cfl.cli import main
from cfl.core import ConfigError, packages
from cfl.experiments.compare import plan
from cfl.experiments.parallel import run_all
from cfl.runtime import export
from cfl.streams.avalanche import from_benchmark
from cfl.streams.datasets import load

ROOT = Path(__file__).resolve().parents[2]
TINY = ["tasks=2", "rounds=1", "partition.clients=4", "model.hidden=[8]"]
MODULES = {name for names in packages.EXTRAS.values() for name in names}


@pytest.fixture
def bare(monkeypatch):
    """No package of an extra can be imported, as after `pip install cfl`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        monkeypatch.delitem(sys.modules, name)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)


def resolved(*overrides):
    return cfl.resolve("permuted-digits", method="fot", overrides=[*TINY, *overrides])


def test_a_run_needs_no_extra(bare, tmp_path, capsys):
    words = [word for override in TINY for word in ("--set", override)]
    with pytest.raises(SystemExit) as stop:
        main(["train", "permuted-digits", "--method", "fot", *words, "--output", str(tmp_path / "run"), "--quiet"])
    assert stop.value.code == 0 and "ACC" in capsys.readouterr().out
    assert (tmp_path / "run/accuracy.png").is_file() and (tmp_path / "run/metrics.json").is_file()


def medmnist(folder):
    np.savez(folder / "pathmnist.npz", **{f"{part}_{kind}": np.zeros(1) for part in ("train", "test")
                                          for kind in ("images", "labels")})  # fmt: skip
    return load("pathmnist", folder)


def folders(folder):
    (folder / "cinic-10").mkdir()
    return load("cinic10", folder)


def compared(folder):
    groups = plan("permuted-digits", "fedavg,fot", "0", folder, overrides=[*TINY, "secagg=full"])
    return run_all([run for group in groups for run in group.runs], jobs=1, quiet=True)


def private(folder):
    return cfl.run(resolved("dp.level=client", "dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false"))


NEEDS = [
    ("secagg=full", "privacy", lambda folder: cfl.run(resolved("secagg=full"))),
    ("secagg=sum", "privacy", lambda folder: cfl.run(resolved("secagg=sum"))),
    ("secagg=full", "privacy", compared),
    ("dp.level=client", "privacy", private),
    ("--tensorboard", "tensorboard", cfl.tensorboard.TensorBoardSink),
    ("--mlflow", "mlflow", cfl.mlflow.MlflowSink),
    ("--wandb", "wandb", cfl.wandb.WandbSink),
    ("data set 'mnist' in the format of its distributor", "vision", lambda folder: load("mnist", folder, True)),
    ("data set 'cinic10' as folders of images", "vision", folders),
    ("--download of data set 'notmnist'", "vision", lambda folder: load("notmnist", folder, True)),
    ("a stream of texts", "text", lambda folder: streams.build("split-topics")),
    ("data set 'pathmnist' in the format of MedMNIST", "medmnist", medmnist),
    ("from_benchmark", "avalanche", lambda folder: from_benchmark(SimpleNamespace(train_stream=[], test_stream=[]))),
    ("an .onnx file", "onnx", lambda folder: export.write(folder / "a.onnx", torch.nn.Linear(1, 1), {}, {})),
]  # of flower: tests/flower/test_programs.py


@pytest.mark.parametrize(("what", "extra", "call"), NEEDS)
def test_an_option_without_its_package_names_both_and_the_extra(what, extra, call, bare, tmp_path):
    with pytest.raises(ConfigError) as found:
        call(tmp_path)
    text = str(found.value)
    assert what in text and text.endswith(f"install it with: pip install 'cfl[{extra}]'")
    assert packages.EXTRAS[extra][0] in text and "\n" not in text


def test_extras_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = dict(setup["options.extras_require"])
    assert set(extras) == {*packages.EXTRAS, "all", "docs", "test", "dist"}
    assert extras["all"].strip() == f"cfl[{','.join(sorted(packages.EXTRAS))}]"


@pytest.mark.slow
def test_avalanche_can_be_imported_after_cfl():
    """Also where torchvision was built for CUDA and torch was not, as `pip install` combines them here."""
    code = "import cfl, sys; assert 'torchvision' not in sys.modules; import avalanche.benchmarks, torchvision"
    found = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("version", "cuda", "declared"),
    [
        ("0.28.0+cu130", None, ["nms", "qnms"]),
        ("0.28.0+cu130", "13.0", []),
        ("0.28.0+cpu", None, []),
        ("0.28", None, []),
    ],
)
def test_operators_are_declared_only_for_builds_that_do_not_match(version, cuda, declared, tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    spec, found = ModuleSpec("torchvision", None, origin=str(tmp_path / "__init__.py")), []
    monkeypatch.setattr(packages, "find_spec", lambda name: spec)
    define = SimpleNamespace(define=lambda name, schema: found.append(name.removeprefix("torchvision::")))
    version_of_torch = SimpleNamespace(cuda=cuda)
    operators = SimpleNamespace(torchvision=SimpleNamespace())
    fake = SimpleNamespace(version=version_of_torch, ops=operators, library=define)
    monkeypatch.setattr(packages, "torch", fake)
    packages.declare_operators()
    assert found == declared
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    packages.declare_operators()  # without torchvision
    assert found == declared
