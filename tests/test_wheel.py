"""The wheel holds the whole package, and says what it needs."""

import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import cfl

ROOT = Path(__file__).resolve().parents[1]
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built offline from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "cfl", folder / "cfl", ignore=UNWANTED)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    command = ["pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, folder]
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=folder)
    with ZipFile(next(folder.glob("*.whl"))) as file:
        yield file


def test_the_wheel_holds_every_file_of_the_package(wheel):
    held = {name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cfl").rglob("*") if path.is_file()}
    assert held == {name for name in files if "__pycache__" not in name}
    assert {"cfl/py.typed", "cfl/report/page.css", "cfl/presets/iris.yaml"} <= held


def test_its_metadata_are_those_of_the_package(wheel):
    def text(name):
        return wheel.read(f"cfl-{cfl.__version__}.dist-info/{name}").decode()

    about = Parser().parsestr(text("METADATA"))
    assert (about["Version"], about["License-Expression"]) == (cfl.__version__, "Apache-2.0")
    assert about["Requires-Python"] == ">=3.11" and about["Description-Content-Type"] == "text/markdown"
    needed = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    heavy = ("avalanche", "opacus", "tensorboard", "torchvision", "cryptography", "pycryptodome", "flwr", "onnx")
    assert needed and not [line for line in needed if line.startswith(heavy)]
    assert "cfl-run = cfl.cli:main" in text("entry_points.txt")


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {cfl.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
