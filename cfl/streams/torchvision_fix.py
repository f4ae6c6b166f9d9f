"""Import torchvision beside a torch build that does not match its compiled operators (for instance a CPU torch).

`torchvision._C` does not load then. torchvision tolerates this, except that it registers fake kernels of two operators
that are not declared, and fails. Declaring their schemas makes data sets, transforms and models work; the operators
themselves still raise torchvision's own error.
"""

import sys
from importlib import import_module
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """Import torchvision; call this before the import of a package that imports torchvision, such as Avalanche.

    Declares the missing operators only if the import fails for lack of them. Other errors of the import are raised
    (ImportError if torchvision is not installed).
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
