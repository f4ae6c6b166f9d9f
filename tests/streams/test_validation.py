"""Training samples held out: which, how many, and what nobody sees of them."""

import numpy as np
import pytest
import torch

from cfl.core import ConfigError, rng
from cfl.streams import build, from_tensors, held_out, with_scenario
from tests import toy


def ids(samples):
    return set(samples.index.tolist())


def stream(*counts, tasks=1, **more):
    """Tasks with so many training samples of each class, and one test sample of class 0."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    parts = [(toy.random(len(y), 3, seed=task), y, toy.random(1, 3, seed=9), [0]) for task in range(tasks)]
    return from_tensors(parts, **more)


def test_the_split_by_hand():
    """0.3 of 10 and of 7 samples, rounded down: the 3 and the 2 that come first in the random order of the rows."""
    whole = stream(10, 7)
    rest, (held,) = held_out(whole, 0.3, seed=5)
    order = rng.numpy_generator(rng.key(5, "validation")).permutation(18)  # 17 training samples and a test sample
    expected = {*sorted(range(10), key=lambda row: order[row])[:3], *sorted(range(10, 17), key=lambda r: order[r])[:2]}
    assert ids(held) == expected and held.targets.tolist() == [0, 0, 0, 1, 1]
    assert ids(rest.tasks[0].train) == set(range(17)) - expected
    assert rest.tasks[0].train.targets.bincount().tolist() == [7, 5]
    assert rest.tasks[0].test is whole.tasks[0].test


def test_the_fraction_counts_as_written():
    """The float 0.29 times 100 is less than 29."""
    assert 0.29 * 100 < 29
    assert len(held_out(stream(100), 0.29, 0)[1][0]) == 29


def test_nothing_is_held_out_by_default():
    whole = stream(10)
    assert held_out(whole, 0.0, 0) == (whole, ())


@pytest.mark.parametrize("fraction", [1.0, -0.1, float("nan"), "0.1"])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        held_out(stream(10), fraction, 0)


def test_the_draw_depends_on_the_seed_and_not_on_the_scenario():
    whole = toy.stream(multi_head=True)
    first, again, other = (held_out(whole, 0.25, seed)[1] for seed in (0, 0, 1))
    grown = held_out(with_scenario(whole, "class"), 0.25, 0)[1]
    for one, same, different, numbered in zip(first, again, other, grown, strict=True):
        assert ids(one) == ids(same) == ids(numbered) != ids(different)
        assert one.targets.bincount().tolist() == [6, 6]  # a quarter of 24
    assert [int(part.targets.min()) for part in grown] == [0, 2, 4]


def test_tasks_of_the_same_images_hold_out_the_same_ones():
    """So that no task trains on an image by which another task's settings are chosen."""
    rest, held = held_out(build("permuted-digits", tasks=3), 0.1, 0)
    assert len({tuple(part.index.tolist()) for part in held}) == 1
    assert held[1].permutation is rest.tasks[1].train.permutation is not None


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits", "iris"])
def test_a_benchmark_is_split_by_class(name):
    whole = build(name)
    rest, held = held_out(whole, 0.1, 3)
    for before, after, part in zip(whole.tasks, rest.tasks, held, strict=True):
        assert ids(part) | ids(after.train) == ids(before.train) and not ids(part) & ids(after.train)
        counts, own = (samples.targets.bincount(minlength=before.classes) for samples in (before.train, part))
        assert own.tolist() == (counts // 10).tolist()


def test_every_class_keeps_training_samples():
    rest, (held,) = held_out(stream(1, 2, 50), 0.99, 0)
    assert rest.tasks[0].train.targets.bincount().tolist() == [1, 1, 1]  # 0.99, 1.98 and 49.5, rounded down
    assert len(held) == 50


def test_a_task_without_held_out_samples_is_named():
    message = (
        r"validation=0.1 holds out no sample of task 'task 1', whose largest class has 9 training samples; raise it"
    )
    x, y = toy.random(20, 3), torch.arange(20) % 2
    tasks = [(x, y, x[:1], y[:1]), (x[:17], y[:17], x[:1], y[:1])]  # classes of 10 and 10, then of 9 and 8
    with pytest.raises(ConfigError, match=message):
        held_out(from_tensors(tasks), 0.1, 0)


@pytest.mark.parametrize("own_pool", [True, False])
def test_public_data_of_the_stream_are_without_the_held_out_samples(own_pool):
    whole = build("iris") if not own_pool else stream(10, 7, public=torch.cat([toy.random(17, 3), torch.zeros(2, 3)]))
    rest, (held,) = held_out(whole, 0.3, 0)
    images = held.pool.images[held.index].numpy()
    seen = {row.tobytes() for row in rest.public.pool.images[rest.public.index].numpy()}
    assert not seen & {row.tobytes() for row in images}
    equal = np.array([[np.array_equal(a, b) for b in images] for a in whole.public.pool.images.numpy()]).any(1)
    assert len(rest.public) == int((~equal).sum())  # nothing else is lost; iris has equal flowers


def test_kept_samples_stay_with_their_clients():
    clients = torch.randint(5, (40,), generator=rng.generator(7))
    x, y = torch.arange(80.0).reshape(40, 2), torch.arange(40) % 2
    stream, (held,) = held_out(from_tensors([(x, y, x, y)], clients=[clients]), 0.25, seed=3)
    (task,) = stream.tasks
    assert len(held) == 10 and task.clients.equal(clients[task.train.index])
