"""Imports what building a stream needs, which takes seconds: a fork server does so once for all its processes."""

from cfl.streams.torchvision_fix import import_torchvision

import_torchvision()

import avalanche.benchmarks  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
