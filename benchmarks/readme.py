"""Renew README's table and picture of Permuted MNIST from the stored runs.

    python benchmarks/readme.py

The picture is what `cfl-run report` draws of the runs in the table, to docs/images/permuted-mnist.png.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from cfl.experiments import reproduce
from cfl.experiments.compare import Run
from cfl.experiments.reproduce import Cell
from cfl.report import write
from cfl.report.reproduced import text

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results" / "runs", HERE.parent / "README.md"
PICTURE = HERE.parent / "docs" / "images" / "permuted-mnist.png"
HEAD = "| partition | method | ACC | paper's | FGT | paper's | seeds |\n|---|---|---|---|---|---|---|\n"


def cells() -> dict[Cell, list[Run]]:
    """Cells of FOT's Table 1 on Permuted MNIST that have stored runs at the paper's length, with these runs."""
    table = reproduce.table("fot-table1")
    found = table.runs(["PMNIST"], range(3), "paper", [], RUNS / "missing", [RUNS])
    finished = {cell: [run for run in runs if run.results()] for cell, runs in found.items()}
    return {cell: runs for cell, runs in finished.items() if runs}


def lines(found: dict[Cell, list[Run]]) -> Iterator[str]:
    """Rows of the table, in Markdown."""
    for cell, runs in found.items():
        own = reproduce.scores(("acc", "fgt"), runs)
        texts = [shown for name, score in own.items() for shown in (text(score), text(cell.paper[name]))]
        method = "FedAvg" if cell.row == "FL" else cell.row.removesuffix("+FL")
        yield f"| {' | '.join((cell.part, method, *texts, str(len(runs))))} |\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = cells()
    before, rest = PAGE.read_text(encoding="utf-8").split(HEAD)
    after = rest.partition("\n\n")[2]
    write.files([run.folder for runs in found.values() for run in runs], [PICTURE], highlight="fot")
    PAGE.write_text(f"{before}{HEAD}{''.join(lines(found))}\n{after}", encoding="utf-8")
    print(f"{len(found)} rows and {PICTURE.name} renewed")


if __name__ == "__main__":
    main()
