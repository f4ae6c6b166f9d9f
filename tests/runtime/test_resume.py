"""A run killed at any moment ends with the same bytes as one never killed."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import cfl
from cfl.assembly import resolve as configuration
from cfl.core import CheckpointError, ConfigError, UpdateError
from cfl.engines.choose import Choice
from cfl.runtime import builder, checkpoint, packs, runner, tree_file
from cfl.runtime.run_folder import RunFolder
from cfl.runtime.sinks import NullSink
from tests import toy

# Momentum, dropout, shared running statistics and client sampling: all that could carry state past a kill.
OPTIONS = ("local.momentum=0.9", "model.dropout=[0.2,0.2]", "partition.name=shards", "seed=3")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


@contextlib.contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, at: int, when: str) -> Iterator[None]:
    """Kill the run inside at its checkpoint number `at`. when: "before..." for before it is written, else after it."""
    save = checkpoint.save

    def dies(folder: Path, serial: int, *rest, **options) -> Path:
        if serial == at and when.startswith("before"):
            raise Killed
        path = save(folder, serial, *rest, **options)
        if serial == at:
            raise Killed
        return path

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint, "save", dies)
        yield


def finished(folder: Path) -> tuple[str, str, bytes]:
    """The text of metrics.json and rounds.jsonl, without seconds and wire bytes, and the bytes of config.yaml."""
    metrics, rows = ((folder / name).read_text() for name in ("metrics.json", "rounds.jsonl"))
    without = re.compile(r'"(seconds|wire_bytes_up|wire_bytes_down)": [\d.e-]+')
    return without.sub("", metrics), without.sub("", rows), (folder / "config.yaml").read_bytes()


def run(folder: Path, resume: bool = False, **options) -> cfl.Result:
    return cfl.run(toy.config(*OPTIONS), stream=toy.stream(), output=folder, resume=resume, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("reference")
    result = run(folder)
    return finished(folder), result


# Three tasks of two training rounds, the first two with gpse and coverage after them: 2 * 4 + 2 rounds.
ROUNDS = 10


def test_the_schedule_of_the_toy_run_is_as_stated(reference: tuple) -> None:
    assert reference[0][1].count("\n") == ROUNDS


@pytest.mark.parametrize("when", ["before the checkpoint is written", "after it"])
@pytest.mark.parametrize("killed_at", toy.quick(1, 4, ROUNDS, of=range(1, ROUNDS + 1)))  # 3 and 4 are no training
def test_killed_at_every_checkpoint_the_run_ends_with_the_same_bytes(
    killed_at: int, when: str, reference: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed(monkeypatch, killed_at, when):
        run(tmp_path)
    result = run(tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]
    for name, leaf in result.params.items():
        assert leaf.equal(reference[1].params[name]), name


def test_a_loss_of_power_after_a_checkpoint_is_survived(
    reference: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, on_disk = tmp_path / "rounds.jsonl", b""
    fsync, save = os.fsync, checkpoint.save

    def synced(descriptor: int) -> None:
        nonlocal on_disk
        fsync(descriptor)
        if rounds.exists() and os.path.samestat(os.fstat(descriptor), rounds.stat()):
            on_disk = rounds.read_bytes()

    def dies(folder: Path, serial: int, *rest, **options) -> Path:
        path = save(folder, serial, *rest, **options)
        if serial == 5:
            raise Killed
        return path

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "fsync", synced)
        patched.setattr(checkpoint, "save", dies)
        run(tmp_path)
    assert on_disk.count(b"\n") >= 5
    rounds.write_bytes(on_disk)
    run(tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]


def test_sigkill_of_a_process_is_survived(reference: tuple, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
import cfl
from cfl.runtime.sinks import NullSink
from tests import toy
from tests.runtime.test_resume import OPTIONS
class Sink(NullSink):
    def round(self, row):
        if row["rounds_done"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
cfl.run(toy.config(*OPTIONS), stream=toy.stream(), output=Path({str(tmp_path)!r}), sink=Sink())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "metrics.json").exists()
    run(tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]


def test_a_folder_without_a_checkpoint_starts_from_the_beginning(reference: tuple, tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text('{"task": 0}\n{"tas')
    run(tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]


def test_a_finished_run_resumed_stays_as_it_is(reference: tuple, tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, resume=True)
    assert finished(tmp_path) == reference[0]


def test_a_resumed_run_repeats_its_notes_and_says_where_it_goes_on(tmp_path: Path) -> None:
    """Killed in the third round, before its checkpoint is written."""
    told: list[list[str]] = []

    class Noted(Stop):
        def start(self, config: cfl.RunConfig, notes: list[str], total_rounds: int) -> None:
            told.append(notes)

    with pytest.raises(Killed):
        run(tmp_path, sink=Noted(3))
    run(tmp_path, resume=True, sink=Noted(ROUNDS + 1))
    assert told[0] and told[1] == [*told[0], f"resumed after 2 of {ROUNDS} rounds"]


def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(reference: tuple, tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "metrics.json").unlink()
    newest = max((tmp_path / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-10])
    notes: list[str] = []

    class Sink(NullSink):
        def warn(self, text: str) -> None:
            notes.append(text)

    run(tmp_path, resume=True, sink=Sink())
    assert any(newest.name in note and "damaged" in note for note in notes)
    assert finished(tmp_path) == reference[0]


def test_another_configuration_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(CheckpointError, match="another configuration"):
        cfl.run(toy.config(*OPTIONS, "local.lr=0.1"), stream=toy.stream(), output=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="--resume"):
        run(tmp_path)


def test_sparser_checkpoints_change_nothing_but_their_number(reference: tuple, tmp_path: Path) -> None:
    class Sink(NullSink):
        def round(self, row: dict) -> None:
            if row["rounds_done"] == 7:
                raise Killed

    sparse = toy.config(*OPTIONS, "checkpoint_every=3")
    with pytest.raises(Killed):
        cfl.run(sparse, stream=toy.stream(), output=tmp_path, sink=Sink())
    cfl.run(sparse, stream=toy.stream(), output=tmp_path, resume=True)
    metrics, rows, _ = finished(tmp_path)
    assert (metrics, rows) == reference[0][:2]


def test_what_a_round_changes_does_not_reach_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint is written after the next round has been computed, and holds what one written at once does."""
    config, save, done = toy.config(*OPTIONS, "checkpoint_every=2"), checkpoint.save, threading.Semaphore(0)

    class Sink(NullSink):
        def round(self, row: dict) -> None:
            if row["rounds_done"] % 2 or row["rounds_done"] == ROUNDS:  # the first after a checkpoint, or no more
                done.release()

    def written(folder: Path, late: bool) -> dict:
        found = {}

        def keep(path: Path, serial: int, trees: dict, meta: dict, *rest) -> None:
            if late:
                assert done.acquire(timeout=60)
            file = save(path, serial, trees, meta, *rest)
            trees, meta = checkpoint.load_latest(file.parent, meta["fingerprint"], pytest.fail)
            found[serial] = {**trees, "meta": {name: value for name, value in meta.items() if name != "seconds"}}

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "save", keep)
            cfl.run(config, stream=toy.stream(), output=folder, sink=Sink() if late else None)
        return found

    late, prompt = written(tmp_path / "late", True), written(tmp_path / "prompt", False)
    assert list(late) == list(prompt) and sorted(late) == [2, 4, 6, 8, 10]  # tasks end at 4, 8 and 10
    for serial, trees in prompt.items():
        assert late[serial].pop("meta") == trees.pop("meta")
        for name, leaves in trees.items():
            assert list(leaves) == list(late[serial][name])
            assert all(
                leaf.nan_to_num(-1).equal(late[serial][name][key].nan_to_num(-1)) for key, leaf in leaves.items()
            )


