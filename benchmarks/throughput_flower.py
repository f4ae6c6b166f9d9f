"""A workload under Flower's simulation, for throughput.py: `throughput_flower.py WORKLOAD`.

A line with a number asks for that many rounds of FedAvg, without evaluation; the answer is the seconds of one. Each
client is a node of its own and takes one core; local training is the plain loop.
"""

import os
import sys
import time
from functools import cache
from importlib.metadata import version

for name, value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ[name] = value

import torch  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from throughput_peer import Line  # noqa: E402
from throughput_work import Workload, epoch, moved  # noqa: E402
from torch.utils.data import Subset, TensorDataset  # noqa: E402

app = ClientApp()


@cache
def made(text: str) -> tuple:
    """The workload, its data and its module; once in each process that trains."""
    torch.set_num_threads(1)
    work = Workload.load(text)
    return work, TensorDataset(*work.data()), work.module()


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's local epoch."""
    import throughput_flower  # in a process of Ray's this function comes without its module, and would keep nothing

    work, data, module = throughput_flower.made(str(message.content["config"]["work"]))
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    first = int(context.node_config["partition-id"]) * work.samples
    epoch(module, Subset(data, range(first, first + work.samples)), work)
    reply = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": work.samples})}
    return Message(content=RecordDict(reply), reply_to=message)


def main() -> None:
    from flwr.app import ConfigRecord
    from flwr.simulation import run_simulation

    line, server, text = Line(), ServerApp(), sys.argv[1]
    work = Workload.load(text)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients)
        start = work.module().state_dict()

        def run(rounds: int) -> tuple[float, ArrayRecord]:
            began = time.perf_counter()
            result = strategy.start(grid, ArrayRecord(start), rounds, train_config=ConfigRecord({"work": text}))
            return (time.perf_counter() - began) / rounds, result.arrays

        seconds, arrays = run(1)
        after = list(arrays.to_torch_state_dict().values())
        line.say(seconds=seconds, moved=moved(list(start.values()), after), version=version("flwr"))
        for ask in line.asks():
            line.say(seconds=run(int(ask))[0])

    run_simulation(server, app, work.clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


if __name__ == "__main__":
    main()
