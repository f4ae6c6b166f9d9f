"""What the page claims: nothing for one seed, and paired differences for several."""

import numpy as np
import pytest
from scipy import stats

from cfl.report import paired, verdict
from cfl.report.overview import by_scene, overview
from cfl.report.runs import RunGroup, Scene
from tests.report.test_runs import made


def scene(**groups):
    """Groups by name. A group: seed to (ACC, FGT), or to ACC alone."""
    found = []
    for name, scores in groups.items():
        pairs = {seed: one if isinstance(one, tuple) else (one, 0.1) for seed, one in scores.items()}
        sent = {"bytes_up": 0, "bytes_down": 0, "client_bytes": 0, "learning_accuracy": 0.5}
        runs = [made(seed=seed, **sent, acc=acc, fgt=fgt) for seed, (acc, fgt) in pairs.items()]
        found.append(RunGroup(name, runs))
    return Scene("permuted-digits", "", found)


def test_the_range_of_many_groups_is_that_of_their_means():
    """Of two seeds; the runs of all groups but one have ended early, without an ACC."""
    shown = scene(a={0: 0.8, 1: 0.9}, **{name: {0: (None, None), 1: (None, None)} for name in "bcde"})
    assert verdict.sentences(shown) == "With seeds 0 and 1, 1 of 5 groups have an ACC, of 85.0 %."
    none = scene(**{name: {0: (None, None), 1: (None, None)} for name in "abcde"})
    assert verdict.sentences(none) == "With seeds 0 and 1, 0 of 5 groups have an ACC."


def marked(shown):
    """Names of the groups with a bold ACC, and with a bold FGT."""
    _, ((*rows,),) = by_scene([shown])
    return [[row[0].text for row in rows if row[column].best] for column in (1, 2)]


def test_one_seed_has_no_best():
    one = scene(a={3: (0.9, 0.01)}, b={3: (0.2, 0.5)})
    assert verdict.sentences(one) == (
        "With seed 3, ACC and FGT are 90.0 % and 1.0 % for a and 20.0 % and 50.0 % for b. "
        "One seed shows no difference to be relied on."
    )
    assert marked(one) == [[], []]
    many = scene(**{name: {0: value / 10} for value, name in enumerate("abcde")})
    assert verdict.sentences(many).startswith(
        "With seed 0, the ACC of 5 groups lies between 0.0 % and 40.0 %. One seed"
    )


def test_seeds_of_one_group_are_not_called_one_seed():
    """The other group was ended by a callback, so it has no ACC."""
    one = scene(a={0: (0.9, None), 1: (0.8, None)}, b={0: (None, None), 1: (None, None)})
    assert verdict.sentences(one) == "With seeds 0 and 1, ACC is 85.0 ± 5.0 % for a and – % for b."


def test_a_stream_of_one_task_has_no_fgt_to_state():
    one = scene(a={3: (0.9, None)}, b={3: (0.2, None)})
    assert verdict.sentences(one) == (
        "With seed 3, ACC is 90.0 % for a and 20.0 % for b. One seed shows no difference to be relied on."
    )


def test_a_bound_beside_methods_has_no_fgt_to_state():
    one = scene(a={3: (0.9, 0.01)}, joint={3: (0.95, None)})
    assert verdict.sentences(one).startswith(
        "With seed 3, ACC and FGT are 90.0 % and 1.0 % for a; ACC is 95.0 % for joint."
    )


def test_many_groups_that_are_not_told_apart_are_counted():
    """Differences of 20 and 0 points on two seeds have an interval around 0; those of 60 and 59.9 points have none."""
    alike = {name: {0: 0.5, 1: 0.6} for name in "bcdef"}
    found = verdict.sentences(scene(a={0: 0.7, 1: 0.6}, **alike))
    assert "but 2 seeds do not tell it apart from any of the 5 others." in found
    worse = scene(a={0: 0.7, 1: 0.6}, **alike, g={0: 0.1, 1: 0.001})
    assert "but 2 seeds do not tell it apart from 5 of the 6 others." in verdict.sentences(worse)


def test_a_difference_that_the_seeds_show_is_claimed_with_its_interval():
    """b is above a by 10, 11 and 12 points, so by 11 ± t(0.975, 2) / sqrt(3); c is far below."""
    found = scene(
        a={0: 0.50, 1: 0.60, 2: 0.70}, b={0: 0.60, 1: 0.71, 2: 0.82}, c={0: 0.10, 1: 0.12, 2: 0.11}
    )  # fmt: skip
    half = stats.t(2).ppf(0.975) / 3**0.5
    acc = f"b has the highest ACC (71.0 ± {100 * np.std([0.6, 0.71, 0.82]):.1f} %), 11.0 points above a "
    assert acc + f"(95 % interval {11 - half:.1f} to {11 + half:.1f})." in verdict.sentences(found)
    assert "a has the lowest mean FGT (10.0 ± 0.0 %), but 3 seeds do not tell it apart from b and c." in (
        verdict.sentences(found)
    )
    assert marked(found) == [["b"], []]  # the FGT of all is equal, so that none is marked


