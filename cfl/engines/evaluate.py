"""Accuracy of models on test samples, and measurements on the clients' models before they are averaged."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cfl.contract import RoundInfo, Samples, Share
from cfl.contract.samples import joined
from cfl.core import Tree, UpdateError, rng, tree
from cfl.models import Model
from cfl.models.passes import by_batch

Observer = Callable[[RoundInfo, int, Tree], None]


class Inference:
    """Predictions for test samples whose task is inferred, and how often the inferred task is right.

    served: task to the parameters that predict for it, of all tasks so far; infer: maps inputs (n, ...) to the task of
    each, (n,) int64, or to None if it infers no task.
    """

    def __init__(self, served: Mapping[int, Tree], infer: Callable[[Tensor], Tensor | None]) -> None:
        self.served, self.infer = served, infer
        self._right: list[Tensor] = []

    def __call__(self, model: Model, x: Tensor, sizes: Mapping[int, int]) -> Tensor | None:
        """Outputs (n, classes) for inputs (n, ...), each by the model of its inferred task; None without inference.

        sizes: true task to its number of inputs, in their order. With a growing head, outputs of other classes than
        those of the inferred task are minus infinity.
        """
        tasks = self.infer(x)
        if tasks is None:
            return None
        own = torch.tensor([*sizes], device=x.device).repeat_interleave(torch.tensor([*sizes.values()]).to(x.device))
        self._right.append(tasks == own)
        return self.outputs(model, x, tasks)

    def outputs(self, model: Model, x: Tensor, tasks: Tensor) -> Tensor:
        """Outputs (n, classes) for inputs (n, ...), each by the model of its task in `tasks` (n,)."""
        logits, last, together = torch.empty(len(x), 0, device=x.device), max(self.served), by_batch(model.module)
        for task in tasks.unique().tolist():
            rows, head = tasks == task, last if model.growing else task
            if together:  # the samples of one task alone would have other statistics, and a single sample none
                found = model.predict(self.served[task], x, head)[rows]
            else:
                found = model.predict(self.served[task], x[rows], head)
            if model.growing:
                classes = model.classes_of(task)
                found[:, : classes.start] = found[:, classes.stop :] = -torch.inf
            logits = logits if logits.shape[1] else found.new_empty(len(x), found.shape[1])
            logits[rows] = found
        return logits

    @property
    def told(self) -> bool:
        """Whether no task was inferred and the parameters differ, so that samples were predicted by their true task."""
        return not self._right and any(not tree.equal(a, b) for a, b in itertools.pairwise(self.served.values()))

    @property
    def figures(self) -> dict[str, float]:
        """Share of test samples whose task is inferred right; empty without inference."""
        return {"task_accuracy": float(torch.cat(self._right).double().mean())} if self._right else {}


def accuracy(model: Model, params: Tree, samples: Samples, task: int, batch_size: int) -> float:
    """Return the fraction of correct predictions on samples of one task; see `accuracies`."""
    return accuracies(model, {task: params}, {task: samples}, batch_size)[0]


def accuracies(
    model: Model,
    served: Mapping[int, Tree],
    parts: Mapping[int, Samples],
    batch_size: int,
    inference: Inference | None = None,
) -> list[float]:
    """Return for each task of `served` the fraction of correct predictions on its samples, in evaluation mode.

    served: task to the parameters that predict for it, through the task's head; if the head grows, through that of the
    last of these tasks, with the classes of all tasks so far; parts: task to its samples;
    batch_size: samples of a batch. Tasks whose parameters are the same tensors share batches. A model that normalises
    by batch statistics takes each task alone, in batches drawn at random with the model's seed, because the batches
    then decide the predictions.
    inference: predicts in place of `served` where it infers the task of a sample.
    Raises UpdateError if the largest output of a sample is NaN or infinity: such a model predicts nothing.
    """
    model.module.eval()
    separate = by_batch(model.module)
    groups: dict[tuple[int, ...], list[int]] = {}
    head = {task: max(served) if model.growing else task for task in served}
    for task, params in served.items():
        leaves = [params[name] for name in (*model.trainable(head[task]), *model.buffers(task))]
        groups.setdefault((task,) if separate else tuple(map(id, leaves)), []).append(task)
    counts: dict[int, list[Tensor]] = {task: [] for task in served}  # correct and not finite, of each batch
    with torch.no_grad():
        for task, *others in groups.values():
            params = model.layout.laid_out(dict(served[task]))
            rows = {own: torch.arange(len(parts[own])) for own in (task, *others)}
            if separate and len(parts[task]) > batch_size:  # samples sorted by class would give batches of one class
                source = rng.generator(rng.key(model.seed, "evaluation", task))
                rows = {task: torch.randperm(len(parts[task]), generator=source)}
            shares = {own: Share(parts[own], each.to(parts[own].targets.device)) for own, each in rows.items()}
            for pieces in _batches(shares, batch_size, separate):
                x, y = (joined(leaves) for leaves in zip(*pieces.values(), strict=True))
                sizes = {own: len(labels) for own, (_, labels) in pieces.items()}
                logits = None if inference is None else inference(model, x, sizes)
                if logits is None:
                    logits = model.predict(params, x, head[task])
                found = torch.stack([logits.argmax(dim=1) == y, ~logits.amax(dim=1).isfinite()])
                for own, mine in zip(pieces, found.split([*sizes.values()], dim=1), strict=True):
                    counts[own].append(mine.sum(dim=1))
    sums = torch.stack([torch.stack(each).sum(dim=0) for each in counts.values()])  # one transfer from the device
    found_of = dict(zip(served, sums.tolist(), strict=True))
    _check_outputs({task: bad for task, (_, bad) in found_of.items()}, served, parts)
    return [correct / len(parts[task]) for task, (correct, _) in found_of.items()]


def _check_outputs(bad: Mapping[int, int], served: Mapping[int, Tree], parts: Mapping[int, Samples]) -> None:
    """Raise UpdateError for the first task with samples whose outputs are not finite. bad: their number, by task."""
    for task, count in bad.items():
        if count:
            leaf = next((name for name, leaf in served[task].items() if not tree.all_finite({name: leaf})), None)
            why = f"its parameter '{leaf}' is not finite" if leaf else "its weights are finite, but too large"
            why += "; lower local.lr or server.lr"
            for name, own in served[task].items():
                if name.partition("@")[0].endswith("running_var") and (own < 0).any():
                    why = f"its variance '{name}' is negative, as uploads of hostile clients can make it (attack.name)"
            raise UpdateError(
                f"the model's outputs are NaN or infinity for {count} of {len(parts[task])} test samples of task "
                f"{task}: {why}"
            )


def _batches(shares: Mapping[int, Share], size: int, keep_together: bool) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Yield the concatenated samples of all shares in batches of `size`: task to inputs and labels.

    keep_together: add a single last sample to the batch before, because one sample has no batch statistics.
    """
    *starts, total = itertools.accumulate((len(rows) for _, rows in shares.values()), initial=0)
    cuts = [*range(0, total, size), total]
    if keep_together and len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
        del cuts[-2]
    for begin, end in itertools.pairwise(cuts):
        pieces = {
            task: rows[max(begin - start, 0) : max(end - start, 0)]
            for start, (task, (_, rows)) in zip(starts, shares.items(), strict=True)
        }
        yield {task: shares[task].samples.gather(rows) for task, rows in pieces.items() if len(rows)}


