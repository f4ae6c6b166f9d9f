"""The privacy budget of a run: epsilon of each client over all rounds, phases and tasks."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from cfl.aggregation import accounting, scope
from cfl.aggregation.accounting import Releases
from cfl.runtime.rounds import Rounds

_SOURCES = {
    "run": "the noise follows from the seed, so that runs repeat: keep the seed secret, and publish one run of a seed "
    "only, or set dp.noise_seed=system",
    "system": "the noise comes from the system's entropy: the run cannot be repeated; cohorts follow from the seed: "
    "keep it secret",
}

Plan = tuple[Releases, ...]
FEW = 3  # plans, see `Budget._worst`


class Budget:
    """The releases of each client's data in a schedule, and the noise that they need.

    The budget follows from the configuration alone: aborted rounds, clients that drop out, and rounds that a callback
    skips count as if there had been uploads. A decision to skip rounds depends on the data; the bound for all planned
    rounds holds whatever is decided, and one for the rounds before the decision need not (Rogers et al., 2016,
    Privacy odometers and filters).
    multiplier: standard deviation of the noise over dp.clip; 0 without differential privacy.
    Raises ConfigError if no amount of noise meets dp.target_epsilon.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.config, self.dp, self.population = rounds, rounds.config, rounds.config.dp, rounds.population
        self._known: dict[Plan, float] = {}
        self.multiplier = self.dp.noise_multiplier or 0.0
        if self.dp.target_epsilon is not None:
            self._solve(self.dp.target_epsilon)

    def plans(self, rounds: int | None = None, skipped: Collection[int] = ()) -> dict[int, Plan]:
        """Releases in the first `rounds` rounds (None: in all) but those `skipped`, for each client that has any."""
        spent: dict[int, Counter[float]] = {}
        together: dict[tuple[int, ...], Counter[float]] = {}  # by tasks seen: releases of all owners of their data
        planned = [] if self.dp.level == "none" else self.rounds.schedule[:rounds]
        for place, (task, phase, _) in enumerate(planned):
            if place in skipped or not scope.releases([phase], self.config):
                continue
            tasks = self.rounds.sees(task)
            owners, expected = self.population.owners(tasks), self.population.expected(phase, tasks)
            if self.dp.level == "client" and self.dp.amplify:  # all that may be drawn spend, at the sampling rate
                together.setdefault(tasks, Counter())[expected / len(owners)] += 1
                continue
            for id in self.rounds.cohort(place):
                own = spent.setdefault(id, Counter())
                if self.dp.level == "example" and phase.train and self.dp.protect == "all":
                    own.update(self._local(id, task, tasks))
                if self.dp.level == "client" or phase.work:
                    own[1.0] += 1
        for tasks, releases in together.items():
            for id in self.population.owners(tasks):
                spent.setdefault(id, Counter()).update(releases)
        return {
            id: tuple(Releases(rate, count) for rate, count in sorted(own.items()))
            for id, own in sorted(spent.items())
            if own
        }

    def epsilon(self) -> dict[int, float]:
        """Epsilon of each client at dp.delta after all rounds."""
        return {id: self._epsilon(plan) for id, plan in self.plans().items()}

    def so_far(self, rounds: int) -> float:
        """Largest epsilon of a client after the first `rounds` rounds; 0 without releases."""
        plans = set(self.plans(rounds).values())
        return max(map(self._epsilon, self._worst(plans)), default=0.0)

    def _solve(self, target: float) -> None:
        """Set the multiplier so that no client exceeds the target."""
        plans, dp = set(self.plans().values()), self.dp
        # `_weight` only approximates the order, so another plan may then exceed the target; None without releases
        worst: Plan | None = max(plans, key=_weight, default=None)
        while worst is not None:
            needed = accounting.noise_multiplier(worst, target, dp.delta, dp.accountant)
            self.multiplier = max(needed, self.multiplier * (1 + accounting.TOLERANCE))
            self._known.clear()
            worst = max(plans, key=self._epsilon)
            if self._epsilon(worst) <= target:
                break

    def _worst(self, plans: set[Plan]) -> list[Plan]:
        """Plans among which that of the largest epsilon is: all known ones, and the first few others by a quick bound.

        The accountant takes a hundred times as long. The bound, by Renyi DP at few orders, may swap plans of almost
        equal epsilon, so more than one is left.
        """
        known = [plan for plan in plans if plan in self._known]
        others = sorted(plans - {*known}, key=self._bound)
        return known + others[-FEW:]

    def _bound(self, plan: Plan) -> float:
        return accounting.epsilon(plan, self.multiplier, self.dp.delta, "rough")

    def _epsilon(self, plan: Plan) -> float:
        if plan not in self._known:
            self._known[plan] = accounting.epsilon(plan, self.multiplier, self.dp.delta, self.dp.accountant)
        return self._known[plan]

    def _local(self, id: int, task: int, tasks: tuple[int, ...]) -> dict[float, int]:
        """Releases of a client's local training in a round: sampling rate of a step to number of steps."""
        client, size = self.population.client(id, task, tasks), self.config.local.batch_size
        return {min(1.0, size / len(client)): self.config.local.epochs * client.steps(size)}

    def report(self, skipped: Collection[int] = ()) -> dict[str, Any]:
        """Figures for metrics.json: epsilon (largest and by client), delta, and the noise over dp.clip.

        skipped: places of rounds that did not run; adds the largest epsilon of the others, had it been planned so.
        """
        if self.dp.level == "none":
            return {}
        spent = self.epsilon()
        return {
            "epsilon": max(spent.values(), default=0.0),
            "epsilon_by_client": {str(id): value for id, value in spent.items()},
            "delta": self.dp.delta,
            "epsilon_of": "all uploads" if self.dp.protect == "all" else "uploads of phases of work alone",
            "noise_multiplier": self.multiplier,
            **({"epsilon_without_skipped": self._without(skipped)} if skipped else {}),
        }

    def _without(self, skipped: Collection[int]) -> float:
        return max(map(self._epsilon, {*self.plans(skipped=skipped).values()}), default=0.0)

    def notes(self) -> list[str]:
        """Lines for the start of a run: the epsilon of the whole run, and its assumptions."""
        if self.dp.level == "none":
            return []
        spent, level = self.epsilon().values(), self.dp.level
        low, high = min(spent, default=0.0), max(spent, default=0.0)
        span = f"{high:.3g}" if high - low <= 0.005 * high else f"{low:.3g} to {high:.3g}, by client,"
        what = (
            "all uploads" if self.dp.protect == "all" else "the uploads of phases with work; updates are NOT protected"
        )
        unit = "client" if level == "client" else "sample in each task of a client"
        notes = [
            f"differential privacy of a {unit}: epsilon {span} at delta {self.dp.delta:g} per client over the whole "
            f"run (noise {self.multiplier:.3g} x clip {self.dp.clip:g}), for {what}",
            f"{_SOURCES[self.dp.noise_seed]}; losses, accuracies and other figures of the simulation are not protected",
        ]
        if level == "client" and any(rate < 1 for plan in self.plans().values() for rate, _ in plan):
            notes.append(
                "epsilon assumes that the cohorts stay secret; if an adversary knows them, set dp.amplify=false"
            )
        if self.config.start is not None:
            notes.append(
                "epsilon does not count the training of the model in `start`; if on the same data, add its own"
            )
        if self.population.stream.vocabulary is not None and self.config.text.tokenizer is None:
            notes.append(
                "epsilon does not count a tokenizer that is trained on the clients' texts; set text.tokenizer to a file"
            )
        return notes


def _weight(plan: Sequence[Releases]) -> float:
    """Approximate order of plans by epsilon: the sum of squared rates (Abadi et al., 2016, theorem 1)."""
    return sum(count * rate**2 for rate, count in plan)
