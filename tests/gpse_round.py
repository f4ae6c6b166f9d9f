"""One round of GPSE by hand, and small networks for it: shared by the tests of its parts."""

import torch
from torch import nn

import cfl
from cfl.contract import Client, Phase, RoundInfo, Share
from cfl.methods.subspace.projection import input_vectors

GPSE_PHASE = Phase("gpse", cohort="available", train=False, work=True)


def label(value):
    """A test's name that is the same in every process: sets print in an order of their own."""
    return str(sorted(value) if isinstance(value, set | frozenset) else value)


def draws(*shape, seed=0):
    """Normal draws in float64 that float32, in which streams keep their samples, holds exactly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


class Net(nn.Sequential):
    """A sequence that takes samples in the precision of its weights."""

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


def mlp(*widths, bias=True):
    pairs = zip(widths[:-1], widths[1:], strict=True)
    layers = [part for a, b in pairs for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in layers[::2]:
            layer.reset_parameters()
    return Net(*layers[:-1]).double()


def handle(module, input_shape, tasks=2, outputs=3, **options):
    return cfl.Model(module, input_shape, [outputs] * tasks, multi_head=False, **options)


def info_of(model, task=0, tasks=3, phase=GPSE_PHASE, clients=(0,), key=11):
    return RoundInfo(
        task=task,
        tasks=tasks,
        phase=phase,
        round=0,
        clients=tuple(clients),
        names=(*model.trainable(0), *model.buffers(0)),
        frozen=frozenset(),
        heads=(0,),
        population=len(clients),
        lr=0.1,
        model=model,
        key=key,
        expected=len(clients),
    )


def clients_of(x, parts):
    """Clients that hold the given positions of one task's samples x."""
    y = torch.zeros(len(x), dtype=torch.int64)
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return [Client(id, {0: Share(samples, rows)}, 0, (0,)) for id, rows in enumerate(parts)]


def gpse(strategy, model, server, clients, info):
    """One GPSE round as the engine runs it: broadcast, work, sum, absorb. Returns the server and the sum."""
    shared = strategy.broadcast(server, info)
    total: dict[str, torch.Tensor] = {}
    for client in clients:
        up, _ = strategy.work(shared["params"], client, shared, {}, info)
        total = {name: total[name] + leaf if name in total else leaf for name, leaf in up.items()}
    return strategy.absorb(server, {"work": total}, info, 1.0), total


def start(strategy, model):
    return {"params": model.params, **strategy.init_server(model.params, model)}


def one_gpse(strategy, model, x, parts=None, **info):
    parts = [torch.arange(len(x))] if parts is None else parts
    return gpse(strategy, model, start(strategy, model), clients_of(x, parts), info_of(model, **info))


def inputs_of(model, params, x, layer, augment=True):
    """X (d, n) of a layer of an MLP, by running the modules before it."""
    stop = int(layer.path)
    with torch.no_grad():
        for number in range(stop):
            part = model.module[number]
            x = x @ params[f"{number}.weight"].T + params[f"{number}.bias"] if isinstance(part, nn.Linear) else part(x)
    return input_vectors(x[:, None, :], layer, augment)[:, 0].T


def projector(basis):
    return basis @ basis.T


def ranks_of(server):
    return {name: basis.shape[1] for name, basis in server["basis"].items()}
