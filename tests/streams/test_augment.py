"""Random crops, flips and cutouts."""

import pytest
import torch

from cfl.core import ConfigError, rng
from cfl.streams.augment import augment, check

BLACK = torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)


def _images(size=200, channels=3, height=10, width=7):
    """All pixels differ; none is 0 or equals a black pixel."""
    return torch.arange(1.0, size * channels * height * width + 1).view(size, channels, height, width)


def _augmented(x, *kinds, key=5):
    return augment(x, kinds, rng.generator(key), BLACK[: x.shape[1]])


def test_no_kind_changes_nothing():
    x = _images()
    assert torch.equal(_augmented(x), x)


def test_a_crop_is_a_window_of_the_padded_image():
    x = _images()
    found = _augmented(x, "crop")
    seen = set()
    for image, crop in zip(x, found, strict=True):
        padded = BLACK.expand(3, 18, 15).clone()
        padded[:, 4:14, 4:11] = image
        places = [
            (top, left)
            for top in range(9)
            for left in range(9)
            if torch.equal(padded[:, top : top + 10, left : left + 7], crop)
        ]
        assert len(places) == 1  # every pixel differs, and any window of 10 x 7 shows some of the image
        seen.add(places[0])
    # 81 windows, 200 draws: 81 (1 - (80/81)^200) = 74.2 are expected to occur
    assert len(seen) > 60 and {top for top, _ in seen} == {left for _, left in seen} == set(range(9))


def test_a_flip_is_the_exact_reverse_of_half_of_the_images():
    x = _images(1000, 1, 3, 4)
    found = _augmented(x, "flip")
    mirrored = x[:, :, :, [3, 2, 1, 0]]
    flipped = torch.tensor([torch.equal(new, old) for old, new in zip(mirrored, found, strict=True)])
    kept = torch.tensor([torch.equal(new, old) for old, new in zip(x, found, strict=True)])
    assert (flipped ^ kept).all()
    assert abs(int(flipped.sum()) - 500) < 5 * 15.8  # binomial(1000, 1/2): std sqrt(250)


def test_a_cutout_is_one_square_of_zeros_cut_at_the_border():
    x = _images(400, 2, 32, 28)
    found = _augmented(x, "cutout")
    centres = set()
    for old, new in zip(x, found, strict=True):
        hole = new[0] == 0
        assert torch.equal(hole, new[1] == 0) and torch.equal(new[:, ~hole], old[:, ~hole])
        matches = []
        for row in range(32):
            for column in range(28):
                top, left = max(row - 8, 0), max(column - 8, 0)
                bottom, right = min(row + 8, 32), min(column + 8, 28)
                if (bottom - top) * (right - left) == hole.sum() and hole[top:bottom, left:right].all():
                    matches.append((row, column))
        assert len(matches) == 1
        centres |= set(matches)
    assert {row for row, _ in centres} == set(range(32)) and {column for _, column in centres} == set(range(28))


def test_the_order_is_crop_flip_cutout():
    x = _images(50, 3, 20, 20)
    both = _augmented(x, "cutout", "flip", "crop")
    steps = _augmented(_augmented(_augmented(x, "crop"), "flip"), "cutout")  # the same draws, one kind at a time
    assert torch.equal(both, steps)
    assert not torch.equal(both, _augmented(_augmented(_augmented(x, "cutout"), "flip"), "crop"))


def test_draws_depend_only_on_the_key_and_the_position_in_the_batch():
    x = _images(40)
    torch.manual_seed(1)
    first, state = _augmented(x, "crop", "flip", "cutout"), torch.random.get_rng_state()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(_augmented(x, "crop", "flip", "cutout"), first)
    assert not torch.equal(_augmented(x, "crop", "flip", "cutout", key=6), first)
    # a smaller batch, for instance without padding, has the same draws for its images
    assert torch.equal(_augmented(x[:13], "crop", "flip", "cutout"), first[:13])
    assert _augmented(x[:0], "crop", "flip", "cutout").shape == (0, 3, 10, 7)


def test_the_batch_is_not_changed_in_place():
    x = _images(20)
    before = x.clone()
    _augmented(x, "crop", "flip", "cutout")
    assert torch.equal(x, before)


def test_errors_name_the_kind_and_the_shape():
    with pytest.raises(ConfigError, match="unknown augmentation 'cutoff'; did you mean 'cutout'"):
        check(("flip", "cutoff"), (3, 8, 8))
    with pytest.raises(ConfigError, match=r"\(flip\) needs images .* not samples of shape \(64,\)"):
        check(("flip",), (64,))
    assert check((), (64,)) is None
