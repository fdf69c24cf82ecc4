"""nginx that looks like S3; see `transfer_servers`."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from transfer_material import PIECE, files_in, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transfer_material import Digests

START_S = 20.0
_KEYS = {"access_key": "AKIDBENCH", "secret_key": "bench-secret"}
_XML = '<?xml version="1.0" encoding="UTF-8"?>'

CONFIG = """
daemon off; {user} worker_processes 2; pid {root}/nginx.pid; error_log {root}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 10000000; default_type binary/octet-stream;
  client_max_body_size 0; client_body_buffer_size 256k; client_body_temp_path {root}/temp;
  proxy_temp_path {root}/temp; fastcgi_temp_path {root}/temp;
  uwsgi_temp_path {root}/temp; scgi_temp_path {root}/temp;
  map "$request_method?$args" $kind {{
    default read;
    "~^PUT" store;
    "~^POST[?].*uploads" begin;
    "~^POST" complete;
    "~^DELETE[?].*uploadId" abort;
    "~^DELETE" drop;
    "~^GET[?].*list-type" list;
  }}
  map $request_uri $bucket {{ "~^/(?<b>[^/?]+)" $b; }}
  map $request_uri $key {{ "~^/[^/?]+/(?<k>[^?]*)" $k; }}
  map $arg_partNumber $place {{ "" objects; default parts; }}
  map $arg_partNumber $part {{ "" ""; default /$arg_partNumber; }}
  server {{
    listen 127.0.0.1:{port};
    if ($kind = begin) {{ rewrite ^ /-begin last; }}
    if ($kind = complete) {{ rewrite ^ /-complete last; }}
    if ($kind = list) {{ rewrite ^ /-lists/$bucket last; }}
    if ($kind = abort) {{ return 204; }}
    if ($kind = drop) {{ rewrite ^/(.*)$ /-store/objects/$1 last; }}
    set $clash "";
    if (-f {root}/objects$uri) {{ set $clash "$kind$http_if_none_match$http_if_match"; }}
    if ($clash ~ "^store.") {{ rewrite ^ /-clash last; }}
    if ($kind = store) {{ rewrite ^/(.*)$ /-store/$place/$1$part last; }}
    location = /-begin {{ default_type application/xml; return 200 '{xml}<InitiateMultipartUploadResult><Bucket>$bucket</Bucket><Key>$key</Key><UploadId>1</UploadId></InitiateMultipartUploadResult>'; }}
    location = /-complete {{ default_type application/xml; return 200 '{xml}<CompleteMultipartUploadResult><Bucket>$bucket</Bucket><Key>$key</Key><ETag>"$request_id-1"</ETag></CompleteMultipartUploadResult>'; }}
    location ^~ /-lists/ {{ root {root}; default_type application/xml; try_files $uri @empty; }}
    location @empty {{ default_type application/xml; return 200 '{empty}'; }}
    location ^~ /-store/ {{
      alias {root}/; dav_methods PUT DELETE; create_full_put_path on; error_page 404 = @none;
      add_header ETag '"$request_id"' always;
      add_header x-amz-checksum-crc64nvme $http_x_amz_checksum_crc64nvme always;
    }}
    location @none {{ return 204; }}
    location = /-clash {{ keepalive_timeout 0; return 412; }}
    location ~ ^/[^/]+/?$ {{ return 200; }}
    location / {{ root {root}/objects; try_files $uri @joined; }}
    location @joined {{
      if (!-f {root}/parts$uri/1) {{ return 404; }}
      root {root}/expected; rewrite ^/.*/([^/]+)$ /$1 break;
    }}
  }}
}}
"""  # noqa: E501  (nginx's strings do not break)


class Sink:
    """nginx; see the module.

    An object whose parts have come but are not joined yet is answered for by the file that it
    will equal: clients ask for the size of what they have sent.
    """

    name = "nginx sink"

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.endpoint = f"http://127.0.0.1:{port}"
        self.access_key, self.secret_key = _KEYS["access_key"], _KEYS["secret_key"]
        self._made = 0

    def make_bucket(self) -> str:
        self._made += 1
        bucket = f"bench-{self._made}"
        (self.root / "objects" / bucket).mkdir()
        return bucket

    def drop_bucket(self, bucket: str) -> None:
        for kind in ("objects", "parts"):
            shutil.rmtree(self.root / kind / bucket, ignore_errors=True)
        (self.root / "-lists" / bucket).unlink(missing_ok=True)

    def fill(self, bucket: str, folder: Path) -> None:
        objects = self.root / "objects" / bucket
        objects.rmdir()
        objects.symlink_to(folder)
        for path in files_in(folder):
            expected = self.root / "expected" / path.name
            expected.unlink(missing_ok=True)
            expected.symlink_to(path)
        self._list(bucket)

    def settle(self, bucket: str) -> None:
        """Join parts to objects, and write the answer to ListObjectsV2."""
        objects, parts = self.root / "objects" / bucket, self.root / "parts" / bucket
        for folder in [path for path in parts.rglob("*") if (path / "1").is_file()]:
            target = objects / folder.relative_to(parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            first = folder / "1"
            with first.open("ab") as whole:
                for number in range(2, len(list(folder.iterdir())) + 1):
                    with (folder / str(number)).open("rb") as part:
                        shutil.copyfileobj(part, whole, PIECE)
                    (folder / str(number)).unlink()
            first.rename(target)
        shutil.rmtree(parts, ignore_errors=True)
        self._list(bucket)

    def _list(self, bucket: str) -> None:
        paths = {key: self.root / "objects" / bucket / key for key in self.keys(bucket)}
        (self.root / "-lists" / bucket).write_text(listing(bucket, paths))

    def keys(self, bucket: str) -> list[str]:
        objects = self.root / "objects" / bucket
        return sorted(str(path.relative_to(objects)) for path in files_in(objects))

    def digests(self, bucket: str, keys: list[str]) -> Digests:
        objects = self.root / "objects" / bucket
        return {key: sha256(objects / key) for key in keys if (objects / key).is_file()}


def listing(bucket: str, paths: Mapping[str, Path]) -> str:
    """Return ListObjectsV2's answer; an ETag is what nginx says, since clients compare."""
    entries = ""
    for key, path in sorted(paths.items()):
        info = path.stat()
        etag = f"&quot;{int(info.st_mtime):x}-{info.st_size:x}&quot;"
        entries += f"<Contents><Key>{escape(key)}</Key><ETag>{etag}</ETag>"
        entries += "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        entries += f"<Size>{info.st_size}</Size></Contents>"
    head = f"<Name>{bucket}</Name><KeyCount>{len(paths)}</KeyCount><IsTruncated>false</IsTruncated>"
    return f"{_XML}<ListBucketResult>{head}{entries}</ListBucketResult>"


@contextlib.contextmanager
def nginx(root: Path) -> Iterator[Sink]:
    """Run a sink that keeps everything in a new folder.

    Raises:
        RuntimeError: nginx is not installed, or does not start.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise RuntimeError("nginx is not installed (Debian: nginx-light)")
    for name in ("objects", "parts", "expected", "temp", "-lists"):
        (root / name).mkdir(parents=True)
    port = free_port()
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    text = CONFIG.format(root=root, port=port, user=user, xml=_XML, empty=listing("bench", {}))
    (root / "nginx.conf").write_text(text)
    command = [program, "-p", str(root), "-e", str(root / "error.log")]
    with subprocess.Popen([*command, "-c", str(root / "nginx.conf")]) as process:
        try:
            wait_for(port, process, root / "error.log")
            yield Sink(root, port)
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when a port answers.

    Raises:
        RuntimeError: It does not; with the end of the log.
    """
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    words = log.read_text()[-500:] if log.exists() else ""
    raise RuntimeError(f"nginx did not start: {words}")
