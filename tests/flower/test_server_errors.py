"""What `cfl-run serve` says and does if its run ends before the last round."""

import json
import logging
from types import SimpleNamespace

import pytest
import yaml
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import cfl
from cfl.assembly import resolve
from cfl.cli import app
from cfl.core import Busy, CflError, CheckpointError, ConfigError, DataError
from cfl.flower import apps, faults, superlink

CONFIG = cfl.resolve("permuted-digits", overrides=["engine=loop"])
RUN = "7"


class Flower:
    """Flower's programs: `flwr run` names a run, `flwr log` does something. failing: commands that fail."""

    def __init__(self, log, failing=()):
        self.log, self.failing, self.called = log, failing, []

    def __call__(self, command, **options):
        self.called.append(command[1:])
        if command[1] == "log":
            self.log()
        said = b"Using ...\nno such run" if command[1] in self.failing else f"Successfully started run {RUN}".encode()
        return SimpleNamespace(returncode=int(command[1] in self.failing), stdout=said)


@pytest.fixture
def flower(monkeypatch):
    def start(*given, **more):
        made = Flower(*given, **more)
        monkeypatch.setattr(superlink, "subprocess", SimpleNamespace(run=made, PIPE=None, STDOUT=None))
        return made

    return start


def serve(output, **options):
    superlink.serve(CONFIG, output, "127.0.0.1:9092", running=True, **options)


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_server_stops_its_run_at_a_superlink_that_goes_on(tmp_path, flower):
    made = flower(interrupt)
    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path)
    assert [words[0] for words in made.called] == ["run", "log", "stop"]
    assert made.called[1][1:] == made.called[2][1:] == [RUN, superlink.CONNECTION]


def test_a_run_that_cannot_be_stopped_is_named_with_the_command_that_stops_it(tmp_path, flower):
    flower(interrupt, failing=["stop"])
    home = tmp_path / "flower"
    with pytest.raises(CflError) as found:
        serve(tmp_path)
    command = f"FLWR_HOME={home} flwr stop 7 cfl"
    assert str(found.value) == (
        f"the run goes on at the SuperLink (flwr ended with status 1: no such run); stop it with: {command}"
    )


ERRORS = {  # what ends the ServerApp, and what `serve` raises; {}: the output folder
    "an option": (ConfigError("set device=cpu"), ConfigError, "set device=cpu"),
    "another process": (Busy("process 3 uses 'x'; wait"), CflError, "process 3 uses 'x'; wait"),
    "another run": (CheckpointError("it is damaged"), CflError, "it is damaged"),
    "data": (DataError("no\nfile"), CflError, "the run in '{}' stopped before its last round: no file; {again}"),
    "not cfl's": (OSError("disk"), CflError, "the run in '{}' stopped before its last round: see above; {again}"),
}


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_a_server_app_is_that_of_serve(name, rounds, tmp_path, flower):
    error, kind, text = ERRORS[name]

    def ends():
        if rounds:
            (tmp_path / "rounds.jsonl").touch()
        with pytest.raises(type(error)), faults.told(tmp_path):
            raise error

    flower(ends)
    again = "continue it with --resume" if rounds else "repeat the command"
    with pytest.raises(CflError) as found:
        serve(tmp_path)
    assert (type(found.value), str(found.value)) == (kind, text.format(tmp_path, again=again))


def test_serve_does_not_report_the_error_of_an_earlier_run(tmp_path, flower):
    with pytest.raises(ConfigError), faults.told(tmp_path):
        raise ConfigError("earlier")
    flower(lambda: None)
    with pytest.raises(CflError, match=r"stopped before its last round: see above; repeat the command$"):
        serve(tmp_path)


def test_a_server_app_tells_its_error_in_a_file_and_in_one_line_of_the_log(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**resolve.dump(CONFIG), "device": "cuda"}))
    given = {"output": str(tmp_path / "out"), "data-root": "", "wait-for": 0}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=given)
    records, flower = [], logging.getLogger("flwr")
    handler = logging.Handler()
    handler.emit = records.append
    flower.addHandler(handler)
    try:
        with pytest.raises(ConfigError) as found:
            apps.server(config)(None, context)
        flower.error("%s raised an exception", "ServerApp", exc_info=found.value)
        flower.error("%s raised an exception", "ServerApp", exc_info=KeyError("bug"))
    finally:
        flower.removeHandler(handler)
        flower.removeFilter(faults.in_one_line)
    text = "nodes compute on CPU cores only, not on device=cuda; set device=cpu"
    assert json.loads((tmp_path / "out/flower/error.json").read_text()) == {"error": "ConfigError", "text": text}
    assert [logging.Formatter().format(one).splitlines()[0] for one in records] == [
        text,
        "ServerApp raised an exception",
    ]
    assert [one.exc_info is None for one in records] == [True, False]  # of an error that is not cfl's, the rest helps


def test_the_command_prints_the_error_in_one_line(tmp_path, flower):
    flower(lambda: (tmp_path / faults.ERROR).write_text('{"error": "ConfigError", "text": "set device=cpu"}'))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolve.dump(CONFIG)))
    words = ["serve", str(tmp_path / "config.yaml"), "--output", str(tmp_path), "--running"]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, ConfigError) and str(found.exception) == "set device=cpu"
