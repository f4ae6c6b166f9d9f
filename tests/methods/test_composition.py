"""Regularizers with a strategy and with each other: what FOT guarantees, order, labels, and what is refused."""

import pytest
import torch

import cfl
from cfl.assembly.resolve import dump, load
from cfl.core import ConfigError, plugins
from cfl.methods.regularizers import FedNova, Scaffold
from cfl.methods.strategies import FOT
from cfl.methods.subspace.projection import names
from tests import toy

# Strong enough for each rule to show in two rounds of a few steps.
OPTIONS = {
    "feddf": ("public.name=stream", "regularizer.feddf.server_lr=0.01"),
    "fedet": ("public.name=stream", "regularizer.fedet.server_lr=0.01"),
    "fedproj": ("public.name=stream", "regularizer.fedproj.server_lr=0.01"),
    "fedsol": ("regularizer.fedsol.scope=full",),
    "moon": ("regularizer.moon.mu=1.0",),
}
ALONE = ("fedprox", "fedsol", "fedntd", "fednova", "scaffold", "feddyn", "fedavgm", "moon", "fedproj", "feddf")
OTHERS = ("kl", "fedrcl", "fedsam", "fedasam", "prox_projection", "fedet")
TOGETHER = ("fedsol+scaffold", "fednova+moon+fedproj", "feddyn+fedntd+feddf")


def run(label, *overrides, multi_head=False, strategy=None):
    """Two tasks of two rounds, in float64; clients hold unlike numbers of samples."""
    own = [option for rule in label.split("+") for option in OPTIONS.get(rule, ())]
    options = ["tasks=2", "cohort=3", "local.lr=0.2", "local.batch_size=5", "partition.name=lda", "partition.alpha=0.5"]
    options += ["strategy.threshold=0.8", "strategy.measure_coverage=false"] if label.startswith("fot") else []
    stream = toy.stream(tasks=2, multi_head=multi_head)
    config = toy.config(*options, *own, *overrides, method=label)
    return cfl.run(config, stream=stream, strategy=strategy, model=toy.mlp(8, 6, 6, 2))


def leak(old, new, layers, bases):
    """The largest |(new - old) O| of a layer, bias included, over the length of the whole step."""
    step = {name: new[name] - leaf for name, leaf in old.items()}
    length = sum(leaf.square().sum() for leaf in step.values()).sqrt()
    largest = 0.0
    for layer in layers:
        rows = torch.cat([step[name].reshape(layer.rows.stop, -1) for name in names(layer, True)], dim=1)
        largest = max(largest, float((rows.double() @ bases[layer.name]).norm() / length))
    return largest


def second_task(rounds):
    """(what came down, the server afterwards) of the training rounds of task 1."""
    return [(down, after) for info, down, after in rounds if info.task == 1 and info.phase.train]


@pytest.mark.parametrize(
    ("rules", "multi_head"),
    toy.quick(
        *((rule, False) for rule in ("fedsol", "scaffold", "feddf", *TOGETHER)),
        ("fedproj", True),
        of=[
            *((rule, False) for rule in (*ALONE, *OTHERS, *TOGETHER)),
            *((rule, True) for rule in ("fedsol", "feddyn", "fedproj")),
        ],
    ),
)
def test_no_rule_makes_orthogonal_training_touch_what_it_protects(rules, multi_head):
    strategy = toy.recording(FOT)(threshold=0.8, measure_coverage=False)
    layers = run(f"fot+{rules}", multi_head=multi_head, strategy=strategy).model.layers
    found = second_task(strategy.rounds)
    bases = found[0][1]["basis"]
    assert len(found) == 2 and set(bases) == {layer.name for layer in layers}
    assert all(0 < basis.shape[1] for basis in bases.values())
    assert any(basis.shape[1] < basis.shape[0] for basis in bases.values())  # there is room to learn
    for down, after in found:
        # The specification allows 1e-5 in float32.
        assert leak(down["params"], after["params"], layers, bases) < 1e-12

    plain = toy.recording(cfl.Strategy)()
    run(rules, multi_head=multi_head, strategy=plain)  # task 0 is the same run: nothing is protected yet
    first = second_task(plain.rounds)[0]
    assert all(torch.equal(leaf, found[0][0]["params"][name]) for name, leaf in first[0]["params"].items())
    assert leak(first[0]["params"], first[1]["params"], layers, bases) > 1e-2


