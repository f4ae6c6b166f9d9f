"""AC-GANs that the clients of a federation train, as in FedCIL: options, networks, games, and a client's state.

State of a client: the weights of its "generator", and (classes of the stream,) bool the classes "seen"; both at the end
of its last task, as "old" and "past"; its last "task"; Adam's "moments" and "steps", if it keeps them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cfl.contract import Batch, Client, Pixels, Server
from cfl.core import ConfigError, Tree, optim, option, options, rng, tree
from cfl.core.options import given
from cfl.methods.generative import acgan
from cfl.methods.generative.acgan import ACGAN, Game
from cfl.methods.generative.generator import COLUMNS, by_class, stored
from cfl.models import Model

PRESETS: dict[str, dict[str, Any]] = {
    "paper": dict(alpha=1.0, beta=1.0, gamma=1.0)
    | dict(iterations=20, consolidation=20, width=16, share="later", keep_optimizers=False),
    "official": dict(alpha=0.0, beta=0.0, gamma=0.0)
    | dict(iterations=400, consolidation=100, width=64, share="always", keep_optimizers=True),
}
"""Values of the options that are None, those of the strategy among them."""


@dataclass(frozen=True)
class FederatedGAN:
    """Options of the AC-GANs, and what clients and server make with them."""

    preset: str = option("paper", "values of options that are none", source="ours", choices=tuple(PRESETS))
    iterations: int | None = option(None, "AC-GAN steps of a client in a round; paper: 20, official: 400", at_least=1)
    batch: int = option(32, "samples of a batch", source="paper: 32", at_least=2)
    lr: float = option(1e-4, "learning rate of Adam", source="code; CIFAR-10 2e-4", above=0.0, steep="local")
    beta1: float = option(0.5, "Adam's decay of the mean", source="code", at_least=0.0, at_most=0.999)
    beta2: float = option(
        0.99, "Adam's decay of the square", source="code; CIFAR-10 0.999", at_least=0.0, at_most=0.9999
    )
    weight_decay: float = option(1e-5, "Adam's weight decay", source="code; CIFAR-10 0", at_least=0.0)
    latent: int = option(110, "entries of z, more than all classes", source="code; EMNIST 126", at_least=2)
    width: int | None = option(None, "filters of the generator; paper: 16, official: 64", at_least=1)

    def __post_init__(self) -> None:
        options.fill(self, PRESETS[self.preset])

    def init_server(self, params: Tree, model: Model) -> Server:
        """The first weights of "critic" and "generator". Raises ConfigError where z has no room for the classes."""
        if self.latent <= (classes := sum(model.sizes)):
            raise ConfigError(f"strategy.latent={self.latent} has no room for {classes} classes and noise; raise it")
        critic = acgan.initial_critic(model, rng.key(model.seed, "fedcil", "critic"))
        return {"critic": critic, "generator": self.gan(model, 0, ()).initial}

    def gan(self, model: Model, task: int, pixels_of: Sequence[Pixels | None]) -> ACGAN:
        """The networks of a task; the generator has its first weights."""
        key = rng.key(model.seed, "fedcil", "generator")
        network = acgan.generator_network(model.input_shape, self.latent, given(self.width), key)
        return ACGAN(model, network.to(acgan.device_of(model)), self.latent, task, pixels_of)

    def game(
        self, gan: ACGAN, leaves: Tree, classes: Tensor, frozen: frozenset[str], source: torch.Generator, state: Tree
    ) -> Game:
        """A game before its next step, with copies of the leaves. Of all heads, it trains those of these classes (k,).

        frozen: parameters that stay as they are; state: a client's, maybe with Adam's moments; empty at the server.
        """
        heads = gan.tasks_and_labels(classes)[0].unique().tolist()  # others have no samples, and would only decay
        names = [name for name in gan.model.trainable(gan.task, heads) if name not in frozen]
        adam = optim.adam(self.beta1, self.beta2, weight_decay=self.weight_decay)
        moments, steps = tree.clone(tree.part(state, "moments")), int(state.get("steps", 0))
        trained = [*names, *tree.under("critic", tree.part(leaves, "critic"))]
        return Game(gan, tree.clone(leaves), trained, adam, self.lr, source, moments, steps)

    def batches(self, client: Client, source: torch.Generator, key: int) -> Iterator[Batch]:
        """A client's random batches of a round; each is drawn when it is due, in turn with other draws of `source`."""
        orders = (torch.randperm(len(client), generator=source) for _ in range(given(self.iterations)))
        return client.gathered((order[: self.batch].to(client.device) for order in orders), key)

    def images(self, server: Server, model: Model) -> Tensor | None:
        """Images of the global generator (classes so far, 8, channels, height, width) uint8, a class a row.

        None for inputs that are no 8-bit images, and until the server has "shown": the number of "classes" so far.
        """
        if "shown" not in server:
            return None
        source, scale = rng.generator(rng.key(model.seed, "fedcil", "images")), Pixels(None, None)
        count = int(server["shown"]["classes"])
        classes = torch.arange(count, device=acgan.device_of(model)).repeat_interleave(COLUMNS)
        drawn = self.gan(model, 0, (scale,)).fakes(server["generator"], classes, source)
        return by_class(stored(drawn.x, scale), classes)


def joined(params: Tree, critic: Tree, generator: Tree) -> Tree:
    """One tree of all weights: those of the model under their names, "critic/..." and "generator/..."."""
    return {**params, **tree.under("critic", critic), **tree.under("generator", generator)}


def begun(state: Tree, gan: ACGAN) -> Tree:
    """A client's state as it enters a round: the first of a task freezes generator and classes of the last."""
    if not state:
        return {"past": torch.zeros(sum(gan.model.sizes), dtype=torch.bool, device=acgan.device_of(gan.model))}
    if int(state["task"]) == gan.task:
        return state
    generator = tree.part(state, "generator")
    return {"past": state["seen"], **tree.under("generator", generator), **tree.under("old", generator)}


def ended(state: Tree, game: Game, seen: Tensor, keep: bool | None) -> Tree:
    """A client's state after a round. state: of `begun`; seen: (classes of the stream,) bool; keep: Adam's moments."""
    new = {"task": torch.tensor(game.gan.task), "seen": seen, "past": state["past"]}
    new |= {**tree.under("generator", game.generator), **tree.under("old", tree.part(state, "old"))}
    if keep:
        new |= {**tree.under("moments", game.moments), "steps": torch.tensor(game.steps)}
    return new