@pytest.mark.parametrize("serial", [4, ROUNDS])
def test_a_disk_that_fails_ends_the_run_before_it_is_called_finished(
    serial: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save

    def fails(folder: Path, number: int, *rest) -> Path:
        if number == serial:
            raise CheckpointError("the disk is full")
        return save(folder, number, *rest)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="the disk is full"):
        patched.setattr(checkpoint, "save", fails)
        run(tmp_path)
    assert (tmp_path / "rounds.jsonl").read_text().count("\n") <= serial + 1  # at the next checkpoint, or at the end
    assert not (tmp_path / "metrics.json").exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=str(blocker / "run")):
        RunFolder(blocker / "run")


def test_ctrl_c_saves_the_round_and_a_later_resume_goes_on(reference: tuple, tmp_path: Path) -> None:
    class Sink(NullSink):
        def round(self, row: dict) -> None:
            if row["rounds_done"] == 6:
                signal.raise_signal(signal.SIGINT)  # to this thread: os.kill may reach another one, and come late

    rare = toy.config(*OPTIONS, "checkpoint_every=1000")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            cfl.run(rare, stream=toy.stream(), output=tmp_path, sink=Sink())
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "checkpoints" / "checkpoint-000006.safetensors").exists()
    cfl.run(rare, stream=toy.stream(), output=tmp_path, resume=True)
    assert finished(tmp_path)[:2] == reference[0][:2]


