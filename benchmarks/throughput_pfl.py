"""A workload under pfl-research 0.6, for throughput.py: `throughput_pfl.py WORKLOAD DEVICE PROCESSES`.

A line with a number asks for that many central iterations of FederatedAveraging, without evaluation; the answer is the
seconds of one. Several processes work by pfl's own variables (PFL_WORKER_ADDRESSES, gloo on a CPU). As is usual with
pfl, a user's data are tensors taken in slices in their own order; nothing is shuffled.
"""

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version

WORK, DEVICE, PROCESSES = sys.argv[1], sys.argv[2], int(sys.argv[3])


def start_others() -> list[subprocess.Popen]:
    """The processes of the ranks after the first, which take part in what this one does."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(PROCESSES)]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{each.getsockname()[1]}" for each in sockets)
    os.environ["PFL_WORKER_RANK"] = "0"
    for each in sockets:
        each.close()
    ranks = [{**os.environ, "PFL_WORKER_RANK": str(rank)} for rank in range(1, PROCESSES)]
    command = [sys.executable, *sys.argv]
    return [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env) for env in ranks]


# All of this is read, and the processes join each other, as pfl is imported.
os.environ["PFL_PYTORCH_DEVICE"] = DEVICE
OTHERS = start_others() if PROCESSES > 1 and "PFL_WORKER_RANK" not in os.environ else []

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.data.sampling import MinimizeReuseUserSampler  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.internal.ops import pytorch_ops  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from throughput_peer import Line  # noqa: E402
from throughput_work import Workload, moved  # noqa: E402

FOREVER = 10**9


class Module(torch.nn.Module):
    """The module with the two methods that pfl asks for."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """Only asked for in the first iteration, which warms up."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Turns(TrainingProcessCallback):
    """Between iterations: answers once as many are done as were asked for, and waits for the next number."""

    def __init__(self, line: Line, start: list[torch.Tensor]) -> None:
        self.line, self.start = line, start
        self.first, self.left, self.rounds, self.began = True, 1, 1, time.perf_counter()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: ANN001, ANN201
        self.left -= 1
        if self.left:
            return False, Metrics()
        seconds = (time.perf_counter() - self.began) / self.rounds
        chief = pytorch_ops.distributed.global_rank == 0
        if chief:
            about = {"moved": moved(self.start, list(model.pytorch_model.parameters())), "version": version("pfl")}
            self.line.say(seconds=seconds, **(about if self.first else {}))
        asked = torch.tensor([int(sys.stdin.readline() or 0)]) if chief else torch.zeros(1, dtype=torch.int64)
        if PROCESSES > 1:  # the others wait here too
            torch.distributed.broadcast(asked, 0)
        self.first, self.left, self.rounds = False, int(asked), int(asked)
        self.began = time.perf_counter()
        return self.rounds == 0, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    line, work = Line(), Workload.load(WORK)
    x, y = work.data()
    users = [
        PyTorchTensorDataset((own.to(DEVICE), labels.to(DEVICE)), user_id=str(number))
        for number, (own, labels) in enumerate(zip(x.split(work.samples), y.split(work.samples), strict=True))
    ]
    data = FederatedDataset(lambda id: users[id], MinimizeReuseUserSampler(range(work.clients)))
    module = Module(work.module())
    start = [leaf.detach().cpu().clone() for leaf in module.parameters()]
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,
            train_cohort_size=work.clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=work.batch),
        callbacks=[Turns(line, start)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
    for other in OTHERS:
        other.wait()
