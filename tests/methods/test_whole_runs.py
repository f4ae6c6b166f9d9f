"""Whole runs of three tasks, recomputed in plain torch: local training, server, and what each method adds to them.

The recomputation shares no code with the methods. It takes from the run what is drawn at random (who takes part, whose
upload arrives, and the keys of the draws), and follows the equations of the papers. The order in which a strategy and
regularizers act is written once, in `trained` and `served`. After every round the global model of the run has to be the
recomputed one to 1e-10.

Clients hold unlike numbers of samples, and some hold none of a task. Three of six are in a cohort, and some of them
drop out; the first task has four rounds, in which clients come back with their states. They train for two epochs by SGD
with momentum, weight decay and a falling learning rate; the server's rate is not 1. The network has one head, a head
for each task, or a head that grows with the tasks.
"""

from functools import cache

import pytest
import torch

import cfl
from cfl.assembly import methods
from cfl.runtime.builder import build_session
from tests import toy
from tests.methods.whole_runs.federation import (
    BATCH,
    CLASSES,
    CLIENTS,
    EPOCHS,
    HIDDEN,
    LR,
    LR_DECAY,
    MOMENTUM,
    RANK,
    SERVER_LR,
    TASKS,
    WEIGHT_DECAY,
    Batch,
    D,
    Local,
    Round,
    served,
    trained,
)
from tests.methods.whole_runs.regularizers import (
    MOON,
    FedAvgM,
    FedDyn,
    FedDynInFedSOL,
    FedNova,
    FedNTD,
    FedProx,
    FedSAM,
    FedSOL,
    FullFedSOL,
    Scaffold,
    ScaffoldInFedSOL,
)
from tests.methods.whole_runs.strategies import (
    ER,
    EWC,
    FOT,
    GLFC,
    GPM,
    RGO,
    FedAvg,
    FedProTIP,
    GradientGPM,
    Joint,
    LimitedEWC,
    LwF,
    PublishedGLFC,
)

CASES = [
    (FedAvg,),
    (EWC,),
    (LimitedEWC,),
    (ER,),
    (GLFC,),
    (LwF,),
    (Joint,),
    (FOT,),
    (GPM,),
    (GradientGPM,),
    (RGO,),
    (FedProTIP,),
    (FedAvg, FedProx),
    (FedAvg, FedNTD),
    (FedAvg, MOON),
    (FedAvg, FedSAM),
    (FedAvg, FedSOL),
    (FedAvg, FullFedSOL),
    (FedAvg, Scaffold),
    (FedAvg, FedDyn),
    (FedAvg, FedNova),
    (FedAvg, FedAvgM),
    (FedAvg, ScaffoldInFedSOL),
    (FedAvg, FedDynInFedSOL),
    (FOT, FedProx),
    (FOT, FedDyn, FedAvgM),
    (FOT, FedSOL, Scaffold, FedNova),
    (ER, FedSOL),
    (ER, FullFedSOL, FedDyn),
    (EWC, Scaffold, FedAvgM),
    (LimitedEWC, FedSAM, FedProx),
    (GLFC, FedNTD, FedNova),
    (LwF, MOON, Scaffold),
    (Joint, Scaffold, FedAvgM),
    (GPM, Scaffold, FedNova),
    (GradientGPM, FedProx, Scaffold),
    (RGO, FedSOL, Scaffold),
    (FedProTIP, FedDyn, FedSAM),
]
GROWING = [
    (FedAvg,),
    (EWC, Scaffold, FedAvgM),
    (ER,),
    (ER, FedSOL),
    (PublishedGLFC,),
    (PublishedGLFC, FedNTD, FedNova),
    (LwF,),
    (LwF, MOON, Scaffold),
    (Joint, FedDyn),
]
VARIANTS = {PublishedGLFC: "glfc", LimitedEWC: "ewc", GradientGPM: "gpm", FullFedSOL: "fedsol"}
VARIANTS |= {ScaffoldInFedSOL: "fedsol+scaffold", FedDynInFedSOL: "fedsol+feddyn"}
SETTINGS = {  # engine, scenario, weights of the mean
    "one head": ("loop", "domain", "samples"),
    "a head per task": ("vmapped", "task", "uniform"),
    "a growing head": ("loop", "class", "samples"),
}
RUNS = [(parts, "one head") for parts in CASES]
BORROWED = (ScaffoldInFedSOL, FedDynInFedSOL)
RUNS += [  # without regularizers alone, for time
    (parts, "a head per task") for parts in CASES if (parts[0], len(parts)) != (FedAvg, 2) or parts[1] in BORROWED
]
RUNS += [(parts, "a growing head") for parts in GROWING]


def stream(multi_head):
    """Tasks whose inputs lie in random subspaces of R^D; labels from a random linear map."""
    tasks = []
    for task in range(TASKS):
        span, labels = toy.random(RANK, D, seed=100 + task), toy.random(RANK, CLASSES, seed=200 + task)
        z = toy.random(80, RANK, seed=300 + task)
        x, y = (z @ span).float(), (z @ labels).argmax(1)
        y[:CLASSES] = torch.arange(CLASSES)
        tasks.append((x[:40], y[:40], x[40:], y[40:]))
    return cfl.from_tensors(tasks, multi_head=multi_head)


