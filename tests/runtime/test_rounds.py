"""Parameters with requires_grad=False train nowhere, whatever the engine, the method and its own `frozen`."""

import pytest
import torch
from torch import nn

import cfl
from cfl.assembly import methods
from cfl.core import ConfigError, plugins, rng, tree
from cfl.models import Model
from cfl.runtime.builder import build_session
from tests import toy

FIRST = ("0.weight", "0.bias")


def net(*fixed):
    """8-6-6-2 with a normalisation layer; `fixed` names the parameters that do not train."""
    with rng.fork(1):
        layers = (nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
        module = nn.Sequential(*layers)
    for name, leaf in module.named_parameters():
        leaf.requires_grad_(name not in fixed)
    return module


def ran(*options, method="fedavg", fixed=FIRST, multi_head=False):
    """A finished run, the names that have moved, and the number of floats that came up in each training round."""
    config = toy.config(*options, method=method)
    session = build_session(config, toy.stream(multi_head=multi_head), methods.build(config), net(*fixed))
    before, sent = tree.clone(session.model.params), []
    session.recorder.row, record = lambda *given: (sent.append(given), record(*given))[1], session.recorder.row
    session.start(resume=False)
    for position in range(len(session.schedule)):
        session.round(position)
    session.close()
    after = session.state.server["params"]
    up = [outcome.bytes_up // 4 // len(outcome.states) for inputs, outcome, *_ in sent if inputs.info.phase.train]
    return session, {name.partition("@")[0] for name, leaf in before.items() if not torch.equal(leaf, after[name])}, up


ALL = {name for name, _ in net().named_parameters()}


@pytest.mark.parametrize("options", [["engine=loop"], ["engine=vmapped", "block=2"], ["engine=pool"], ["secagg=full"]])
def test_frozen_parameters_do_not_move_under_any_engine(options):
    _, moved, _ = ran(*options)
    assert moved == ALL - set(FIRST)


def test_they_travel_in_no_round():
    # 8 * 6 + 6 = 54 of the network's 54 + 42 + 12 + 14 = 122 numbers are frozen
    session, _, up = ran()
    assert set(up) == {122 - 54}
    assert set(ran(fixed=())[2]) == {122}
    assert set(session.prepare(0).shared["params"]) == ALL - set(FIRST)
    assert session.finish().metrics["client_bytes"] == 54 * 4  # each client holds them


@pytest.mark.parametrize("method", toy.quick("fedavg", "fot", "er", "rgo", of=plugins.strategies.names()))
@pytest.mark.parametrize("multi_head", toy.quick(True, of=[False, True]))
def test_every_strategy_keeps_them(method, multi_head):
    body = ALL - {"5.weight", "5.bias"}
    assert ran(method=method, multi_head=multi_head)[1] == ALL - set(FIRST)
    assert ran(method=method, multi_head=multi_head, fixed=body)[1] == ALL - body  # but for the head, nothing trains


@pytest.mark.parametrize(
    "regularizer",
    toy.quick(*toy.RULES, of=plugins.local.names()),
)
def test_every_regularizer_keeps_them(regularizer):
    public = ["public.name=stream"] if plugins.local.get(regularizer).needs_public else []
    assert ran(*public, method=f"gpm+{regularizer}")[1] == ALL - set(FIRST)


def test_they_are_frozen_together_with_what_the_strategy_freezes():
    session, moved, _ = ran("strategy.bias=freeze", "strategy.norm_affine=freeze", method="fot")
    assert moved == ALL - set(FIRST)  # the strategy freezes after the first task
    assert session.prepare(len(session.schedule) - 1).info.frozen == {*FIRST, "2.bias", "3.weight", "3.bias", "5.bias"}


def test_frozen_layers_have_no_bases_and_no_fisher_information():
    fot = ran(method="fot")[0]
    assert list(fot.state.server["basis"]) == ["2", "5"]
    for method, names in (("gpm", {"basis/2", "basis/5"}), ("ewc", None)):
        states = [set(state) for state in ran(method=method)[0].state.clients.values()]
        assert states and not any("/0" in name for state in states for name in state)
        assert names is None or all({f"strategy/{name}" for name in names} == state for state in states)


def test_a_fixed_bias_leaves_the_weight_its_own_basis():
    # Without its bias as a 9th input, the first layer's bases have 8 rows; the guarantee for its outputs still holds,
    # because a bias that never moves adds no change.
    session, moved, _ = ran(method="fot", fixed=("0.bias",))
    assert session.state.server["basis"]["0"].shape[0] == 8 and session.state.server["basis"]["2"].shape[0] == 7
    assert moved == ALL - {"0.bias"}


def test_the_first_layer_is_still_the_first():
    frozen = Model(net(*FIRST), (8,), [2], multi_head=False)
    assert frozen.stem == "0" and [layer.name for layer in frozen.layers] == ["2", "5"]
    assert plugins.strategies.get("fot")(freeze_first=True).frozen(1, frozen) == {"3.weight", "3.bias"}


def test_notes_name_them():
    class Notes(cfl.sinks.NullSink):
        def start(self, config, notes, total_rounds):
            self.notes = notes

    sink = Notes()
    cfl.run(toy.config(), stream=toy.stream(), model=net(*FIRST), sink=sink)
    assert sink.notes[0] == "frozen by requires_grad=False: 0.weight, 0.bias"
    assert not any("0.weight" in line for line in sink.notes[1:])  # of FOT: neither projected nor free


def test_a_network_of_which_nothing_trains_is_refused():
    with pytest.raises(ConfigError, match=r"all parameters .* requires_grad=False.*call requires_grad_\(True\)"):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), model=net(*ALL))


def test_a_round_has_the_pixels_of_the_tasks_so_far():
    config = toy.config("tasks=3", "rounds=1", method="fedavg")
    session = build_session(config, toy.stream(3), methods.build(config))
    assert [len(session.rounds.info(place).pixels_of) for place in range(3)] == [1, 2, 3]
