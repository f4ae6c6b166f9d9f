"""Run twenty short runs and print a digest of each metrics.json, to compare two versions to the byte.

    python benchmarks/digests.py FOLDER [--compare OTHER]

Ten strategies, eight regularizers, four engines, secure aggregation and differential privacy are among the runs; one
needs MNIST and Fashion-MNIST in the folder that CFL_DATA names. Run the script once for each version, on one machine;
--compare names the folder of the other version and exits with 1 on a difference. The working directory is imported
first, so the script also measures another checkout: cd there and call it.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

SHORT = "tasks=3 rounds=3 cohort=5 partition.clients=8 local.batch_size=8 workers=2"
PRIVATE = "dp.noise_multiplier=1 agg.weights=uniform"
RUNS = {
    "fedavg": "permuted-digits --method fedavg",
    "fot": "permuted-digits --method fot",
    "fot-split": "split-digits --method fot --engine vmapped block=3",
    "gpm": "permuted-digits --method gpm --engine pool+vmapped block=3",
    "ewc": "permuted-digits --method ewc --engine vmapped block=2",
    "er": "split-digits --method er --engine pool block=2",
    "rgo": "split-digits --method rgo",
    "glfc": "split-digits --method glfc --engine vmapped block=4",
    "lwf": "split-digits --method lwf",
    "joint": "split-digits --method joint --engine vmapped block=3",
    "single-task": "permuted-digits --method single_task",
    "fedsol": "permuted-digits --method fot+fedsol --engine vmapped block=3",
    "scaffold": "permuted-digits --method ewc+scaffold",
    "fedprox-fednova": "split-digits --method fot+fedprox+fednova local.optimizer=adam local.lr=0.002",
    "fedproj": "fashion-mnist --method fedproj --scale smoke tasks=1 cohort=2 partition.name=iid",
    "fedntd": "split-digits --method gpm+fedntd --engine pool block=3",
    "fedavgm-moon": "permuted-digits --method fot+fedavgm+moon local.momentum=0.9 local.weight_decay=0.001",
    "secagg": "permuted-digits --method fot secagg=full drop_rate=0.2 partition.name=shards",
    "dp-client": f"permuted-digits --method fot dp.level=client sampling=poisson {PRIVATE}",
    "dp-example": f"permuted-digits --method fedavg dp.level=example --engine vmapped block=3 {PRIVATE}",
}


def arguments(text: str) -> list[str]:
    """Command-line arguments of a run; key=value becomes --set key=value."""
    benchmark, *words = text.split()
    words = [benchmark, *SHORT.split(), *words]
    return [part for word in words for part in (["--set", word] if "=" in word else [word])]


def digest(folder: Path) -> str:
    """A digest of a run's metrics.json without its wall-clock seconds, which no repetition gives again."""
    lines = (folder / "metrics.json").read_text(encoding="utf-8").splitlines()
    kept = "\n".join(line for line in lines if not line.startswith('  "seconds":'))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("--compare", type=Path, help="folder with the runs of another version")
    args = parser.parse_args()
    differ = []
    for name, text in RUNS.items():
        output = args.folder.resolve() / name
        command = [sys.executable, "-c", "from cfl.cli import main; main()", "train", *arguments(text)]
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        own = digest(output)
        if args.compare and own != digest(args.compare / name):
            differ.append(name)
        print(own, name, "DIFFERS" if name in differ else "", flush=True)
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
