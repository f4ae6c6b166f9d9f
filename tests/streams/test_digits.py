"""Scikit-learn's digits as a data set."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from cfl.streams.datasets import digits, pooled


def test_digits_are_complete_and_standardised():
    found = digits()
    assert found.x_train.shape == (1400, 64) and found.x_test.shape == (397, 64)
    assert found.x_train.dtype == torch.float32
    raw, labels = load_digits(return_X_y=True)
    assert torch.equal(torch.cat([found.y_train, found.y_test]).bincount(), torch.from_numpy(labels).bincount())
    train = found.x_train.double()
    assert abs(train.mean()) < 1e-6 and abs(train.std(correction=0) - 1) < 1e-6
    # one affine map for all pixels: its inverse, by the known range 0..16, returns each feature's multiset of values
    everything = torch.cat([found.x_train, found.x_test]).double()
    back = 16 * (everything - everything.min()) / (everything.max() - everything.min())
    assert (raw.min(), raw.max()) == (0, 16)
    assert torch.allclose(back.sort(0).values, torch.from_numpy(np.sort(raw, axis=0)), atol=1e-4)


def test_the_split_is_fixed_and_random():
    first, torch_state = digits(), torch.random.get_rng_state()
    again = digits()
    assert torch.equal(first.x_train, again.x_train) and torch.equal(torch_state, torch.random.get_rng_state())
    # 397 of 1,797 samples, about 178 a class: mean 39.7, std sqrt(178 * .22 * .78) = 5.5
    assert (first.y_test.bincount() - 39.7).abs().max() < 5 * 5.5


def test_pooled_holds_train_then_test():
    found = digits()
    pool = pooled(found)
    assert len(pool.images) == 1797 and torch.equal(pool.images[1400], found.x_test[0]) and pool.mean is None
