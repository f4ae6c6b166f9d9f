"""Continual-learning metrics: pure functions of the accuracy matrix, and their text.

acc: (T, T) fractions in [0, 1]; acc[i, j] is the accuracy on task j after training on task i. Entries with j > i may be
NaN, and `forward_transfer` alone reads them.
"""

import math

import numpy as np

NONE = "–"  # in place of a missing number


def average_accuracy(acc: np.ndarray) -> float:
    """ACC: mean accuracy over all tasks after the last one (FOT, section 5)."""
    return float(acc[-1].mean())


def forgetting(acc: np.ndarray) -> float:
    """FGT: mean over all tasks but the last of acc[j, j] - acc[T-1, j] (FOT, eq. 13); negative values are kept.

    NaN for a single task, where forgetting is undefined.
    """
    return float((acc.diagonal() - acc[-1])[:-1].mean()) if len(acc) > 1 else float("nan")


def forgetting_from_best(acc: np.ndarray) -> float:
    """Mean over all tasks but the last of max_{j <= i < T-1} acc[i, j] - acc[T-1, j] (Chaudhry et al., 2018, eq. 3)."""
    if len(acc) == 1:
        return float("nan")
    return float(np.mean([acc[j:-1, j].max() - acc[-1, j] for j in range(len(acc) - 1)]))


def backward_transfer(acc: np.ndarray) -> float:
    """BWT: mean over all tasks but the last of acc[T-1, j] - acc[j, j], that is -FGT (Lopez-Paz and Ranzato, 2017)."""
    return -forgetting(acc)


def forward_transfer(acc: np.ndarray, untrained: np.ndarray) -> float:
    """FWT: mean over all tasks but the first of acc[j-1, j] - untrained[j] (Lopez-Paz and Ranzato, 2017).

    untrained: (T,) accuracy of the initial model on each task. NaN for a single task.
    """
    return float((acc.diagonal(1) - untrained[1:]).mean()) if len(acc) > 1 else float("nan")


def learning_accuracy(acc: np.ndarray) -> float:
    """Mean accuracy on each task right after training on it (Riemer et al., 2019)."""
    return float(acc.diagonal().mean())


def seen_accuracy(acc: np.ndarray) -> np.ndarray:
    """(T,) mean accuracy on the tasks seen so far, after each task."""
    return np.array([row[: task + 1].mean() for task, row in enumerate(acc)])


def summary(acc: np.ndarray, sequential: bool) -> dict[str, float]:
    """ACC, FGT, BWT and learning accuracy; all but ACC are NaN if one model does not learn the tasks in sequence."""
    figures = {
        "acc": average_accuracy(acc),
        "fgt": forgetting(acc),
        "fgt_max": forgetting_from_best(acc),
        "bwt": backward_transfer(acc),
        "learning_accuracy": learning_accuracy(acc),
    }
    return figures if sequential else dict.fromkeys(figures, math.nan) | {"acc": figures["acc"]}


def percent(value: float | None, decimals: int = 1) -> str:
    """Format a fraction in percent; a dash for None and NaN, such as forgetting after one task."""
    return NONE if value is None or math.isnan(value) else f"{100 * value:z.{decimals}f}"