def test_a_tree_that_the_server_dropped_does_not_come_back(tmp_path: Path) -> None:
    class Drops(cfl.Strategy):
        """Doubles its steps until the first round is over."""

        def init_server(self, params, model):  # noqa: ANN001, ANN202
            return {"doubled": {"yes": torch.ones(())}}

        def absorb(self, server, mean, info, lr):  # noqa: ANN001, ANN202
            new = super().absorb(server, mean, info, 2 * lr if "doubled" in server else lr)
            return {name: leaves for name, leaves in new.items() if name != "doubled"}

    class Kill(NullSink):
        def round(self, row: dict) -> None:
            if row["rounds_done"] == 3:
                raise Killed

    whole = cfl.run(toy.config(method="fedavg"), stream=toy.stream(), strategy=Drops())
    with pytest.raises(Killed):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), strategy=Drops(), output=tmp_path, sink=Kill())
    resumed = cfl.run(toy.config(method="fedavg"), stream=toy.stream(), strategy=Drops(), output=tmp_path, resume=True)
    assert all(torch.equal(resumed.params[name], leaf) for name, leaf in whole.params.items())


class Stop(NullSink):
    """Kills the run when so many rounds are done, before the last is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, row: dict) -> None:
        if row["rounds_done"] == self.after:
            raise Killed


@pytest.mark.parametrize("killed_at", range(2, 6))  # 2 + 1 + 2 rounds
def test_states_that_several_files_hold_come_back(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients store trees after a task, and others in each round; rounds of three of four clients, files of two."""
    monkeypatch.setattr(packs, "LARGEST", 9000)  # a client has 18 leaves, together 1,320 bytes, and their names
    options = toy.config(*OPTIONS, "tasks=2", method="ewc+scaffold")
    runs = [cfl.run(options, stream=toy.stream(2), output=tmp_path / "whole").params]
    with pytest.raises(Killed):
        cfl.run(options, stream=toy.stream(2), output=tmp_path / "killed", sink=Stop(killed_at))
    runs.append(cfl.run(options, stream=toy.stream(2), output=tmp_path / "killed", resume=True).params)
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")
    assert all(torch.equal(leaf, runs[1][name]) for name, leaf in runs[0].items())
    saved = [last_trees(tmp_path / name) for name in ("whole", "killed")]
    assert list(saved[0]) == list(saved[1]) and "client/3" in saved[0]
    for name, leaves in saved[0].items():
        assert all(leaf.nan_to_num(-1).equal(saved[1][name][key].nan_to_num(-1)) for key, leaf in leaves.items())


def last_trees(folder: Path) -> dict:
    newest = max((folder / "checkpoints").glob("checkpoint-*"))
    entry = tree_file.entry(newest.read_bytes())
    assert len(entry["packs"]) > 1
    trees, _ = checkpoint.load_latest(newest.parent, entry["meta"]["fingerprint"], pytest.fail)
    return trees


@pytest.mark.parametrize(
    "engine",
    [
        ("engine=vmapped", "block=2"),
        pytest.param(("engine=pool", "block=2"), marks=pytest.mark.slow),
        pytest.param(("engine=pool+vmapped", "block=2"), marks=pytest.mark.slow),
    ],
    ids=lambda options: options[0],
)
def test_every_engine_ends_with_the_bytes_of_its_own_whole_run(engine: tuple[str, ...], tmp_path: Path) -> None:
    """In the middle of a task; the number of workers may differ before and after."""
    one, two = (toy.config(*OPTIONS, *engine, f"workers={count}", method="fot+scaffold") for count in (1, 2))
    whole = cfl.run(one, stream=toy.stream(), output=tmp_path / "whole")
    with pytest.raises(Killed):
        cfl.run(one, stream=toy.stream(), output=tmp_path / "killed", sink=Stop(6))
    resumed = cfl.run(two, stream=toy.stream(), output=tmp_path / "killed", resume=True)
    assert finished(tmp_path / "killed")[:2] == finished(tmp_path / "whole")[:2]
    assert all(torch.equal(leaf, whole.params[name]) for name, leaf in resumed.params.items())


