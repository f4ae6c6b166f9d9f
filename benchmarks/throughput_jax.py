"""A workload in plain JAX on the CPU, for throughput.py: `throughput_jax.py WORKLOAD`.

A line with a number asks for that many rounds, each from the first weights with new orders of the samples; the answer
is the seconds of one. Blocks of clients train under `vmap`, on one device or shared out over as many as there are
cores. Networks of dense layers have the whole round in one `jit`, with `scan` over steps and blocks. XLA runs
convolutions inside loops many times slower on a CPU (jax-ml/jax issue 12868), so with them the step is the `jit`.
The first answer comes after a choice by timing: how many devices, and how large a block.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from throughput_peer import Line
from throughput_work import Workload, moved

Params = dict[str, Array]
BLOCKS = (1, 4, 16)  # beside all clients of a device at once
EPS = 1e-5  # of torch's batch normalisation


def converted(leaves: dict[str, torch.Tensor]) -> Params:
    """Weights, or their gradients, of a torch module: matrices (in, out) and kernels (height, width, in, out)."""
    turned = {name: leaf.permute(2, 3, 1, 0) if leaf.ndim == 4 else leaf.t() for name, leaf in leaves.items()}
    return {name: jnp.asarray(leaf.detach().numpy()) for name, leaf in turned.items()}


# -- the networks of cfl.models, without dropout; x as in torch, (batch, channels, height, width)


def forward(work: Workload) -> Callable[[Params, Array], Array]:
    """The workload's network: logits (batch, classes) of weights and x."""
    if work.model == "resnet18":
        return functools.partial(resnet18, stem_stride=work.options["stem_stride"])
    return stack


def stack(params: Params, x: Array) -> Array:
    """The MLP and FOT's AlexNet: ReLU between layers, and 2 x 2 maxima after convolutions."""
    *hidden, last = sorted({name.partition(".")[0] for name in params}, key=int)
    if any(leaf.ndim == 4 for leaf in params.values()):
        x = x.transpose(0, 2, 3, 1)
    else:
        x = x.reshape(len(x), -1)
    for place in hidden:
        if params[f"{place}.weight"].ndim == 4:
            x = pooled(jax.nn.relu(convolution(params[f"{place}.weight"], x)), jnp.max)
        else:
            x = jax.nn.relu(dense(params, place, flat(x)))
    return dense(params, last, x)


def resnet18(params: Params, x: Array, stem_stride: int) -> Array:
    """FOT's reduced ResNet-18 with batch normalisation."""
    x = convolution(params["stem.weight"], x.transpose(0, 2, 3, 1), stem_stride, padding=1)
    x = jax.nn.relu(normalised(params, "norm", x))
    for number in range(8):
        block, stride = f"blocks.{number}", 2 if number in (2, 4, 6) else 1
        out = convolution(params[f"{block}.conv1.weight"], x, stride, padding=1)
        out = jax.nn.relu(normalised(params, f"{block}.norm1", out))
        out = normalised(params, f"{block}.norm2", convolution(params[f"{block}.conv2.weight"], out, padding=1))
        if f"{block}.shortcut.0.weight" in params:
            x = convolution(params[f"{block}.shortcut.0.weight"], x, stride)
            x = normalised(params, f"{block}.shortcut.1", x)
        x = jax.nn.relu(out + x)
    return dense(params, "head", flat(pooled(x, jnp.mean)))


def dense(params: Params, name: str, x: Array) -> Array:
    x = x @ params[f"{name}.weight"]
    return x + params[f"{name}.bias"] if f"{name}.bias" in params else x


def convolution(kernel: Array, x: Array, stride: int = 1, padding: int = 0) -> Array:
    """x with channels last, which XLA wants on a CPU."""
    sides, names = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), sides, dimension_numbers=names)


