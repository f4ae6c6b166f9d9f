"""Makes torchvision importable beside a torch that its operators do not fit, and orders the tests."""

from cfl.streams.torchvision_fix import import_torchvision

import_torchvision()


def pytest_collection_modifyitems(items):
    """Begin with the tests that mostly wait, so that none of them is left when the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
