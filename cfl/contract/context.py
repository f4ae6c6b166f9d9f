"""The context of a local step, as client hooks see it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cfl.contract.samples import Batch, Samples
from cfl.core import Tree
from cfl.models import Model


class Forward(Protocol):
    """Outputs of the model, in its current mode, at `params`.

    Parameters that are not in `params` take their values from the broadcast. Running statistics that are not in
    `params` are the client's own. A call does not change them.

    heads=None: (batch, classes), each sample through the head of its own task.
    heads=(t, ...): (batch, heads, classes), every sample through each of these heads; one head in a single-head model.
    Narrower heads are padded with logits so low that their softmax is 0.
    dropout=False: switch `nn.Dropout` off, for a reference without noise.
    features=True: return the inputs of the last Linear layer, (batch, d), in place of the outputs.
    """

    def __call__(
        self,
        params: Tree,
        batch: Batch,
        heads: tuple[int, ...] | None = None,
        *,
        dropout: bool = True,
        features: bool = False,
    ) -> Tensor: ...


class Ctx(NamedTuple):
    """The context of a client hook: everything that a hook may read beside its own arguments.

    shared: the broadcast, the same for all clients; shared["params"] is the global model at the start of the round.
    state: the client's own tree, as `init_client`, `work` or the last `finish` returned it.
    batch: the minibatch; memory: up to one batch of stored samples, drawn for this step, possibly empty.
    forward: the model as a function of its parameters; model: its layers and parameter names.
    task, step: the round's task and the local step, both counted from 0.
    lr, momentum: of the local optimiser; momentum is 0 for an optimiser without it.
    key: integer to derive generators from, see `cfl.rng.generator`; it differs from step to step and from client to
        client. Clients whose hooks read it train one at a time under every engine.
    sent: the regularizer's own part of the broadcast, as its `provide` returned it.
    client: () int64, the client's id, to index per-client entries of the broadcast; public: the public data, or None.
    lent: in `finish`, True if another regularizer borrows this one's terms.
    features: in `penalty`, (batch, d): the inputs of the last Linear layer in the pass that gave the logits; None for a
        model with `no_features`.
    correction: in `around`, the gradient, as a function of `params`, of the terms borrowed through `borrows`.
    """

    shared: Mapping[str, Tree]
    state: Tree
    batch: Batch
    memory: Batch
    forward: Forward
    model: Model
    task: int
    step: int
    lr: float
    key: int
    sent: Tree = {}
    momentum: float = 0.0
    client: Tensor = torch.tensor(0)
    public: Samples | None = None
    lent: bool = False
    features: Tensor | None = None
    correction: Callable[[Tree], Tree] | None = None

    def __repr__(self) -> str:
        return f"Ctx(task={self.task}, step={self.step}, {self.batch}, state={sorted(self.state)})"
