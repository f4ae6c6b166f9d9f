"""Algebra on trees: laws on random trees, exact inverses, and what must not be shared or changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfl.core import tree
from tests import toy

SHAPES = st.dictionaries(
    st.text("abc.@/0", min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)


def filled(shapes, seed):
    """Whole numbers: sums and products of them are exact in float32, so laws can be checked to the bit."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-9, 10, shape, generator=source).float() for name, shape in shapes.items()}


def assert_equal(a, b):
    assert list(a) == list(b)
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(-4, 4))
def test_algebra_agrees_with_vectors(shapes, factor):
    a, b = filled(shapes, 1), filled(shapes, 2)
    u, v = toy.flat(a), toy.flat(b)
    assert torch.equal(toy.flat(tree.add(a, b)), u + v)
    assert torch.equal(toy.flat(tree.sub(a, b)), u - v)
    assert torch.equal(toy.flat(tree.scale(a, factor)), factor * u)
    assert torch.equal(tree.dot(a, b), u @ v)
    assert tree.nbytes(a) == 4 * u.numel()


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 3))
def test_stack_adds_a_first_dimension(shapes, count):
    trees = [filled(shapes, seed) for seed in range(count)]
    stacked = tree.stack(trees)
    assert {name: leaf.shape for name, leaf in stacked.items()} == {
        name: (count, *shape) for name, shape in shapes.items()
    }
    for back, original in zip(toy.unstacked(stacked), trees, strict=True):
        assert_equal(back, original)


def test_map_follows_the_first_tree_and_ignores_the_order_of_the_others():
    a, b = {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}, {"y": torch.tensor(10.0), "x": torch.tensor(20.0)}
    assert {name: leaf.item() for name, leaf in tree.add(a, b).items()} == {"x": 21, "y": 12}
    assert list(tree.add(a, b)) == ["x", "y"]


def test_select_keeps_the_asked_order_and_refuses_missing_names():
    a = {"x": torch.tensor(1.0), "y": torch.tensor(2.0), "z": torch.tensor(3.0)}
    assert list(tree.select(a, ("z", "x"))) == ["z", "x"]
    assert tree.select(a, ("z",))["z"] is a["z"]
    with pytest.raises(KeyError, match="w"):
        tree.select(a, ("w",))


def test_the_weighted_mean_by_hand():
    stacked = {"a": torch.tensor([[1.0, 2.0], [5.0, 6.0]])}
    assert tree.weighted_mean(stacked, [1.0, 3.0])["a"].tolist() == [4.0, 5.0]  # (1 + 15) / 4 and (2 + 18) / 4
    assert tree.weighted_sum(stacked, [1.0, 3.0])["a"].tolist() == [16.0, 20.0]
    assert stacked["a"].tolist() == [[1.0, 2.0], [5.0, 6.0]]


def test_scale_leaves_counters_alone():
    scaled = tree.scale({"w": torch.tensor([3.0]), "n": torch.tensor(7)}, 0.5)
    assert scaled["w"].tolist() == [1.5]
    assert scaled["n"].item() == 7 and scaled["n"].dtype == torch.int64


def test_clone_shares_neither_memory_nor_graph():
    source = {"w": torch.ones(2, requires_grad=True), "n": torch.tensor(1)}
    copy = tree.clone(source)
    copy["w"].add_(1)
    copy["n"].add_(1)
    assert source["w"].tolist() == [1, 1] and source["n"].item() == 1
    assert not copy["w"].requires_grad


def test_nbytes_counts_every_dtype():
    leaves = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(2, dtype=torch.float64),
        "c": torch.tensor(1),
        "d": torch.zeros(0),
    }
    assert tree.nbytes(leaves) == 15 * 4 + 2 * 8 + 8 + 0


def test_equal_trees_have_the_same_names_and_values():
    ones, zeros = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    assert tree.equal(ones, tree.clone(ones)) and tree.equal({}, {})
    for one, other in ((ones, zeros), (ones, {}), ({}, ones)):
        assert not tree.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_all_finite(bad):
    good = {"w": torch.zeros(3), "n": torch.tensor(2)}
    assert tree.all_finite(good) and tree.all_finite({})
    assert not tree.all_finite({**good, "v": torch.tensor([0.0, bad])})


@settings(max_examples=40, deadline=None)
@given(SHAPES, SHAPES)
def test_parts_of_a_tree_come_back_under_their_own_names(ours, theirs):
    a, b = filled(ours, 1), filled(theirs, 2)
    both = {**tree.under("a", a), **tree.under("ab", b)}  # one owner's name begins with the other's
    assert_equal(tree.part(both, "a"), a)
    assert_equal(tree.part(both, "ab"), b)
    assert tree.part(both, "b") == {}
