"""The result of a run."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cfl.assembly.resolve import dump
from cfl.config.overrides import flat
from cfl.config.schema import RunConfig
from cfl.core import Tree
from cfl.core.metrics import percent
from cfl.models import Model
from cfl.runtime import notebook, table


@dataclass(frozen=True)
class Result:
    """Result of a run: metrics as in metrics.json (fractions, bytes, seconds), and the global model.

    accuracy_matrix: (tasks, tasks) fractions, NaN where not evaluated; params: the tree of the final global model;
    config: with all options; scenario: see `cfl.streams.scenario`.
    """

    metrics: dict[str, Any]
    accuracy_matrix: np.ndarray
    params: Tree
    model: Model
    config: RunConfig
    scenario: str

    def frame(self) -> Any:
        """Return the run as a pandas DataFrame of one row: options by dotted name, and figures with their units.

        Raises ConfigError if pandas is not installed.
        """
        return table.frame(table.row(self.metrics, self.scenario, flat(dump(self.config)), {}))

    def __repr__(self) -> str:
        method, benchmark = (repr(self.metrics[name])[:60] for name in ("method", "benchmark"))
        scores = " ".join(f"{name.upper()} {percent(self.metrics[name])} %" for name in ("acc", "fgt"))
        return f"Result(method={method}, benchmark={benchmark}, seed={self.metrics['seed']}, {scores})"

    def _repr_html_(self) -> str:
        """Tables for a notebook."""
        return notebook.result(self.metrics)
