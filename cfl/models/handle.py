"""A handle on any `nn.Module`, by inspection: its parameters as a tree, a head for each task, and its layers.

Names in the tree are the module's own. A leaf that belongs to one task (the head of a task-incremental stream, the
running statistics of normalisation layers) carries the task after an "@": `head.weight@3`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.core import ConfigError, Tree, tree
from cfl.core.errors import MOST_NAMES, few
from cfl.core.functorch import transforming
from cfl.models import adapters, recurrent
from cfl.models import precision as precisions
from cfl.models.dropout import switched_off
from cfl.models.heads import check_outputs
from cfl.models.layers import drop_running_stats, full_name, layers_of, leaf_slots, new_heads, norm_parameters, on_input
from cfl.models.memory_format import Layout, is_channels_last
from cfl.models.passes import by_batch, couples, passes
from cfl.models.tracing import constants, features_fault, frozen_names, own_copy, trace

NormStats = Literal["per_task", "batch", "running"]
NO_CLASS = -1e9  # logit of a class that a narrower head does not have: its softmax is 0, its logarithm is finite


class Model:
    """A module, the tree of its initial parameters, and the names of the leaves that each task trains.

    module: any nn.Module that maps (batch, *input_shape) to (batch, outputs);
    classes: outputs of each task's head; multi_head: one head per task, made from the module's last Linear layer;
    growing: the heads are parts of one head, which has those of all tasks so far (class-incremental streams);
    norm_stats: running statistics of batch normalisation "per_task", "running" (shared), or none ("batch").
    dtype: of the samples; None: that of the module's parameters; precision: of products within `lowered`.
    Attributes: params: the tree; frozen: names in it of the parameters with requires_grad=False, which no task trains;
    fixed: these parameters, which clients hold from the start and the methods below use where `params` lack them;
    layers: the projectable layers that train, in the order of their first call; stem: path of the first layer called;
    norms: affine parameters of normalisation layers, name to the number of projected modules called before the layer;
    couples_samples: whether a sample's outputs in training depend on the others of its batch, see `couples`;
    takes_one: whether a batch in training may be a single sample; joins_last: whether one joins the batch before it in
    evaluation; masks: buffers that no client sends, see `constants`; layout: fastest layout of leaves in memory;
    classifier: path of the last Linear layer, or None; no_features: what to change so that `features` works, or empty.
    Raises ConfigError for a module that cannot be trained, whose outputs do not fit the stream, or that is all frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: Sequence[int],
        classes: Sequence[int],
        *,
        multi_head: bool,
        growing: bool = False,
        norm_stats: NormStats = "per_task",
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        precision: precisions.Precision = "float32",
    ) -> None:
        self.module, self.precision, self._lowered = own_copy(module, device), precision, False
        self._recurrent = recurrent.has_layers(self.module)
        if precision != "float32":
            precisions.prepare(self.module)
        self.tasks, self.multi_head, self.growing, self.seed = len(classes), multi_head, growing, seed
        self.sizes, self.input_shape = tuple(classes), tuple(input_shape)
        if norm_stats == "batch":
            drop_running_stats(self.module)
        spare = own_copy(self.module, device)  # a module may keep what its forward computes, and then has no copy
        traced = trace(self.module, input_shape, device, dtype, seed)
        called, outputs, mixed, self._never_changed = traced.called, traced.outputs, traced.mixed, traced.notes
        self.moving, self.takes_one = traced.moving, traced.alone
        self.joins_last = by_batch(self.module) and not self.takes_one
        self.couples_samples = couples(spare, input_shape, device, dtype)
        paths = traced.projectable
        self.classifier: str | None = None
        self._head_names: list[str] = []
        if paths and isinstance(last := called[paths[-1]], nn.Linear):
            self.classifier = paths[-1]
            self._head_names = [full_name(paths[-1], name) for name, _ in last.named_parameters()]
        self.no_features = features_fault(self.classifier, mixed)
        check_outputs(self.module, self.classifier, outputs, classes, multi_head, input_shape, device, dtype)
        self._parameter_names = [name for name, _ in self.module.named_parameters()]
        self.masks = constants(self.module, self.moving)
        self._buffer_names = [name for name, _ in self.module.named_buffers() if name not in self.masks]
        if growing and norm_stats == "per_task" and self.moving:
            raise ConfigError(
                "with scenario=class nothing tells the task of a test sample, nor its running statistics: set "
                "model.norm_stats=running or model.norm_stats=batch"
            )
        self._names_per_task = set(self._head_names if multi_head else ())
        self._names_per_task.update(self._buffer_names if norm_stats == "per_task" else ())
        self._slots = leaf_slots(self.module)
        self.stem = paths[0] if paths else None
        self.layout = Layout(self.module, input_shape, device, precision)
        self.layers = layers_of(self.module, paths[:-1] if multi_head else paths, mixed)
        self.norms = norm_parameters(called, self.layers)
        fixed = frozen_names(self.module)
        self.frozen = frozenset(self.tree_name(name, task) for name in fixed for task in range(self.tasks))
        self.start_from(self._initial())

    def __repr__(self) -> str:
        return f"Model({type(self.module).__name__}, input_shape={self.input_shape}, classes={self.sizes})"

    def notes(self) -> list[str]:
        """Lines on the parameters that no task trains and on the precision, shown at the start of a run."""
        names = dict.fromkeys(name.partition("@")[0] for name in self.fixed)
        held = f"{tree.nbytes(self.fixed):,} bytes of frozen parameters are on every client, and no round sends them"
        found = [f"frozen by requires_grad=False: {few([*names], MOST_NAMES)}", held] if names else []
        found += self._never_changed
        statistics = self.moving and self.buffers_per_task and not self.multi_head
        found += ["accuracies are those with the statistics of each test sample's task"] if statistics else []
        device = next(iter(self.params.values())).device
        return found + adapters.notes(self.module) + precisions.notes(self.precision, device)

    def start_from(self, params: Tree) -> None:
        """Replace the initial parameters, the frozen ones among them. params: all leaves of the tree."""
        self.params: Tree = params
        self.fixed: Tree = {name: leaf for name, leaf in params.items() if name in self.frozen}

    def is_parameter(self, name: str) -> bool:
        """True for the name in the tree of a parameter, False for that of a buffer."""
        return name.partition("@")[0] in self._parameter_names

    def tree_name(self, name: str, task: int) -> str:
        """Name in the tree, for a task, of the parameter or buffer `name` of the module."""
        return f"{name}@{task}" if name in self._names_per_task else name

    def trainable(self, task: int, heads: Sequence[int] = ()) -> tuple[str, ...]:
        """Names in the tree of the parameters that a task may train: body, own head, heads of the tasks in `heads`."""
        own = [self.tree_name(name, task) for name in self._parameter_names]
        every = dict.fromkeys([*own, *(name for head in (task, *heads) for name in self.head(head))])
        return tuple(name for name in every if name not in self.frozen)

    def buffers(self, task: int) -> tuple[str, ...]:
        """Names in the tree of the buffers (running statistics) that a task uses."""
        return tuple(self.tree_name(name, task) for name in self._buffer_names)

    @property
    def buffers_per_task(self) -> bool:
        """True if each task has its own running statistics."""
        return self.tasks > 1 and self.buffers(0) != self.buffers(1)

    def head(self, task: int) -> tuple[str, ...]:
        """Names in the tree of the parameters of the last Linear layer, for a task; if it grows, of all its parts."""
        return tuple(name for part in self._parts(task) for name in self.new_head(part))

    def new_head(self, task: int) -> tuple[str, ...]:
        """Names in the tree of the parameters of the last Linear layer that a task is the first to have."""
        return tuple(self.tree_name(name, task) for name in self._head_names)

    def old_head(self, task: int) -> frozenset[str]:
        """Names in the tree of the parts of a growing head that earlier tasks have trained; else none."""
        return frozenset(self.head(task)) - frozenset(self.new_head(task))

    def classes_of(self, task: int) -> slice:
        """Numbers of a task's classes among those of all tasks; only a growing head has them as outputs and labels."""
        return slice(sum(self.sizes[:task]), sum(self.sizes[: task + 1]))

    def among(self, logits: Tensor, task: int) -> Tensor:
        """Outputs (batch, classes) of a growing head, those of other tasks' classes replaced by `NO_CLASS`."""
        others = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        others[self.classes_of(task)] = False
        return logits.masked_fill(others, NO_CLASS)

    def bind(self, params: Mapping[str, Tensor], task: int) -> Tree:
        """Select the leaves of one task, under the module's own names; the parts of a growing head are joined."""
        params = self._whole(params)
        leaves = {name: params[self.tree_name(name, task)] for name in (*self._parameter_names, *self._buffer_names)}
        if self.growing and task:
            for name in self._head_names:
                leaves[name] = torch.cat([params[self.tree_name(name, part)] for part in self._parts(task)])
        return leaves | self.masks

    def _whole(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`params`, with the frozen parameters that they lack."""
        return {**self.fixed, **params} if self.frozen else params

    def _parts(self, task: int) -> tuple[int, ...]:
        """Tasks whose heads are joined in that of a task."""
        return tuple(range(task + 1)) if self.growing else (task,)

    def logits(self, params: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """Outputs (batch, classes of the task; of all tasks so far if the head grows).

        In training mode the buffers in `params` are written in place.
        """
        return self._call(self.bind(params, task), x)

    def predict(self, params: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """What `logits` returns, within `lowered` and in `passes`; for the evaluation mode."""
        with self.lowered():
            return torch.cat([self.logits(params, part, task) for part in passes(self.module, x, len(x))])

    def outputs(self, params: Mapping[str, Tensor], x: Tensor, task: int, heads: Sequence[int]) -> Tensor:
        """Outputs of several heads in one pass: (batch, heads, classes of the widest), see `cfl.contract.Forward`.

        task: the task whose buffers are used. A single-head model gives (batch, 1, classes).
        """
        if not self.multi_head:
            return self.logits(params, x, task)[:, None]
        params = self._whole(params)
        leaves, sizes = self.bind(params, task), [len(params[self.new_head(head)[0]]) for head in heads]
        for name in self._head_names:
            leaves[name] = torch.cat([params[self.tree_name(name, head)] for head in heads])
        logits = self._call(leaves, x).split(sizes, dim=1)
        return torch.stack([F.pad(own, (0, max(sizes) - own.shape[1]), value=NO_CLASS) for own in logits], dim=1)

    def own_logits(self, params: Mapping[str, Tensor], x: Tensor, task: int, own: Tensor) -> Tensor:
        """Outputs (batch, classes of the widest head) of each sample through the head of its own task.

        task: the task whose buffers are used, and up to which a growing head goes; own: (batch,) task of each sample.
        `params` may lack unused heads.
        """
        if self.growing:
            return self.logits(params, x, task)
        known = self._whole(params)
        heads = [head for head in range(self.tasks) if all(name in known for name in self.head(head))]
        every = self.outputs(params, x, task, heads)
        if every.shape[1] == 1:
            return every[:, 0]
        chosen = (own[:, None] == torch.tensor(heads, device=own.device)).to(every.dtype)
        return every.gather(1, chosen.argmax(1)[:, None, None].expand(-1, 1, every.shape[2]))[:, 0]

    def features(self, params: Mapping[str, Tensor], x: Tensor, task: int) -> Tensor:
        """Inputs of the last Linear layer: (batch, d). Raises ConfigError for a module with `no_features`."""
        if self.no_features:
            raise ConfigError(f"features are the inputs of the last Linear layer; {self.no_features}")
        with self.watched_features() as seen:
            self.logits(params, x, task)
        return seen[-1]

    @contextlib.contextmanager
    def watched_features(self) -> Iterator[list[Tensor]]:
        """Collect the inputs (batch, d) of the last Linear layer in each pass; none for a module with `no_features`."""
        seen: list[Tensor] = []
        with contextlib.ExitStack() as hooks:
            if not self.no_features:
                layer: Any = self.module.get_submodule(str(self.classifier))
                hook = on_input(layer, lambda x: seen.append(x.flatten(1).to(layer.weight.dtype)))
                hooks.callback(hook.remove)
            yield seen

    @contextlib.contextmanager
    def evaluation(self, dropout: bool = False) -> Iterator[None]:
        """Put the module in evaluation mode; with `dropout`, its dropout layers stay in training mode."""
        was_training = self.module.training
        self.module.eval()
        for layer in self.module.modules() if dropout else ():
            layer.training = isinstance(layer, _DropoutNd)
        try:
            yield
        finally:
            self.module.train(was_training)

    @contextlib.contextmanager
    def lowered(self) -> Iterator[None]:
        """Compute products and convolutions in `precision`: local steps and predictions do, all else is float32."""
        before, self._lowered = self._lowered, self.precision != "float32"
        try:
            yield
        finally:
            self._lowered = before

    def without_dropout(self) -> contextlib.AbstractContextManager[None]:
        """Switch the module's dropout layers off; all other layers keep their mode."""
        return switched_off(self.module)

    def _call(self, leaves: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Call the module with these leaves as its parameters and buffers, as `torch.func.functional_call` does."""
        if self.layout.gains and not transforming() and any(map(is_channels_last, leaves.values())):
            x = x.contiguous(memory_format=torch.channels_last)
        # `functional_call` looks up every name at each call: a local step of the permuted-digits MLP takes 17 % longer,
        # one of the Permuted MNIST MLP 0.4 % (benchmarks/functional_call.py, stored in results/functional-call there).
        slots = [(holder, key, leaf) for name, leaf in leaves.items() for holder, key in self._slots[name]]
        own = [holder[key] for holder, key, _ in slots]
        try:
            for holder, key, leaf in slots:
                holder[key] = leaf
            if not self._lowered:
                return recurrent.call(self.module, x, self._recurrent)
            with precisions.lowered(x.device):
                outputs = recurrent.call(self.module, x, self._recurrent)
            return outputs.to(next(leaf.dtype for *_, leaf in slots if leaf.is_floating_point()))
        finally:
            for (holder, key, _), leaf in zip(slots, own, strict=True):
                holder[key] = leaf

    def _initial(self) -> Tree:
        params, own = Tree(), dict((*self.module.named_parameters(), *self.module.named_buffers()))
        for name in (*self._parameter_names, *self._buffer_names):
            for task in range(self.tasks) if name in self._names_per_task else (0,):
                params[self.tree_name(name, task)] = own[name].detach().clone(memory_format=torch.contiguous_format)
        if self.multi_head:
            params |= new_heads(self.module, str(self.classifier), self.sizes, self.seed)
        return params
