"""Built-in models by name; `cfl.run` also takes any other `nn.Module`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from cfl.core import ConfigError, plugins, rng, unknown
from cfl.core.errors import MOST_NAMES, few, reason
from cfl.core.options import checked
from cfl.models import pretrained
from cfl.models.alexnet import alexnet_cl
from cfl.models.bert import bert_tiny
from cfl.models.cnn import cnn
from cfl.models.handle import Model
from cfl.models.layers import Layer
from cfl.models.mlp import mlp
from cfl.models.resnet import resnet8, resnet18, resnet18_cifar
from cfl.models.vgg import vgg11
from cfl.models.vit import vit_small

__all__ = ["Layer", "Model", "build", "filled"]

_OF_EVERY_MODEL = ("name", "weights", "norm_stats", "adapter", "adapter_rank", "adapter_alpha", "adapter_targets")
_FOT = "FOT (Bakman et al., ICLR 2024)"
plugins.models.register("mlp", source=f"{_FOT}, Permuted MNIST")(mlp)
plugins.models.register("alexnet_cl", source=f"{_FOT}, Split CIFAR-100")(alexnet_cl)
plugins.models.register("resnet18", source=f"{_FOT}, 5-Datasets and Mini-ImageNet; He et al., CVPR 2016")(resnet18)
plugins.models.register("cnn", source="McMahan et al., AISTATS 2017; FedSOL (Lee et al., CVPR 2024)")(cnn)
plugins.models.register("vgg11", source="Simonyan & Zisserman, ICLR 2015, configuration A; FedSOL, Table 3")(vgg11)
plugins.models.register("resnet8", source="FedProj (2025); He et al., CVPR 2016")(resnet8)
plugins.models.register("resnet18_cifar", source="He et al., CVPR 2016, as usual for CIFAR")(resnet18_cifar)
plugins.models.register("vit_small", source="Dosovitskiy et al., ICLR 2021")(vit_small)
plugins.models.register("bert_tiny", source="Devlin et al., NAACL 2019; Turc et al., 2019")(bert_tiny)

_SHAPES = ((3, 32, 32), (2, 8))  # of inputs to try a model with: a colour image, and token ids with their mask


def filled(name: str, options: Mapping[str, Any], weights: str | None = None) -> dict[str, Any]:
    """Complete the options of a model: by the sizes of the folder `weights`, then with its builder's defaults.

    The folder is read only if an option is missing. Raises ConfigError for an unknown option, for a value that is not
    of the type in the builder's annotation, and for a folder that holds no weights of this model.
    """
    known = builder_options(name)
    for option in options:
        if option not in known:
            raise _unknown(name, option, list(known))
    defaults = {name: known[name].default for name in known if known[name].default is not Parameter.empty}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    sizes = pretrained.sizes(weights, name) if weights is not None and {*known} - {*options} else {}
    given = {
        option: value if repr(value) == repr(plain.get(option, ...)) else _checked(option, value, known[option])
        for option, value in options.items()
    }
    return plain | sizes | given


def builder_options(name: str) -> dict[str, Parameter]:
    """The options of a model: the parameters of its builder that follow input shape and number of outputs."""
    builder = plugins.models.get(name)
    try:
        found = signature(builder, eval_str=True)
    except (NameError, TypeError, SyntaxError, AttributeError):  # annotations that cannot be read, which stay texts
        found = signature(builder)
    return dict(list(found.parameters.items())[2:])


def _has(name: str, option: str) -> bool:
    """Whether a model has an option; False for one that cannot be loaded, or has no signature."""
    with suppress(ConfigError, ValueError):
        return option in builder_options(name)
    return False


def _checked(option: str, value: Any, parameter: Parameter) -> Any:
    """Return a value of the annotated type as it is, and None for the word none; all values without an annotation."""
    hint = parameter.annotation
    if hint is Parameter.empty or isinstance(hint, str):
        return value
    return None if checked(f"model.{option}", value, hint) is None else value


def _unknown(name: str, option: str, known: Sequence[str]) -> ConfigError:
    """Make the error for an option that a model lacks; it names the nearest option, or the models that have it."""
    others = [f"'{other}'" for other in plugins.models.names() if _has(other, option)]
    every = [*_OF_EVERY_MODEL, *known]
    if not others and get_close_matches(option.lower(), every, n=1, cutoff=0.7):
        return unknown("option", f"model.{option}", [f"model.{each}" for each in every])
    text = f"model '{name}' has no option '{option}'; it has {', '.join(known) or 'none'}"
    if not others:
        return ConfigError(text)
    return ConfigError(f"{text}; {few(others, MOST_NAMES)} {'has' if len(others) == 1 else 'have'} it")


def build(name: str, input_shape: Sequence[int], outputs: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a fresh module; raises ConfigError for an unknown name or option, or a shape the model cannot take."""
    options = filled(name, options)
    try:
        module = plugins.models.get(name)(input_shape, outputs, **options)
    except Exception as error:  # whatever the builder of another package raises
        shape = tuple(input_shape)
        raise ConfigError(f"model '{name}' cannot be built for inputs of shape {shape}: {reason(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the builder of model '{name}' must return an nn.Module, not {module!r}")
    return module


def sample(name: str, options: Mapping[str, Any]) -> nn.Module | None:
    """Build a module on the meta device, to inspect its layers; None if it takes neither colour images nor texts."""
    with torch.device("meta"):
        return next((module for module, _ in _tried(name, options)), None)


def draws(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether a model draws random numbers in training, such as dropout; True if it cannot be tried."""
    try:
        with rng.fork(0), torch.no_grad():
            module, shape = next(_tried(name, options))
            before = torch.get_rng_state()
            module.train()(torch.zeros(2, *shape))
            return not before.equal(torch.get_rng_state())
    except (StopIteration, TypeError, ValueError, RuntimeError):  # such as a model of other inputs
        return True


def _tried(name: str, options: Mapping[str, Any]) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """The module for each of `_SHAPES` that it can be built for, with this shape."""
    for shape in _SHAPES:
        with suppress(ConfigError):  # the run builds the model for its own input shape and reports the error
            yield build(name, shape, 2, options), shape
