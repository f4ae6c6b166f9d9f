"""Makes torchvision importable beside a torch that its operators do not fit."""

from cfl.streams.torchvision_fix import import_torchvision

import_torchvision()
