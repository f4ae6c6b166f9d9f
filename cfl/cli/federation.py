"""The commands of a federation on real nodes: `cfl-run serve` and `cfl-run join`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cfl.assembly.resolve import resolve
from cfl.cli.app import DataRoot, app, display
from cfl.experiments.compare import alone
from cfl.report import tables
from cfl.runtime.model_file import check_described
from cfl.runtime.run_folder import read_json

Clients = Annotated[str, typer.Option(help="Clients of this node, such as 3 or 0-3,7.")]


@app.command(epilog="Example: cfl-run serve config.yaml --wait-for 10")
def serve(
    config: Path,
    output: Annotated[Path | None, typer.Option(help="Output folder (default: a folder under runs/).")] = None,
    address: Annotated[str, typer.Option(help="Address of the SuperLink, host:port.")] = "127.0.0.1:9092",
    certificates: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, server.crt and server.key (default: no TLS).")
    ] = None,
    node_keys: Annotated[
        Path | None, typer.Option(help="Folder with the public keys, *.pub, of the nodes that may join (default: any).")
    ] = None,
    running: Annotated[bool, typer.Option("--running", help="Use the SuperLink that runs at the address.")] = False,
    wait_for: Annotated[int, typer.Option(min=0, show_default=False, help="Clients to wait for (default: all).")] = 0,
    data_root: DataRoot = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
) -> None:
    """Serve a run to nodes, which join with 'cfl-run join'.

    CONFIG: a config.yaml, as 'cfl-run train' writes it.
    """
    from cfl.flower import superlink  # loads Flower

    settings = resolve(file=config)
    check_described(config, settings.benchmark, but=("stream",))  # the nodes have the data
    folder = output or Path("runs") / alone(settings)
    try:
        superlink.serve(
            settings, folder, address, certificates=certificates, node_keys=node_keys, running=running,
            wait_for=wait_for, data_root=data_root, resume=resume,
        )  # fmt: skip
    except KeyboardInterrupt:
        again = " and --resume" if (folder / "rounds.jsonl").exists() else ""
        print(f"interrupted; continue with the same command{again}", file=sys.stderr)
        raise
    display(*tables.run(read_json(folder / "metrics.json"), settings.title, folder))


@app.command(epilog="Example: cfl-run join 127.0.0.1:9092 --clients 0-3")
def join(
    address: str,
    clients: Clients,
    folder: Annotated[Path, typer.Option(help="Folder for the states of the node's clients.")] = Path("cfl-node"),
    data: Annotated[
        str | None, typer.Option(help="The node's own data: a folder with task0.npz, ..., or a benchmark.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the node in messages (default: the folder's).")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate of the authority that signed the server's (default: no TLS).")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the node, if the server asks for one.")] = None,
    signing_keys: Annotated[
        Path | None,
        typer.Option(help="Folder with the node's private keys (3 of client 3) and all public ones (3.pub)."),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Join the federation at ADDRESS, host:port, as a node, until interrupted.

    ADDRESS: that of the server's SuperLink.
    """
    from cfl.flower import supernode  # loads Flower

    supernode.join(
        address, folder, clients, name=name, data=data, data_root=data_root, certificate=certificate, key=key,
        signing_keys=signing_keys,
    )  # fmt: skip
