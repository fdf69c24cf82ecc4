"""One transfer at a time, as `bench_transfer` measures it: run, time, compare, clean up."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import transfer_table as tables
from transfer_material import files_in, sha256
from transfer_peers import OURS, Client, Job

from mxconvert.bench.process import Usage, run_process
from mxconvert.doctor.machine import load_average

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transfer_material import Digests, Material
    from transfer_servers import Server

CASES = {"push": "push", "memory": "load", "tmpfs": "pull", "disk": "pull"}


class Failed(Exception):  # noqa: N818  (a fact to report)
    """A client did not do its job; the message says what went wrong."""


@dataclass
class Bench:
    """Everything that the runs share, and what they found.

    Attributes:
        venvs: Where the peers live.
        folders: Where downloads go, by case.
        samples: One for each run with the model.
        starts: One for each run with the small model.
        missing: Why a client has no figures, by what it should have done.
    """

    venvs: Path
    folders: dict[str, Path]
    samples: list[tables.Sample] = field(default_factory=list)
    starts: list[tables.Sample] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self, client: Client, job: Job, server: Server, *more: str) -> tuple[Usage, str]:
        """Run a client's process to the end.

        Raises:
            Failed: With its last words.
        """
        keys = (server.access_key, server.secret_key)
        env = client.environment(self.venvs, job.endpoint, keys) | dict.fromkeys(more, "1")
        with tempfile.TemporaryFile() as log:
            usage = run_process(client.command(self.venvs, job), env=env, log=log)
            log.seek(0)
            words = log.read().decode("utf-8", "replace")
        if usage.status:
            raise Failed(f"status {usage.status}: {' '.join(words.split())[-400:]}")
        return usage, words

    def push(self, client: Client, server: Server, material: Material) -> Usage:
        """Upload into a new bucket, compare, and remove it."""
        bucket = server.make_bucket()
        try:
            job = self.job("push", material.folder, material, server, bucket)
            usage, _ = self.run(client, job, server)
            server.settle(bucket)
            keys = {key: name for key in server.keys(bucket) if (name := material.name_of(key))}
            arrived = server.digests(bucket, list(keys))
            compare({keys[key]: digest for key, digest in arrived.items()}, material)
        finally:
            server.drop_bucket(bucket)
        return usage

    def pull(
        self, case: str, client: Client, server: Server, material: Material
    ) -> tuple[Usage, float]:
        """Download into a new folder, compare, and remove it; also return seconds of fsync."""
        target = self.folders[case] / "target"
        shutil.rmtree(target, ignore_errors=True)
        bucket = material.buckets[client.ours]
        if not client.ours:
            for name in material.digests:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            job = self.job("pull", target, material, server, bucket)
            if not material.small:
                warm_pages(2 * material.num_bytes)
            usage, _ = self.run(client, job, server)
            seconds = sync(target) if case == "disk" else 0.0
            compare(digests(target, material.digests), material)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        return usage, seconds

    def load(self, client: Client, server: Server, material: Material, *, check: bool) -> Usage:
        """Download into memory; with ``check``, compare instead of measuring."""
        bucket = material.buckets[client.ours]
        job = self.job("load", material.folder, material, server, bucket)
        if check and client.by_tensors:
            return self.run(client, job, server)[0]
        if not material.small:
            warm_pages(2 * material.num_bytes)
        usage, words = self.run(client, job, server, *(["TRANSFER_CHECK"] if check else []))
        if check:
            compare(json.loads(words.splitlines()[-1]), material)
        return usage

    @staticmethod
    def job(action: str, folder: Path, material: Material, server: Server, bucket: str) -> Job:
        """Return a job on a server."""
        return Job(
            action=action,
            folder=folder,
            listing=material.listing,
            endpoint=server.endpoint,
            bucket=bucket,
        )

    def measure(
        self, case: str, client: Client, server: Server, material: Material, number: int
    ) -> None:
        """Run a client once and keep the figures, or why there are none."""
        load, seconds = load_average(), 0.0
        try:
            if case == "push":
                usage = self.push(client, server, material)
            elif case == "memory":
                if not number:
                    self.load(client, server, material, check=True)
                usage = self.load(client, server, material, check=False)
            else:
                usage, seconds = self.pull(case, client, server, material)
        except Failed as error:
            self.missing[f"{client.name}, {server.name}, {tables.WORDS[case]}"] = str(error)
            return
        sample = tables.Sample(
            server=server.name,
            case=case,
            client=client.name,
            number=number,
            num_bytes=material.num_bytes,
            wall_s=usage.wall_s,
            synced_s=usage.wall_s + seconds,
            cpu_s=usage.cpu_s,
            peak_mb=usage.tree_peak_bytes / 10**6,
            load=load,
        )
        (self.starts if material.small else self.samples).append(sample)

    def load_ours(self, server: Server, materials: Iterable[Material]) -> bool:
        """Push each model once, for pulls of ours: it lays files out in its own way."""
        try:
            for material in materials:
                material.buckets[True] = bucket = server.make_bucket()
                self.run(OURS, self.job("push", material.folder, material, server, bucket), server)
                server.settle(bucket)
        except Failed as error:
            self.missing[f"{OURS.name}, {server.name}, down"] = f"its push failed: {error}"
            return False
        return True


def digests(folder: Path, names: Iterable[str]) -> Digests:
    """Return the SHA-256 of files, as far as they are there."""
    present = [name for name in names if (folder / name).is_file()]
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(present, pool.map(lambda name: sha256(folder / name), present), strict=True)
        )


def compare(found: Digests, material: Material) -> None:
    """Compare what arrived with the source.

    Raises:
        Failed: Something is missing or has other bytes.
    """
    wrong = [name for name, digest in material.digests.items() if found.get(name) != digest]
    if wrong:
        raise Failed(f"missing or other bytes: {', '.join(wrong[:3])} ({len(wrong)} files)")


def warm_pages(num_bytes: int) -> None:
    """Touch memory and free it, so that free pages are backed by the machine below."""
    code = (
        "import mmap, sys\n"
        "m = mmap.mmap(-1, int(sys.argv[1]))\n"
        "m.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "for i in range(0, len(m), mmap.PAGESIZE): m[i] = 1"
    )
    run_process([sys.executable, "-I", "-S", "-c", code, str(num_bytes)])


def sync(folder: Path) -> float:
    """Wait until the disk has all files of a folder; return the seconds."""
    code = "import os, sys\nfor f in sys.argv[1:]: os.fsync(os.open(f, os.O_RDONLY))"
    paths = [str(path) for path in files_in(folder)]
    return run_process([sys.executable, "-I", "-S", "-c", code, *paths]).wall_s
