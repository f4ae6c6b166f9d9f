"""Hashes of values: equal for equal content, whatever the addresses, and different for what differs anywhere."""

import functools
import importlib
import json
import linecache
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cfl.core import content


def factor(value: float) -> Callable[[float], float]:
    return lambda x: x * value


def default(value: float) -> Callable[[float], float]:
    return lambda x=value: x


def keyword(value: float) -> Callable[[float], float]:
    return lambda *, x=value: x


def buffered(size: int) -> nn.Module:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(size))
    return module


class Net(nn.Module):
    def __init__(self, activation: Callable = functional.relu, width: int = 4) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(3, width), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))


@dataclass
class Pair:
    first: object
    second: object


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: float) -> None:
        self.a = a


class Slot:
    __slots__ = "value"  # a single name, not the names of its letters

    def __init__(self, value: float) -> None:
        self.value = value


class Lazy:
    """An object that keeps what it has computed."""

    def __init__(self, number: int) -> None:
        self.number = number

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.number


def returning(value: float, wrap: Callable) -> type:
    """A class whose method, wrapped, returns a number that the source does not show."""
    return type("Made", (), {"__module__": __name__, "value": wrap(lambda *_: value)})


def prompted(text: str) -> Callable[[float], float]:
    """A function without a source, as at a prompt."""
    return eval(f"lambda x: {text}", {"__name__": __name__})


STRENGTH = 1.0


def nested(x: float) -> Callable[[], float]:
    return lambda: x * STRENGTH


def long(at: int) -> torch.Tensor:
    """A tensor that `repr` shortens, with a 1 at a place."""
    return torch.zeros(5000).index_fill(0, torch.tensor([at]), 1.0)


def objects(at: int) -> np.ndarray:
    """An array of objects that `repr` shortens, with a 1 at a place."""
    return np.array([int(place == at) for place in range(5000)], dtype=object)


class Queue(deque):
    """A queue that may have attributes."""