def test_a_choice_is_taken_again_whatever_a_new_measurement_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choosing(*choice: object) -> None:
        monkeypatch.setattr(builder, "choose", lambda *given: Choice(*choice))

    auto = toy.config(*OPTIONS, "engine=auto")
    fixed = toy.config(*OPTIONS, "engine=vmapped", "block=3")
    whole = cfl.run(fixed, stream=toy.stream(), output=tmp_path / "whole")
    choosing("vmapped", 3, 1)
    with pytest.raises(Killed):
        cfl.run(auto, stream=toy.stream(), output=tmp_path / "killed", sink=Stop(6))
    choosing("loop", None, 2)
    resumed = cfl.run(auto, stream=toy.stream(), output=tmp_path / "killed", resume=True)
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")
    assert all(torch.equal(leaf, whole.params[name]) for name, leaf in resumed.params.items())
    # an engine without a block takes the block of that engine, another one is another run
    open_block = toy.config(*OPTIONS, "engine=vmapped")
    stored = configuration.dump(fixed)
    assert runner._settled(open_block, stored) == runner._settled(auto, {**stored, "workers": 7}) == fixed
    earlier = {name: value for name, value in stored.items() if name != "validation"}  # a version without this option
    assert runner._settled(auto, earlier) == fixed
    for other in ({"engine": "loop", "block": None}, {"seed": 99}):
        assert runner._settled(open_block, {**stored, **other}) == open_block
    assert runner._settled(auto.model_copy(update={"block": 2}), stored).block == 2
    compiled = {**stored, "compile": True}
    assert runner._settled(auto, compiled).compile and runner._settled(open_block, compiled).compile
    assert runner._settled(auto.model_copy(update={"compile": False}), compiled).engine == "auto"
    assert runner._settled(auto, {}) == auto and runner._settled(auto, {"engine": "loop"}) == auto
    with pytest.raises(CheckpointError, match="another configuration"):
        loop = toy.config(*OPTIONS, "engine=loop")
        cfl.run(loop, stream=toy.stream(), output=tmp_path / "killed", resume=True)


def test_results_without_a_checkpoint_are_not_replaced(tmp_path: Path) -> None:
    """As stored runs have them, where checkpoints were deleted to save space."""
    run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = finished(tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds the results of a run, and no checkpoint of it"):
        run(tmp_path / "run", resume=True)
    assert finished(tmp_path / "run") == before


def test_first_rounds_before_a_checkpoint_are_not_replaced_by_another_run(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        cfl.run(toy.config("checkpoint_every=9"), stream=toy.stream(), output=tmp_path, sink=Stop(1))
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"another configuration.*repeat the options of that run: local\.lr=0\.05"
    ):
        cfl.run(toy.config("local.lr=0.3"), stream=toy.stream(), output=tmp_path, resume=True)
    assert cfl.run(toy.config("checkpoint_every=9"), stream=toy.stream(), output=tmp_path, resume=True).metrics


def test_a_run_that_failed_in_its_first_round_may_go_on_with_other_options(tmp_path: Path) -> None:
    """As the error advises; no round is lost."""
    with pytest.raises(UpdateError, match=r"lower local\.lr"):
        cfl.run(toy.config("local.lr=1e30"), stream=toy.stream(), output=tmp_path)
    assert cfl.run(toy.config("local.lr=0.1"), stream=toy.stream(), output=tmp_path, resume=True).metrics


def test_options_of_no_attack_are_not_compared(tmp_path: Path) -> None:
    """They change nothing, and `cfl-run compare` takes such runs for the same."""
    cfl.run(toy.config(), stream=toy.stream(), output=tmp_path)
    assert cfl.run(toy.config("attack.clients=2"), stream=toy.stream(), output=tmp_path, resume=True).metrics


class Adapted(nn.Sequential):
    """A network whose frozen first layer is drawn anew each time that it is made."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(toy.DIMENSIONS, 6), nn.ReLU(), nn.Linear(6, 2))
        self[0].requires_grad_(False)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_resumed_run_trains_against_the_frozen_weights_of_its_checkpoint(tmp_path, monkeypatch, engine):
    """A network of the user's own may begin with other weights in the process that resumes the run."""
    torch.manual_seed(1)
    first, config = Adapted(), toy.config(f"engine={engine}", "workers=1", "local.lr=0.3", "eval_later=true")
    stream = toy.stream(multi_head=False)
    whole = cfl.run(config, stream=stream, model=first, output=tmp_path / "whole")
    with killed(monkeypatch, 3, "after"):
        cfl.run(config, stream=stream, model=first, output=tmp_path / "parts")
    found = cfl.run(config, stream=stream, model=Adapted(), output=tmp_path / "parts", resume=True)
    assert finished(tmp_path / "parts") == finished(tmp_path / "whole")
    assert found.metrics["initial_accuracy"] == whole.metrics["initial_accuracy"]


def test_a_new_run_in_a_folder_leaves_no_checkpoint_of_the_run_before(tmp_path):
    class Stop(NullSink):
        def round(self, row):
            raise KeyboardInterrupt

    cfl.run(toy.config("tasks=2", "rounds=2"), stream=toy.stream(2), output=tmp_path)
    for name in ("rounds.jsonl", "metrics.json"):
        (tmp_path / name).unlink()
    with pytest.raises(KeyboardInterrupt):
        cfl.run(toy.config("tasks=2", "rounds=2"), stream=toy.stream(2), output=tmp_path, sink=Stop())
    assert not list((tmp_path / "checkpoints").glob("checkpoint-*"))
