"""Importing torchvision beside a torch build that its compiled operators do not fit (for instance a CPU torch).

Then `torchvision._C` does not load, which torchvision tolerates everywhere but where it registers fake kernels of two
operators that nobody declared. Declaring their schemas lets data sets, transforms and models work; the operators
themselves still raise torchvision's own error.
"""

import sys
from importlib import import_module
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """The torchvision package; to be called before any import of a package that imports torchvision (Avalanche).

    Declares the missing operators on the one error that needs it, and nothing where torchvision loads as it is.
    Raises whatever else the import raises (ImportError where torchvision is not installed).
    """
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or "does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
    import torch

    for operator in _OPERATORS:
        torch.library.define(f"torchvision::{operator}", _SCHEMA)
    return import_module("torchvision")
