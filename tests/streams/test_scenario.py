"""Scenarios: which task a label belongs to, and who knows it."""

from dataclasses import replace

import pytest
import torch

from cfl.core import ConfigError, DataError
from cfl.streams import from_tensors, with_scenario
from tests import toy


def targets(stream):
    return [(set(task.train.targets.tolist()), set(task.test.targets.tolist()), task.classes) for task in stream.tasks]


@pytest.mark.parametrize("multi_head", [False, True])
def test_class_incremental_tasks_number_their_classes_one_after_another(multi_head):
    """Three tasks of two classes: 0 and 1, then 2 and 3, then 4 and 5."""
    found = with_scenario(toy.stream(multi_head=multi_head), "class")
    assert targets(found) == [({0, 1}, {0, 1}, 2), ({2, 3}, {2, 3}, 4), ({4, 5}, {4, 5}, 6)]
    assert (found.scenario, found.heads, found.growing) == ("class", (2, 2, 2), True)


def test_samples_stay_as_they_are():
    before, after = toy.stream(), with_scenario(toy.stream(), "class")
    for one, other in zip(before.tasks, after.tasks, strict=True):
        assert one.test.gather(torch.arange(5))[0].equal(other.test.gather(torch.arange(5))[0])


@pytest.mark.parametrize(("multi_head", "natural"), [(False, "domain"), (True, "task")])
def test_the_natural_scenario_changes_nothing(multi_head, natural):
    stream = toy.stream(multi_head=multi_head)
    assert stream.scenario == natural
    assert with_scenario(stream, natural) is stream and with_scenario(stream, None) is stream


@pytest.mark.parametrize(("multi_head", "scenario"), [(False, "task"), (True, "domain")])
def test_tasks_with_equal_numbers_of_classes_may_share_a_head_or_not(multi_head, scenario):
    found = with_scenario(toy.stream(multi_head=multi_head), scenario)
    assert found.scenario == scenario and found.multi_head != multi_head
    assert targets(found) == targets(toy.stream())


def unequal():
    x, y = torch.randn(30, 4), torch.arange(30)
    return from_tensors([(x, y % 2, x, y % 2), (x, y % 3, x, y % 3)], name="unequal", multi_head=True)


def test_tasks_of_different_sizes_have_parts_of_different_sizes():
    found = with_scenario(unequal(), "class")
    assert found.heads == (2, 3) and [task.classes for task in found.tasks] == [2, 5]


def test_numbers_of_classes_are_listed_in_the_order_of_the_tasks():
    x, y = torch.randn(24, 4), torch.arange(24)
    stream = from_tensors([(x, y % size, x, y % size) for size in (4, 2, 4, 3)], name="mixed", multi_head=True)
    with pytest.raises(ConfigError, match=r"those of 'mixed' have \[4, 2, 4, 3\]"):
        with_scenario(stream, "domain")


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"equal numbers of classes, and those of 'unequal' have \[2, 3\]"):
        with_scenario(unequal(), "domain")
    with pytest.raises(ConfigError, match="has targets of scenario=class, so it cannot run with task"):
        with_scenario(with_scenario(toy.stream(), "class"), "task")


def test_an_unknown_scenario_is_named():
    with pytest.raises(ConfigError, match="unknown scenario 'clas'.*class"):
        with_scenario(toy.stream(), "clas")


def test_scenarios_have_data_of_their_own():
    """A run does not resume under another scenario."""
    hashes = [with_scenario(toy.stream(), name).digests(public=False) for name in ("task", "class", "domain")]
    assert len({tuple(found.values()) for found in hashes}) == 3


def test_a_head_that_grows_has_parts():
    stream = with_scenario(toy.stream(multi_head=True), "class")
    with pytest.raises(DataError, match=r"growing=True, so its head has parts: set multi_head=True"):
        replace(stream, multi_head=False)


@pytest.mark.parametrize("labels", [[(0, 1), (2, 3), (4, 5)], [(7, 9), (0, 4), (5, 6)]])
def test_tasks_of_a_shared_head_that_share_no_label_get_no_output_without_samples(labels):
    x, y = torch.randn(30, 4), torch.arange(30) % 2
    tasks = [(x, torch.tensor(own)[y], x, torch.tensor(own)[y]) for own in labels]
    stream = from_tensors(tasks)
    assert targets(with_scenario(stream, "class")) == targets(with_scenario(toy.stream(), "class"))
    assert targets(with_scenario(stream, "task")) == targets(toy.stream(multi_head=True))
    found = with_scenario(stream, "class")
    assert found.tasks[1].train.targets.equal(2 + y)  # labels in ascending order
    assert with_scenario(stream, "domain") is stream


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([(0, 1), (1, 2)], [({0, 1}, 2), ({2, 3}, 4)]),
        ([(0, 2), (0, 2)], [({0, 1}, 2), ({2, 3}, 4)]),
        ([(3, 7)], [({0, 1}, 2)]),
    ],
    ids=str,
)
def test_labels_that_tasks_share_are_other_classes_in_each(labels, classes):
    """As with a head for each task: class numbers ascend with the labels, and every output has samples."""
    x, y = torch.randn(30, 4), torch.arange(30) % 2
    stream = from_tensors([(x, torch.tensor(own)[y], x, torch.tensor(own)[y]) for own in labels])
    assert targets(with_scenario(stream, "class")) == [(own, own, count) for own, count in classes]
    assert targets(with_scenario(stream, "task")) == [({0, 1}, {0, 1}, 2) for _ in labels]


def test_tasks_of_a_shared_head_may_have_unequal_numbers_of_labels():
    """Labels 0 to 3, then 4 and 5, then 6 to 8; the head of the single-head stream has 9 outputs for all."""
    sizes, x = (4, 2, 3), torch.arange(24.0).reshape(12, 2)
    tasks = [(x, torch.arange(12) % n + sum(sizes[:i]), x, torch.arange(12) % n + sum(sizes[:i]))
             for i, n in enumerate(sizes)]  # fmt: skip
    stream = from_tensors(tasks, name="uneven")
    assert [task.classes for task in stream.tasks] == [9, 9, 9]
    own = [(torch.arange(12) % n).tolist() for n in sizes]
    found = with_scenario(stream, "task")
    assert [task.train.targets.tolist() for task in found.tasks] == own and found.multi_head
    assert [task.classes for task in found.tasks] == [4, 2, 3]
    assert [task.classes for task in with_scenario(stream, "class").tasks] == [4, 6, 9]
