"""Predictions of a strategy's global model, for the tasks that it has learned."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.contract import Samples, Server, Strategy
from cfl.core import Tree
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

        With a growing head, the outputs of classes that are ruled out are hugely negative.
        """
        self.model.module.eval()
        with torch.no_grad():
            return torch.cat([self._batch(part, task, last) for part in x.split(self.batch_size)])

    def _batch(self, x: Tensor, task: int | None, last: int) -> Tensor:
        if task is not None:
            found = self.model.predict(self.strategy.serve(self.server, task), x, last if self.model.growing else task)
            return self.model.among(found, task) if self.model.growing else found
        tasks = self._infer(last)(x)
        if tasks is None:
            return self.model.predict(self.strategy.serve(self.server, last), x, last)
        return Inference(self._served(range(last + 1)), self._infer(last)).outputs(self.model, x, tasks)

    def _infer(self, last: int) -> Callable[[Tensor], Tensor | None]:
        return lambda x: self.strategy.infer_task(self.server, x, last, self.model)

    def _served(self, tasks: Iterable[int]) -> dict[int, Tree]:
        return {task: self.strategy.serve(self.server, task) for task in tasks}
