"""TARGET: synthetic samples from the global model carry what earlier tasks taught (Zhang et al., ICCV 2023).

After each task but the last, the server inverts the global model (`cfl.methods.generative.inversion`). No client takes
part, and nothing but the model is used. In the next task each client gets the samples S and that model, the teacher,
once. A local step adds to the loss of its minibatch
    lambda H(softmax(teacher(u) / T), softmax(f(u) / T)),    u a batch of S,  lambda = 25, T = 2  (official code),
the cross-entropy H over the old classes, without a factor T^2. With scenario=class the loss of the minibatch itself is
over the classes of the task alone. With a head a task, H is the mean over the old heads: FOT compares with TARGET in
this setting, but does not say how it adapts it.

Deviations: an epoch ends with the client's data, where the code ends it with the shorter of data and S; clients do not
crop or flip S; the teacher's pass leaves running statistics alone, and so does the student's pass over S.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Batch, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.contract.losses import soft_cross_entropy
from cfl.core import ConfigError, Tree, option, plugins, rng
from cfl.methods.generative.generator import by_class, inputs
from cfl.methods.generative.inversion import Inversion
from cfl.models import Model

_STRIDE = 7919  # a prime: clients begin at different samples of S


@plugins.strategies.register("target")
@dataclass(frozen=True)
class TARGET(Inversion, Strategy):
    """Distillation on synthetic samples that the server makes from the global model (Zhang et al., 2023)."""

    source: ClassVar[str] = "Zhang et al., ICCV 2023, with the official code's constants"
    per_sample: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("teacher", "synthetic")
    task_incremental: ClassVar[str] = "synthetic samples distil each old head, and these train, too"
    class_incremental: ClassVar[str] = (
        "new samples train the classes of their task alone, synthetic ones distil one softmax over the old classes"
    )

    not_for_texts: ClassVar[str] = "its server makes samples by gradients, which token ids have none of"

    strength: float = option(25.0, "lambda, weight of the distillation", source="code", at_least=0.0, steep="local")
    temperature: float = option(2.0, "T of the distillation", source="code", above=0.0)
    batch: int = option(64, "synthetic samples in a local step", source="ours; code: 500", at_least=1)

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        generate = Phase("generate", self.rounds or 0, cohort="none", train=False)
        return [Phase("train", rounds), *([generate] if task < tasks - 1 else [])]

    def init_server(self, params: Tree, model: Model) -> Server:
        if self.batch == 1 and not model.takes_one:
            raise ConfigError("strategy.batch=1, but the model fails on a batch of one sample in training; raise it")
        return {}

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset()

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        if info.phase.cohort == "none":
            return self.invert(server, info)
        return super().absorb(server, mean, info, lr)

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        """Keep the teacher and the samples, in random order; drop the networks that made them."""
        params, synthetic = server["params"], server["synthetic"]
        order = torch.randperm(len(synthetic["x"]), generator=rng.generator(rng.key(model.seed, "synthetic", task)))
        names = model.trainable(task - 1, tuple(range(task)))
        old, new = ((*names, *model.buffers(one)) for one in (task - 1, task))  # statistics may be a task's own
        teacher = {name: params[before] for name, before in zip(new, old, strict=True)}
        shuffled = {**synthetic, "x": synthetic["x"][order.to(synthetic["x"].device)]}
        return {"params": params, "teacher": teacher, "synthetic": shuffled}

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        if info.task and info.phase.train:
            count = len(server["synthetic"]["x"])
            start = torch.randint(count, (), generator=rng.generator(rng.key(info.key, "synthetic")))
            down |= {name: server[name] for name in self.kept} | {"start": {"row": start}}
        return down

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        """Cross-entropy, over the classes of the task alone."""
        return super().loss(ctx.model.among(logits, ctx.task) if ctx.model.growing else logits, ctx)

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        if ctx.task == 0:
            return 0.0
        batch, old = self.recalled(ctx), tuple(range(ctx.task))
        with ctx.model.evaluation():
            targets = ctx.forward(ctx.shared["teacher"], batch, old).detach()
        outputs = ctx.forward(params, batch, old)
        if ctx.model.growing:  # one softmax over the old classes
            targets, outputs = targets.flatten(1)[:, None], outputs.flatten(1)[:, None]
        return self.strength * soft_cross_entropy(targets, outputs, self.temperature).mean()

    def recalled(self, ctx: Ctx) -> Batch:
        """The synthetic batch of a local step; its labels are meaningless zeros."""
        samples, first = ctx.shared["synthetic"], ctx.shared["start"]["row"]
        places = torch.arange(self.batch, device=first.device) + ctx.step * self.batch
        rows = (first + _STRIDE * ctx.client + places) % len(samples["x"])
        x = inputs(samples["x"][rows], samples.get("mean"), samples.get("std"))
        zeros = torch.zeros_like(rows)
        return Batch.whole(x, zeros, zeros)

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        return {"synthetic_samples": len(server["synthetic"]["x"]) if "synthetic" in server else 0}

    def images(self, server: Server, model: Model) -> Tensor | None:
        """The first eight synthetic images of each class: (classes, 8, channels, height, width); None for others."""
        if "labels" not in server or server["synthetic"]["x"].dtype != torch.uint8:
            return None
        both = torch.stack([server["labels"]["own"], server["labels"]["y"]])
        return by_class(server["synthetic"]["x"], both.unique(dim=1, return_inverse=True)[1])
