"""What a client hook sees: the context of a local step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cfl.contract.data import Batch, Samples
from cfl.core.tree import Tree
from cfl.models.handle import Model


class Forward(Protocol):
    """Outputs of the model in its current mode at `params`; what is not in `params` is as it came down.

    Running statistics that `params` does not hold are the client's own; they stay as they are.

    Without `heads`, (batch, classes): each sample through the head of its own task. With a tuple of tasks,
    (batch, heads, classes): every sample through each of their heads (a single-head model has one, whatever is asked).
    Heads with fewer classes than others are filled up with a number so low that its softmax is 0.
    dropout: False switches `nn.Dropout` off, for a reference that is not to be noisy.
    features: True gives what enters the last Linear layer instead, (batch, d).
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
    """All that a client hook may see.

    shared: what came down, the same for all clients; shared["params"] is the global model at the start of the round.
    sent: the part of it that a regularizer's own `provide` gave.
    state: this client's own tree, as `init_client`, `work` or the last `finish` left it.
    memory: at most a batch of the samples that the strategy's state points to, drawn for this step; perhaps none.
    forward: the model as a function; model: its layers and names.
    step: number of the local step, from 0; lr, momentum: of the local optimiser (momentum 0 where it has none).
    key: integer to derive generators from, unique to client and step.
    client: () int64, the client's id, to look up what was sent for each client; public: the public data, if any.
    lent: in `finish`, whether another one has borrowed the terms of this one.
    features: in `penalty`, (batch, d): what entered the last Linear layer in the pass that gave the logits.
    correction: in `around`, the gradient by `params` of the terms of the regularizer that `borrows` names.
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