def test_pairing_shows_a_difference_that_is_small_beside_the_spread():
    """b is above a by 0.9, 1.0 and 1.1 points: unpaired, the spread of 20 points over the seeds would hide it."""
    found = scene(a={0: 0.30, 1: 0.50, 2: 0.70}, b={0: 0.309, 1: 0.51, 2: 0.711})
    assert "b has the highest ACC (51.0 ± 16.4 %), 1.0 points above a" in verdict.sentences(found)


def test_what_is_not_told_apart_from_the_best_is_marked_too():
    found = scene(a={0: 0.5, 1: 0.6, 2: 0.7}, b={0: 0.7, 1: 0.55, 2: 0.65}, c={0: 0.1, 1: 0.2, 2: 0.3})
    assert "b has the highest mean ACC" in verdict.sentences(found)
    assert "but 3 seeds do not tell it apart from a." in verdict.sentences(found)
    assert marked(found)[0] == ["a", "b"]


def test_means_that_print_alike_are_equally_good():
    found = scene(a={0: 0.50000, 1: 0.60000}, b={0: 0.50011, 1: 0.60010}, c={0: 0.1, 1: 0.2})
    assert paired.ranking([group.metrics for group in found.groups], "acc").gaps[0]["high"] < 0
    assert marked(found)[0] == ["a", "b"]


def test_groups_with_different_seeds_are_compared_over_those_that_all_have():
    found = scene(a={0: 0.50, 1: 0.60, 2: 0.99}, b={0: 0.70, 1: 0.81})
    text = verdict.sentences(found)
    assert text.startswith(
        "a and b have different seeds (a with seeds 0, 1 and 2; b with seeds 0 and 1), "
        "and a and b are compared over 2 seeds that all have. b has the highest ACC (75.5 ± 5.5 %)"
    )
    assert marked(found) == [[], []]  # the means in the table are over different seeds


@pytest.mark.parametrize("others", [{0: 0.7}, {5: 0.7, 6: 0.8}])
def test_groups_that_share_fewer_than_two_seeds_are_not_compared(others):
    text = verdict.sentences(scene(a={0: 0.5, 1: 0.6}, b=others))
    assert text.startswith(
        "a and b share fewer than two seeds, so they are not compared: a with seeds 0 and 1; b with "
    )


def test_a_group_alone_has_its_figures():
    assert verdict.sentences(scene(a={0: 0.5})) == "a reaches an ACC of 50.0 % and an FGT of 10.0 %, over seed 0."
    assert (
        verdict.sentences(scene(a={0: (0.5, None), 1: (0.6, None)}))
        == "a reaches an ACC of 55.0 ± 5.0 %, over 2 seeds."
    )


def test_a_group_without_the_score_is_left_out_of_its_ranking():
    """A method that trains all tasks at once has no FGT."""
    found = scene(
        joint={0: (0.9, None), 1: (0.8, None)}, b={0: (0.5, 0.1), 1: (0.4, 0.2)}, c={0: (0.5, 0.5), 1: (0.5, 0.6)}
    )
    ranked = paired.ranking([group.metrics for group in found.groups], "fgt")
    assert (ranked.best, list(ranked.gaps)) == (1, [2])
    alone = scene(joint={0: (0.9, None), 1: (0.8, None)}, b={0: (0.5, 0.1), 1: (0.4, 0.2)})
    assert "FGT" not in verdict.sentences(alone)


def test_the_overview_names_benchmark_and_setting_where_they_differ():
    first, second = scene(a={0: 0.5}), scene(a={0: 0.5})
    titles, rows, labels = overview([first, second])
    assert (titles[0], labels) == ("method", 1)
    other = Scene("split-digits", "cohort=3", second.groups)
    titles, rows, labels = overview([first, other])
    assert titles[:3] == ["benchmark", "setting", "method"] and labels == 3
    assert [cell.text for cell in rows[1][:3]] == ["split-digits", "cohort=3", "a"]


@pytest.mark.parametrize(("p", "text"), [(0.0421, "0.042"), (0.0006, "0.001"), (0.0004, "< 0.001")])
def test_a_small_p_is_not_written_as_0(p, text):
    assert paired.cells({"mean": 0.1, "low": 0.05, "high": 0.15, "p": p}) == ["+10.0", "+5.0 to +15.0", text]