def normalised(params: Params, name: str, x: Array) -> Array:
    """Batch normalisation by the statistics of the batch."""
    x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + EPS)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def pooled(x: Array, how: Callable[..., Array]) -> Array:
    """Windows of 2 x 2; by a reshape, for the gradient of `reduce_window` is slow on a CPU."""
    count, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return how(x.reshape(count, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def flat(x: Array) -> Array:
    """Pixels in torch's order, channels first."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1) if x.ndim == 4 else x


# -- a round


def sgd(work: Workload) -> Callable[[Params, Array, Array], Params]:
    """A step of SGD on the mean cross-entropy of a batch."""
    network = forward(work)

    def loss(params: Params, x: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(network(params, x)), y[:, None], axis=1).mean()

    def step(params: Params, x: Array, y: Array) -> Params:
        gradients = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf, gradient: leaf - work.lr * gradient, params, gradients)

    return step


def fold(step: Callable[[Any, Any], Any], carry: Any, items: Any, size: int, scanned: bool) -> Any:
    """step(carry, part) for parts of `size` items along the first axis of `items`; the last may be smaller."""
    first, count = 0, len(jax.tree.leaves(items)[0])
    if scanned:
        first = count // size * size
        parts = jax.tree.map(lambda leaf: leaf[:first].reshape(-1, size, *leaf.shape[1:]), items)
        carry, _ = lax.scan(lambda carry, part: (step(carry, part), None), carry, parts)
    for at in range(first, count, size):
        carry = step(carry, jax.tree.map(lambda leaf, at=at: leaf[at : at + size], items))
    return carry


def trained(work: Workload, block: int) -> Callable[..., Params]:
    """The sum of the weights of clients after their epoch: start, x and y (clients, samples, ...), orders like y."""
    scanned, own = work.model == "mlp", sgd(work)
    compiled = (lambda function: function) if scanned else functools.partial(jax.jit, donate_argnums=0)
    step = compiled(jax.vmap(lambda params, x, y, rows: own(params, x[rows], y[rows]), (0, 0, 0, 1)))
    add = compiled(lambda total, params: jax.tree.map(lambda a, b: a + b.sum(0), total, params))

    def clients(start: Params, x: Array, y: Array, orders: Array) -> Params:
        def train(total: Params, part: tuple[Array, Array, Array]) -> Params:
            x, y, orders = part
            params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(x), *leaf.shape)), start)
            params = fold(lambda params, rows: step(params, x, y, rows), params, orders.T, work.batch, scanned)
            return add(total, params)

        return fold(train, jax.tree.map(jnp.zeros_like, start), (x, y, orders), block, scanned)

    return jax.jit(clients) if scanned else clients


class Round:
    """Local training of all clients on some devices, and the average."""

    def __init__(self, work: Workload, devices: int, block: int) -> None:
        self.work, self.block, self.devices = work, block, jax.devices()[:devices]
        self.start = converted(dict(work.module().named_parameters()))
        self.orders, self.trained = np.random.default_rng(0), trained(work, block)
        x, y = (part.numpy().reshape(work.clients, work.samples, *part.shape[1:]) for part in work.data())
        self.ids = np.array_split(np.arange(work.clients), devices)
        self.inputs = [
            tuple(jax.device_put(part, device) for part in (self.start, x[ids], y[ids].astype(np.int32)))
            for device, ids in zip(self.devices, self.ids, strict=True)
        ]
        self.pool = ThreadPoolExecutor(devices)

    def __str__(self) -> str:
        return f"{len(self.devices)} device(s), blocks of {self.block}"

    def __call__(self) -> dict[str, np.ndarray]:
        """The mean of the clients' weights."""
        rows = np.tile(np.arange(self.work.samples, dtype=np.int32), (self.work.clients, 1))
        orders = self.orders.permuted(rows, axis=1)
        first, *others = self.pool.map(lambda place: self.share(place, orders), range(len(self.devices)))
        for other in others:
            first = jax.tree.map(np.add, first, other)
        return {name: leaf / self.work.clients for name, leaf in first.items()}

    def share(self, place: int, orders: np.ndarray) -> dict[str, np.ndarray]:
        """The sum of the weights of a device's clients."""
        with jax.default_device(self.devices[place]):
            return jax.tree.map(np.asarray, self.trained(*self.inputs[place], orders[self.ids[place]]))


def fastest(work: Workload, cores: int) -> Round:
    """The round whose devices and block take the least time."""
    best, least = None, math.inf
    for devices in sorted({1, min(cores, work.clients)}):
        share, smaller = -(-work.clients // devices), math.inf
        for block in sorted({*(size for size in BLOCKS if size < share), share}):
            run = Round(work, devices, block)
            run()  # compiles
            took = [seconds(run, 1)]
            while sum(took) < 1:  # short rounds are timed more often
                took.append(seconds(run, 1))
            if min(took) < least:
                best, least = run, min(took)
            if min(took) > 1.2 * smaller:  # larger blocks of convolutions would take minutes
                break
            smaller = min(took)
    assert best is not None
    return best


def seconds(run: Round, rounds: int) -> float:
    """Seconds of a round, out of some."""
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    line, work, cores = Line(), Workload.load(sys.argv[1]), os.cpu_count() or 1
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cores)
    run = fastest(work, cores)
    step = [torch.from_numpy(leaf - np.asarray(run.start[name])) for name, leaf in run().items()]
    line.say(moved=moved([torch.zeros_like(leaf) for leaf in step], step), version=version("jax"), setting=str(run))
    for ask in line.asks():
        line.say(seconds=seconds(run, int(ask)))


if __name__ == "__main__":
    main()
