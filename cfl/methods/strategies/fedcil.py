"""FedCIL: an AC-GAN at every client, whose discriminator is the classifier (Qi et al., ICLR 2023).

`cfl.methods.generative` has the networks and the losses (`acgan`), their options and what a client keeps of them
(`federated_gan`). In each iteration a client takes a batch (x, y) of the task and, in later tasks, as many images of
its earlier classes from its own generator of the last task (replay). From the second round of a task on, the global
generator G_s adds terms to L_D (consistency enforcement):

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

from cfl.contract import Client, Gathers, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import Tree, option, plugins, rng, tree
from cfl.core.options import given
from cfl.methods.generative import acgan
from cfl.methods.generative.acgan import Labelled, choose
from cfl.methods.generative.consolidation import averaged, groups_of, pool
from cfl.methods.generative.federated_gan import FederatedGAN, begun, ended, joined
from cfl.models import Model


@plugins.strategies.register("fedcil")
@dataclass(frozen=True)
class FedCIL(FederatedGAN, Strategy):
    """AC-GAN at each client, replay of generated images, and consolidation at the server (Qi et al., 2023)."""

    source: ClassVar[str] = "Qi et al., ICLR 2023; FOT, section 5 (task-incremental)"
    sends: ClassVar[str] = (
        "its model, its critic and its number of samples, every round; from the second task, or from the first with "
        "strategy.share=always, also its generator and the list of classes that it has seen"
    )
    gathers: ClassVar[Gathers] = "stack"
    task_incremental: ClassVar[str] = "replays generated images of earlier tasks through their heads, which train, too"
    class_incremental: ClassVar[str] = "replays generated images of earlier classes, and the whole head trains"
    not_extendable: ClassVar[str] = "its generators have an input for each class of its tasks"
    not_for_texts: ClassVar[str] = "its generator makes images, and texts are token ids"

    alpha: float | None = option(None, "weight of KL(G_s, data); paper: 1, official: 0", at_least=0.0)
    beta: float | None = option(None, "weight of KL(G_s, G); paper: 1, official: 0", at_least=0.0)
    gamma: float | None = option(None, "weight of NLL(G_s); paper: 1, official: 0", at_least=0.0)
    consolidation: int | None = option(None, "AC-GAN steps of the server in a round; paper: 20, official: 100",
                                       at_least=0)  # fmt: skip
    weights: str = option("samples", "weights of the clients", source="paper", choices=("samples", "uniform"))
    share: str | None = option(None, "when generators travel; paper: later, as FOT counts; official: always",
                               choices=("later", "always"))  # fmt: skip
    keep_optimizers: bool | None = option(None, "keep Adam's moments within a task, twice the model; official: true")

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["regularizers"]:
            return f"its clients make no local steps in which {', '.join(run['regularizers'])} could act; leave it out"
        if run["secagg"] != "none":
            return f"its server draws images from each client's generator, which secagg={run['secagg']} hides"
        if run["class_loss"] != "seen":
            return "its images are of all classes seen, and so is its loss; set class_loss=seen"
        return None

    def notes(self, model: Model) -> list[str]:
        ours = "clients train with strategy.lr, batch, iterations and weights"
        return [f"{ours}; agg.weights and all of local.* but local.augment have no effect"]

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return [Phase("gan", rounds, train=False, work=True)]

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))  # replayed samples go through the heads of their tasks

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset()

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        names = ("critic", "generator") if self._travels(info.task) else ("critic",)
        return {**super().broadcast(server, info), **{name: server[name] for name in names}}

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Train the client's AC-GAN. Upload it with the number of samples and, if generators travel, the classes."""
        gan, travels = self.gan(info.model, info.task, info.pixels_of), self._travels(info.task)
        source, state = rng.generator(rng.key(info.key, "gan", client.id)), begun(state, gan)
        past = state["past"].nonzero().flatten()
        seen = state["past"].index_fill(0, gan.classes_of(client.targets.unique()), True)
        classes = seen.nonzero().flatten()
        taught = travels and not tree.equal(shared["generator"], gan.initial)  # else the server's is not trained yet
        generator = shared["generator"] if taught else tree.part(state, "generator") or gan.initial
        game = self.game(gan, joined(params, shared["critic"], generator), classes, info.frozen, source, state)
        later = taught and info.round  # consistency enforcement, from the second round of a task
        strengths = (given(self.alpha), given(self.beta), given(self.gamma))
        with acgan.training(info.model, rng.key(info.key, "dropout", client.id)):
            for batch in self.batches(client, source, rng.key(info.key, "augment", client.id)):
                reals = [Labelled(batch.x, gan.classes_of(batch.y))]
                if len(past):  # section 2.2: as many images of the client's earlier classes
                    reals.append(gan.fakes(tree.part(state, "old"), choose(past, len(batch.y), source), source))
                extra = game.consistency(shared["generator"], reals[0], gan.known, strengths) if later else None
                game.step(reals, classes, extra)
        up = {name: leaf for name, leaf in game.leaves.items() if travels or not name.startswith("generator/")}
        up["samples"] = torch.tensor(float(len(client)), device=client.device)
        return {**up, **({"labels": seen.float()} if travels else {})}, ended(state, game, seen, self.keep_optimizers)

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """Step to the mean of the clients' AC-GANs, then train it on what their generators draw (section 2.3)."""
        uploads, travels = mean["work"], self._travels(info.task)
        whole = joined(server["params"], server["critic"], server["generator"])
        samples = uploads["samples"] if self.weights == "samples" else torch.ones_like(uploads["samples"])
        steps = {name: averaged(whole[name] - leaf, samples) for name, leaf in uploads.items() if name in whole}
        whole = super().absorb({"params": whole}, {"strategy": steps}, info, lr)["params"]
        if travels and self.consolidation:
            whole |= self._consolidated(tree.select(whole, steps), uploads, info)
        new = {"params": tree.select(whole, server["params"])}
        new |= {name: tree.part(whole, name) for name in ("critic", "generator")}
        if travels and info.pixels:
            new["shown"] = {"classes": torch.tensor(info.model.classes_of(info.task).stop)}
        return {**server, **new}

    def _consolidated(self, leaves: Tree, uploads: Tree, info: RoundInfo) -> Tree:
        """The AC-GAN after training on images of the clients' generators, balanced over the classes."""
        gan, source = self.gan(info.model, info.task, info.pixels_of), rng.generator(rng.key(info.key, "consolidate"))
        game = self.game(gan, leaves, gan.known, info.frozen, source, {})
        groups = groups_of(uploads, info.model.classes_of(info.task).start)
        with acgan.training(info.model, rng.key(info.key, "dropout")):
            for _ in range(given(self.consolidation)):
                game.step([pool(gan, group, self.batch, source) for group in groups], gan.known, keep=False)
        return game.leaves

    def _travels(self, task: int) -> bool:
        return task > 0 or self.share == "always"
