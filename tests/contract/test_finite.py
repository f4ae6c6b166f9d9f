"""The server's trees are finite wherever a hook returns them, and an error names hook, tree, place and remedy."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import cfl
from cfl.contract.composed import ComposedMethod
from cfl.contract.finite import any_of, check_finite
from cfl.core import UpdateError
from cfl.methods.regularizers import FedAvgM
from cfl.models import Model
from tests import toy

NAN, INF = torch.tensor(float("nan")), torch.tensor(float("inf"))


def test_only_new_leaves_are_looked_at():
    bad = torch.tensor([1.0, float("nan")])
    check_finite("absorb", {"params": {"w": bad, "count": torch.tensor(3)}}, {"params": {"w": bad}}, {}, "")
    with pytest.raises(UpdateError, match=r"^absorb returns NaN in 'params/w' \(here\); lower x$"):
        check_finite("absorb", {"params": {"v": torch.ones(2), "w": bad}}, {"params": {}}, {}, "(here); lower x")
    with pytest.raises(UpdateError, match="absorb returns infinity in 'params/w'"):
        check_finite("absorb", {"params": {"w": INF}}, {}, {"strategy": {"w": torch.ones(2)}}, "")


def test_trees_beside_the_model_may_hold_infinity():
    """Such as the start of a running minimum; NaN is an error there, too."""
    check_finite("init_server", {"best": {"loss": INF}}, {}, {}, "")
    with pytest.raises(UpdateError, match="init_server returns NaN in 'best/loss'"):
        check_finite("init_server", {"best": {"loss": NAN}}, {}, {}, "")


def test_uploads_that_overflow_in_their_sum_are_not_blamed_on_the_hook():
    with pytest.raises(UpdateError, match="^the aggregated uploads hold infinity in 'strategy/w'"):
        check_finite("absorb", {"params": {"w": NAN}}, {}, {"strategy": {"w": INF}}, "")


def test_words_are_joined():
    assert [any_of(words) for words in ("a", "ab", "abc")] == ["a", "a or b", "a, b or c"]


def run(*options, **more):
    return cfl.run(toy.config(*options, method=more.pop("method", "fedavg")), stream=toy.stream(), **more)


@dataclass(frozen=True)
class AtRound(cfl.Strategy):
    """Returns NaN from `absorb` in one round of the second task."""

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        if (info.task, info.round) == (1, 1):
            new["params"]["1.bias"] = new["params"]["1.bias"] * float("nan")
        return new


def test_a_run_stops_in_the_round_of_the_step_and_keeps_what_it_had(tmp_path):
    message = r"absorb of strategy \(AtRound\) returns NaN in 'params/1.bias' \(task 1, phase train, round 1\)"
    with pytest.raises(UpdateError, match=message):
        run("checkpoint_every=1", strategy=AtRound(), output=tmp_path)
    rows = [json.loads(line) for line in Path(tmp_path, "rounds.jsonl").read_text().splitlines()]
    assert [(row["task"], row["round"]) for row in rows] == [(0, 0), (0, 1), (1, 0)]
    assert rows[1]["accuracy"] is not None and not Path(tmp_path, "metrics.json").exists()
    with pytest.raises(UpdateError, match=message):  # the last checkpoint is of the round before
        run("checkpoint_every=1", strategy=AtRound(), output=tmp_path, resume=True)


def test_a_regularizer_is_named_with_its_own_options():
    # 0.9 * 3e38 + 3e38 = 5.7e38 is more than the largest float, 3.4e38.
    composed = ComposedMethod({"strategy": cfl.Strategy(), "fedavgm": FedAvgM()})
    params, large = {"w": torch.zeros(2)}, {"w": torch.full((2,), 3e38)}
    server = {"params": params, "local/fedavgm": large}
    message = r"server_step of regularizer\.fedavgm \(FedAvgM\) returns infinity in 'step/w' \(task 0, .* "
    message += r"lower server\.lr \(now 0\.5\), regularizer\.fedavgm\.momentum \(now 0\.9\) or local\.lr"
    with pytest.raises(UpdateError, match=message):
        composed.absorb(
            server,
            {"params": params},
            {"strategy": large},
            toy.consolidation(Model(toy.mlp(2, 2), (2,), [2], multi_head=False)),
            0.5,
        )