EQUAL = {
    "numbers": lambda: [1, 2.5, True, None, "text", b"bytes", 1j],
    "not a number": lambda: float("nan"),
    "a closure": lambda: factor(2.0),
    "a partial": lambda: functools.partial(functional.relu, inplace=True),
    "a method of an object": lambda: Pair(1, 2).__repr__,
    "a long tensor": lambda: long(2500),
    "an array": lambda: np.arange(9.0).reshape(3, 3).T,
    "an array of texts": lambda: np.array(["cat", "horse"]),
    "an array of records": lambda: np.array([(1, 2.0)], dtype=[("id", int), ("weight", float)]),
    "an array with a mask": lambda: np.ma.array([1, 2], mask=[False, True]),
    "a set": lambda: {"c", "b", "a"},
    "a queue": lambda: deque([long(2500), {"c", "b", "a"}, threading.Lock()]),
    "an array of objects": lambda: np.array([[1, "text"], [None, long(2500)]], dtype=object),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "an object with a slot that is not set": lambda: Slots.__new__(Slots),
    "a fresh network": Net,  # other initial weights
    "an object with an address": lambda: [threading.Lock(), object(), torch.Generator()],
    "an object in itself": lambda: (lambda one: one.append(one) or one)([]),
    "a queue in itself": lambda: (lambda one: one.append(one) or one)(deque([long(2500)])),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_values_have_equal_hashes(make):
    assert content.digest(make()) == content.digest(make())


DIFFERENT = {
    "a captured number": (factor(2.0), factor(3.0)),
    "a default of a function": (default(2.0), default(3.0)),
    "a default of a keyword": (keyword(2.0), keyword(3.0)),
    "the object of a method": (Pair(1, 2).__repr__, Pair(2, 1).__repr__),
    "the shape of a buffer": (buffered(2), buffered(3)),
    "functions": (functional.relu, functional.gelu),
    "a number in the middle of a long tensor": (long(2500), long(2501)),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "strides": (torch.arange(4).view(2, 2), torch.arange(4).view(2, 2).T),
    "an activation that has no weights": (Net(functional.relu), Net(functional.gelu)),
    "a layer that has no weights": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
    "a rate of dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "a frozen weight": (Net(), Net().requires_grad_(False)),
    "fields of an object": (Pair(1, 2), Pair(2, 1)),
    "items of a mapping": ({"a": 1}, {"a": 2}),
    "slots of an object": (Slots(1), Slots(2)),
    "constants of a function without a source": (prompted("x + 1"), prompted("x + 2")),
    "operations of a function without a source": (prompted("x + x"), prompted("x * x")),
    "a single slot of an object": (Slot(1), Slot(2)),
    "a property of a class": (returning(1, property), returning(2, property)),
    "a cached property of a class": (returning(1, functools.cached_property), returning(2, functools.cached_property)),
    "a static method of a class": (returning(1, staticmethod), returning(2, staticmethod)),
    "a class method of a class": (returning(1, classmethod), returning(2, classmethod)),
    "a sparse tensor": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "a tensor in a queue": (deque([long(2500)]), deque([long(2501)])),
    "a tensor in a queue in a queue": (deque([deque([long(2500)])]), deque([deque([long(2501)])])),
    "an object in a queue": (deque([Pair(1, long(2500))]), deque([Pair(1, long(2501))])),
    "a queue with attributes": (Queue([1]), Queue([2])),
    "the longest length of a queue": (deque([long(0)], 1), deque([long(0)], 2)),
    "a tensor among the values of a mapping": ({1: long(2500)}.values(), {1: long(2501)}.values()),
    "a number in the middle of an array of objects": (objects(2500), objects(2501)),
    "a tensor in an array of objects": (np.array([Pair(1, long(0))]), np.array([Pair(1, long(1))])),
    "shapes of arrays of objects": (objects(0).reshape(2, -1), objects(0)),
    "a text in an array": (np.array(["cat", "dog"]), np.array(["cat", "dot"])),
    "a date in an array": (np.array(["2024-01-01"], "datetime64[D]"), np.array(["2024-01-02"], "datetime64[D]")),
    "orders of bytes": (np.array([1], "<i4"), np.array([1], ">i4")),
    "the mask of an array": (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
    "an array and its mask": (np.ma.array([1, 2]), np.array([1, 2])),
    "bytes in a view": (memoryview(b"a"), memoryview(b"b")),
    "arguments of a partial": (functools.partial(factor, 1), functools.partial(factor, 2)),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_different_values_have_different_hashes(pair):
    assert content.digest(pair[0]) != content.digest(pair[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (deque([1, 2.5, "a", (None, [b"x"])], 9), "deque([1, 2.5, 'a', (None, [b'x'])], maxlen=9)"),
        (deque([Path("a"), np.float64(0.5)]), "deque([PosixPath('a'), np.float64(0.5)])"),
        (np.array([1, "a", None], dtype=object), "array([1, 'a', None], dtype=object)"),
        ({1: "a"}.items(), "dict_items([(1, 'a')])"),
    ],
)
def test_collections_that_their_text_shows_keep_the_hash_of_the_text(value, text):
    """With which runs of earlier versions continue."""
    described = json.dumps([f"{type(value).__module__}.{type(value).__qualname__}", text])
    assert content.digest(value) == blake2b(described.encode(), digest_size=16).hexdigest()


class Alike:
    """An object that a set keeps in the order of insertion; the order of functions is that of their addresses."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __hash__(self) -> int:
        return 0


def doubled(x: float) -> float:
    return default(2.0)(x)


def tripled(x: float) -> float:
    return default(3.0)(x)


def test_functions_in_a_set_that_share_a_helper_are_hashed_in_no_order():
    """They are described as if the helper were known, and then the helper: else the first that is met would have it."""
    one, other = Alike(doubled), Alike(tripled)
    assert [*{one, other}] == [one, other] and [*{other, one}] == [other, one]
    assert content.digest({one, other}) == content.digest({other, one}) != content.digest({one})


def test_rows_are_hashed_in_pieces_as_a_whole(monkeypatch):
    """And from whatever pool they come."""
    rows = torch.arange(120.0).view(40, 3)
    index = torch.tensor([5, 3, 39, 0])
    whole = content.of_rows(rows, index)
    assert whole == content.of_rows(rows[index], torch.arange(4)) != content.of_rows(rows, index.flip(0))
    assert whole != content.of_rows(rows.to(torch.float64), index)
    assert whole != content.of_rows(rows.view(40, 3, 1), index)  # the same bytes in rows of another shape
    monkeypatch.setattr(content, "_PIECE", 24)  # two rows of 12 bytes
    assert content.of_rows(rows, index) == whole


def test_a_property_that_was_computed_meanwhile_does_not_count():
    """Else a run would not resume in a process that has looked at the property before."""
    fresh, used = Lazy(3), Lazy(3)
    assert used.double == 6 and "double" in vars(used)
    assert content.digest(used) == content.digest(fresh) != content.digest(Lazy(4))


def test_an_object_that_stands_in_two_places_counts_in_both():
    """It is not taken for a value that contains itself: equal lists have equal hashes, whoever shares an object."""
    one = Pair(1, long(3))
    assert content.digest([one, one]) == content.digest([Pair(1, long(3)), Pair(1, long(3))])


def test_a_global_that_an_inner_function_reads_counts(monkeypatch):
    before = content.digest(nested)
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 2.0)
    assert content.digest(nested) != before


def test_a_partial_is_as_foreign_as_its_function():
    """The module of a partial is functools, of the standard library, whatever it calls."""
    assert content.foreign(functools.partial(factor, 2.0)) and not content.foreign(functools.partial(functional.relu))


MODULE = "STRENGTH = {strength}\n\n\ndef helper(x):\n    return x * {helper}\n\n\nclass Mine:\n    def hook(self, x):\n"
CALL = "        return helper(x) * STRENGTH\n"


@pytest.mark.slow
def test_the_code_of_another_package_counts_and_that_of_this_one_does_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(name, **values):
        (tmp_path / f"{name}.py").write_text(MODULE.format(**values) + CALL)
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom {name} import Mine\n"
        code += "from cfl.core import content; print(content.digest(Mine), content.foreign(Mine))"
        return ran(code)

    first = hashed("plugin", strength=1, helper=2)
    assert first.endswith("True")
    assert hashed("plugin", strength=1, helper=2) == first
    assert hashed("plugin", strength=11, helper=2) != first and hashed("plugin", strength=1, helper=22) != first
    assert not content.foreign(nn.Linear) and not content.foreign(content.digest) and not content.foreign(np.mean)


@pytest.mark.parametrize(
    ("files", "call"),
    [
        ({"helps.py": "def factor(x):\n    return {} * x\n"}, "import helps\ndef hook(x):\n    return helps.factor(x)"),
        ({"helps.py": "FACTOR = {}\n"}, "import helps\ndef hook(x):\n    return helps.FACTOR * x"),
        (
            {"kit/__init__.py": "", "kit/deep.py": "def factor(x):\n    return {} * x\n"},
            "import kit.deep\ndef hook(x):\n    return kit.deep.factor(x)",
        ),
        (
            {
                "helps.py": "import more\ndef factor(x):\n    return more.twice(x)\n",
                "more.py": "def twice(x):\n    return {} * x\n",
            },
            "import helps as h\ndef hook(x):\n    return h.factor(x)",
        ),
    ],
    ids=["function", "value", "package", "modules"],
)
def test_code_that_is_called_as_an_attribute_of_a_module_counts(files, call, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(number):
        for name in ("helps", "more", "kit", "kit.deep"):
            sys.modules.pop(name, None)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.format(number))
        importlib.invalidate_caches()
        linecache.clearcache()
        namespace = {"__name__": "plugin"}
        with monkeypatch.context() as within:
            within.setattr(sys, "dont_write_bytecode", True)
            exec(call, namespace)
        return content.digest(namespace["hook"])

    assert hashed(1) == hashed(1) != hashed(22)  # of another length, as Python compares sizes of cached files


def test_what_an_installed_package_holds_does_not_count(monkeypatch):
    """Its modules and their values depend on what the process has imported and done, and an upgrade continues a run."""
    namespace = {"__name__": "plugin"}
    exec("import scipy.optimize\ndef hook(x):\n    return scipy.optimize.minimize(abs, x)", namespace)
    before = content.digest(namespace["hook"])
    monkeypatch.setattr(namespace["scipy"].optimize, "minimize", abs)
    assert content.digest(namespace["hook"]) == before


def test_a_function_whose_lines_are_no_longer_python_counts_by_its_code(tmp_path):
    """A script is edited while it runs: the lines at which a function stood may not even be Python any more."""

    def double(file):
        namespace = {"__name__": "script"}
        exec(compile("def double(x):\n    return 2 * x\n", file, "exec"), namespace)
        return namespace["double"]

    (tmp_path / "script.py").write_text("values = (\n    '''")
    assert content.digest(double(str(tmp_path / "script.py"))) == content.digest(double("<no file>"))


@pytest.mark.slow
def test_a_script_counts_by_what_its_classes_use(tmp_path):
    """The call that resumes a run stands in the same file."""

    def hashed(last, **values):
        text = MODULE.format(**values) + CALL + "from cfl.core import content\nprint(content.digest(Mine))\n" + last
        (tmp_path / "script.py").write_text(text)
        return ran(tmp_path / "script.py")

    first = hashed("resume = False\n", strength=1, helper=2)
    assert hashed("resume = True\n", strength=1, helper=2) == first
    assert len({first, hashed("", strength=11, helper=2), hashed("", strength=1, helper=22)}) == 3


def ran(code):
    """What a fresh process prints, whose sets have another order."""
    words = [str(code)] if isinstance(code, Path) else ["-c", code]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
