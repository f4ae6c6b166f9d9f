"""The scripts behind the site, which are no package, as modules."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    """Imports a script, given by its path in the repository."""

    def load(path):
        spec = spec_from_file_location(f"docs_{Path(path).stem}", ROOT / path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