def session(parts, setting):
    engine, scenario, weights = SETTINGS[setting]
    options = [f"tasks={TASKS}", "rounds=[4,1,2]", f"partition.clients={CLIENTS}", "cohort=3", "drop_rate=0.2"]
    options += ["partition.name=lda", "partition.task_share=0.8", "partition.min_samples=3", f"agg.weights={weights}"]
    options += [f"local.batch_size={BATCH}", f"local.epochs={EPOCHS}", f"local.lr={LR}", f"local.lr_decay={LR_DECAY}"]
    options += [f"local.momentum={MOMENTUM}", f"local.weight_decay={WEIGHT_DECAY}", f"server.lr={SERVER_LR}"]
    options += ["seed=4", f"engine={engine}", "block=2", f"scenario={scenario}"]
    options += [option for part in parts for option in part.options]
    label = "+".join(VARIANTS.get(part, part.__name__.lower()) for part in parts)
    config = cfl.resolve("permuted-digits", method=label, overrides=options)
    return build_session(config, stream(scenario != "domain"), methods.build(config), toy.mlp(D, HIDDEN, CLASSES))


def samples(client, tasks):
    """What a client holds of the tasks."""
    found = []
    for task in tasks:
        if task in client.shares:
            x, y = client.shares[task].samples.gather(client.shares[task].rows)
            found.append(Batch(x.double(), y, torch.full_like(y, task)))
    return Batch(*(torch.cat(leaves) for leaves in zip(*found)))


def grown(w, params, tasks):
    """The weights with the parts of the head for these tasks joined to one layer, behind what is there of it."""
    parts = {name: [params[f"{name}@{task}"] for task in tasks] for name in ("2.weight", "2.bias")}
    body = {name: leaf for name, leaf in w.items() if "@" not in name}
    return {**body, **{name: torch.cat([w.get(name, own[0][:0]), *own]) for name, own in parts.items() if own}}


@cache
def recomputed(parts, setting):
    """Run and recompute, and compare the global models after every round. Returns the last one, and what was met."""
    rules, run = [part() for part in parts], session(parts, setting)
    w, last, known, met = dict(run.model.params), -1, [], set()
    for position in range(len(run.schedule)):
        info, _, clients, _ = run.prepare(position)
        tasks, lr = rules[0].sees(info.task), LR * LR_DECAY**info.round
        if info.task > last:
            last, new = info.task, [task for task in tasks if task not in known]
            known += new
            w = grown(w, run.model.params, new) if setting == "a growing head" else w
            for rule in rules:
                rule.begin(last, w)
        there = [Local(client.id, last, lr, info.key, w, samples(client, tasks)) for client in clients]
        if info.phase.train:
            held = [sum(len(run.population.deals[task].rows[id]) for task in tasks) for id in range(CLIENTS)]
            measure = held if SETTINGS[setting][2] == "samples" else [int(n > 0) for n in held]
            total = sum(measure[me.id] for me in there)
            p = {me.id: measure[me.id] / total for me in there}
            server = Round(p, sum(n > 0 for n in held), total / sum(measure))
            w = served(rules, w, {me.id: trained(rules, me) for me in there}, server)
            met |= {("held", n) for n in held} | {("arrived", len(there)), ("dropped", bool(info.dropped))}
            met |= {(me.id, info.round) for me in there if info.task == 0}
        else:
            rules[0].consolidate(there, info.clients)
        run.round(position)
        found = run.state.server["params"]
        for name, leaf in (grown(found, found, known) if setting == "a growing head" else found).items():
            assert torch.allclose(leaf, w[name], atol=1e-10, rtol=0), f"{name} after {info.place}"
    return w, met


@pytest.mark.filterwarnings("ignore:the projection removed")  # the tasks are to overlap
@pytest.mark.parametrize(
    ("parts", "setting"), RUNS, ids=["+".join(part.__name__ for part in parts) + f", {place}" for parts, place in RUNS]
)
def test_a_run_is_that_of_plain_torch(parts, setting):
    """And each part has an effect: without it, the model is another one."""
    w, _ = recomputed(parts, setting)
    for other in {(FedAvg,), parts[:1], *((FedAvg, rule) for rule in parts[1:])} - {parts}:
        if (other, setting) in RUNS:
            unlike, _ = recomputed(other, setting)
            assert max((w[name] - leaf).abs().max() for name, leaf in unlike.items()) > 1e-3, other


@pytest.mark.parametrize("setting", ["one head", "a head per task"])
def test_the_runs_are_as_uneven_as_they_are_meant_to_be(setting):
    _, met = recomputed((FedAvg,), setting)
    sizes = {n for what, n in met if what == "held"}
    assert 0 in sizes and len(sizes) > 4 and any(0 < n < BATCH for n in sizes) and any(n % BATCH for n in sizes)
    assert max(sum((id, round) in met for round in range(4)) for id in range(CLIENTS)) >= 3  # its state came back twice
    assert ("dropped", True) in met and {n for what, n in met if what == "arrived"} >= {2, 3}
