"""Packages that `cfl` runs without: the extras that install them, and torchvision beside a CPU build of torch."""

from importlib.util import find_spec
from pathlib import Path

import torch

from cfl.core.errors import ConfigError

EXTRAS = {
    "avalanche": ("avalanche",),
    "flower": ("flwr", "cryptography", "Crypto"),
    "medmnist": ("medmnist",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "onnx": ("onnx", "onnxscript"),
    "privacy": ("opacus", "cryptography", "Crypto"),
    "tensorboard": ("tensorboard",),
    "text": ("tokenizers",),
    "vision": ("torchvision",),
    "wandb": ("wandb",),
}
"""Extra to the modules that it installs, as in `pip install 'cfl[privacy]'`."""

_OPERATORS = ("nms", "qnms")  # those of which torchvision registers a fake without a look whether they exist
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def need(extra: str, what: str) -> None:
    """Raise ConfigError unless all modules of an extra are installed. what: the option, command or file in need."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install it with: pip install 'cfl[{extra}]'")


def declare_operators() -> None:
    """Make torchvision importable beside a torch without CUDA, if torchvision was built for CUDA, as on PyPI.

    Its operators cannot load then. torchvision tolerates this, except that it registers fakes of two operators that
    are not declared, and fails with "operator torchvision::nms does not exist". Their schemas are declared here; data
    sets, transforms and models work, and the operators raise torchvision's own error. Reads the build from
    torchvision's file of its version, because an import takes a second. Does nothing for builds that match.
    """
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, _OPERATORS[0]):
        return
    spec = find_spec("torchvision")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file and file.is_file() and "+cu" in file.read_text(encoding="utf-8"):
        for name in _OPERATORS:
            torch.library.define(f"torchvision::{name}", _SCHEMA)
