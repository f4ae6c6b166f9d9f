"""Projected, frozen and fine-tuned layers after the first task, by kind of layer."""

import types
import warnings

import pytest
from torch import nn

import cfl
from cfl.methods.strategies.fedprotip import FedProTIP
from cfl.methods.strategies.fot import FOT
from cfl.methods.strategies.gpm import GPM
from tests import toy
from tests.gpse_round import Net, draws, handle, label, mlp, one_gpse, ranks_of, start


def _conv_norm_model(**options):
    module = Net(
        nn.Conv2d(4, 4, 2, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    )
    return handle(module.double(), (4, 4, 4), **options)


NORMS = {f"{path}.{name}" for path in (1, 4, 8) for name in ("weight", "bias")}


def test_nothing_is_frozen_in_the_first_task():
    model = _conv_norm_model()
    assert FOT(freeze_first=True, bias="freeze", second_half="freeze").frozen(0, model) == frozenset()


@pytest.mark.parametrize(
    "options,frozen",
    [
        ({}, NORMS),
        ({"norm_affine": "free"}, set()),
        ({"norm_affine": "free", "bias": "freeze"}, {"0.bias", "3.bias", "7.bias", "9.bias"}),
        ({"norm_affine": "free", "freeze_first": True}, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (  # four layers: half is two, for any number of groups
            {"norm_affine": "free", "first_half": "freeze"},
            {f"{path}.{name}" for path in (0, 1, 3, 4) for name in ("weight", "bias")},
        ),
        (
            {"norm_affine": "free", "second_half": "freeze"},
            {f"{path}.{name}" for path in (7, 8, 9) for name in ("weight", "bias")},
        ),
        ({"norm_affine": "free", "bias": "freeze", "first_half": "finetune"}, {"7.bias", "9.bias"}),
        ({"first_half": "finetune"}, {"8.weight", "8.bias"}),  # norms of fine-tuned layers are fine-tuned
    ],
    ids=label,
)
def test_what_is_frozen_after_the_first_task(options, frozen):
    assert FOT(**options).frozen(1, _conv_norm_model()) == frozen


@pytest.mark.parametrize(
    "options,projected",
    [
        ({}, ["0.group0", "0.group1", "3", "7", "9"]),
        ({"freeze_first": True}, ["3", "7", "9"]),
        ({"first_half": "finetune"}, ["7", "9"]),
        ({"second_half": "freeze"}, ["0.group0", "0.group1", "3"]),
    ],
    ids=label,
)
def test_which_layers_have_a_basis(options, projected):
    model = _conv_norm_model()
    strategy = FOT(**options)
    assert list(start(strategy, model)["basis"]) == projected
    server, sums = one_gpse(strategy, model, draws(9, 4, 4, 4))
    assert {name.partition("/")[2] for name in sums} == set(projected)
    assert all(rank > 0 for rank in ranks_of(server).values())


def test_an_odd_number_of_layers_has_the_larger_half_first():
    model = handle(mlp(6, 5, 4, 3), (6,))
    assert list(start(FOT(second_half="finetune"), model)["basis"]) == ["0", "2"]  # half of 3, rounded up


def test_notes_say_what_is_covered_and_what_is_not():
    model = _conv_norm_model()
    text = "\n".join(FOT(bias="free", norm_affine="free").notes(model))
    assert "projected: 0.weight (d=8), 0.weight (d=8), 3.weight (d=16)" in text
    unprotected = next(line for line in text.splitlines() if line.startswith("not protected"))
    assert all(name in unprotected for name in (*NORMS, "0.bias", "9.bias")) and "weight (d" not in unprotected
    text = "\n".join(FOT().notes(model))
    assert "0.weight+0.bias (d=9)" in text and "not protected" not in text


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.gru(x)[1][-1])


@pytest.mark.parametrize("method", [FOT, GPM, FedProTIP])
@pytest.mark.parametrize("multi_head", [True, False])
def test_a_body_without_a_layer_to_project_is_warned_of(method, multi_head):
    recurrent = cfl.Model(_Recurrent(), (6, 4), [3, 3], multi_head=multi_head)
    with pytest.warns(UserWarning, match="apart from heads, the model has no layer to project"):
        lines = method().notes(recurrent)
    assert [line.split(":")[0] for line in lines if "gru.weight_hh_l0" in line] == [
        "not protected, free to change in every task"
    ]


@pytest.mark.parametrize("method", [FOT, GPM, FedProTIP])
@pytest.mark.parametrize("multi_head", [True, False])
def test_a_body_that_is_projected_frozen_or_empty_is_not_warned_of(method, multi_head):
    frozen = _Recurrent()
    frozen.gru.requires_grad_(False)
    modules = {(6, 4): frozen, (6,): mlp(6, 5, 3), (3,): nn.Linear(3, 3)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for shape, module in modules.items():
            method().notes(cfl.Model(module, shape, [3, 3], multi_head=multi_head))
    assert not found


@pytest.mark.parametrize("policy", ["freeze", "finetune"])
def test_layers_that_are_not_projected_by_choice_are_not_warned_of(policy):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        FOT(first_half=policy, second_half=policy).notes(handle(mlp(6, 5, 3), (6,)))
    assert not found


def _doubled(*sizes):
    """A convolution that gets a forward of its own after it is made."""
    conv = nn.Conv2d(*sizes)
    conv.forward = types.MethodType(lambda self, x: 2 * nn.Conv2d.forward(self, x), conv)
    return conv


def test_layers_with_a_forward_of_their_own_are_named():
    """Delta W x = 0 says nothing of the outputs where the filters are not W, but standardised."""
    found = []
    for kind in (toy.Standardised, _doubled, nn.Conv2d):
        model = handle(Net(kind(1, 2, 2), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)), (1, 3, 3))
        found.append([line for line in FOT().notes(model) if "forward of its own" in line])
    line = "projected, but outputs for earlier inputs may change, since the layer has a forward of its own: 0"
    assert found == [[line], [line], []]


@pytest.mark.parametrize(("norm", "names"), [(nn.LayerNorm(4), {"0.weight", "0.bias"}), (nn.RMSNorm(4), {"0.weight"})])
def test_a_model_of_a_norm_and_a_head_alone_has_nothing_to_project(norm, names):
    module = nn.Sequential(norm, nn.Linear(4, 2))
    model = cfl.Model(module, (4,), [2, 2], multi_head=True)
    assert FOT().frozen(1, model) == names
    assert FOT(norm_affine="free").frozen(1, model) == frozenset()
