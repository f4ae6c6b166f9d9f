"""A run in progress: in each round, the server broadcasts, clients train, uploads are summed, and the server steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cfl.config.schema import RunConfig
from cfl.contract import Phase, RoundInfo, RoundInputs, Server, Strategy, TreesByOwner
from cfl.contract.composed import ComposedMethod
from cfl.core import CallbackError, HookError, UpdateError, metrics, tree, warn
from cfl.engines import Engine, Outcome
from cfl.engines.evaluate import Inference, LocalModels, Observer, accuracy
from cfl.models import Model
from cfl.runtime import schedule
from cfl.runtime.population import Population
from cfl.runtime.privacy_budget import Budget
from cfl.runtime.recorder import Recorder, row_of
from cfl.runtime.result import Result
from cfl.runtime.rounds import Rounds
from cfl.runtime.run_folder import plain
from cfl.runtime.schedule import Schedule
from cfl.runtime.serving import Predictor
from cfl.runtime.state import RunState
from cfl.streams import Stream
from cfl.streams.store import TaskSamples


@dataclass(eq=False)
class Session:
    """A run in progress; `cfl.runtime.builder.build_session` makes it.

    state: all that the run has computed so far; notes: remarks for the user at the start; about: contents of
    model.json; validation: training samples of each task that are held out, or none.
    """

    config: RunConfig
    stream: Stream
    composed: ComposedMethod
    model: Model
    population: Population
    rounds: Rounds
    budget: Budget
    state: RunState
    engine: Engine
    recorder: Recorder
    notes: list[str]
    about: dict[str, Any]
    validation: tuple[TaskSamples, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """The strategy of the run."""
        return self.composed.strategy

    @property
    def schedule(self) -> Schedule:
        """(task, phase, round within the phase) of every round."""
        return self.rounds.schedule

    def start(self, resume: bool) -> None:
        """Open the run's folder, restore the last checkpoint if `resume` is set, and announce the run."""
        if self.config.eval_later and self.strategy.sequential:
            self.state.initial_accuracy = self._accuracies(range(len(self.stream)), None)
        self.recorder.start(self.config, self.about, self.notes, resume)
        if fixed := self.model.fixed:  # of the checkpoint: a network of the user's own may begin with others
            self.model.start_from({**self.model.params, **tree.select(self.state.server["params"], fixed)})

    def conclude_pending(self) -> None:
        """Conclude the round after which a callback failed, if the last session ended so."""
        if self.state.pending is not None:
            self._conclude(self.state.position, self.state.pending[0])

    def close(self) -> None:
        """Release what the engine holds, such as worker processes."""
        self.engine.close()

    def prepare(self, position: int) -> RoundInputs:
        """Draw the cohort of a round and make its broadcast, from the current state."""
        return self.rounds.inputs(position, self.state)

    def round(self, position: int, observe: Observer | None = None) -> None:
        """Run one round of the schedule, and end the task after its last round. observe: see `cfl.run`."""
        inputs = self.prepare(position)
        self.recorder.lap("server")
        local_models = self._local_models(inputs, observe)
        alone = inputs.info.phase.cohort == "none"
        outcome = Outcome() if alone else self.engine.round(inputs, local_models)
        held = self.rounds.held(inputs, self.state.last_task)
        self.recorder.lap("clients", local_models.seconds if local_models else 0.0)
        self._absorb(inputs, outcome)
        for text in outcome.faults(inputs.info):
            self.recorder.sink.warn(text)
        self.recorder.lap("server")
        figures = local_models.figures if local_models else {}
        self._conclude(position, self.recorder.row(inputs, outcome, figures, held))

    def finish(self) -> Result:
        """Return the metrics of the whole run, and write them if the run has a folder."""
        state, matrix = self.state, self.state.accuracy_matrix
        try:
            own = self.recorder.callbacks.call("on_end", self._predictor())
        except CallbackError as error:
            raise self._resumable(error) from error
        result = {
            "method": self.rounds.label,
            "benchmark": self.stream.name,
            "seed": self.config.seed,
            **metrics.summary(matrix, self.strategy.sequential),
            **self._transferred(),
            "accuracy_matrix": [row_of(row) for row in matrix],
            **self._validated(),
            "subspace_use": {},
            **{name: value for name, value in state.reports[-1].items() if name != "callbacks"},
            "by_task": state.reports,
            **state.totals(),
            **self._client_bytes(),
            **self.budget.report(state.skipped),
            **({"stopped": state.stops} if state.stops else {}),
            **({"callbacks": own} if own else {}),
        }
        self.recorder.finish(result)
        return Result(plain(result), matrix, state.server["params"], self.model, self.config, self.stream.scenario)

    def _conclude(self, position: int, computed: dict[str, Any]) -> None:
        """Evaluate a computed round, let the callbacks see it, record it, and end the task after its last round.

        The state changes last, so that a round whose callback fails can be saved as computed, and concluded later.
        """
        state, row, (task, phase, number) = self.state, dict(computed), self.schedule[position]
        ends = self.rounds.ends_task(position, state.skipped)
        row["accuracy"] = self._evaluate(task, phase, number, ends)
        self.recorder.lap("evaluate")
        try:
            if own := self.recorder.callbacks.call("on_round", self._predictor(), row):
                row["callbacks"] = own
            stopped, places = self._decide(position, row)
            if not ends and (ends := self.rounds.ends_task(position, state.skipped | places)):
                row["accuracy"] = self._evaluate(task, phase, number, ends)
            if ends and (own := self.recorder.callbacks.call("on_task", self._predictor(), row)):
                state.reports[task]["callbacks"] = own
        except CallbackError as error:
            state.pending = computed, error.callback
            self.recorder.save(wait=True)
            raise self._resumable(error) from error
        self.recorder.lap("callbacks" if self.recorder.callbacks else "evaluate")
        if stopped:
            row["stopped"] = stopped
            state.skipped |= places
            state.stops.append({"task": task, "phase": phase.name, "round": number, **stopped})
        if places:
            what = f"phase {phase.name} of task {task}" if stopped["skips"] == "phase" else "the run"
            early = f"{len(places)} round{'s' * (len(places) > 1)} early"
            self.recorder.sink.note(f"{stopped['callback']} ends {what}, {early}")
        state.position, state.pending = schedule.following(self.schedule, position, state.skipped), None
        if ends and state.position < len(self.schedule):
            self.rounds.begin_task(task + 1, state)
        self.recorder.lap("evaluate")
        self.recorder.callbacks.keep(row)
        self.recorder.round(row, ends)

    def _decide(self, position: int, row: dict[str, Any]) -> tuple[dict[str, Any], set[int]]:
        """What a callback decides after a round, and the places of the rounds that it skips; empty for none.

        The first decision to end the run counts also if no round is left: later tasks may come, see `later_tasks`.
        """
        if not (found := self.recorder.callbacks.stop(row)):
            return {}, set()
        name, what = found
        places = {*schedule.skipped(self.schedule, position, what)} - self.state.skipped
        ends = what == "run" and all(stop["skips"] != "run" for stop in self.state.stops)
        return {"callback": name, "skips": what, "rounds": len(places)} if places or ends else {}, places

    def _resumable(self, error: CallbackError) -> CallbackError:
        """The error, with what to do."""
        kept = (
            "the round is saved, mend the callback and resume the run" if self.recorder.folder else "mend the callback"
        )
        return CallbackError(f"{error}; {kept}")

    def _absorb(self, inputs: RoundInputs, outcome: Outcome) -> None:
        """Step the server and store the clients' states; an aborted round changes nothing."""
        info, state = inputs.info, self.state
        if outcome.aborted is None:
            survivors = self.rounds.survived(info, tuple(outcome.states), outcome.noise)
            try:
                after = self.composed.absorb(
                    state.server, inputs.shared, outcome.mean, survivors, self.config.server.lr
                )
            except HookError as error:
                raise UpdateError(f"the server's step failed ({info.place}): {error}") from error
            if info.phase.diagnostic and (self.config.secagg, self.config.dp.level) != ("none", "none"):
                self._check_measurement(info, inputs.shared, after)
            state.server = after
        state.clients.update((id, own) for id, own in outcome.states.items() if own or inputs.states[id])
        state.last_task.update(dict.fromkeys(outcome.states, info.task))

    def _check_measurement(self, info: RoundInfo, shared: TreesByOwner, after: Server) -> None:
        """Raise UpdateError if the unprotected uploads of a diagnostic phase have changed the broadcast."""
        now = self.composed.broadcast(after, info)
        if now.keys() != shared.keys() or not all(tree.equal(leaves, now[name]) for name, leaves in shared.items()):
            raise UpdateError(
                f"the strategy's absorb changes the broadcast ({info.place}), but nothing protects the uploads of a "
                "phase with diagnostic=True; set diagnostic=False, or keep the results for `report`"
            )

    def _evaluate(self, task: int, phase: Phase, number: int, last: bool) -> float | None:
        """Accuracy of the global model on the current task if an evaluation is due. last: the round ends the task."""
        if last:
            return self._end_task(task)
        every = self.config.eval_every
        due = phase.train and bool(every) and (number + 1) % every == 0
        return self._accuracies([task], self._predictor().inference(task))[0] if due else None

    def _end_task(self, task: int) -> float:
        """Fill a row of the accuracy matrices: the global model on every task so far, with `eval_later` on all."""
        state = self.state
        inference = self._predictor().inference(task)
        state.accuracy_matrix[task, : task + 1] = self._accuracies(range(task + 1), inference)
        if inference and inference.told:
            warn("accuracies are those with the task of each test sample given: the strategy serves other parameters "
                 f"for each task, and infers no task, but scenario={self.stream.scenario}")  # fmt: skip
        if state.initial_accuracy and (later := range(task + 1, len(self.stream))):
            state.accuracy_matrix[task, task + 1 :] = self._accuracies(later, None)
        if self.validation:
            held = dict(enumerate(self.validation[: task + 1]))
            found = self._predictor().accuracies(held, self._predictor().inference(task))
            state.validation_matrix[task, : task + 1] = found
        own = self.strategy.report(state.server, self.model)
        state.reports[task:] = [plain({**own, **(inference.figures if inference else {})})]
        self.recorder.images(task, self.strategy.images(state.server, self.model))
        return float(state.accuracy_matrix[task, task])

    def _accuracies(self, tasks: Iterable[int], inference: Inference | None) -> list[float]:
        return self._predictor().accuracies({task: self.stream.tasks[task].test for task in tasks}, inference)

    def _predictor(self) -> Predictor:
        scenario, batch_size = self.stream.scenario, self.config.eval_batch_size
        return Predictor(self.model, self.strategy, self.state.server, scenario, batch_size)

    def _local_models(self, inputs: RoundInputs, observe: Observer | None) -> LocalModels | None:
        """Measure the local models of this round; None if no measurement is due and no observer is set."""
        info, every = inputs.info, self.config.eval_local
        due = info.phase.train and bool(every) and (info.trained + 1) % every == 0
        if not due and observe is None:
            return None
        return LocalModels(info, inputs.shared["params"], self._score if due else None, observe)

    def _score(self, params: tree.Tree, task: int) -> float:
        return accuracy(self.model, params, self.stream.tasks[task].test, task, self.config.eval_batch_size)

    def _validated(self) -> dict[str, Any]:
        """Figures of the held-out training samples for metrics.json, if there are any."""
        if not self.validation:
            return {}
        matrix = self.state.validation_matrix
        return {
            "validation_acc": metrics.average_accuracy(matrix),
            "validation_matrix": [row_of(row) for row in matrix],
        }

    def _transferred(self) -> dict[str, Any]:
        """FWT, and what it compares with, for metrics.json, if later tasks are evaluated."""
        initial = self.state.initial_accuracy
        if not initial:
            return {}
        fwt = metrics.forward_transfer(self.state.accuracy_matrix, np.array(initial))
        return {"fwt": fwt, "initial_accuracy": initial}

    def _client_bytes(self) -> dict[str, float]:
        """Bytes that a client stores between rounds, mean and maximum over all clients with data."""
        state, last = self.state, len(self.state.reports) - 1
        kept = self.rounds.kept_at_end(state.server, last)
        holders = {id for id, task in state.last_task.items() if task == last}
        without_state = self._stored({})
        stored = [
            (self._stored(state.clients[id]) if id in state.clients else without_state) + kept * (id in holders)
            for id in self.population.owners(tuple(range(len(self.stream))))
        ]
        return {"client_bytes": sum(stored) / len(stored), "client_bytes_max": max(stored)}

    def _stored(self, state: tree.Tree) -> int:
        """Bytes of a client's trees, the samples in its memory, the public inputs, and the frozen parameters."""
        public = self.rounds.public
        inputs = len(public) * public.pool.images[0].nbytes if public else 0  # public samples have no labels
        return inputs + tree.nbytes(self.model.fixed) + self.rounds.stored_bytes(state)
