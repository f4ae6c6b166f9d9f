"""FedCIL: an AC-GAN at every client, whose discriminator is the classifier (Qi et al., ICLR 2023).

`cfl.methods.generative.acgan` has the networks and the losses. In each iteration a client takes a batch (x, y) of the
task and, in later tasks, as many images of its earlier classes from its own generator of the last task (replay). From
the second round of a task on, the global generator G_s adds terms to L_D (consistency enforcement):

    alpha KL(D_c(G_s(z | y)) || D_c(x)) + beta KL(D_c(G_s(z | c)) || D_c(G(z' | c))) + gamma NLL(D_c(G_s(z | c)), c)

with c uniform over all classes so far. The server averages discriminators and generators by samples. Then it trains
the means on images that the clients' generators draw, balanced over the classes (model consolidation).

The released code multiplies the three terms by 0: `preset=official` has its values on MNIST. By default the terms act,
and the steps are as many as a CPU can make.

Deviations, as the paper has a network of its own and one head for all classes:
- The discriminator is the run's own network with the heads of the scenario, and a linear critic.
- With share=later, as FOT counts bytes (Table 13), no generator travels in the first task. Clients train theirs alone,
  and go on with them in the first round of the second task, since that of the server is not trained yet.
- The targets of the KL terms are constants. Adam starts anew in each round unless `keep_optimizers` is set.
- The server draws earlier classes, too, from the generators just uploaded. Those of the last task stay on the clients.
- Generators normalise by the statistics of the batch. Running statistics of the model come from real and replayed
  batches and are averaged like weights; they do not change in the consolidation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Client, Gathers, Phase, Pixels, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import ConfigError, Tree, optim, option, options, plugins, rng, tree
from cfl.core.options import given
from cfl.methods.generative import acgan
from cfl.methods.generative.acgan import ACGAN, Game, Labelled, choose
from cfl.methods.generative.consolidation import groups_of, pool
from cfl.models import Model

COLUMNS = 8  # images of a class in `images`
PRESETS: dict[str, dict[str, Any]] = {
    "paper": dict(alpha=1.0, beta=1.0, gamma=1.0)
    | dict(iterations=20, consolidation=20, width=16, share="later", keep_optimizers=False),
    "official": dict(alpha=0.0, beta=0.0, gamma=0.0)
    | dict(iterations=400, consolidation=100, width=64, share="always", keep_optimizers=True),
}
"""Values of the options that are None."""


@plugins.strategies.register("fedcil")
@dataclass(frozen=True)
class FedCIL(Strategy):
    """AC-GAN at each client, replay of generated images, and consolidation at the server (Qi et al., 2023)."""

    source: ClassVar[str] = "Qi et al., ICLR 2023; FOT, section 5 (task-incremental)"
    sends: ClassVar[str] = (
        "its model, its critic and its number of samples, every round; from the second task, or from the first with "
        "strategy.share=always, also its generator and the list of classes that it has seen"
    )
    gathers: ClassVar[Gathers] = "stack"
    task_incremental: ClassVar[str] = "replays generated images of earlier tasks through their heads, which train, too"
    class_incremental: ClassVar[str] = "replays generated images of earlier classes, and the whole head trains"

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
    alpha: float | None = option(None, "weight of KL(G_s, data); paper: 1, official: 0", at_least=0.0)
    beta: float | None = option(None, "weight of KL(G_s, G); paper: 1, official: 0", at_least=0.0)
    gamma: float | None = option(None, "weight of NLL(G_s); paper: 1, official: 0", at_least=0.0)
    consolidation: int | None = option(None, "AC-GAN steps of the server in a round; paper: 20, official: 100",
                                       at_least=0)  # fmt: skip
    weights: str = option("samples", "weights of the clients", source="paper", choices=("samples", "uniform"))
    share: str | None = option(None, "when generators travel; paper: later, as FOT counts; official: always",
                               choices=("later", "always"))  # fmt: skip
    keep_optimizers: bool | None = option(None, "keep Adam's moments within a task, twice the model; official: true")

    def __post_init__(self) -> None:
        options.fill(self, PRESETS[self.preset])

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["regularizers"]:
            return f"its clients make no local steps in which {', '.join(run['regularizers'])} could act; leave it out"
        if run["secagg"] != "none":
            return f"its server draws images from each client's generator, which secagg={run['secagg']} hides"
        if run["class_loss"] != "seen":
            return "its images are of all classes seen, and so is its loss; set class_loss=seen"
        return None

    def notes(self, model: Model) -> list[str]:
        return ["clients train with strategy.lr, batch, iterations and weights; local.* and agg.weights have no effect"]

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return [Phase("gan", rounds, train=False, work=True)]

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))  # replayed samples go through the heads of their tasks

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset()

    def init_server(self, params: Tree, model: Model) -> Server:
        if self.latent <= (classes := sum(model.sizes)):
            raise ConfigError(f"strategy.latent={self.latent} has no room for {classes} classes and noise; raise it")
        critic = acgan.initial_critic(model, rng.key(model.seed, "fedcil", "critic"))
        return {"critic": critic, "generator": self._initial(self._gan(model, 0, None))}

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        names = ("critic", "generator") if self._travels(info.task) else ("critic",)
        return {**super().broadcast(server, info), **{name: server[name] for name in names}}

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Train the client's AC-GAN. Upload it with the number of samples and, if generators travel, the classes.

        State: the weights of the "generator", and (classes of the stream,) bool the classes "seen"; both at the end of
        the client's last task, as "old" and "past"; its last "task"; Adam's "moments" and "steps", if it keeps them.
        """
        model, key, source = info.model, info.key, rng.generator(rng.key(info.key, "gan", client.id))
        gan, travels, state = self._gan(model, info.task, info.pixels), self._travels(info.task), _begun(state, info)
        past = state["past"].nonzero().flatten()
        seen = state["past"].index_fill(0, gan.classes_of(client.targets.unique()), True)
        generator = self._initial(gan)
        taught = travels and not tree.equal(shared["generator"], generator)  # else the server's is not trained yet
        generator = shared["generator"] if taught else tree.part(state, "generator") or generator
        leaves = {**params, **tree.under("critic", shared["critic"]), **tree.under("generator", generator)}
        game = self._game(gan, leaves, seen.nonzero().flatten(), info, source, state)
        whole = (torch.randperm(len(client), generator=source) for _ in range(given(self.iterations)))
        positions = (order[: self.batch].to(client.device) for order in whole)
        with acgan.training(model, rng.key(key, "dropout", client.id)):
            for batch in client.gathered(positions, rng.key(key, "augment", client.id)):
                reals = [Labelled(batch.x, gan.classes_of(batch.y))]
                if len(past):  # section 2.2: as many images of the client's earlier classes
                    reals.append(gan.fakes(tree.part(state, "old"), choose(past, len(batch.y), source), source))
                extra = None
                if taught and info.round:  # from the second round of a task
                    strengths = (given(self.alpha), given(self.beta), given(self.gamma))
                    extra = game.consistency(shared["generator"], reals[0], _known(info), strengths)
                game.step(reals, seen.nonzero().flatten(), extra)
        kept = {"task": torch.tensor(info.task), "seen": seen, "past": state["past"]}
        kept |= {**tree.under("generator", game.generator), **tree.under("old", tree.part(state, "old"))}
        if self.keep_optimizers:
            kept |= {**tree.under("moments", game.moments), "steps": torch.tensor(game.steps)}
        up = {name: leaf for name, leaf in game.leaves.items() if travels or not name.startswith("generator/")}
        up["samples"] = torch.tensor(float(len(client)), device=client.device)
        return {**up, **({"labels": seen.float()} if travels else {})}, kept

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """Step to the mean of the clients' AC-GANs, then train it on what their generators draw (section 2.3)."""
        uploads, travels = mean["work"], self._travels(info.task)
        whole = {
            **server["params"],
            **tree.under("critic", server["critic"]),
            **tree.under("generator", server["generator"]),
        }
        samples = uploads["samples"] if self.weights == "samples" else torch.ones_like(uploads["samples"])
        steps = {name: _mean(whole[name] - leaf, samples) for name, leaf in uploads.items() if name in whole}
        whole = super().absorb({"params": whole}, {"strategy": steps}, info, lr)["params"]
        if travels and self.consolidation:
            whole |= self._consolidated(tree.select(whole, steps), uploads, info)
        new = {"params": tree.select(whole, server["params"]), "critic": tree.part(whole, "critic")}
        new["generator"] = tree.part(whole, "generator")
        if travels and info.pixels:
            new["shown"] = {"classes": torch.tensor(len(_known(info)))}
        return {**server, **new}

    def _consolidated(self, leaves: Tree, uploads: Tree, info: RoundInfo) -> Tree:
        """The AC-GAN after training on images of the clients' generators, balanced over the classes."""
        gan, source = self._gan(info.model, info.task, info.pixels), rng.generator(rng.key(info.key, "consolidate"))
        game, known = self._game(gan, leaves, _known(info), info, source, {}), _known(info)
        groups = groups_of(uploads, info.model.classes_of(info.task).start)
        with acgan.training(info.model, rng.key(info.key, "dropout")):
            for _ in range(given(self.consolidation)):
                reals = [pool(gan, group, self.batch, source) for group in groups]
                game.step(reals, known, keep=False)
        return game.leaves

    def images(self, server: Server, model: Model) -> Tensor | None:
        """Images of the global generator (classes so far, 8, channels, height, width) uint8, a class a row.

        None for inputs that are no 8-bit images, and before the server has a trained generator.
        """
        if "shown" not in server or len(model.input_shape) != 3:
            return None
        count = int(server["shown"]["classes"])
        classes = torch.arange(count, device=_device(model)).repeat_interleave(COLUMNS)
        gan = self._gan(model, 0, Pixels(None, None))
        with torch.no_grad():
            x = gan.draw(server["generator"], classes, rng.generator(rng.key(model.seed, "fedcil", "images")))
        return (x * 255).round().to(torch.uint8).unflatten(0, (count, COLUMNS))

    def _travels(self, task: int) -> bool:
        return task > 0 or self.share == "always"

    def _gan(self, model: Model, task: int, pixels: Pixels | None) -> ACGAN:
        network = acgan.generator_network(
            model.input_shape, self.latent, given(self.width), rng.key(model.seed, "fedcil", "generator")
        )
        return ACGAN(model, network.to(_device(model)), self.latent, task, pixels)

    def _initial(self, gan: ACGAN) -> Tree:
        return tree.clone(dict(gan.network.named_parameters()))

    def _game(
        self, gan: ACGAN, leaves: Tree, classes: Tensor, info: RoundInfo, source: torch.Generator, state: Tree
    ) -> Game:
        """An AC-GAN before its first step, which trains the heads of these classes (k,) and copies of the leaves."""
        heads = gan.tasks_and_labels(classes)[0].unique().tolist()  # others have no samples, and would only decay
        names = [name for name in info.model.trainable(info.task, heads) if name not in info.frozen]
        adam = optim.adam(self.beta1, self.beta2, weight_decay=self.weight_decay)
        moments, steps = tree.clone(tree.part(state, "moments")), int(state.get("steps", 0))
        trained = [*names, *tree.under("critic", tree.part(leaves, "critic"))]
        return Game(gan, tree.clone(leaves), trained, adam, self.lr, source, moments, steps)


def _begun(state: Tree, info: RoundInfo) -> Tree:
    """A client's state as it enters a round: the first of a task freezes the generator and the classes of the last."""
    if not state:
        return {"past": torch.zeros(sum(info.model.sizes), dtype=torch.bool, device=_device(info.model))}
    if int(state["task"]) == info.task:
        return state
    generator = tree.part(state, "generator")
    return {"past": state["seen"], **tree.under("generator", generator), **tree.under("old", generator)}


def _known(info: RoundInfo) -> Tensor:
    """All classes of the stream so far: (k,)."""
    return torch.arange(info.model.classes_of(info.task).stop, device=_device(info.model))


def _device(model: Model) -> torch.device:
    return next(iter(model.params.values())).device


def _mean(stacked: Tensor, samples: Tensor) -> Tensor:
    """Weighted mean of a leaf (clients, ...); of counters, that of the lowest id."""
    if not stacked.is_floating_point():
        return stacked[0]
    shares = (samples / samples.sum()).to(stacked)
    return torch.stack([share * own for share, own in zip(shares, stacked, strict=True)]).sum(dim=0)
