"""Pictures of results; matplotlib is imported when one is drawn, and draws to files only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def accuracy(rows: Sequence[Sequence[float | None]], title: str, path: Path) -> None:
    """Draw the accuracy matrix, and the accuracy on each task as later ones are learnt, to a PNG file.

    rows: (tasks, tasks) fractions, None for tasks not yet seen.
    """
    matrix = 100 * np.array(rows, dtype=float)
    figure, (left, right) = _figure(2)
    _heat_map(left, matrix, figure)
    _curves(right, matrix)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)


def comparison(
    summaries: Mapping[str, Mapping[str, Any]],
    matrices: Mapping[str, Sequence[Sequence[float | None]]],
    title: str,
    path: Path,
) -> None:
    """Draw ACC and FGT of each method (mean, standard deviation), and the mean accuracy on seen tasks, to a PNG file.

    summaries: method to what `tables.summary` gives; matrices: method to its mean accuracy matrix (fractions).
    """
    methods, places = list(summaries), np.arange(len(summaries))
    figure, (left, right) = _figure(2, height=max(4.2, 1.5 + 0.5 * len(methods)))
    for shift, name, colour in ((-0.2, "acc", "tab:blue"), (0.2, "fgt", "tab:orange")):
        means = [100 * summaries[method][name]["mean"] for method in methods]
        stds = [100 * summaries[method][name]["std"] for method in methods]
        bars = left.barh(places + shift, means, 0.4, xerr=stds, capsize=3, color=colour, label=name.upper())
        texts = ["" if np.isnan(mean) else f"{mean:.1f}" for mean in means]  # forgetting is not defined for all
        left.bar_label(bars, texts, padding=3, fontsize=9)
    left.set(yticks=places, yticklabels=methods, xlabel="percent", title="after the last task")
    left.invert_yaxis()  # the first method on top, as in the table
    left.margins(x=0.14)
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    for method, rows in matrices.items():
        seen = np.nanmean(100 * np.array(rows, dtype=float), axis=1)
        right.plot(range(len(seen)), seen, marker="o", label=method)
    right.set(
        xticks=_ticks(len(next(iter(matrices.values())))),
        ylim=(0, 102),
        xlabel="after task",
        ylabel="mean accuracy on tasks seen, %",
        title="over the stream",
    )
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    right.grid(alpha=0.3)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)


def _figure(columns: int, height: float = 4.2) -> tuple[Any, Any]:
    # Not pyplot: it would choose a window system and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _heat_map(axes: Any, matrix: np.ndarray, figure: Any) -> None:
    image = axes.imshow(matrix, vmin=0, vmax=100, cmap="viridis")
    figure.colorbar(image, ax=axes, label="accuracy, %", shrink=0.85)
    if len(matrix) <= 12:  # more numbers than that cannot be read
        for (after, task), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                colour = "black" if value > 60 else "white"
                axes.text(task, after, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9)
    ticks = _ticks(len(matrix))
    axes.set(xticks=ticks, yticks=ticks, xlabel="tested on task", ylabel="after task", title="accuracy matrix")


def _curves(axes: Any, matrix: np.ndarray) -> None:
    for task in range(matrix.shape[1]):
        after = np.arange(task, len(matrix))
        axes.plot(after, matrix[task:, task], marker="o", markersize=4, color=f"C{task % 10}", label=f"task {task}")
    axes.set(xticks=_ticks(len(matrix)), ylim=(0, 102), xlabel="after task", ylabel="accuracy, %", title="each task")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=1 + matrix.shape[1] // 16)


def _ticks(tasks: int) -> list[int]:
    return list(range(0, tasks, 1 + tasks // 16))
