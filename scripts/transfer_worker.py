"""Move files to or from S3 with one client library; `bench_transfer` runs it as a process.

    python transfer_worker.py CLIENT push|pull|load LIST FOLDER ENDPOINT BUCKET

CLIENT is boto3, s3fs, s3fs-streams, obstore, obstore-ranges, runai or mxconvert-open, each tuned:
parts of 16 MiB, 16 requests at once, payload unsigned. LIST is a JSON file of keys and sizes.
``load`` keeps the bytes in memory instead of writing them to FOLDER; with ``TRANSFER_CHECK`` in the
environment it prints their SHA-256 as JSON. Runs in the client's own environment, so it imports
nothing but that client.
"""

# ruff: noqa: PLC0415  (loads only the client that runs)

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PART = 16 << 20
REQUESTS = 16
PIECE = 1 << 20
ROOT = Path(__file__).resolve().parents[1]

Listing = dict[str, int]
Loaded = dict[str, list[Any]]
"""The pieces of each file, in order."""


class Boto3:
    """boto3's transfer manager: one pool of requests for all files."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig, create_transfer_manager
        from botocore.config import Config

        config = Config(
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            max_pool_connections=REQUESTS + 4,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self.bucket = bucket
        self.client = boto3.client("s3", endpoint_url=endpoint, config=config)
        tuned = TransferConfig(
            multipart_threshold=PART,
            multipart_chunksize=PART,
            max_concurrency=REQUESTS,
            io_chunksize=PIECE,
            preferred_transfer_client="classic",
        )
        self.manager = create_transfer_manager(self.client, tuned)

    def push(self, folder: Path, files: Listing) -> None:
        with self.manager as manager:
            sent = [manager.upload(str(folder / key), self.bucket, key) for key in files]
            for each in sent:
                each.result()

    def pull(self, folder: Path, files: Listing) -> None:
        with self.manager as manager:
            got = [manager.download(self.bucket, key, str(folder / key)) for key in files]
            for each in got:
                each.result()

    def load(self, files: Listing) -> Loaded:
        buffers = {key: io.BytesIO() for key in files}
        with self.manager as manager:
            got = [manager.download(self.bucket, key, to) for key, to in buffers.items()]
            for each in got:
                each.result()
        return {key: [buffer.getbuffer()] for key, buffer in buffers.items()}


class S3fs:
    """s3fs: some files at once, some ranges or parts at once of each."""

    files_at_once = 4

    def __init__(self, endpoint: str, bucket: str) -> None:
        import s3fs

        self.bucket = bucket
        self.fs = s3fs.S3FileSystem(
            endpoint_url=endpoint,
            default_block_size=PART,
            max_concurrency=REQUESTS // self.files_at_once,
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "s3": {"addressing_style": "path", "payload_signing_enabled": False},
                "max_pool_connections": REQUESTS + 4,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )

    def _remote(self, files: Listing) -> list[str]:
        return [f"{self.bucket}/{key}" for key in files]

    def push(self, folder: Path, files: Listing) -> None:
        local = [str(folder / key) for key in files]
        self.fs.put(local, self._remote(files), batch_size=self.files_at_once, chunksize=PART)

    def pull(self, folder: Path, files: Listing) -> None:
        local = [str(folder / key) for key in files]
        self.fs.get(self._remote(files), local, batch_size=self.files_at_once, chunksize=PART)

    def load(self, files: Listing) -> Loaded:
        got = self.fs.cat(self._remote(files), batch_size=self.files_at_once)
        return {key: [got[f"{self.bucket}/{key}"]] for key in files}


class S3fsStreams(S3fs):
    """s3fs, one request per file at a time: faster, as long as there are many files."""

    files_at_once = REQUESTS


class Obstore:
    """obstore as it is: one stream per file; uploads of some files at once, in parts."""

    files_at_once = 8

    def __init__(self, endpoint: str, bucket: str) -> None:
        import obstore
        from obstore.store import S3Store

        self.library = obstore
        self.store = S3Store(
            bucket,
            endpoint=endpoint,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True, "pool_max_idle_per_host": str(REQUESTS)},
        )

    def push(self, folder: Path, files: Listing) -> None:
        at_once = REQUESTS // self.files_at_once
        options = {"chunk_size": PART, "max_concurrency": at_once}
        with ThreadPoolExecutor(self.files_at_once) as pool:
            list(
                pool.map(
                    lambda key: self.library.put(self.store, key, folder / key, **options), files
                )
            )

    def pull(self, folder: Path, files: Listing) -> None:
        def one(key: str) -> None:
            with (folder / key).open("wb", buffering=0) as file:
                for piece in self._stream(key):
                    write(file.fileno(), piece)

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, files))

    def load(self, files: Listing) -> Loaded:
        with ThreadPoolExecutor(REQUESTS) as pool:
            return dict(
                zip(files, pool.map(lambda key: list(self._stream(key)), files), strict=True)
            )

    def _stream(self, key: str) -> Any:
        return self.library.get(self.store, key).stream(min_chunk_size=PIECE)


class ObstoreRanges(Obstore):
    """obstore, a request for each 16 MiB."""

    def pull(self, folder: Path, files: Listing) -> None:
        opened = {key: os.open(folder / key, os.O_WRONLY | os.O_CREAT, 0o644) for key in files}

        def one(place: tuple[str, int, int]) -> None:
            write(opened[place[0]], self._range(place), place[1])

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, places(files)))
        for file in opened.values():
            os.close(file)

    def load(self, files: Listing) -> Loaded:
        found: Loaded = {key: [] for key in files}
        wanted = places(files)
        with ThreadPoolExecutor(REQUESTS) as pool:
            for place, data in zip(wanted, pool.map(self._range, wanted), strict=True):
                found[place[0]].append(data)
        return found

    def _range(self, place: tuple[str, int, int]) -> Any:
        key, begin, size = place
        return self.library.get_range(self.store, key, start=begin, length=size)


def places(files: Listing) -> list[tuple[str, int, int]]:
    """Return key, begin and size of each range of the files."""
    return [
        (key, begin, min(PART, size - begin))
        for key, size in files.items()
        for begin in range(0, size, PART)
    ]


def write(file: int, data: Any, offset: int | None = None) -> None:
    """Write all of it, here or at an offset."""
    view = memoryview(data)
    while view:
        done = os.write(file, view) if offset is None else os.pwrite(file, view, offset)
        offset = None if offset is None else offset + done
        view = view[done:]


def digest(pieces: list[Any]) -> str:
    """Return the SHA-256 of pieces."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


