"""Push and pull: ours beside other S3 clients, against two servers on loopback.

    python scripts/bench_transfer.py [--size 2GiB] [--repeat 3] [--json FILE] [--venvs DIR]
        [--servers sink seaweedfs] [--cases push memory tmpfs disk] [--clients NAME...]

Makes a virtual environment for each peer below ``--venvs`` (0.4 GB together, kept for the next
time) and one model of ``--size`` in ``--files`` shards, written by ``mxconvert quantize``. Every
client moves that folder as a process of its own: up from tmpfs, down to memory (the bytes are
kept there; only libraries can), to tmpfs and to a disk; 16 requests at once, parts of 16 MiB
(see `transfer_peers`). The rounds alternate: each client runs once per round, in an order that
turns. Before each download the kernel is given free memory that it has touched before: on a
virtual machine a page that was given back costs several times the copy into it, and who ran
first or started slowly would pay. ``sink`` is an nginx that only looks like S3, so that the
client is the bound; ``seaweedfs`` is a real server, which bounds uploads (see
`transfer_servers`).

A row gives medians over the rounds: MB/s (10^6 bytes per second of the whole process), for the
disk also until fsync of all files returned, CPU seconds per GB (10^9) of the client's processes
and not the server's, and the most memory that they ever held together. A model of a few kB is
moved too, right before each run: what that takes is the start of a client, and the columns
"without start" (for the disk, with fsync) are what a long transfer sees.

After each run, outside of the time, the SHA-256 of everything that arrived is compared with the
source's; bytes kept in memory are compared once per client, in a run of its own. A client that
cannot be installed, fails, or delivers other bytes is listed with the reason.

Needs about 6 times ``--size`` in ``--folder`` and 5 times on ``--disk`` for a short while.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import transfer_table as tables
from transfer_material import make_materials, parse_size
from transfer_peers import CLIENTS, OURS, Client, Unavailable
from transfer_runs import CASES, Bench
from transfer_servers import GONE, SERVERS

from mxconvert.bench.workspace import workspace
from mxconvert.doctor.machine import cpu_model, processors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transfer_servers import Server

VENVS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxconvert-transfer"


def install(bench: Bench, names: Iterable[str]) -> Iterator[Client]:
    """Yield the clients that can be had."""
    bench.venvs.mkdir(parents=True, exist_ok=True)
    for client in (CLIENTS[name] for name in names):
        print(f"{client.name}: installing below {bench.venvs}", file=sys.stderr)
        try:
            client.install(bench.venvs)
        except (Unavailable, subprocess.SubprocessError, OSError) as error:
            bench.missing[client.name] = str(error)
        else:
            yield client


def measure_server(
    bench: Bench, server: Server, clients: list[Client], cases: list[str], args: argparse.Namespace
) -> Iterator[None]:
    """Run all rounds against a server; yield after each case of a round."""
    for material in args.materials:
        material.buckets[False] = server.make_bucket()
        server.fill(material.buckets[False], material.folder)
    pulls = any(client.ours for client in clients) and set(cases) - {"push"}
    ready = bool(pulls) and bench.load_ours(server, args.materials)
    for number in range(args.repeat):
        for case in cases:
            turn = number % max(len(clients), 1)
            for client in clients[turn:] + clients[:turn]:
                if CASES[case] not in client.actions:
                    continue
                if client.ours and case != "push" and not ready:
                    continue
                said = f"{server.name}, round {number + 1}, {tables.WORDS[case]}: {client.name}"
                print(said, file=sys.stderr, flush=True)
                for material in reversed(args.materials):
                    bench.measure(case, client, server, material, number)
            yield


def report(bench: Bench, versions: dict[str, str], args: argparse.Namespace) -> dict[str, object]:
    """Return everything as a document."""
    found = tables.rows(bench.samples, bench.starts)
    return {
        "cpu": cpu_model(),
        "processors": processors(),
        "bytes": {material.folder.name: material.num_bytes for material in args.materials},
        "versions": versions,
        "rows": [asdict(row) for row in found],
        "goals": [asdict(g) | {"met": g.met} for g in tables.goals(found, OURS.name)],
        "missing": bench.missing,
        "samples": [asdict(sample) for sample in bench.samples],
        "starts": [asdict(sample) for sample in bench.starts],
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=parse_size, default="2GiB", help="of the model")
    parser.add_argument("--files", type=int, default=8, help="shards")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--venvs", type=Path, default=VENVS, help=f"default {VENVS}")
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--clients", nargs="*", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def main() -> None:
    """Run from the command line."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up
    with ExitStack() as stack:
        work, disk = (stack.enter_context(workspace(f)) for f in (args.folder, args.disk))
        bench = Bench(args.venvs.resolve(), {"tmpfs": work, "disk": disk})
        clients = list(install(bench, args.clients))
        versions = {client.name: client.version(bench.venvs) for client in clients}
        args.materials = list(make_materials(work, disk, args.size, args.files))
        for name in args.servers:
            try:
                with SERVERS[name](work / name) as server:
                    for _ in measure_server(bench, server, clients, args.cases, args):
                        if args.json:  # it takes minutes: what is there is kept
                            document = report(bench, versions, args)
                            args.json.write_text(json.dumps(document, indent=2) + "\n")
            except GONE as error:
                bench.missing[name] = str(error)
            shutil.rmtree(work / name, ignore_errors=True)
    show(bench, versions, args)


def show(bench: Bench, versions: dict[str, str], args: argparse.Namespace) -> None:
    """Print the tables."""
    found = tables.rows(bench.samples, bench.starts)
    size = f"{args.materials[0].num_bytes:,} bytes in {len(args.materials[0].digests)} files"
    print(f"{cpu_model()}, {processors():.0f} processors, {size}, {args.repeat} rounds\n")
    print("\n".join(tables.table(found, versions)))
    if wanted := list(tables.goals(found, OURS.name)):
        print("\n" + "\n".join(tables.goal_table(wanted)))
    for what, why in bench.missing.items():
        print(f"\nnot available: {what}: {why}")


if __name__ == "__main__":
    main()
