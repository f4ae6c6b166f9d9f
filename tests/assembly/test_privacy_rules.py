"""Configurations that cannot be protected are refused with the reason; those that can be protected run."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import nn

import cfl
from cfl.aggregation.mask_graph import unsafe
from cfl.aggregation.quantize import FixedPoint
from cfl.aggregation.scope import releases
from cfl.assembly.methods import check_model
from cfl.assembly.privacy_rules import check_schedule
from cfl.assembly.resolve import dump, load, resolve
from cfl.contract import Phase, Strategy
from cfl.core import ConfigError, plugins
from cfl.methods.regularizers import FedProx, LocalRegularizer
from cfl.methods.strategies import FOT
from cfl.models import sample
from cfl.report.described import PROTECTIONS, refused
from tests import toy

UNIFORM, NOISE, TARGET = "agg.weights=uniform", "dp.noise_multiplier=1.0", "dp.target_epsilon=2.0"
CLIENT = ["dp.level=client", NOISE, UNIFORM, "sampling=poisson"]
EXAMPLE = ["dp.level=example", NOISE, UNIFORM]
WORK = [*CLIENT, "dp.protect=work"]
SUMS = ["strategy.sketch=gram", "strategy.project_at=server"]


def read(*overrides, method="fedavg", local=()):
    """A configuration with 20 clients, 10 per round."""
    return resolve("permuted-digits", method=method, regularizers=local, overrides=[*overrides, "public.name=mnist"])


# --- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    # weights and sampling that the accountants assume
    "weights by samples": (
        ["dp.level=client", NOISE, "sampling=poisson"],
        r"agg\.weights=samples gives sums no fixed divisor.*set agg\.weights=uniform",
    ),
    "weights by samples, example": (["dp.level=example", NOISE], r"set agg\.weights=uniform"),
    "a part of the clients, of fixed size": (
        ["dp.level=client", NOISE, UNIFORM],
        r"sampling=fixed has no bound.*set sampling=poisson, or dp\.amplify=false",
    ),
    "a part of the clients, the same for every seed": (
        ["dp.level=client", NOISE, UNIFORM, "sampling=round"],
        r"sampling=round has no bound.*set sampling=poisson, or dp\.amplify=false",
    ),
    "a draw that a server knows, of fixed size": (
        ["dp.level=client", NOISE, UNIFORM, "secagg=full"],
        r"^with secagg=full the server is not trusted and knows who takes part.*; set dp\.amplify=false$",
    ),
    "a draw that a server knows": (
        [*CLIENT, "secagg=sum"],
        r"^with secagg=sum the server is not trusted.*, so sampling does not amplify privacy; set dp\.amplify=false$",
    ),
    # the budget
    "no budget": (["dp.level=client"], r"dp\.level=client needs dp\.target_epsilon or dp\.noise_multiplier"),
    "no budget, example": (["dp.level=example"], r"dp\.level=example needs dp\.target_epsilon or dp\.noise_multip"),
    "two budgets": ([*CLIENT, TARGET], r"dp\.level=client takes only one of dp\.target_epsilon and dp\.noise_multip"),
    "two budgets, example": ([*EXAMPLE, TARGET], r"dp\.level=example takes only one of dp\.target_epsilon and dp\.no"),
    "two budgets alone": (
        [NOISE, TARGET, UNIFORM, "sampling=poisson"],
        r"dp\.level=client takes only one of dp\.target_epsilon and dp\.noise_multiplier",
    ),
    "a budget for nobody": (["dp.level=none", TARGET], r"dp\.target_epsilon is set, but dp\.level is none; set dp"),
    "noise for nobody": (["dp.level=none", NOISE], r"dp\.noise_multiplier is set, but dp\.level is none"),
    # secure sums
    "a cohort of one": (["secagg=full", "cohort=1"], r"a secure sum of one client is its upload: secagg=full"),
    "a cohort of one, unmasked": (["secagg=sum", "cohort=1"], r"secagg=sum needs a cohort of 2 or more"),
    "a population of one": (["secagg=full", "partition.clients=1"], "a secure sum of one client is its upload"),
    # 16 bits less the sign, 12 behind the point, and log2(20) = 4.3 for the sum: 1.3 too many
    "no room for the sum": (
        ["secagg=full", "secure.bits=16", "secure.fraction_bits=12"],
        r"secure\.fraction_bits=12 leaves no room in secure\.bits=16 for sums of 20 clients; lower it by 2 or more",
    ),
    "uploads of work where there are none": (WORK, r"dp\.protect=work protects nothing: 'fedavg' sends updates only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_protected_is_refused_with_the_reason(case):
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as caught:
        read(*overrides)
    assert "\n" not in str(caught.value)


METHODS_REFUSED = {
    "uploads one by one, hidden": ("fedavg", ["fedet"], ["secagg=full"], "'fedet' needs each client's own upload"),
    "uploads one by one, summed": ("fedavg", ["fedet"], ["secagg=sum"], "'fedet' needs .* set secagg=none"),
    "uploads one by one, samples": (
        "fedavg",
        ["fedet"],
        EXAMPLE,
        "'fedet' needs .* dp.level=example protects sums only",
    ),
    "uploads one by one beside sketches": (
        "fot",
        ["fedet"],
        [*EXAMPLE, *SUMS, "dp.protect=work"],
        "'fedet' needs .* dp.level=example protects sums only",
    ),
    "a count of steps, which tells that of samples": ("fedavg", ["fednova"], EXAMPLE, "'fednova' uses samples beyond"),
    "a count of steps in the clip": ("fedavg", ["fednova"], CLIENT, "'fednova' .* clips its count of steps"),
    "a count of clients in the clip": ("fedavg", ["feddf"], CLIENT, "'feddf' .* clips its count of clients"),
    "the same of its relative": ("fedavg", ["fedproj"], CLIENT, "'fedproj' .* clips its count of clients"),
    "samples together": ("fedavg", ["fedrcl"], EXAMPLE, "'fedrcl' uses samples beyond .* set dp.level=client"),
    "samples in memory": ("er", [], EXAMPLE, "'er' uses samples beyond the gradients"),
    "importances of what has no work uploads": ("ewc", [], WORK, "'ewc' sends updates only; set dp.protect=all"),
    "stored bases": ("gpm", [], WORK, "'gpm' sends updates only"),
    "ratios of norms": ("fot", [], [*CLIENT, "strategy.criterion=norm_ratio"], "ratios of norms, which are unbounded"),
    "ratios of norms as printed": ("fot", [], [*CLIENT, "strategy.criterion=eq12"], "set it to energy"),
    "ratios, one by one": ("fot", [], [*EXAMPLE, *SUMS[:1], "strategy.criterion=norm_ratio"], "set it to energy"),
    "energies in the clip of an update": (
        "fot",
        [],
        [*CLIENT, "dp.amplify=false", "strategy.model=local", "strategy.participants=sampled"],
        "energies along with the update, .*: set strategy.project_at=server, or strategy.model=global",
    ),
    "sketches of samples": ("fot", [], EXAMPLE, "set strategy.sketch=gram, strategy.project_at=server"),
    "Gaussian sketches of samples": ("fot", [], [*EXAMPLE, SUMS[1]], "only sums over samples are bounded per sample"),
    "energies of samples": ("fot", [], [*EXAMPLE, SUMS[0]], "only sums over samples are bounded per sample"),
    "ratios, work alone": ("fot", [], [*WORK, "strategy.criterion=norm_ratio"], "set it to energy"),
}


@pytest.mark.parametrize("case", METHODS_REFUSED)
def test_methods_that_cannot_be_protected_are_refused_with_the_reason(case):
    method, local, overrides, message = METHODS_REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read(*overrides, method=method, local=local)


def test_faults_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        read("secagg=full", "secure.bits=16", "cohort=1", "dp.level=client")
    text = str(caught.value)
    for part in (
        "a secure sum of one client",
        "leaves no room",
        "needs dp.target_epsilon or dp.noise_multiplier",
        "agg.weights",
        "sampling does not amplify",
    ):
        assert part in text
    assert text.count("; ") >= 4 and "\n" not in text


def test_a_file_is_checked_like_overrides():
    data = dump(read(*CLIENT))
    assert load(data).dp.level == "client"
    with pytest.raises(ConfigError, match=r"set agg\.weights=uniform"):
        load({**data, "agg": {"weights": "samples"}})
    with pytest.raises(ConfigError, match="is set, but dp.level is none"):
        load({**data, "dp": {**data["dp"], "level": "none"}})


# --- what is taken --------------------------------------------------------------------------------------------------

TAKEN = {
    "client": ("fedavg", CLIENT),
    "a part of the clients, of fixed size, in full": (
        "fedavg",
        ["dp.level=client", NOISE, UNIFORM, "dp.amplify=false"],
    ),
    "a draw that a server knows, in full": (
        "fedavg",
        ["dp.level=client", NOISE, UNIFORM, "secagg=full", "dp.amplify=false"],
    ),
    "all clients, hidden": ("fedavg", [*CLIENT, "secagg=full", "cohort=20"]),
    "a draw that a server knows, single samples": ("fedavg", [*EXAMPLE, "secagg=full"]),
    "all clients in a draw of fixed size": ("fedavg", ["dp.level=client", NOISE, UNIFORM, "cohort=20"]),
    "more asked for than there are": ("fedavg", ["dp.level=client", NOISE, UNIFORM, "cohort=99"]),
    "sketches of all, updates as they are": ("fot", ["dp.level=client", NOISE, "dp.protect=work"]),
    "a draw of fixed size, single samples": ("fedavg", EXAMPLE),
    "samples in Gram matrices": ("fot", [*EXAMPLE, *SUMS]),
    "a cohort of two": ("fedavg", ["secagg=full", "cohort=2"]),
    # 16 - 1 - 10 - log2(20) = 0.68
    "just room for the sum": ("fedavg", ["secagg=full", "secure.bits=16", "secure.fraction_bits=10"]),
    "ratios of norms without privacy": ("fot", ["strategy.criterion=norm_ratio", "secagg=full"]),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_can_be_protected_is_taken(case):
    method, overrides = TAKEN[case]
    config = read(*overrides, method=method)
    assert (config.secagg, config.dp.level) != ("none", "none")
    assert load(dump(config)) == config


def test_sketches_that_a_sample_of_the_clients_sends_need_its_sampling_to_be_poisson():
    options = ["dp.level=client", NOISE, "dp.protect=work", "strategy.participants=sampled"]
    with pytest.raises(ConfigError, match="sampling=fixed has no bound"):
        read(*options, method="fot")
    assert read(*options, "sampling=poisson", method="fot").sampling == "poisson"


# --- the schedule ---------------------------------------------------------------------------------------------------

DRAWN, ALL = Phase("train"), Phase("all", cohort="available")
STORES = Phase("store", cohort="available", train=False, work=True, stores=True)
SKETCHES = Phase("sketches", cohort="available", train=False, work=True)
SOME = replace(SKETCHES, cohort="sampled")  # of the clients
PRIVATE = ["dp.level=client", NOISE, "dp.protect=work"]  # valid for FOT, which sketches all clients


@pytest.mark.parametrize(
    ("overrides", "phases", "message"),
    [
        (PRIVATE, [SKETCHES, SOME], "^sampling=fixed has no bound"),
        ([*PRIVATE, "secagg=sum"], [SKETCHES, SOME], "^with secagg=sum the server is not trusted"),
        ([*PRIVATE, "secagg=full", "sampling=poisson"], [SOME], "^with secagg=full the server is not trusted"),
        ([*PRIVATE, "sampling=poisson"], [SKETCHES, SOME], None),
        ([*PRIVATE, "secagg=full", "dp.amplify=false"], [SKETCHES, SOME], None),
        ([*PRIVATE, "cohort=20"], [SKETCHES, SOME], None),
        (PRIVATE, [DRAWN, SKETCHES], None),  # updates of a sampled cohort are not protected
        (PRIVATE, [SKETCHES, replace(SOME, diagnostic=True), replace(SOME, stores=True)], None),
        ([*EXAMPLE, *SUMS, "secagg=full"], [DRAWN, SOME], None),
        ([], [DRAWN, SOME], None),
    ],
    ids=str,
)
def test_a_draw_that_the_accountants_do_not_cover_is_refused_in_any_task(overrides, phases, message):
    config = read(*overrides, method="fot")
    if message is None:
        check_schedule(phases, {}, config)
    else:
        with pytest.raises(ConfigError, match=message):
            check_schedule(phases, {}, config)


@pytest.mark.parametrize(
    ("overrides", "phases", "owners", "fault"),
    [
        (["cohort=64", "secure.quorum=0.1"], [DRAWN], 64, "0.1 lets 7 of 64 clients"),  # 6.4 rounded up, twice
        (["cohort=64", "secure.quorum=0.11"], [DRAWN], 64, None),  # 7.04 rounded up is one more than 7
        (["cohort=10", "secure.quorum=0.1"], [DRAWN], 10, None),  # at least two are needed, and one may collude
        (["cohort=10", "secure.quorum=0.1"], [DRAWN, ALL], 64, "0.1 lets 2 of 10 clients"),
        (["cohort=10"], [DRAWN], 64, "0.5 lets 5 of 10 clients"),  # all 7 of 64 may be in the cohort, see below
        (["cohort=10", "secure.quorum=0.7"], [DRAWN], 64, "0.7 lets 7 of 10 clients"),
        (["cohort=10", "secure.quorum=0.8"], [DRAWN], 64, None),
        (["cohort=10", "secure.quorum=0.8", "sampling=poisson"], [DRAWN], 64, None),  # the mean size
        (["cohort=10", "secure.quorum=0.1"], [STORES], 64, None),
        (["cohort=10", "secure.quorum=0.11"], [replace(STORES, stores=False)], 64, None),  # no sampled cohort
        (["cohort=64", "secure.quorum=0.1"], [DRAWN], 10, None),  # only 10 hold data
        (["cohort=64", "secure.quorum=0.15"], [DRAWN], 64, None),  # 9.6 rounded up
        (["cohort=64", "secure.quorum=0.15", "sampling=poisson"], [DRAWN], 64, None),  # as all are drawn
        (["cohort=64", "sampling=poisson"], [DRAWN, ALL], 64, None),
    ],
    ids=str,
)
def test_a_quorum_that_accomplices_reach_by_themselves_is_refused(overrides, phases, owners, fault):
    """Of a sampled cohort of 10, the 9 clients beside an honest one hold all 7 accomplices among 64 with a probability
    of C(56, 2) / C(63, 9) = 6.5e-8, which is above 2^-40."""
    config = toy.config("secagg=sum", "partition.clients=64", *overrides, method="fedavg")
    if fault is None:
        check_schedule(phases, {0: owners}, config)
    else:
        with pytest.raises(ConfigError, match=f"^secure.quorum={fault} open a sum, and [0-9]+ may collude with"):
            check_schedule(phases, {0: owners}, config)


def test_the_quorum_that_the_message_names_is_the_smallest_that_is_safe():
    for cohort, clients in ((10, 64), (50, 1400), (140, 1400), (64, 64), (5, 1000)):
        few = toy.config("secagg=sum", f"partition.clients={clients}", f"cohort={cohort}", "secure.quorum=0.05")
        with pytest.raises(ConfigError, match="raise it to") as caught:
            check_schedule([DRAWN], {0: clients}, few)
        remedy = str(caught.value).partition("raise it to ")[2]
        assert remedy.endswith(", or raise cohort") == (cohort < clients)
        quorum = float(remedy.split(",")[0])
        for value, safe in ((quorum, True), (quorum - 1.2 / cohort, False)):  # it is rounded up to three digits
            config = toy.config(
                "secagg=sum", f"partition.clients={clients}", f"cohort={cohort}", f"secure.quorum={value}"
            )
            assert (unsafe(cohort, clients, config) is None) == safe, (cohort, clients, value)


@pytest.mark.parametrize(
    ("overrides", "owners", "fault"),
    [
        (
            ["cohort=100", "secure.neighbours=2"],
            100,
            "2 is not safe in a cohort of 100 clients; the smallest number that is: 30",
        ),
        (
            ["cohort=100", "secure.neighbours=28"],
            100,
            "28 is not safe in a cohort of 100 clients; the smallest number that is: 30",
        ),
        (["cohort=100", "secure.neighbours=30"], 100, None),
        (["cohort=100", "secure.neighbours=1000"], 100, None),
        (["cohort=100", "secure.neighbours=30", "drop_rate=0.1"], 100, "30 .* 100 clients; .*: 42"),
        (["cohort=100", "secure.neighbours=30"], 20, None),  # only 20 hold data: the complete graph
        (
            ["cohort=20", "secure.neighbours=18"],
            20,
            "18 is not safe in a cohort of 20 clients; the smallest number that is: 19",
        ),
        (["cohort=20", "secure.neighbours=19"], 20, None),
        (["cohort=20"], 20, None),
    ],
    ids=str,
)
def test_fewer_neighbours_than_are_safe_are_refused(overrides, owners, fault):
    """A tenth may collude, so 15 clients in a row on the ring are all needed to bring 100 x 0.1^15 below 2^-40."""
    config = toy.config("secagg=full", "partition.clients=100", *overrides, method="fedavg")
    if fault is None:
        check_schedule([DRAWN], {0: owners}, config)
    else:
        with pytest.raises(ConfigError, match=f"^secure.neighbours={fault}; set it to null, which chooses"):
            check_schedule([DRAWN], {0: owners}, config)


def test_updates_are_released_where_all_is_protected():
    phases = [DRAWN, ALL, SKETCHES, SOME, replace(SOME, diagnostic=True), STORES]
    assert releases(phases, read(*CLIENT)) == releases(phases, read(*EXAMPLE)) == phases[:4]
    assert releases(phases, read(*WORK, method="fot")) == [SKETCHES, SOME]


@pytest.mark.filterwarnings("ignore:the noise hides all")
def test_a_strategy_that_draws_in_later_tasks_only_is_refused_before_anything_runs():
    config = toy.config(*PRIVATE, "dp.accountant=rdp", "rounds=1", method="fot")
    seen = toy.Rows()
    with pytest.raises(ConfigError, match="sampling=fixed has no bound"):
        cfl.run(config, stream=toy.stream(), strategy=Late(), sink=seen)
    assert not seen.rows
    full = config.model_copy(update={"dp": config.dp.model_copy(update={"amplify": False})})
    assert cfl.run(full, stream=toy.stream(), strategy=Late()).metrics["epsilon"] > 0


def test_secure_sums_refuse_cohorts_that_everybody_can_compute():
    known = toy.config("secagg=sum", "sampling=round", "partition.clients=20", "cohort=10", method="fedavg")
    with pytest.raises(ConfigError, match="cohorts of sampling=round.*: set sampling=fixed$"):
        check_schedule([DRAWN], {0: 20}, known)
    check_schedule([ALL], {0: 20}, known)
    check_schedule([DRAWN], {0: 10}, known)  # no draw


@pytest.mark.parametrize("secagg", ["full", "sum"])
def test_a_task_that_one_client_holds_has_no_secure_sum(secagg):
    protected = read(f"secagg={secagg}")
    check_schedule([DRAWN], {0: 2, 1: 20}, protected)
    check_schedule([DRAWN], {0: 20, 1: 1}, read())
    with pytest.raises(ConfigError, match="is its upload, and only one holds data of task 1: raise partition.task_sh"):
        check_schedule([DRAWN], {0: 20, 1: 1}, protected)

    # a quarter of 4 clients is one, half of them are two
    quarter, half = (
        toy.config(f"secagg={secagg}", f"partition.task_share={share}", "tasks=1", "rounds=1", method="fedavg")
        for share in (0.25, 0.5)
    )
    with pytest.raises(ConfigError, match="only one holds data of task 0"):
        cfl.run(quarter, stream=toy.stream(1))
    assert cfl.run(half, stream=toy.stream(1)).metrics["bytes_up"] > 0


@pytest.mark.parametrize("budget", [NOISE, TARGET])
def test_a_budget_alone_is_one_of_clients(budget):
    assert read(budget, UNIFORM, "sampling=poisson").dp.level == "client"
    assert read(budget, UNIFORM, "dp.level=example").dp.level == "example"
    assert read().dp.level == "none"


@pytest.mark.parametrize(
    ("clients", "bits", "fraction"), [(20, 16, 10), (20, 16, 11), (16, 16, 11), (17, 16, 11), (2, 32, 30), (3, 32, 30)]
)
def test_room_is_what_the_integers_have(clients, bits, fraction):
    options = ["secagg=sum", f"partition.clients={clients}", f"secure.bits={bits}", f"secure.fraction_bits={fraction}"]
    room = 2 ** (bits - 1 - fraction) >= clients  # each client's share of the range is at least 1
    if room:
        assert read(*options).secure.fraction_bits == fraction
        assert FixedPoint(bits, fraction, clients).largest >= 1 - 2.0**-fraction
    else:
        with pytest.raises(ConfigError, match="leaves no room"):
            read(*options)


# --- batch statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protection", [CLIENT, EXAMPLE], ids=["client", "example"])
@pytest.mark.parametrize("name", plugins.models.names())
def test_models_with_batch_statistics_are_refused_by_name(name, protection):
    module = sample(name, {})
    has = any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in module.modules())
    assert has == (name in ("resnet8", "resnet18_cifar"))
    options = [*protection, f"model.name={name}"]
    if has:
        with pytest.raises(ConfigError, match=rf"BatchNorm layer 'norm' of model\.name={name}.*use a model without"):
            resolve("cifar10", overrides=options)
        assert resolve("cifar10", overrides=[*options, "model.norm=false"]).model.name == name
        assert resolve("cifar10", overrides=[f"model.name={name}", "secagg=full"]).secagg == "full"
    else:
        assert resolve("cifar10", overrides=options).dp.level != "none"


def with_norm(norm):
    return nn.Sequential(nn.Linear(8, 6), norm, nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("stats", ["per_task", "running", "batch"])
@pytest.mark.parametrize("protection", [CLIENT, EXAMPLE], ids=["client", "example"])
def test_modules_with_batch_statistics_are_refused_by_a_run(protection, stats):
    config = toy.config(*protection, f"model.norm_stats={stats}", method="fedavg")
    with pytest.raises(ConfigError, match="the BatchNorm layer '1'.*its statistics mix the samples of a batch"):
        cfl.run(config, stream=toy.stream(), model=with_norm(nn.BatchNorm1d(6)))


@pytest.mark.parametrize("stats", ["per_task", "running", "batch"])
def test_batch_statistics_are_refused_for_single_samples_whatever_is_protected(stats):
    """A layer's inputs then depend on the other samples of a batch, so no sample's part in a sketch is bounded."""
    norm = f"model.norm_stats={stats}"
    config = toy.config(*EXAMPLE, *SUMS, "dp.protect=work", norm, method="fot")
    with pytest.raises(ConfigError, match="dp.level=example cannot run with the BatchNorm layer '1'"):
        cfl.run(config, stream=toy.stream(), model=with_norm(nn.BatchNorm1d(6)))
    # a client is clipped as a whole
    check_model(with_norm(nn.BatchNorm1d(6)), toy.config(*WORK, norm, method="fot"))


def test_other_norms_and_updates_without_protection_are_taken():
    norms = [nn.LayerNorm(6), nn.GroupNorm(2, 6)]
    for config in (read(*CLIENT), read(*EXAMPLE)):
        for norm in norms:
            check_model(with_norm(norm), config)
        for norm in (nn.BatchNorm1d(6), nn.BatchNorm2d(6), nn.SyncBatchNorm(6)):
            with pytest.raises(ConfigError, match="BatchNorm layer '1'"):
                check_model(with_norm(norm), config)
    for config in (read(), read("secagg=full"), read(*WORK, method="fot")):
        check_model(with_norm(nn.BatchNorm1d(6)), config)


# --- single samples -------------------------------------------------------------------------------------------------

SINGLE = {  # (can be protected at dp.level=example, why)
    "er": (False, "stored samples join each batch: one is used in tasks that the budget does not count"),
    "ewc": (False, "squared gradients of raw samples stay in the client's state and pull its later updates"),
    "fedavg": (True, "a mean of single losses"),
    "fedcil": (False, "generators that draw images like the raw samples, one by one"),
    "fedprotip": (False, "sends directions of raw inputs and second moments of features, which nothing bounds"),
    "fot": (True, "a mean of single losses; Gram matrices are sums over samples, each bounded by the strategy itself"),
    "glfc": (False, "stored samples, and weights by the classes of the whole batch"),
    "gpm": (False, "bases of raw inputs stay in the client's state and cut its later updates"),
    "joint": (False, "its loss weighs each sample by the number of those of its task in the batch"),
    "lorm": (False, "sends Gram matrices of raw inputs, whose inverses would magnify noise"),
    "lwf": (True, "a mean of single losses; the teacher is an earlier global model"),
    "olora": (True, "a term of the weights"),
    "rgo": (False, "curvature from raw samples stays in the client's state and shapes its later updates"),
    "single_task": (True, "a mean of single losses, by task"),
    "target": (True, "a mean of single losses; the server makes its samples from protected models"),
    "fedasam": (False, "moves by the gradient of the batch before it takes the one that counts: two uses a step"),
    "fedavgm": (True, "sums of protected updates"),
    "feddf": (True, "logits of the trained model on public data: made of protected gradients alone"),
    "feddyn": (True, "a term of the weights, and a state made of earlier protected updates"),
    "fedet": (False, "shows each client's logits, and weighs them by its number of samples"),
    "bulyan": (True, "made of updates, and of no sample; shows each update"),
    "fednova": (False, "sends the number of its steps, which tells that of its samples"),
    "fedntd": (True, "a mean of single divergences from the global model"),
    "fedproj": (True, "projects the protected gradient, by public data"),
    "fedprox": (True, "a term of the weights"),
    "fedrcl": (False, "contrasts the samples of a batch with each other"),
    "fedsam": (False, "moves by the gradient of the batch before it takes the one that counts: two uses a step"),
    "fedsol": (False, "moves by a proximal gradient of the raw batch (proximal=kl), which nothing bounds"),
    "kl": (True, "a mean of single divergences from the global model"),
    "krum": (True, "a mean of some of the updates, and no sample; shows each update"),
    "median": (True, "made of updates, and of no sample; shows each update"),
    "moon": (True, "contrasts each sample with itself at other models"),
    "norm_bound": (True, "a factor of the update, from its norm; at the server, shows each update"),
    "prox_projection": (False, "projects by a proximal gradient of the raw batch (proximal=kl), which nothing bounds"),
    "rfa": (True, "a mean of updates, and of no sample; shows each update"),
    "scaffold": (True, "control variates made of protected updates"),
    "trimmed_mean": (True, "made of updates, and of no sample; shows each update"),
}  # fmt: skip


RULES = ("bulyan", "krum", "median", "norm_bound", "rfa", "trimmed_mean")  # which combine the updates


def own():
    """Names of the package's strategies and regularizers, and their classes."""
    items = {name: kind.get(name) for kind in (plugins.strategies, plugins.local) for name in kind.names()}
    return {name: item for name, item in items.items() if item.__module__.startswith("cfl.")}


