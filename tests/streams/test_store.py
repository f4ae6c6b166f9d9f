"""Pools, samples of tasks, tasks and streams."""

import numpy as np
import pytest
import torch

import cfl
from cfl import streams
from cfl.core import ConfigError, DataError, rng
from cfl.streams import from_tensors, selected
from cfl.streams.augment import augment
from cfl.streams.store import Pool, Stream, Task, TaskSamples
from tests import toy


def _task(name: str = "t", classes: int = 2, first: int = 0, pool: Pool | None = None) -> Task:
    pool = pool or Pool(torch.zeros(20, 3))
    labels = torch.tensor([0, 1])
    return Task(
        name,
        TaskSamples(pool, torch.arange(first, first + 2), labels),
        TaskSamples(pool, torch.tensor([8, 9]), labels),
        classes,
    )


def test_gather_scales_normalises_then_permutes():
    images = torch.randint(0, 256, (6, 2, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.2, 0.7]).view(2, 1, 1), torch.tensor([0.5, 0.25]).view(2, 1, 1)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    part = TaskSamples(Pool(images, mean, std), torch.tensor([4, 1, 5]), torch.tensor([7, 8, 9]), order)

    x, y = part.gather(torch.tensor([2, 0]))

    assert x.dtype == torch.float32 and y.tolist() == [9, 7]
    for sample, row in zip(x, (5, 4), strict=True):
        for pixel in range(24):  # one pixel at a time, in plain numbers: pixel p shows the source pixel order[p]
            channel, rest = divmod(int(order[pixel]), 12)
            value = images[row, channel, rest // 4, rest % 4].item() / 255
            expected = (value - mean[channel].item()) / std[channel].item()
            assert sample.flatten()[pixel].item() == pytest.approx(expected, abs=1e-5)


def test_gather_does_not_scale_float_images():
    images = torch.tensor([[300.0, -2.0], [1.0, 0.5]])
    x, y = TaskSamples(Pool(images), torch.tensor([1, 0]), torch.tensor([0, 1])).gather(torch.tensor([1]))
    assert x.tolist() == [[300.0, -2.0]] and y.tolist() == [1]


@pytest.mark.parametrize("raw", [True, False])
def test_gather_rounds_as_separate_operations_and_does_not_change_the_pool(raw):
    images = torch.randint(0, 256, (40, 3, 5, 5), dtype=torch.uint8, generator=rng.generator(0))
    mean, std = (
        torch.tensor([0.4914, 0.4824, 0.4467]).view(3, 1, 1),
        torch.tensor([0.2471, 0.24353, 0.2616]).view(3, 1, 1),
    )
    order = torch.randperm(75, generator=rng.generator(1))
    pool = Pool(images if raw else images / 255, mean, std)
    kept = [leaf.clone() for leaf in (pool.images, mean, std)]
    part = TaskSamples(pool, torch.arange(40).flip(0), torch.zeros(40).long(), order)
    x, _ = part.gather(torch.arange(30))
    expected = ((images.float() / 255 - mean) / std)[torch.arange(39, 9, -1)].flatten(1)[:, order].view(30, 3, 5, 5)
    assert torch.equal(x, expected)
    assert all(torch.equal(leaf, before) for leaf, before in zip((pool.images, mean, std), kept, strict=True))


def _image_stream(permutation: torch.Tensor | None = None) -> Stream:
    """One task of 40 images of 2 x 6 x 6; half of them are test images."""
    images = torch.randint(0, 256, (40, 2, 6, 6), dtype=torch.uint8, generator=rng.generator(0))
    pool = Pool(images, torch.tensor([0.25, 0.5]).view(2, 1, 1), torch.tensor([0.5, 0.25]).view(2, 1, 1))
    parts = [TaskSamples(pool, rows, torch.zeros(20).long(), permutation) for rows in torch.arange(40).split(20)]
    return Stream(
        "s", (Task("t", *parts, 1),), (2, 6, 6), False, public=TaskSamples(pool, *[torch.zeros(1).long()] * 2)
    )


def test_gather_augments_only_with_a_key_and_only_to_train():
    stream, rows = _image_stream(), torch.arange(20)
    more = stream.with_augment(["crop", "flip"])
    plain, (train, test) = stream.tasks[0].train, (more.tasks[0].train, more.tasks[0].test)
    assert (plain.augment, train.augment, test.augment, more.public.augment) == ((), ("crop", "flip"), (), ())
    x, y = plain.gather(rows)
    assert torch.equal(plain.gather(rows, 3)[0], x) and torch.equal(train.gather(rows)[0], x)
    assert torch.equal(test.gather(rows, 3)[0], test.gather(rows)[0])
    changed, labels = train.gather(rows, 3)
    assert not torch.equal(changed, x) and torch.equal(labels, y)
    assert torch.equal(changed, train.gather(rows, 3)[0]) and not torch.equal(changed, train.gather(rows, 4)[0])
    # black, after normalisation: (0 - .25) / .5 and (0 - .5) / .25
    black = torch.tensor([-0.5, -2.0]).view(2, 1, 1)
    assert torch.equal(changed, augment(x, ("crop", "flip"), rng.generator(3), black))


def test_augmentation_comes_before_the_permutation():
    order = torch.randperm(72, generator=rng.generator(1))
    kinds = ("crop", "flip", "cutout")
    plain, permuted = (_image_stream(p).with_augment(kinds).tasks[0].train for p in (None, order))
    rows = torch.arange(20)
    expected = plain.gather(rows, 9)[0].flatten(1)[:, order].view(20, 2, 6, 6)
    assert torch.equal(permuted.gather(rows, 9)[0], expected)


def test_crops_of_a_pool_without_normalisation_are_padded_with_zeros():
    pool = Pool(torch.ones(1, 1, 2, 2))  # a window of 2 x 2 in a frame of 4 black pixels often misses the image
    part = TaskSamples(pool, torch.zeros(64).long(), torch.zeros(64).long(), augment=("crop",))
    x, _ = part.gather(torch.arange(64), 0)
    assert set(x.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (3, 4), (2, 1, 4), (2, 3, 4)])
