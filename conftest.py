"""Imports `cfl` before the tests import torchvision, which may not fit torch: see `cfl.core.packages`."""

import cfl  # noqa: F401
