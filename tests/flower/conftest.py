"""The tests of this folder need Flower, an extra of the package."""

import pytest


def pytest_collect_file():
    """Skip the folder without Flower, before a test file imports it."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
