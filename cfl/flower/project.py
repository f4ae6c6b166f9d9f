"""A Flower project for a run, as `flwr run` takes it."""

import shutil
from pathlib import Path

import yaml

from cfl.assembly import methods, resolve
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, files
from cfl.core.version import __version__
from cfl.flower import apps, forward, own_data, programs
from cfl.runtime.run_folder import PROJECT
from cfl.runtime.runner import stream_of

PACKAGE = "cfl_app"

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "cfl-run"
version = "1.0.0"
description = {title}
license = "Apache-2.0"
# cfl {version} is installed on the server and on each node, with the packages of the run's method and data.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "cfl"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

[tool.flwr.app.config]
output = {output}
data-root = {data_root}
wait-for = {wait_for}
"""
_PACKAGE = '"""The run that config.yaml describes."""\n'
_SERVER = '''\
"""The server of the run that config.yaml describes."""

from pathlib import Path

from cfl.flower.apps import server

app = server(Path(__file__).with_name("config.yaml"))
'''
_CLIENT = '''\
"""The nodes of the run that config.yaml describes."""

from pathlib import Path

from {package}.forward import client


def here():
    from cfl.flower import apps

    return apps.answer


app = client(Path(__file__).with_name("config.yaml"), here)
'''


def write(config: RunConfig, output: Path, data_root: Path | None = None, wait_for: int = 0) -> Path:
    """Write the project of a run, and return its folder, `flower/project` in that of the run on the server, `output`.

    data_root: folder of the data sets there; wait_for: number of clients that have to be there before the first round,
    0 for all. The project tells nodes the tasks of the run, for which the server reads its benchmark.
    Raises ConfigError if the folder holds something else or cannot be written, and the errors of the benchmark.
    """
    apps.check(config, wait_for)
    folder = output / "flower" / "project"
    package = folder / PACKAGE
    if folder.exists() and any(folder.iterdir()) and not (package / "config.yaml").exists():
        raise ConfigError(f"'{folder}' holds something else than a project of cfl's; choose another folder")
    stream = stream_of(config, data_root, False, public=methods.need_public(methods.build(config)))
    described = own_data.described(stream, config)  # before anything is written: data may be missing
    files.make_folder(package, output, "--output")
    pyproject = _PYPROJECT.format(
        title=programs.quoted(config.title), version=__version__, package=PACKAGE, wait_for=wait_for,
        output=programs.quoted(str(output.absolute())),
        data_root=programs.quoted(str(data_root.absolute()) if data_root else ""),
    )  # fmt: skip
    (folder / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    for name, source in (("__init__", _PACKAGE), ("server", _SERVER), ("client", _CLIENT.format(package=PACKAGE))):
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    shutil.copy(Path(forward.__file__), package / PROJECT)
    text = yaml.safe_dump(resolve.dump(config), sort_keys=False, allow_unicode=True)
    (package / "config.yaml").write_text(text, encoding="utf-8")
    (package / apps.STREAM).write_text(described, encoding="utf-8")
    return folder
