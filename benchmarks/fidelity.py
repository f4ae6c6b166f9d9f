"""Where papers, their codes and `cfl` differ: what the differences change (docs/fidelity.md).

    python benchmarks/fidelity.py [--parts coverage dp ...] [--output benchmarks/results/fidelity]

coverage: share of the energy that a subspace really covers when FOT's rank rule, on a Gaussian sketch, says 0.94.
ranks: directions that the three rank rules take of one spectrum; FOT with each of them.
intervals: differences from FOT's Table 1 over three seeds, by the stored runs of Permuted MNIST.
dp: FOT's appendix H for epsilon 5 and delta 1e-5: what its noise gives, and what noise leaves of a sketch.
sizes: bytes of FOT's models, sketches and bases, beside its Table 5 and the arithmetic of its Table 13.
bias: outputs of the first task after training on the second, with biases projected and free.
precision: FedAvg and FOT with products in float32 and in bfloat16, and what FOT's guarantee is worth in either.
gpm: one direction too few in the first task, as in GPM's code.
overlap: how much a client's basis of GPM covers of other clients' inputs.
encoding: RGO's feature encoding, with RGO and by itself.
scale: FedSOL's scale by layer (paper) and by output axis (code).
sharpness: which rho of FedSAM lets the network of FedSOL's MNIST learn.
alias: a penalty whose reference is the weights themselves; inputs and logits cast to integers.
projection: FedProj's projection with its condition, and without as eq. 14 prints it.

Each part prints the tables of the page, and writes them to <part>.json. `scale`, `sharpness` and `overlap` need MNIST
and `alias` CIFAR-100 (CFL_DATA); all else comes with scikit-learn or is drawn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from fidelity_baselines import encoding, gpm, overlap
from fidelity_fot import bias, coverage, dp, intervals, precision, ranks, sizes
from fidelity_local import alias, projection, scale, sharpness
from fidelity_tables import Table, markdown
from host import about

FOLDER = Path("benchmarks/results/fidelity")
PARTS: dict[str, Callable[[], list[Table]]] = {
    part.__name__: part
    for part in (
        coverage, ranks, intervals, dp, sizes, bias, precision, gpm, overlap, encoding, scale, sharpness, alias,
        projection,
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the figures, a file a part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        tables = PARTS[part]()
        for table in tables:
            print(f"\n### {table.title}\n\n{markdown(table)}", flush=True)
        stored = {
            "command": f"python benchmarks/fidelity.py --parts {part}",
            "date": datetime.date.today().isoformat(),
            "machine": about("torch"),
            "tables": [table._asdict() for table in tables],
        }
        (options.output / f"{part}.json").write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