@pytest.mark.parametrize("rule", ["fednova", "feddyn", "feddf"])
def test_the_protection_holds_for_any_server_rate_and_in_float32(rule):
    strategy = toy.recording(FOT)(threshold=0.8, measure_coverage=False)
    config = toy.config("local.lr=0.2", "server.lr=0.6", *OPTIONS.get(rule, ()), method=f"fot+{rule}")
    result = cfl.run(config, stream=toy.stream(), strategy=strategy)
    rounds = [entry for entry in strategy.rounds if entry[0].task and entry[0].phase.train]
    assert len(rounds) == 4
    for _, down, after in rounds:
        assert leak(down["params"], after["params"], result.model.layers, after["basis"]) < 1e-5


@pytest.mark.parametrize(
    "rules",
    [
        ("fedprox", "fedntd"),  # terms of the loss add up
        pytest.param(("moon", "kl", "fedrcl"), marks=pytest.mark.slow),
        ("fedprox", "fedsol"),  # a gradient taken elsewhere is that of the whole loss
        ("scaffold", "fedprox"),  # a constant is added to the whole gradient
        ("fednova", "scaffold"),  # one reads the steps, the other does not touch the server's step
        pytest.param(("fednova", "moon"), marks=pytest.mark.slow),
        pytest.param(("feddyn", "fedntd"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_the_order_does_not_matter_where_what_the_rules_do_adds_up(rules):
    there, back = (run("+".join(order)) for order in (rules, rules[::-1]))
    assert all(torch.allclose(back.params[name], leaf, atol=1e-9) for name, leaf in there.params.items())
    without = run("+".join(rules[1:]))
    assert any(not torch.allclose(without.params[name], leaf, atol=1e-7) for name, leaf in there.params.items())


def test_the_order_matters_where_one_rule_wraps_the_other():
    there, back = run("fedsam+fedsol"), run("fedsol+fedsam")
    assert any(not torch.allclose(back.params[name], leaf, atol=1e-7) for name, leaf in there.params.items())


# --- labels ----------------------------------------------------------------------------------------------------------

LABELS = ["fedavg", "fot", "fedsol", "fot+fedsol", "fedsol+moon", "gpm+fednova+moon", "fedprox+scaffold"]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_comes_back_from_the_configuration_that_it_makes(label):
    config = cfl.resolve("permuted-digits", method=label)
    assert config.label == label
    assert load(dump(config)) == config
    assert cfl.resolve("permuted-digits", method=config.method, regularizers=config.regularizers) == config
    assert cfl.resolve("permuted-digits", overrides=[f"method={label}"]) == config


def test_a_label_is_a_strategy_and_its_regularizers():
    assert cfl.resolve("permuted-digits", method="fot+fedsol") == cfl.resolve(
        "permuted-digits", method="fot", regularizers=["fedsol"]
    )
    alone = cfl.resolve("permuted-digits", method="fedsol")
    assert (alone.method, alone.regularizers) == ("fedavg", ("fedsol",))
    assert alone == cfl.resolve("permuted-digits", method="fedavg+fedsol")
    more = cfl.resolve("permuted-digits", method="fot + fedsol", regularizers=["moon"])
    assert (more.method, more.regularizers, more.label) == ("fot", ("fedsol", "moon"), "fot+fedsol+moon")


def test_hyper_parameters_reach_the_regularizers_of_a_label():
    config = cfl.resolve("permuted-digits", method="fot+fedsol", overrides=["regularizer.fedsol.rho=0.7"])
    assert config.regularizer["fedsol"]["rho"] == 0.7
    assert set(config.regularizer) == {"fedsol"}


def test_a_file_with_a_label_is_read_and_a_label_replaces_the_one_in_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("benchmark: permuted-digits\nmethod: fot+fedsol\nregularizer: {fedsol: {rho: 0.7}}\n")
    config = cfl.resolve(file=file)
    assert (config.label, config.regularizer["fedsol"]["rho"]) == ("fot+fedsol", 0.7)
    other = cfl.resolve(file=file, method="gpm+moon")
    assert (other.label, set(other.regularizer)) == ("gpm+moon", {"moon"})


def test_metrics_carry_the_label():
    assert run("fot+fednova").metrics["method"] == "fot+fednova"
    assert run("moon").metrics["method"] == "moon"


@pytest.mark.parametrize("label", ["fot+fedsol", "scaffold"])
def test_a_run_by_label_is_the_run_by_parts(label):
    strategy, rules = ("fot", ["fedsol"]) if label == "fot+fedsol" else ("fedavg", ["scaffold"])
    runs = [cfl.run(toy.config(method=label), stream=toy.stream())]
    runs.append(cfl.run(toy.config(method=strategy, regularizers=rules), stream=toy.stream()))
    assert all(torch.equal(runs[0].params[name], leaf) for name, leaf in runs[1].params.items())


# --- what is refused when the configuration is read ------------------------------------------------------------------

PUBLIC = "public.name=cifar100"  # not opened before a run


@pytest.mark.parametrize(
    ("label", "overrides", "message"),
    [
        ("feddf+fedproj", [PUBLIC], "'feddf' and 'fedproj' both decide what the server learns from public data; use"),
        ("fot+fedet+moon+feddf", [PUBLIC], "'fedet' and 'feddf' both decide what the server learns"),
        ("fednova+feddyn", [], "'fednova' and 'feddyn' both decide the length of the server's step; use one"),
        ("scaffold", ["local.optimizer=adam"], r"'scaffold' cannot run like this: .*set local\.optimizer=sgd"),
        ("fot+fedsol+scaffold", ["local.optimizer=adam"], r"'scaffold' cannot run like this"),
        ("feddf", [], r"'feddf' needs public data; set public\.name to a data set, such as cifar100, or to stream"),
        ("fot+fedproj", [], r"'fedproj' needs public data"),
        ("fedproj", [PUBLIC, "regularizer.fedproj.stop=1"], "with start=1 and stop=1 it never projects; raise stop"),
        ("joint+fedproj", [PUBLIC], "'fedproj' distils one task at a time, but 'joint' trains on all tasks at once"),
        ("joint+feddf", [PUBLIC], "'feddf' distils one task at a time, but 'joint'"),
        (
            "fot+fedsol",
            ["regularizer.fedsol.proximal=moon"],
            "'fedsol' borrows the terms of 'moon', which is not used; add --local moon",
        ),
        ("fedsol", ["regularizer.fedsol.proximal=fedsol"], "'fedsol' borrows the terms of 'fedsol'"),
        ("fott", [], "unknown method 'fott'; did you mean 'fot'"),
        ("fedsool", [], "unknown method 'fedsool'; did you mean 'fedsol'"),
        ("fot+fedsool", [], "unknown local regularizer 'fedsool'; did you mean 'fedsol'"),
        ("fot+scafold", [], "unknown local regularizer 'scafold'; did you mean 'scaffold'"),
        ("fedprox+fot", [], "names the strategy after a regularizer; write fot\\+fedprox"),
        ("fot+", [], "unknown local regularizer ''"),
        ("+fot", [], "unknown method ''"),
        ("fot+fedsol+fedsol", [], "local regularizers must differ from each other"),
        ("fedsol", ["regularizer.moon.mu=1"], r"regularizer\.moon is set, but 'moon' is not used; add --local moon"),
        ("fot+fedsol", ["fedsol.rho=1"], r"unknown option 'fedsol\.rho'; did you mean 'regularizer\.fedsol\.rho'"),
        ("fot+fedsol", ["regularizer.fedsol.roh=1"], r"did you mean 'regularizer\.fedsol\.rho'"),
    ],
)
def test_what_does_not_fit_is_one_line_that_says_what_to_do(label, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        cfl.resolve("permuted-digits", method=label, overrides=overrides)
    assert "\n" not in str(caught.value)


def test_what_fits_is_not_refused():
    assert cfl.resolve("permuted-digits", method="fot+feddf", overrides=[PUBLIC]).public.name == "cifar100"
    assert cfl.resolve("permuted-digits", method="fednova", overrides=["local.optimizer=adam"]).label == "fednova"
    overrides = ["regularizer.fedsol.proximal=moon", "regularizer.fedsol.scope=full"]
    borrowing = cfl.resolve("permuted-digits", method="fedsol+moon", overrides=overrides)
    assert borrowing.regularizer["fedsol"]["proximal"] == "moon"


def test_objects_of_ones_own_are_refused_likewise():
    with pytest.raises(ConfigError, match="both decide the length of the server's step"):
        cfl.run(
            toy.config(method="fedavg"),
            stream=toy.stream(),
            regularizers={"one": FedNova(), "other": plugins.local.get("feddyn")()},
        )
    with pytest.raises(ConfigError, match="'mine' cannot run like this"):
        config = toy.config("local.optimizer=adam", method="fedavg")
        cfl.run(config, stream=toy.stream(), regularizers={"mine": Scaffold()})


@pytest.mark.parametrize("frozen", ["strategy.bias=freeze", "strategy.norm_affine=freeze"])
@pytest.mark.parametrize("label", ["fot+feddf", "gpm+fedet", "fot+fedproj"])
def test_distillation_leaves_alone_what_a_strategy_freezes(label, frozen):
    module = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    recorder = toy.recording(plugins.strategies.get(label.partition("+")[0]))
    method, rule = label.split("+")
    config = toy.config("tasks=2", *OPTIONS[rule], frozen, method=label)
    strategy = recorder(**{frozen.removeprefix("strategy.").partition("=")[0]: "freeze"})
    cfl.run(config, stream=toy.stream(tasks=2), strategy=strategy, model=module)
    for info, down, after in strategy.rounds:
        if info.task == 1 and info.phase.train:
            assert info.frozen
            for name in down["params"]:
                same = torch.equal(down["params"][name], after["params"][name])
                assert same == (name in info.frozen), name


def test_what_has_a_later_turn_starts_from_what_the_others_made_whatever_the_order():
    for later, other in (("feddf", "fednova"), ("feddf", "feddyn"), ("fedavgm", "feddf"), ("fedavgm", "feddyn")):
        first, last = (run(label).params for label in (f"{later}+{other}", f"{other}+{later}"))
        assert all(torch.equal(leaf, last[name]) for name, leaf in first.items())


@pytest.mark.parametrize("name", ["work", "strategy", "a+b", "a/b"])
def test_owners_have_plain_names(name):
    with pytest.raises(ConfigError, match="cannot be called"):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), regularizers={name: FedNova()})


def test_a_look_at_local_models_is_in_evaluation_mode():
    modes = []
    cfl.run(
        toy.config("tasks=1", method="fedavg"),
        stream=toy.stream(tasks=1),
        observe=lambda info, client, params: modes.append(info.model.module.training),
    )
    assert modes == [False] * 6  # three clients in two rounds


def test_further_regularizers_join_those_of_a_file(tmp_path):
    cfl.run(toy.config(method="fot+fedsol"), stream=toy.stream(), output=tmp_path)
    file = tmp_path / "config.yaml"
    assert cfl.resolve(file=file, regularizers=["moon"]).label == "fot+fedsol+moon"
    assert cfl.resolve(file=file, method="fot").label == "fot"
    assert cfl.resolve(file=file, method="ewc+kl", regularizers=["moon"]).label == "ewc+kl+moon"


def test_rounds_of_a_task_are_counted_over_its_phases():
    """FOT with local models trains in two phases; the last training round of a task projects as well."""
    sent = []

    class Watch(plugins.local.get("fedproj")):
        def provide(self, own, info):
            down = super().provide(own, info)
            sent.append((info.phase.name, info.round, bool(down)))
            return down

    config = toy.config(
        "tasks=2",
        "rounds=3",
        "strategy.model=local",
        "strategy.participants=sampled",
        "public.name=stream",
        method="fot",
    )
    cfl.run(config, stream=toy.stream(tasks=2), regularizers={"fedproj": Watch()})
    assert sent[:3] == [("train", 0, False), ("train", 1, True), ("train+gpse", 0, True)]