def test_every_method_and_regularizer_is_classified():
    assert set(SINGLE) == set(own())  # for a new one, check its use of samples, and state why it is safe or not
    assert all(why for _, why in SINGLE.values())


@pytest.mark.parametrize("name", SINGLE)
def test_single_samples_are_protected_where_the_table_says_so(name):
    safe, _ = SINGLE[name]
    assert vars(own()[name]).get("per_sample", False) == safe
    further = SUMS if name == "fot" else []
    reason = refused(name, [*EXAMPLE, *further])
    if name in RULES:
        assert reason == f"'{name}' needs each client's own upload, but dp.level=example protects sums only"
    elif safe:
        assert reason is None
    elif name in ("fedprotip", "lorm"):  # which are refused at any level
        assert {"fedprotip": "second moments of features", "lorm": "noise in Gram matrices"}[name] in reason
    else:
        assert f"'{name}' uses samples beyond the gradients that dp.level=example bounds" in reason


@pytest.mark.parametrize("name", SINGLE)
def test_clients_and_sums_are_protected_but_for_those_that_need_more_than_a_sum(name):
    client, summed = refused(name, CLIENT), refused(name, ["secagg=full"])
    stacks = {"fedet", "fedcil", *RULES}
    assert (client is not None) == (name in stacks | {"feddf", "fedproj", "fednova", "fedprotip", "lorm"})
    assert (summed is not None) == (name in stacks)