def test_crops_are_padded_with_black_for_each_shape_of_a_mean(shape):
    """A black pixel, (0 - mean) / std at its place in the crop, is below 0 here, and one of the image is above."""
    mean, std = (torch.rand(shape, generator=rng.generator(key)) + 0.5 for key in (1, 2))
    part = TaskSamples(Pool(torch.full((1, 2, 3, 4), 9.0), mean, std), *[torch.zeros(64).long()] * 2, augment=("crop",))
    x, _ = part.gather(torch.arange(64), 0)
    black = ((torch.zeros(2, 3, 4) - mean) / std).expand_as(x)
    border = x < 0
    assert torch.equal(x[border], black[border])
    # one of the 81 windows has no border: 64 / 81 = 0.8 such crops are expected
    assert (~border.flatten(1).any(1)).sum() < 6 and not border.all()


def test_augmentation_refuses_unknown_kinds_and_vectors():
    with pytest.raises(ConfigError, match="unknown augmentation 'flop'; did you mean 'flip'"):
        _image_stream().with_augment(["flop"])
    with pytest.raises(ConfigError, match=r"needs images .* not samples of shape \(3,\)"):
        Stream("s", (_task(),), (3,), False).with_augment(["flip"])
    assert Stream("s", (_task(),), (3,), False).with_augment([]).tasks[0].train.augment == ()


def test_stream_to_keeps_augmentation_and_public_data():
    stream = _image_stream().with_augment(["flip"])
    moved = stream.to("cuda" if torch.cuda.is_available() else "cpu")
    assert moved.tasks[0].train.augment == ("flip",) and moved.tasks[0].test.augment == ()
    assert moved.public.pool is moved.tasks[0].train.pool  # still shared
    assert moved.public.index.device == moved.tasks[0].train.index.device


def test_stream_to_keeps_the_one_copy_of_images():
    pool = Pool(torch.zeros(20, 3), torch.zeros(3), torch.ones(3))
    order = torch.tensor([2, 0, 1])
    parts = [TaskSamples(pool, torch.tensor([i]), torch.tensor([0]), order) for i in range(4)]
    stream = Stream("s", (Task("a", parts[0], parts[1], 1), Task("b", parts[2], parts[3], 1)), (3,), False)

    moved = stream.to("cuda" if torch.cuda.is_available() else "cpu")

    everything = [part for task in moved.tasks for part in (task.train, task.test)]
    assert len(moved) == 2 and moved.tasks[1].name == "b"
    assert len({id(part.pool) for part in everything}) == 1
    assert len({id(part.permutation) for part in everything}) == 1


def test_streams_without_tasks_or_with_unequal_tasks_are_refused():
    with pytest.raises(DataError, match="no task"):
        Stream("s", (), (3,), False)
    with pytest.raises(DataError, match=r"\[2, 3\] classes"):
        Stream("s", (_task(), _task(classes=3)), (3,), False)
    assert len(Stream("s", (_task(), _task(classes=3)), (3,), True)) == 2
    with pytest.raises(DataError, match=r"shape \(3,\), not \(4,\)"):
        Stream("s", (_task(),), (4,), False)
    with pytest.raises(DataError, match="growing=True, so its head has parts: set multi_head=True"):
        Stream("s", (_task(),), (3,), False, growing=True)