class LocalModels:
    """Measures the clients' models of a round after local training: engines call it with each id and parameters.

    score: returns the accuracy of parameters on a task, a fraction; observe: the user's observer; None skips either.
    seconds: time spent in calls.
    """

    def __init__(
        self, info: RoundInfo, params: Tree, score: Callable[[Tree, int], float] | None, observe: Observer | None
    ) -> None:
        self.info, self.params, self.score, self.observe = info, params, score, observe
        self.seconds = 0.0
        self._found: dict[int, tuple[float | None, float]] = {}

    def __call__(self, client: int, params: Tree) -> None:
        begin = time.monotonic()
        if self.score is not None:
            names = [name for name in params if self.info.model.is_parameter(name)]
            drift = tree.sub(tree.select(params, names), self.params)
            own: float | None = None
            with contextlib.suppress(UpdateError):  # outputs of a local model that are not finite do not stop a run
                own = self.score(params, self.info.task)
            self._found[client] = own, float(tree.dot(drift, drift).sqrt())
        if self.observe is not None:
            self.observe(self.info, client, tree.clone(params))
        self.seconds += time.monotonic() - begin

    @property
    def figures(self) -> dict[str, list[Any]]:
        """Columns, sorted by client: id, accuracy, and distance from the global model; empty without `score`.

        The accuracy is None if outputs are not finite.
        """
        rows = [(client, *self._found[client]) for client in sorted(self._found)]
        return dict(zip(("client", "accuracy", "drift"), map(list, zip(*rows, strict=True)), strict=False))
