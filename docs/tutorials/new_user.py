"""From data to predictions: rotated clothes, an own method, a report, the trained model.

    python docs/tutorials/new_user.py --data FOLDER --output runs/new-user

FOLDER holds fashion-mnist.npz, with arrays x_train, y_train, x_test and y_test.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import rotate

import cfl
from cfl import plugins, tree
from cfl.report import write
from cfl.streams.avalanche import from_benchmark

ANGLES = (0, 30, 60)
NAMES = "T-shirt trouser pullover dress coat sandal shirt sneaker bag boot"


def rotated_fashion(path, images):
    """A stream of the same clothes, turned further in each task.

    images: number of train images of a task.
    """
    with np.load(path) as file:
        sizes = {
            "x_train": images,
            "y_train": images,
            "x_test": 1000,
            "y_test": 1000,
        }
        parts = {name: file[name][:size] for name, size in sizes.items()}

    def turned(which, angle):
        """Images (n, 1, 28, 28) uint8 and labels (n,)."""
        x, y = parts[f"x_{which}"], parts[f"y_{which}"]
        x = rotate(x, angle, axes=(1, 2), reshape=False, order=1)
        return torch.from_numpy(x)[:, None], torch.from_numpy(y).long()

    from avalanche.benchmarks import tensors_benchmark  # after cfl

    benchmark = tensors_benchmark(
        train_tensors=[turned("train", angle) for angle in ANGLES],
        test_tensors=[turned("test", angle) for angle in ANGLES],
        task_labels=[0] * len(ANGLES),  # one head for all tasks
    )
    return from_benchmark(benchmark, name="rotated-fashion")


@plugins.strategies.register("blended")
@dataclass(frozen=True)
class Blended(cfl.Strategy):
    """FedAvg whose model is blended, after each task, with the one before it."""

    share: float = cfl.option(
        0.5, "share of the new model", above=0.0, at_most=1.0
    )

    def serve(self, server, task):
        return self.blend(server)

    def begin_task(self, server, task, model):
        blend = self.blend(server)
        return {**server, "params": blend, "before": blend}

    def blend(self, server):
        """Mean of the model now and before the task; in task 0 the model itself."""
        if "before" not in server:
            return server["params"]
        new, old = self.share, 1 - self.share
        return tree.map(
            lambda a, b: new * a + old * b, server["params"], server["before"]
        )


def main(arguments=None):
    """Train three methods, write a report and predict.

    Returns the accuracy on each task of the loaded model.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of fashion-mnist.npz")
    add("--output", type=Path, required=True, help="folder of runs and report")
    add("--images", type=int, default=4000, help="train images of a task")
    add("--rounds", type=int, default=15, help="rounds of a task")
    given = parser.parse_args(arguments)

    stream = rotated_fashion(given.data / "fashion-mnist.npz", given.images)
    settings = [
        f"rounds={given.rounds}",
        "partition.name=dirichlet",
        "partition.alpha=1.0",
        "partition.clients=10",
        "cohort=5",
        "local.batch_size=20",
        "local.lr=0.05",
        "model.name=cnn",
        "model.width=8",
        "model.hidden=64",
    ]
    for method in ("fedavg", "blended", "fot"):
        config = cfl.resolve(
            "rotated-fashion", method=method, overrides=settings
        )
        result = cfl.run(config, stream=stream, output=given.output / method)
        acc, fgt = result.metrics["acc"], result.metrics["fgt"]
        print(f"{method:8} ACC {acc:.3f}  FGT {fgt:.3f}")
        print(np.round(100 * result.accuracy_matrix, 1))

    write.files([given.output], [given.output / "report.html"])
    print("report in", given.output / "report.html")

    model = cfl.load(given.output / "blended")
    x, y = stream.tasks[0].test.gather(range(5))
    names = NAMES.split()
    for guess, label in zip(model.predict(x).tolist(), y.tolist(), strict=True):
        print(f"predicted {names[guess]:9} true {names[label]}")
    return model.accuracies(stream)


if __name__ == "__main__":
    main()