def test_tasks_refuse_bad_samples():
    pool = Pool(torch.zeros(4, 3))
    one = TaskSamples(pool, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(DataError, match="sample id twice"):
        _task(first=8)  # the test samples have the rows 8 and 9
    with pytest.raises(DataError, match=r"train target 1 of task 't' \(sample 1\) .* 0\.\.0"):
        _task(classes=1)
    with pytest.raises(DataError, match="no test samples"):
        Task("t", one, TaskSamples(pool, torch.tensor([]).long(), torch.tensor([]).long()), 1)
    with pytest.raises(DataError, match="index and targets"):
        TaskSamples(pool, torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(DataError, match="float64"):
        Pool(torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(("dtype", "size"), [(torch.uint8, 24 * 1 + 8), (torch.float32, 24 * 4 + 8)])
def test_a_stored_sample_is_its_numbers_and_a_label_of_eight_bytes(dtype, size):
    one = torch.zeros(1).long()
    assert TaskSamples(Pool(torch.zeros(5, 2, 3, 4, dtype=dtype)), one, one).sample_bytes == size


def test_every_part_of_a_task_and_the_order_of_tasks_count_in_the_digests():
    """All rows of the pool are equal, so nothing but the changed part tells the streams apart."""
    part, other = torch.arange(4), torch.arange(4, 8)
    plain = {"mean": 0.0, "std": 1.0, "train": part, "test": other, "labels": torch.tensor([0, 0, 1, 1])}
    plain |= {"tested": plain["labels"], "order": None, "classes": 2, "names": "ab", "growing": False, "heads": True}

    def digests(**changed):
        one = {**plain, **changed}
        pool = Pool(torch.zeros(8, 3), *(torch.full((3,), one[name]) for name in ("mean", "std")))
        first = Task(
            one["names"][0],
            TaskSamples(pool, one["train"], one["labels"], one["order"]),
            TaskSamples(pool, one["test"], one["tested"]),
            one["classes"],
        )
        second = Task(one["names"][1], *(TaskSamples(pool, rows, plain["labels"]) for rows in (part, other)), 2)
        tasks = (second, first) if changed.get("swapped") else (first, second)
        return frozenset(Stream("s", tasks, (3,), one["heads"], growing=one["growing"]).digests(False).items())

    labels = torch.tensor([0, 1, 0, 1])
    changes = [
        {}, {"mean": 1.0}, {"std": 2.0}, {"train": part.flip(0)}, {"test": other.flip(0)}, {"labels": labels},
        {"tested": labels}, {"order": torch.tensor([2, 0, 1])}, {"classes": 3}, {"growing": True}, {"heads": False},
        {"swapped": True}, {"names": "aa"}, {"names": "aa", "labels": labels},
    ]  # fmt: skip
    assert len({digests(**change) for change in changes}) == len(changes)


def test_from_tensors_single_head_keeps_labels():
    x = torch.arange(12.0).view(6, 2)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    stream = streams.from_tensors([(x, y, x + 100, y), (x + 200, y * 2, x[:1] + 300, y[:1])], name="mine")

    assert (stream.name, stream.multi_head, stream.input_shape) == ("mine", False, (2,))
    assert [task.classes for task in stream.tasks] == [5, 5]  # the largest label is 2 * 2
    second = stream.tasks[1]
    assert torch.equal(second.train.gather(torch.arange(6))[0], x + 200)
    assert torch.equal(second.test.gather(torch.tensor([0]))[0], x[:1] + 300)
    assert torch.equal(second.train.targets, y * 2)


def test_from_tensors_multi_head_counts_labels_from_zero():
    x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    a, b = torch.tensor([7, 4, 7]), torch.tensor([1, 2, 9])
    stream = streams.from_tensors([(x, a, x, a), (x, b, x, b)], multi_head=True)
    assert [task.name for task in stream.tasks] == ["classes 4 7", "classes 1 2 9"]
    assert [task.train.targets.tolist() for task in stream.tasks] == [[1, 0, 1], [0, 1, 2]]
    assert [task.classes for task in stream.tasks] == [2, 3]


def test_from_tensors_takes_public_inputs():
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    public = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    stream = streams.from_tensors([(x, y, x, y)], public=public)
    found, labels = stream.public.gather(torch.tensor([4, 0]))
    assert found.tolist() == [[8.0, 9.0], [0.0, 1.0]] and labels.tolist() == [0, 0]
    assert found.dtype == torch.float32 and stream.public.index.tolist() == [0, 1, 2, 3, 4]
    assert streams.from_tensors([(x, y, x, y)]).public is None
    with pytest.raises(
        DataError, match=r"the public data of stream .* shape \(3,\), not \(2,\); bring all to one shape"
    ):
        streams.from_tensors([(x, y, x, y)], public=torch.zeros(5, 3))
    with pytest.raises(DataError, match="public inputs are torch.uint8 and the tasks' are torch.float32"):
        streams.from_tensors([(x, y, x, y)], public=torch.zeros(5, 2, dtype=torch.uint8))


def test_data_are_read_for_nan_once_and_uint8_never(monkeypatch):
    passes, aminmax = [], torch.Tensor.aminmax

    def counted(x):
        passes.append(x.dtype)
        return aminmax(x)

    monkeypatch.setattr(torch.Tensor, "aminmax", counted)
    stream = toy.stream(tasks=3)  # a pool of all tasks, and one of the public data
    assert len(passes) == 2
    moved = stream.to("cpu").with_augment([])
    assert len(passes) == 2 and moved.tasks[0].train.pool is stream.tasks[0].train.pool
    for _ in range(2):
        cfl.run(toy.config("rounds=1", method="fedavg"), stream=stream)
    _image_stream().with_augment(["flip"])
    assert len(passes) == 2


def test_rows_with_nan_that_no_task_has_do_no_harm():
    images = torch.zeros(20, 3)
    images[15, 1] = float("nan")
    assert Pool(images).broken.tolist() == [15]
    assert len(Stream("s", (_task(pool=Pool(images)),), (3,), False)) == 1
    images[9, 2] = float("-inf")  # the second test sample
    with pytest.raises(DataError, match="test sample 1 of task 't' of stream 's' .* NaN or infinite"):
        Stream("s", (_task(pool=Pool(images)),), (3,), False)


def test_sums_of_large_numbers_that_overflow_are_no_infinite_samples():
    assert len(Pool(torch.full((4, 9), 3e38)).broken) == 0


def test_from_tensors_takes_arrays_and_lists_as_it_takes_tensors():
    """The numbers of the run are the same to the bit."""
    parts = [toy.stream(tasks=1).tasks[0]]
    tensors = [[*part.train.gather(torch.arange(48)), *part.test.gather(torch.arange(40))] for part in parts]
    config, runs = toy.config("tasks=1", method="fedavg"), []
    for convert in (lambda leaf: leaf, torch.Tensor.numpy, torch.Tensor.tolist):
        stream = streams.from_tensors([[convert(leaf) for leaf in part] for part in tensors])
        runs.append(cfl.run(config, stream=stream).params)
    assert all(torch.equal(run[name], leaf) for run in runs[1:] for name, leaf in runs[0].items())


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_from_tensors_copies_what_the_caller_may_use_again(kind):
    x, y, clients = torch.ones(6, 2, dtype=kind), torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    stream = streams.from_tensors([(x, y, x, y)], clients=[clients], public=x)
    task = stream.tasks[0]
    held = (task.train.pool.images, stream.public.pool.images, task.train.targets, task.test.targets, task.clients)
    before = [leaf.clone() for leaf in held]
    for leaf in (x, y, clients):
        leaf.add_(1)
    assert all(map(torch.equal, held, before))


def test_from_tensors_names_the_error():
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match="train labels of task 1"):
        streams.from_tensors([(x, y, x, y), (x, y[:2], x, y)])
    with pytest.raises(
        DataError, match="train samples of task 1 .* torch.uint8 .* and train samples of task 0 torch.float32"
    ):
        streams.from_tensors([(x, y, x, y), (x.byte(), y, x, y)])
    with pytest.raises(DataError, match="no task"):
        streams.from_tensors([])
    with pytest.raises(DataError, match=r"train labels of task 0 must be 0, 1, 2, ..., not -1 \(sample 1\)"):
        streams.from_tensors([(x, -y, x, y)])


def test_masked_entries_are_refused():
    x, y = np.ma.masked_greater(np.arange(8.0).reshape(4, 2), 6), [0, 1, 0, 1]
    with pytest.raises(DataError, match="train samples of task 0 have masked entries; fill them, or leave"):
        from_tensors([(x, y, np.zeros((4, 2)), y)])
    whole = np.ma.masked_greater(np.arange(8.0).reshape(4, 2), 9)  # nothing is masked
    assert from_tensors([(whole, y, whole, y)]).tasks[0].train.gather(torch.arange(4))[0].tolist() == whole.tolist()


def test_a_name_that_several_tasks_have_selects_none():
    x, y = torch.zeros(4, 2), torch.arange(4) % 2
    stream = from_tensors([(x, y, x, y), (x + 1, y, x, y), (x, y + 2, x, y + 2)], multi_head=True)
    assert [task.name for task in stream.tasks] == ["classes 0 1", "classes 0 1", "classes 2 3"]
    with pytest.raises(ConfigError, match=r"several tasks of stream 'custom' have one name, so tasks must be a number"):
        selected(stream, ["classes 0 1"])
    assert selected(stream, 2).tasks == stream.tasks[:2]


def test_other_test_samples_have_another_hash():
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    other = x[8:].clone()
    other[2, 1] += 1
    one, two = (from_tensors([(x[:8], y[:8], test, y[8:])]).digests(False) for test in (x[8:], other))
    assert one.keys() == two.keys() and one != two
