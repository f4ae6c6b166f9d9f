"""Policy for a model's layers after the first task: project, freeze or fine-tune each one (FOT, Tables 6 and 14)."""

import math
from dataclasses import dataclass

from cfl.core import option
from cfl.methods.subspace.projection import covered, width
from cfl.models import Layer, Model

_HALF = ("fot", "freeze", "finetune")


@dataclass(frozen=True)
class LayerPolicy:
    """Options for layers, biases and normalisation, and the layers and parameters of a model that they select."""

    bias: str = option("augment", "biases", source="code: free", choices=("augment", "free", "freeze"))
    norm_affine: str = option("freeze", "norm weights and biases", source="code: free", choices=("freeze", "free"))
    freeze_first: bool = option(
        False, "freeze the first layer after the first task; never sketch its inputs", source="Table 6"
    )
    first_half: str = option("fot", "policy for the first half of the layers", source="Table 14", choices=_HALF)
    second_half: str = option("fot", "policy for the second half of the layers", source="Table 14", choices=_HALF)

    def projected(self, model: Model) -> list[Layer]:
        """Layers whose updates are projected."""
        return [layer for layer in model.layers if self._policy(layer, model) == "fot"]

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        """Names of the parameters that do not change in a task; in the first one all change."""
        if task == 0:
            return frozenset()
        layers = [layer for layer in model.layers if self._policy(layer, model) == "freeze"]
        names = {name for layer in layers for name in (layer.weight, layer.bias) if name}
        names |= {layer.bias for layer in self.projected(model) if layer.bias and self.bias == "freeze"}
        by_path = list({layer.path: layer for layer in model.layers}.values())  # one entry per grouped convolution
        for name, after in model.norms.items():  # a norm follows the policy of the layer before it
            policy = self._policy(by_path[max(after - 1, 0)], model) if by_path else ""
            if policy == "freeze" or self.norm_affine == "freeze" and policy != "finetune":
                names.add(name)
        return model.old_head(task) | names

    def notes(self, model: Model) -> list[str]:
        """Lines for the user: projected, frozen and unprotected parameters of the model."""
        return covered(model, self.projected(model), self.frozen(1, model), self.with_bias)

    @property
    def with_bias(self) -> bool:
        """True if biases are projected along with the weights, as the weight of a constant input."""
        return self.bias == "augment"

    def width(self, layer: Layer) -> int:
        """Length d of the layer's input vectors."""
        return width(layer, self.with_bias)

    def _policy(self, layer: Layer, model: Model) -> str:
        """The layer's policy after the first task: "fot", "freeze" or "finetune"."""
        if self.freeze_first and layer.path == model.stem:
            return "freeze"
        paths = list(dict.fromkeys(each.path for each in model.layers))
        return self.first_half if paths.index(layer.path) < math.ceil(len(paths) / 2) else self.second_half
