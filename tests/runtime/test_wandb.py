import json
import struct

import pytest

import cfl
from cfl.assembly.resolve import dump
from cfl.runtime.sinks import Sinks
from cfl.runtime.wandb import WandbSink
from tests import toy
from tests.runtime.test_resume import Killed, Stop

wandb = pytest.importorskip("wandb")


def records(path):
    """The records of an offline file: blocks of 32 KiB with a header of 7 bytes, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:  # too short for a record's header: padding
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", raw, at)
        parts += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


def rows(path):
    """Step to what is logged there."""
    found = {}
    for record in records(path):
        if record.HasField("history"):
            own = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.setdefault(own.pop("_step"), {}).update(own)
    return {step: {name: value for name, value in own.items() if name[0] != "_"} for step, own in found.items()}


def run(folder, *others, **more):
    sink = WandbSink(folder)
    try:
        return cfl.run(CONFIG, stream=toy.stream(), output=folder, sink=Sinks(sink, *others), **more)
    finally:
        sink.close()


CONFIG = toy.config("eval_every=1", "checkpoint_every=2")


@pytest.mark.parametrize(
    ("benchmark", "project"), [("mine/a:b#c?", "mine_a_b_c_"), ("50%\\x", "50__x"), (200 * "a", 128 * "a")]
)
def test_a_benchmark_of_any_name_has_a_project(benchmark, project, tmp_path):
    sink = WandbSink(tmp_path)
    sink.start(CONFIG.model_copy(update={"benchmark": benchmark}), [], 1)
    sink.close()
    wandb.teardown()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert [record.run.project for record in records(file) if record.HasField("run")][0] == project


@pytest.mark.slow
def test_offline_files_have_the_options_rounds_and_results_also_of_a_resumed_run(tmp_path, capfd):
    with pytest.raises(Killed):  # in task 1, one round after a checkpoint
        run(tmp_path, Stop(7))
    metrics = run(tmp_path, resume=True).metrics
    wandb.teardown()  # waits for the process that writes the files
    assert capfd.readouterr() == ("", "")
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name  # the same id
    begun = next(record.run for record in records(first) if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert begun.project == "permuted-digits" and begun.display_name == tmp_path.name
    assert {name: config[name] for name in dump(CONFIG)} == json.loads(json.dumps(dump(CONFIG)))
    before, after = rows(first), rows(second)
    assert list(before) == [*range(1, 8)] and list(after) == [7, 8, 9, 10]
    assert before[7] == after[7]
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    for step, line in enumerate(lines, 1):
        own = {**before, **after}[step]
        for name in ("loss", "accuracy"):
            assert own.get(name) == line[name]
        assert own[f"bytes_up/{line['phase']}"] == line["bytes_up"]
    matrix = metrics["accuracy_matrix"]
    assert [before[4]["task/0"], after[8]["task/1"], after[10]["task/0"]] == [matrix[0][0], matrix[1][1], matrix[2][0]]
    assert after[10]["ACC"] == metrics["acc"] and after[10]["total/bytes_down"] == metrics["bytes_down"]