def test_refused_gives_the_reason_that_reading_gives():
    with pytest.raises(ConfigError) as caught:
        read("secagg=full", local=["fedet"])
    assert refused("fedet", ["secagg=full"]) == str(caught.value)
    for option, further in PROTECTIONS.items():  # each with the options that it needs
        assert refused("fedavg", [option, *further]) is None


# --- a user's own classes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heir(Strategy):
    """Subclass of a safe method that does not declare itself safe."""


@dataclass(frozen=True)
class Examined(Strategy):
    per_sample: ClassVar[bool] = True


@dataclass(frozen=True)
class Late(FOT):
    """Sketches all clients after the first task, and a sampled cohort after the second."""

    def plan(self, task, tasks, rounds):
        phases = super().plan(task, tasks, rounds)
        return [replace(phase, cohort="sampled") if task and phase.work else phase for phase in phases]


@dataclass(frozen=True)
class NearHeir(FedProx):
    pass


@dataclass(frozen=True)
class SketchHeir(FOT):
    pass


@dataclass(frozen=True)
class Shows(LocalRegularizer):
    per_sample: ClassVar[bool] = True
    gathers: ClassVar = "stack"


def run(*overrides, method="fedavg", **objects):
    config = toy.config("tasks=1", "rounds=1", "dp.accountant=rdp", *overrides, method=method)
    return cfl.run(config, stream=toy.stream(1), **objects).metrics


