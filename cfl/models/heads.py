"""Check that the outputs of a module fit a stream, and that a head for each task can replace its last Linear layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.core import ConfigError, rng
from cfl.models.layers import owners
from cfl.models.passes import draws


def check_outputs(
    module: nn.Module,
    classifier: str | None,
    outputs: int,
    classes: Sequence[int],
    multi_head: bool,
    input_shape: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Raise ConfigError for a module whose outputs, or last Linear layer `classifier`, do not fit a stream's heads.

    outputs: of the module; classes: of each head; dtype: as in `draws`.
    """
    if not multi_head:
        if outputs != classes[0]:
            raise ConfigError(f"the model has {outputs} outputs, but the stream has {classes[0]} classes")
        return
    if classifier is None:
        raise ConfigError(
            "the stream has a head for each task, but the model's last layer is not nn.Linear: end the model in a "
            "Linear layer, or use a single-head stream"
        )
    head = module.get_submodule(classifier)
    if {name for name, _ in head.named_parameters()} - {"weight", "bias"}:
        raise ConfigError(
            f"the stream has a head for each task, and the model's last Linear layer, '{classifier}', has a "
            "parametrization such as weight_norm; remove it: the heads are plain Linear layers"
        )
    own, uses = {id(leaf) for leaf in head.parameters()}, owners(module)
    if any(uses[leaf] > 1 for leaf in own):
        shared = [name for name, leaf in module.named_parameters(remove_duplicate=False) if id(leaf) in own]
        raise ConfigError(
            f"the stream has a head for each task, but the model's last Linear layer, '{classifier}', shares "
            f"parameters with another layer ({', '.join(shared)}); give it its own"
        )
    place = f"the stream has a head for each task, in place of the model's last Linear layer, '{classifier}'"
    if outputs != head.out_features:
        raise ConfigError(
            f"{place}, but the model returns {outputs} outputs where this layer has {head.out_features}; end the "
            "model in it"
        )
    if _bypassed(module, classifier, draws(3, input_shape, device, dtype, module)):
        raise ConfigError(
            f"{place}, but the outputs depend on the samples without this layer, too; call it last, and return what "
            "it gives"
        )


def _bypassed(module: nn.Module, classifier: str, x: Tensor) -> bool:
    """Whether the outputs depend on the samples (batch, ...) even if all parameters of the head are zero."""
    head = module.get_submodule(classifier)
    zeros = {
        f"{classifier}.{name}" if classifier else name: torch.zeros_like(leaf) for name, leaf in head.named_parameters()
    }
    was_training, outputs = module.training, []
    module.eval()
    try:
        for samples in (x, x.flip(0)):
            with rng.fork(0, x.device), torch.no_grad():  # noise is the same for both
                outputs.append(functional_call(module, zeros, (samples,)))
    except Exception:  # whatever a user's forward raises on three samples that are not zeros
        return False
    finally:
        module.train(was_training)
    return not torch.allclose(outputs[0], outputs[1], equal_nan=True)
