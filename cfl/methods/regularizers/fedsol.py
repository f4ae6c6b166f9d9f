"""FedSOL (Lee et al., CVPR 2024): the gradient of the local loss at weights perturbed to raise a proximal loss.

A step (Algorithm 1): g_p is the gradient of a proximal loss at the weights w, and e = rho Lambda g_p / |g_p| (eq. 6).
The optimiser steps from w with the gradient of the local loss at w + e. Lambda scales each weight by its distance from
the global model (eq. 7): the code divides |w - w_global| by its norm along the output axis, the paper by its norm over
the whole layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, GradFn, LocalRegularizer
from cfl.contract.losses import divergence, masked_mean
from cfl.core import ConfigError, Tree, option, plugins, tree
from cfl.methods.regularizers.kl import global_logits
from cfl.models import Model

_SMALL = 1e-12
ROUNDING = 1e-6
"""A shorter proximal gradient is rounding error: at the first local step the client's model is the global model."""


def proximal_gradient(kind: str, temperature: float, params: Tree, names: frozenset[str], ctx: Ctx) -> Tree:
    """Gradient of a proximal loss by the leaves in `names`.

    kind: "kl" for KL(global || local), "l2" for |w - w_global|^2 / 2; temperature: of the divergence.
    """
    at = {name: leaf for name, leaf in params.items() if name in names}
    if kind == "l2":
        return {name: leaf - ctx.shared["params"][name] for name, leaf in at.items()}
    targets = global_logits(ctx)

    def loss(at: Tree) -> Tensor:
        logits = ctx.forward({**params, **at}, ctx.batch)
        return masked_mean(divergence(targets, logits, temperature), ctx.batch.mask)

    return torch.func.grad(loss)(at)


@plugins.local.register("fedsol")
@dataclass(frozen=True)
class FedSOL(LocalRegularizer):
    """Stabilised orthogonal learning: the local gradient where a proximal loss is raised (Lee et al., 2024)."""

    source: ClassVar[str] = "Lee et al., CVPR 2024, Algorithm 1, eq. 5 to 7"

    rho: float = option(1.5, "length of the perturbation", source="Table 5", at_least=0.0, steep="local")
    scope: str = option("head", "part of the model to perturb", source="section 4.3", choices=("head", "body", "full"))
    scale: str = option(
        "output_axis",
        "scale of a weight in the perturbation: |w - w_global| over its norm across outputs (code), over that of the "
        "layer (paper), or none (fixed perturbation)",
        source="eq. 7",
        choices=("output_axis", "layer", "none"),
    )
    proximal: str = option("kl", "proximal loss: kl, l2, or a regularizer whose terms it borrows", source="Table 4")
    temperature: float = option(3.0, "temperature of the divergence", source="official code", above=0.0)
    first_step_guard: bool = option(True, "skip perturbations by gradients of rounding error", source="ours")

    @property
    def borrows(self) -> str | None:
        return None if self.proximal in ("kl", "l2") else self.proximal

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if self.borrows and self.scope == "head":
            return f"the terms of '{self.borrows}' cover all layers (Table 4); set regularizer.fedsol.scope=full"
        return None

    def init_client(self, params: Tree, model: Model) -> Tree:
        if self.scope != "full" and model.classifier is None:
            raise ConfigError(
                "'fedsol' finds no head: the model does not end in nn.Linear; set regularizer.fedsol.scope=full"
            )
        heads = {name for task in range(model.tasks) for name in model.head(task)}
        if self.scope == "body" and all(name in heads for name in params if model.is_parameter(name)):
            raise ConfigError("'fedsol' finds no body: the model is all head; set regularizer.fedsol.scope=full")
        return {}

    def around(self, grad_fn: GradFn) -> GradFn:
        def perturbed(params: Tree, ctx: Ctx) -> Tree:
            names = self.perturbed_names(params, ctx)
            if not names:  # the strategy has frozen the whole scope
                return grad_fn(params, ctx)
            if ctx.correction is not None:
                gradient = {name: leaf for name, leaf in ctx.correction(params).items() if name in names}
            else:
                gradient = proximal_gradient(self.proximal, self.temperature, params, names, ctx)
            shift = self.perturbation(gradient, params, ctx.shared["params"], ctx.model.growing)
            return grad_fn({**params, **{name: params[name] + leaf for name, leaf in shift.items()}}, ctx)

        return perturbed

    def perturbed_names(self, params: Tree, ctx: Ctx) -> frozenset[str]:
        """Names of the trainable leaves in the scope."""
        if self.scope == "head":
            return frozenset(ctx.model.head(ctx.task)) & frozenset(params)
        tasks = range(ctx.model.tasks) if self.scope == "body" else ()  # heads of earlier tasks may train, too
        return frozenset(params) - {name for task in tasks for name in ctx.model.head(task)}

    def perturbation(self, gradient: Tree, params: Tree, center: Tree, growing: bool = False) -> Tree:
        """rho Lambda g_p / |g_p| (eq. 6). gradient: g_p; center: the global model; growing: whether the head grows."""
        norm = tree.dot(gradient, gradient).sqrt()
        length = self.rho / (norm + _SMALL)
        if self.first_step_guard:
            length = torch.where(norm < ROUNDING, 0.0, length)
        moved = {name: params[name] - center[name] for name in gradient}
        layers = joined(moved) if growing else moved
        return {name: length * self.weight_scale(moved[name], layers[name]) * leaf for name, leaf in gradient.items()}

    def weight_scale(self, moved: Tensor, layer: Tensor) -> Tensor | float:
        """Lambda (eq. 7) of a leaf; 0 where no weight moved. moved, layer: w - w_global in it and in its layer."""
        if self.scale == "none":
            return 1.0
        axes = 0 if self.scale == "output_axis" else tuple(range(layer.dim()))
        return moved.abs() / torch.linalg.vector_norm(layer, dim=axes, keepdim=True).clamp(min=_SMALL)


def joined(leaves: Tree) -> Tree:
    """For each leaf all parts of the layer that it belongs to, in the order of the leaves: parts of a growing head."""
    layers: dict[str, list[Tensor]] = {}
    for name, leaf in leaves.items():
        layers.setdefault(name.partition("@")[0], []).append(leaf)
    whole = {layer: torch.cat(parts) for layer, parts in layers.items()}
    return {name: whole[name.partition("@")[0]] for name in leaves}