def test_a_subclass_does_not_inherit_that_it_is_safe():
    with pytest.raises(ConfigError, match="'Heir' does not declare that samples reach its uploads through gradients"):
        run(*EXAMPLE, strategy=Heir())
    with pytest.raises(ConfigError, match="'near' does not declare that samples"):
        run(*EXAMPLE, regularizers={"near": NearHeir()})
    assert 0 < run(*EXAMPLE, strategy=Examined())["epsilon"] < math.inf
    assert 0 < run(*CLIENT, strategy=Heir())["epsilon"] < math.inf  # client-level protection covers any method


def test_under_work_alone_regularizers_may_do_what_they_like_and_the_strategy_not():
    options = [*EXAMPLE, *SUMS, "dp.protect=work"]
    config = read(*options, method="fot", local=["fedrcl"])
    assert config.dp.protect == "work"
    with pytest.raises(ConfigError, match="'SketchHeir' does not declare that samples"):
        run(*options, method="fot", strategy=SketchHeir(sketch="gram", project_at="server"))


@pytest.mark.parametrize(
    ("protection", "message"),
    [
        (["secagg=full"], "'shows' needs each client's own upload, which secagg=full hides"),
        (["secagg=sum"], "which secagg=sum hides"),
        (CLIENT, "'shows' needs each client's own upload, but dp.level=client protects sums only"),
        (EXAMPLE, "'shows' needs each client's own upload, but dp.level=example protects sums only"),
        (["secagg=full", *EXAMPLE], "'shows' needs each client's own upload, which secagg=full hides"),
    ],
    ids=["full", "sum", "client", "example", "full and example"],
)
def test_uploads_that_are_shown_one_by_one_are_refused(protection, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(*protection, regularizers={"shows": Shows()})
    assert str(caught.value).count("needs each client's own upload") == 1  # once is enough


def test_faults_of_several_members_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        run(*EXAMPLE, "secagg=full", regularizers={"near": NearHeir(), "shows": Shows()}, strategy=Heir())
    for part in (
        "'shows' needs each client's own upload",
        "'near' does not declare that samples",
        "'Heir' does not declare that samples",
    ):
        assert part in str(caught.value)


def test_bare_updates_of_the_same_round_undo_the_secrecy_of_a_draw():
    """GPSE in the last training round, by the sampled clients: the same round sends their updates without noise."""
    ride = [*WORK, "strategy.participants=sampled", "strategy.model=local"]
    with pytest.raises(ConfigError, match=r"updates, which dp\.protect=work does not .*; set dp\.amplify=false"):
        read(*ride, method="fot")
    assert read(*ride, "dp.amplify=false", method="fot").dp.protect == "work"
    assert read(*ride, "strategy.model=global", method="fot").dp.amplify  # a separate round with its own cohort