class RunAI:
    """Run:ai's streamer: all files at once, into a buffer of its own, tensor by tensor."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(REQUESTS)
        os.environ["RUNAI_STREAMER_CHUNK_BYTESIZE"] = str(PART)
        from runai_model_streamer import SafetensorsStreamer

        self.bucket, self.streamer = bucket, SafetensorsStreamer

    def load(self, files: Listing) -> Loaded:
        weights = [f"s3://{self.bucket}/{key}" for key in files if key.endswith(".safetensors")]
        with self.streamer() as streamer:
            streamer.stream_files(weights)
            return {name: [tensor] for name, tensor in streamer.get_tensors()}


class MxConvertOpen:
    """Ours: every tensor checked."""

    def __init__(self, _: str, bucket: str) -> None:
        sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
        import mxconvert

        self.artifact = mxconvert.open(f"s3://{bucket}/model")

    def load(self, _: Listing) -> Loaded:
        with self.artifact as artifact:
            return {name: [tensor] for name, tensor in artifact.tensors()}


CLIENTS: dict[str, Any] = {
    "runai": RunAI,
    "mxconvert-open": MxConvertOpen,
    "boto3": Boto3,
    "s3fs": S3fs,
    "s3fs-streams": S3fsStreams,
    "obstore": Obstore,
    "obstore-ranges": ObstoreRanges,
}


def main(arguments: list[str]) -> None:
    """Move the files."""
    client, action, listing, folder, endpoint, bucket = arguments
    files: Listing = json.loads(Path(listing).read_text())
    moving = CLIENTS[client](endpoint, bucket)
    if action == "load":
        found = moving.load(files)
        if "TRANSFER_CHECK" in os.environ:
            print(json.dumps({key: digest(pieces) for key, pieces in found.items()}))
    elif action == "push":
        moving.push(Path(folder), files)
    else:
        moving.pull(Path(folder), files)


if __name__ == "__main__":
    main(sys.argv[1:])
