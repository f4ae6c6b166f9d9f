"""Metrics of the accuracy matrix, by hand and against loops over the definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cfl.core import metrics

NAN = float("nan")
MATRICES = st.integers(2, 5).flatmap(lambda size: arrays(np.float64, (size, size), elements=st.floats(0, 1)))


def test_two_tasks_by_hand():
    acc = np.array([[0.9, NAN], [0.8, 0.7]])  # rows: after task 0, 1; columns: task
    assert metrics.average_accuracy(acc) == pytest.approx(0.75)  # (0.8 + 0.7) / 2
    assert metrics.forgetting(acc) == pytest.approx(0.1)  # 0.9 - 0.8
    assert metrics.backward_transfer(acc) == pytest.approx(-0.1)
    assert metrics.forgetting_from_best(acc) == pytest.approx(0.1)  # its maximum is over task 0's first row alone
    assert metrics.learning_accuracy(acc) == pytest.approx(0.8)  # (0.9 + 0.7) / 2


def test_improvement_is_negative_forgetting():
    acc = np.array([[0.6, NAN], [0.8, 0.7]])
    assert metrics.forgetting(acc) == pytest.approx(-0.2)
    assert metrics.forgetting_from_best(acc) == pytest.approx(-0.2)
    assert metrics.backward_transfer(acc) == pytest.approx(0.2)


def test_forgetting_from_best_uses_the_maximum():
    acc = np.array([[0.5, NAN, NAN], [0.9, 0.6, NAN], [0.4, 0.3, 0.8]])
    assert metrics.forgetting(acc) == pytest.approx((0.1 + 0.3) / 2)  # 0.5 - 0.4 and 0.6 - 0.3
    assert metrics.forgetting_from_best(acc) == pytest.approx((0.5 + 0.3) / 2)  # 0.9 - 0.4 and 0.6 - 0.3


def test_seen_accuracy_leaves_out_later_tasks():
    acc = np.array([[0.9, 0.3, 0.1], [0.8, 0.7, 0.5], [NAN, NAN, NAN]])  # the run was stopped in the last task
    assert metrics.seen_accuracy(acc) == pytest.approx([0.9, 0.75, NAN], nan_ok=True)  # 0.9 and (0.8 + 0.7) / 2


def test_forward_transfer_by_hand():
    acc = np.array([[0.9, 0.3, NAN], [0.8, 0.7, 0.5], [0.8, 0.7, 0.9]])
    untrained = np.array([0.5, 0.1, 0.2])
    assert metrics.forward_transfer(acc, untrained) == pytest.approx(0.25)  # ((0.3 - 0.1) + (0.5 - 0.2)) / 2


def test_one_task():
    acc = np.array([[0.75]])
    assert metrics.average_accuracy(acc) == metrics.learning_accuracy(acc) == 0.75
    undefined = (
        metrics.forgetting(acc),
        metrics.forgetting_from_best(acc),
        metrics.backward_transfer(acc),
        metrics.forward_transfer(acc, np.array([0.1])),
    )
    assert all(map(math.isnan, undefined))


@settings(max_examples=60, deadline=None)
@given(MATRICES)
def test_agrees_with_the_definitions(acc):
    last = len(acc) - 1
    fgt = [acc[j, j] - acc[last, j] for j in range(last)]
    best = [max(acc[i, j] for i in range(j, last)) - acc[last, j] for j in range(last)]
    fwt = [acc[j - 1, j] - acc[0, j] for j in range(1, last + 1)]
    assert metrics.average_accuracy(acc) == pytest.approx(sum(acc[last]) / (last + 1))
    assert metrics.forgetting(acc) == pytest.approx(sum(fgt) / last, abs=1e-12)
    assert metrics.backward_transfer(acc) == -metrics.forgetting(acc)
    assert metrics.forgetting_from_best(acc) == pytest.approx(sum(best) / last, abs=1e-12)
    assert metrics.forward_transfer(acc, acc[0]) == pytest.approx(sum(fwt) / last, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(MATRICES)
def test_reads_nothing_of_tasks_not_yet_learned(acc):
    unseen = acc.copy()
    unseen[np.triu_indices(len(acc), 1)] = NAN
    for metric in (
        metrics.average_accuracy,
        metrics.forgetting,
        metrics.forgetting_from_best,
        metrics.learning_accuracy,
    ):
        assert metric(unseen) == metric(acc)


def test_the_summary_by_hand():
    acc = np.array([[0.8, NAN, NAN], [0.9, 0.7, NAN], [0.7, 0.5, 0.6]])
    found = metrics.summary(acc, sequential=True)
    # (0.7 + 0.5 + 0.6) / 3, (0.1 + 0.2) / 2, (0.9 - 0.7 + 0.2) / 2, (0.8 + 0.7 + 0.6) / 3
    expected = {"acc": 0.6, "fgt": 0.15, "fgt_max": 0.2, "bwt": -0.15, "learning_accuracy": 0.7}
    assert list(found) == list(expected) and found == pytest.approx(expected)


def test_of_models_of_single_tasks_only_the_accuracy_is_defined():
    found = metrics.summary(np.array([[0.9, NAN], [0.8, 0.7]]), sequential=False)
    assert found.pop("acc") == pytest.approx(0.75)
    assert list(found) == ["fgt", "fgt_max", "bwt", "learning_accuracy"] and all(map(math.isnan, found.values()))


def test_of_one_task_the_summary_has_no_forgetting():
    found = metrics.summary(np.array([[0.75]]), sequential=True)
    assert (found["acc"], found["learning_accuracy"]) == (0.75, 0.75)
    assert math.isnan(found["fgt"]) and math.isnan(found["bwt"])
