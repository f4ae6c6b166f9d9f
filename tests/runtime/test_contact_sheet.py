"""Contact sheets: pictures of a strategy's images, as a run writes them into its folder."""

import numpy as np
import pytest
import torch
from PIL import Image

import cfl
from cfl.contract import Strategy
from cfl.core import HookError
from cfl.runtime import contact_sheet, run_folder
from tests import toy
from tests.runtime.test_resume import killed

CONFIG = toy.config("tasks=3", "rounds=2", method="fedavg")


def run(output=None, resume=False, strategy=toy.Paints):
    return cfl.run(CONFIG, stream=toy.stream(), strategy=strategy, output=output, resume=resume)


def pictures(folder):
    return {path.name: path.read_bytes() for path in (folder / "images").iterdir()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run(folder)
    return pictures(folder)


def test_a_grey_grid_has_the_pixels_computed_by_hand():
    """Two rows of two images of 14 x 14: each is doubled to 28 x 28, one pixel apart."""
    images = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).reshape(2, 2, 1, 1, 1).repeat(1, 1, 1, 14, 14)
    images[0, 1, 0, 0, 1] = 200  # one pixel: row 0, column 1 of the second image
    grid = np.full((57, 57), 128, dtype=np.uint8)
    grid[:28, :28], grid[:28, 29:], grid[29:, :28], grid[29:, 29:] = 1, 2, 3, 4
    grid[0:2, 31:33] = 200
    assert contact_sheet.sheet(images)[:, :, 0].tolist() == grid.tolist()


def test_a_grid_of_small_colour_images_has_the_pixels_computed_by_hand():
    """A row of two images of 2 x 3 pixels (height, width): each is enlarged by 10, to 20 x 30."""
    images = torch.arange(36, dtype=torch.uint8).reshape(1, 2, 3, 2, 3)
    picture = contact_sheet.sheet(images)
    assert picture.shape == (20, 61, 3)
    assert (picture[:, 30] == 128).all()
    # channel c of image n at (y, x) is 18 n + 6 c + 3 y + x
    assert picture[0, 0].tolist() == [0, 6, 12]
    assert picture[9, 9].tolist() == [0, 6, 12] and picture[9, 10].tolist() == [1, 7, 13]
    assert picture[10, 29].tolist() == [5, 11, 17]
    assert picture[0, 31].tolist() == [18, 24, 30] and picture[19, 60].tolist() == [23, 29, 35]


@pytest.mark.parametrize(("width", "shown"), [(1, 28), (8, 32), (27, 54), (28, 28), (32, 32), (64, 64)])
def test_images_are_enlarged_by_the_smallest_factor(width, shown):
    assert contact_sheet.sheet(torch.zeros(1, 1, 1, width, width, dtype=torch.uint8)).shape == (shown, shown, 1)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_file_holds_the_grid_and_its_number_of_rows(channels, mode, tmp_path):
    images = torch.arange(5 * 2 * channels * 16).to(torch.uint8).reshape(5, 2, channels, 4, 4)
    (tmp_path / "a.png").write_bytes(contact_sheet.png(images))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == mode
        assert np.asarray(picture).tolist() == contact_sheet.sheet(images).squeeze().tolist()
    assert contact_sheet.measured(tmp_path / "a.png") == ((57, 144), 5)


def test_a_picture_of_another_program_has_no_rows(tmp_path):
    Image.new("L", (4, 6)).save(tmp_path / "a.png")
    assert contact_sheet.measured(tmp_path / "a.png") == ((4, 6), 0)
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(OSError, match="cannot identify"):
        contact_sheet.measured(tmp_path / "a.png")


def test_a_run_writes_the_images_of_each_task_that_has_some(reference, tmp_path):
    assert sorted(reference) == ["task-1.png", "task-2.png"]
    (tmp_path / "last.png").write_bytes(reference["task-2.png"])
    assert contact_sheet.measured(tmp_path / "last.png") == ((4 * 33 - 1, 3 * 33 - 1), 3)


def test_without_images_or_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    run(tmp_path / "run", strategy=Strategy)
    assert not (tmp_path / "run" / "images").exists()
    monkeypatch.chdir(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    run()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("when", ["before the checkpoint is written", "after it"])
@pytest.mark.parametrize("killed_at", [4, 5, 6])
def test_a_resumed_run_leaves_the_same_pictures(killed_at, when, reference, tmp_path, monkeypatch):
    """Round 4 ends task 1, round 6 ends task 2: a picture may be newer than the last checkpoint."""
    with killed(monkeypatch, killed_at, when):
        run(tmp_path)
    if (killed_at, when) != (6, "after it"):  # the last task is repeated
        (tmp_path / "images" / "task-2.png").write_bytes(b"old")
    run(tmp_path, resume=True)
    assert pictures(tmp_path) == reference


def test_a_fresh_run_removes_the_pictures_of_an_old_one_alone(reference, tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("task-0.png", "task-7.png", "mine.png", "task-mine.png"):
        (tmp_path / "images" / name).write_bytes(b"old")
    run(tmp_path)
    assert pictures(tmp_path) == {**reference, "mine.png": b"old", "task-mine.png": b"old"}


def test_sheets_are_listed_by_task(tmp_path):
    assert run_folder.sheets(tmp_path) == {}
    (tmp_path / "images").mkdir()
    for task in (10, 9):
        (tmp_path / "images" / f"task-{task}.png").touch()
    assert list(run_folder.sheets(tmp_path).items()) == [(n, tmp_path / f"images/task-{n}.png") for n in (9, 10)]


def test_a_picture_that_cannot_be_written_names_the_file(tmp_path):
    (tmp_path / "images").touch()
    folder = run_folder.RunFolder(tmp_path)
    with pytest.raises(cfl.errors.ConfigError, match=r"images/task-0\.png' cannot be written .*another --output"):
        folder.write_sheet(0, b"")


GOOD = torch.zeros(2, 3, 1, 4, 4, dtype=torch.uint8)
PROMISE = r"it has to return None, or a uint8 tensor \(rows, columns, 1 or 3 channels, height, width\)"


@pytest.mark.parametrize(
    ("made", "came"),
    [
        (GOOD.float(), r"a float32 tensor of shape \(2, 3, 1, 4, 4\)"),
        (GOOD[0], r"an? uint8 tensor of shape \(3, 1, 4, 4\)"),
        (GOOD.repeat(1, 1, 2, 1, 1), r"an? uint8 tensor of shape \(2, 3, 2, 4, 4\)"),
        (GOOD[:0], r"an? uint8 tensor of shape \(0, 3, 1, 4, 4\)"),
        (GOOD.numpy(), "an? ndarray"),
        ([GOOD], "a list of 1"),
    ],
)
def test_another_result_is_named(made, came):
    class Bad(Strategy):
        def images(self, server, model):
            return made

    with pytest.raises(HookError, match=rf"^Bad\.images returned {came}; {PROMISE}$"):
        run(strategy=Bad)
