"""Who holds what: owners, clients and their shares, and the weight of a cohort among all owners."""

import numpy as np
import pytest
import torch

import cfl
from cfl.assembly import methods
from cfl.contract import Phase
from cfl.core import ConfigError, rng
from cfl.runtime.builder import build_session
from cfl.runtime.population import Population
from cfl.streams import with_scenario
from tests import toy


def population(*overrides):
    config = toy.config("partition.clients=6", "partition.task_share=0.5", *overrides, method="fedavg")
    return Population(toy.stream(), config)


def test_owners_of_several_tasks_are_those_of_any():
    people = population()
    each = [set(people.owners((task,))) for task in range(3)]
    assert all(len(owners) == 3 for owners in each)  # half of six
    assert people.owners((0, 2)) == tuple(sorted(each[0] | each[2]))


def test_a_client_holds_its_rows_of_all_tasks_so_far_and_trains_on_those_of_now():
    people = population()
    client = people.client(people.owners((1,))[0], 1, (1,))
    assert list(client.shares) == [0, 1] and client.now == (1,)
    assert torch.equal(client.shares[1].rows, people.deals[1].rows[client.id])
    assert len(client) == len(people.deals[1].rows[client.id]) == 48 // 3


def test_hostile_clients_reverse_labels_among_the_classes_of_the_task():
    stream = with_scenario(toy.stream(2, multi_head=True), "class")
    config = toy.config("tasks=2", "scenario=class", "attack.name=label_flip", "attack.clients=1", method="fedavg")
    people = Population(stream, config)
    for task, total in enumerate((0 + 1, 2 + 3)):  # task 0 has the classes 0 and 1, task 1 has 2 and 3
        assert torch.equal(people.reversed[task].targets, total - people.train[task].targets)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_fraction_of_a_cohort_is_its_weight_among_the_owners(weights):
    uneven = ("partition.name=dirichlet", "partition.alpha=1.0", f"agg.weights={weights}")
    people = population(*uneven)
    owners = people.owners((0,))
    sizes = [len(people.deals[0].rows[id]) for id in owners]
    assert len(set(sizes)) > 1 and sum(sizes) == 48  # dirichlet deals all samples
    expected = sizes[0] / 48 if weights == "samples" else 1 / len(owners)
    assert people.fraction(owners[:1], (0,)) == pytest.approx(expected)
    assert people.fraction(owners, (0,)) == 1.0


def test_clients_without_data_are_named():
    assert population().notes() == ["clients without data are never sampled: task 0: 3, task 1: 3, task 2: 3"]
    assert population("partition.task_share=1.0").notes() == []


def test_a_partition_that_ignores_the_clients_of_the_stream_is_noted():
    """A user who passes clients, and forgets the option, would compare methods on another partition."""
    data = torch.zeros(8, 3), torch.arange(8) % 2
    stream = cfl.from_tensors([(*data, *data)], clients=[torch.arange(8) % 2])
    (line,) = Population(stream, cfl.resolve("own", overrides=["partition.clients=2", "local.batch_size=2"])).notes()
    assert line.startswith("partition.name=iid deals all samples anew; partition.name=stream leaves each to the client")
    named = cfl.resolve("own", overrides=["partition.clients=2", "partition.name=stream"])
    assert Population(stream, named).notes() == []


def test_batches_must_fit_but_where_sizes_are_up_to_chance():
    with pytest.raises(ConfigError, match="local.batch_size=17 is more than the 16 samples"):
        population("local.batch_size=17")
    assert population("local.batch_size=17", "partition.name=dirichlet").owners((0,))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_fraction_over_several_tasks_counts_each_owner_or_sample_once(weights):
    people = population("partition.name=dirichlet", f"agg.weights={weights}")
    owners = people.owners((0, 2))
    held = {id: len(people.deals[0].of(id)) + len(people.deals[2].of(id)) for id in owners}
    assert people.fraction((), (0, 2)) == 0.0
    for ids in (owners[1:], owners[:2]):
        part, all_ = (sum(held[id] if weights == "samples" else 1 for id in some) for some in (ids, owners))
        assert people.fraction(ids, (0, 2)) == part / all_


def crowd(count, *overrides):
    """One task dealt to so many clients, two samples each."""
    x, y = torch.zeros(2 * count, 1), torch.arange(2 * count) % 2
    options = (f"partition.clients={count}", "local.batch_size=1", "cohort=64", *overrides)
    return Population(cfl.from_tensors([(x, y, x[:2], y[:2])]), toy.config(*options, method="fedavg"))


# numpy draws without replacement in one way from more than 10,000 of which less than 1/50 are taken or from fewer ones,
# and in another way from more of which more are taken (here 640 of 20,000)
@pytest.mark.parametrize(("count", "cohort"), [(100, 64), (20_000, 64), (20_000, 640)])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_cohorts_are_the_draw_from_the_owners_themselves(count, cohort, share):
    people, phase = crowd(count, f"cohort={cohort}", f"partition.task_share={share}"), Phase("train")
    owners = people.owners((0,))
    assert len(owners) == count * share
    for key in (1, 2):
        drawn = rng.numpy_generator(rng.key(key, "cohort")).choice(owners, cohort, replace=False)
        found = people.cohort(phase, (0,), 0, key)
        assert found == tuple(sorted(drawn.tolist())) and all(type(id) is int for id in found)


def test_poisson_cohorts_are_a_draw_for_each_owner():
    people = crowd(1000, "sampling=poisson", "partition.task_share=0.5")
    owners = people.owners((0,))
    taken = rng.numpy_generator(rng.key(7, "cohort")).random(500) < 64 / 500
    found = people.cohort(Phase("train"), (0,), 0, 7)
    assert found == tuple(np.array(owners)[taken].tolist()) and 0 < len(found) < 500


def test_cohorts_by_round_are_those_of_the_papers_codes():
    """`numpy.random.seed(round)`, then `numpy.random.choice`: the round counts through the run, the seed does not."""
    state, more = np.random.get_state(), ["tasks=2", "rounds=3", "cohort=2", "sampling=round"]
    for seed in (0, 5):
        config = toy.config(*more, f"seed={seed}", method="fot")
        run = build_session(config, toy.stream(2), methods.build(config))
        training = [place for place, (_, phase, _) in enumerate(run.schedule) if phase.train]
        assert len(training) == 6 and len(training) < len(run.schedule)  # sketches and coverage are between
        for number, place in enumerate(training):
            np.random.seed(number)
            drawn = np.random.choice(range(run.config.partition.clients), 2, replace=False)
            assert run.rounds.info(place).clients == tuple(sorted(drawn.tolist()))
    np.random.set_state(state)


def test_rounds_without_training_have_cohorts_of_their_own():
    people, phase = crowd(100, "sampling=round"), Phase("work", train=False, work=True)
    assert people.cohort(phase, (0,), 0, 1) != people.cohort(phase, (0,), 0, 2)
    assert people.cohort(phase, (0,), 0, 1) == crowd(100).cohort(phase, (0,), 0, 1)


def test_a_round_makes_nothing_for_clients_that_are_not_in_it():
    people = crowd(10_000)
    cohort = people.cohort(Phase("train"), (0,), 0, 3)
    clients = [people.client(id, 0, (0,)) for id in cohort]
    assert [len(client) for client in clients] == [2] * 64 and people.fraction(cohort, (0,)) == 64 / 10_000
    base = people.deals[0].order
    assert all(client.shares[0].rows.data_ptr() in range(*_span(base)) for client in clients)  # views of one tensor
    assert "rows" not in vars(people.deals[0])  # the list of all clients' positions


def _span(leaf):
    return leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes
