"""Predictions of a strategy's global model, for the tasks that it has learned."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cfl.contract import Samples, Server, Strategy
from cfl.contract.samples import batched
from cfl.core import ConfigError, DataError, Tree, tree
from cfl.engines.evaluate import Inference, accuracies
from cfl.models import Model


@dataclass(frozen=True)
class Predictor:
    """What predicts: a model, a strategy, the trees of its server, and what tells the task of a sample.

    scenario: see `cfl.streams.scenario`; batch_size: samples of a batch.
    """

    model: Model
    strategy: Strategy
    server: Server
    scenario: str
    batch_size: int

    def inference(self, last: int) -> Inference | None:
        """The strategy's inference of tasks 0 to `last`; None if the scenario gives the task of a sample."""
        if self.scenario == "task":
            return None
        return Inference(self._served(range(last + 1)), self._infer(last))

    def accuracies(self, tests: Mapping[int, Samples], inference: Inference | None = None) -> list[float]:
        """Return the fraction of correct predictions on the samples of each task; see `cfl.engines.evaluate`."""
        return accuracies(self.model, self._served(tests), tests, self.batch_size, inference)

    def logits(self, x: Tensor, task: int | None, last: int) -> Tensor:
        """Outputs (n, classes) for inputs (n, *input_shape). task: of all samples, None to infer it; last: last task.

        With a growing head, the outputs of classes that are ruled out are hugely negative. Raises ConfigError for a
        task that is missing, see `check_shared`; DataError for a single sample without statistics.
        """
        if task is None and self.scenario == "task":
            self.check_shared(last)
            task = last
        self.model.module.eval()
        if self.model.joins_last and len(x) == 1:
            raise DataError("x is one sample, and the model normalises by the statistics of a batch; give two or more")
        parts = batched(x, self.batch_size, self.model.joins_last)
        with torch.no_grad():
            return torch.cat([self._batch(part, task, last) for part in parts])

    def check_shared(self, last: int) -> None:
        """Raise ConfigError if tasks 0 to `last` of a stream of several tasks have heads or other parts of their own.

        Parts of a growing head are not meant: the head of the last task has them all.
        """
        if self.model.growing or self.model.tasks == 1:
            return
        served = (self.model.bind(self.strategy.serve(self.server, task), task) for task in range(last + 1))
        if self.model.multi_head or any(not tree.equal(a, b) for a, b in pairwise(served)):
            what = "a head" if self.model.multi_head else "parts"
            raise ConfigError(f"the model has {what} for each task; pass task=0 to {last}")

    def _batch(self, x: Tensor, task: int | None, last: int) -> Tensor:
        if task is not None:
            found = self.model.predict(self.strategy.serve(self.server, task), x, last if self.model.growing else task)
            return self.model.among(found, task) if self.model.growing else found
        tasks = self._infer(last)(x)
        if tasks is None:
            self.check_shared(last)
            return self.model.predict(self.strategy.serve(self.server, last), x, last)
        return Inference(self._served(range(last + 1)), self._infer(last)).outputs(self.model, x, tasks)

    def _infer(self, last: int) -> Callable[[Tensor], Tensor | None]:
        return lambda x: self.strategy.infer_task(self.server, x, last, self.model)

    def _served(self, tasks: Iterable[int]) -> dict[int, Tree]:
        return {task: self.strategy.serve(self.server, task) for task in tasks}
