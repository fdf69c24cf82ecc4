"""`verify URL`: as thorough as in a folder; listings and ETags are believed in nothing."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mxconvert.cli.store_options import open_client
from mxconvert.digest import ChunkHasher
from mxconvert.errors import ExitStatus, Interrupted, StoreError, StoreFault, UsageError
from mxconvert.events import Advanced, FileFinished, Started, ignore
from mxconvert.manifest import MANIFEST_NAME, TENSORS_NAME, encode_manifest, parse_manifest
from mxconvert.stop import StopToken
from mxconvert.verify import Level, VerifyOptions, VerifyReport, verify_artifact, verify_remote
from tests.support import Tensor, shell
from tests.support.faults import (
    Action,
    ChangeETag,
    CutBody,
    Flip,
    HideKeys,
    IgnoreRange,
    Stall,
    StripChecksums,
    access_denied,
    etag_base64,
    etag_none,
    etag_of_parts,
    etag_random,
    slow_down,
)
from tests.support.publish import artifact_id, publish, put_file, put_ref
from tests.verify_base import (
    DENSE,
    EXPERT,
    INDEX,
    codes,
    edit_json,
    edit_tensors,
    flip,
    header_end,
    make_artifact,
    one,
    rebuild,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.faults import FaultProxy
    from tests.support.seaweed import S3Server

PACKED = "model.layers.1.mlp.experts.3.up_proj.weight_packed"
SCALE = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
CHUNK = 4096
NO_WEIGHTS = "no byte of the weights was compared with a digest"


@pytest.fixture(scope="session")
def published(s3: S3Server, made: Path) -> str:
    """A bucket that holds the artifact below ``m``; read it, never change it."""
    bucket = s3.make_bucket()
    publish(s3, bucket, made)
    return bucket


@pytest.fixture
def store(s3: S3Server, bucket: str) -> tuple[S3Server, str]:
    """The server and a bucket to publish to."""
    return s3, bucket


@pytest.fixture
def check(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VerifyReport]:
    """Verify a URL here, through the proxy."""
    for name, value in proxy.environment().items():
        monkeypatch.setenv(name, value)

    def run(
        url: str, level: str = "digest", jobs: int = 4, retry_for: str = "20s", **options
    ) -> VerifyReport:
        reporter, stop = options.pop("reporter", ignore), options.pop("stop", StopToken())
        chosen = VerifyOptions(level=Level(level), **options)
        with open_client(url, jobs=jobs, retry_for=retry_for, reporter=reporter, stop=stop) as (
            place,
            client,
        ):
            report = verify_remote(client, place, chosen, reporter, stop=stop)
        assert report.ok == (not report.findings)
        json.dumps(report.to_json())
        return report

    return run


def payload(request) -> bool:
    """Whether a request reads a whole file, and not a header."""
    wanted = request.headers.get("range") or ""
    return wanted.startswith("bytes=0-") and wanted != "bytes=0-7"


def rechunk(root: Path, size: int) -> None:
    """Write the manifest again with chunks of another size."""
    manifest = parse_manifest((root / MANIFEST_NAME).read_bytes(), "M")
    entries = []
    for entry in manifest.files:
        hasher = ChunkHasher(size)
        hasher.update((root / entry.path).read_bytes())
        digest = hasher.finish(entry.sha256)
        entries.append(replace(entry, chunks=digest.chunks))
        assert digest.crc64nvme == entry.crc64nvme
    new = replace(manifest, files=tuple(entries), chunk_size=size)
    (root / MANIFEST_NAME).write_bytes(encode_manifest(new))


# ------------------------------------------------------------------------- what is fine


@pytest.mark.parametrize("version", ["", "@latest", "@ID", "@16"])
@pytest.mark.parametrize("level", ["structure", "digest"])
def test_an_untouched_artifact_passes(check, published, made, level, version) -> None:
    found = artifact_id(made)
    version = version.replace("ID", found).replace("16", found[:16])
    url = f"s3://{published}/m{version}"
    report = check(url, level, strict=True)
    assert report.ok
    assert report.notes == ()
    assert report.target == url
    assert report.artifact_id == found
    assert report.location == f"s3://{published}/m/{found[:16]}"
    local = verify_artifact(made, VerifyOptions(level=Level(level)))
    for name in ("files_listed", "tensors", *(["tensors_hashed"] if level == "digest" else [])):
        assert report.counts[name] == local.counts[name]
    if level == "digest":
        assert report.to_json()["counts"] == local.to_json()["counts"]
        assert report.not_checked == local.not_checked


def test_the_folder_itself_and_flat_artifacts_pass(check, s3, published, bucket, made) -> None:
    folder = artifact_id(made)[:16]
    assert check(f"s3://{published}/m/{folder}", strict=True).ok
    publish(s3, bucket, made, "flat", flat=True)
    put_ref(s3, bucket, "flat", "latest", "0" * 64)
    put_file(s3, bucket, f"flat/{'0' * 16}/model.safetensors", b"of another version")
    assert check(f"s3://{bucket}/flat/", strict=True).ok


def test_progress_adds_up(check, published) -> None:
    for options in ({}, {"sample": "2/3"}, {"level": "structure"}):
        events: list = []
        check(f"s3://{published}/m", reporter=events.append, **options)
        (started,) = [event for event in events if isinstance(event, Started)]
        finished = [event for event in events if isinstance(event, FileFinished)]
        advanced = sum(event.num_bytes for event in events if isinstance(event, Advanced))
        assert advanced == started.total_bytes == sum(event.size_bytes for event in finished)
        assert started.total_files == len(finished)
        assert all(event.ok for event in finished)


def test_remote_reads_no_weights(check, proxy, published, made) -> None:
    """Of weight files only headers come over the wire."""
    report = check(f"s3://{published}/m", "structure")
    assert NO_WEIGHTS in report.not_checked
    weights = list(made.glob("*.safetensors"))
    assert len(weights) > 5
    for path in weights:
        assert proxy.sent("GetObject", key=f"*/{path.name}") == header_end(path)
    small = [path for path in made.iterdir() if path not in weights]
    for path in small:
        expected = 0 if path.name.startswith(".") else path.stat().st_size
        assert proxy.sent("GetObject", key=f"*/{path.name}") == expected, path.name
    assert report.counts["bytes_read"] == sum(
        path.stat().st_size
        for path in small
        if path.name != MANIFEST_NAME and not path.name.startswith(".")
    )


def test_full_reads_every_byte_once(check, proxy, published, made) -> None:
    check(f"s3://{published}/m")
    for path in made.glob("*.safetensors"):
        size = path.stat().st_size
        assert proxy.sent("GetObject", key=f"*/{path.name}") == size + header_end(path)


# ------------------------------------------------------- what is damaged at the store


@pytest.mark.parametrize("name", [EXPERT, "config.json", INDEX, TENSORS_NAME])
@pytest.mark.parametrize("level", ["structure", "digest"])
def test_missing_object(check, store, made, name, level) -> None:
    s3, bucket = store
    base = publish(s3, bucket, made)
    s3.delete(bucket, base + name)
    report = check(f"s3://{bucket}/m", level)
    assert one(report, "missing-file").path == name
    assert "not-stored" not in codes(report)


@pytest.mark.parametrize("level", ["structure", "digest"])
def test_wrong_size(check, s3, bucket, made, level) -> None:
    base = publish(s3, bucket, made)
    data = (made / EXPERT).read_bytes()
    put_file(s3, bucket, base + EXPERT, data[:-1])
    finding = one(check(f"s3://{bucket}/m", level), "size")
    assert (finding.path, finding.expected, finding.found) == (
        EXPERT, str(len(data)), str(len(data) - 1),
    )  # fmt: skip


def flip_object(
    s3: S3Server, bucket: str, key: str, offset: int, bit: int = 0, *, digests: bool
) -> None:
    data = bytearray(s3.get(bucket, key))
    data[offset] ^= 1 << bit
    put_file(s3, bucket, key, bytes(data), digests=digests)


@pytest.mark.parametrize("digests", [True, False])
def test_flipped_bit_in_tensor_data(check, s3, bucket, made, digests) -> None:
    """What a store keeps of the wrong bytes gives them away; if it keeps nothing, reading does."""
    base = publish(s3, bucket, made, digests=digests)
    at = header_end(made / EXPERT) + 5
    flip_object(s3, bucket, base + EXPERT, at, digests=digests)
    report = check(f"s3://{bucket}/m", "structure")
    assert codes(report) == ({"store-checksum": 1, "store-note": 1} if digests else {})
    silent = [text for text in report.not_checked if "keeps neither" in text]
    assert len(silent) == (not digests)
    report = check(f"s3://{bucket}/m")
    finding = one(report, "digest")
    assert finding.path == EXPERT
    assert finding.expected in finding.message
    assert finding.found in finding.message
    assert "1 of 1 chunks differ, the first is chunk 0 (bytes 0 to" in finding.message
    assert one(report, "tensor-digest").path == EXPERT
    assert report.counts["files_failed"] == 1


def test_flipped_bit_in_header_padding(check, s3, bucket, artifact) -> None:
    from tests.support import raw_safetensors, read_safetensors

    raw_safetensors(artifact / EXPERT, read_safetensors(artifact / EXPERT), pad=4096)
    rebuild(artifact)
    base = publish(s3, bucket, artifact, digests=False)
    assert check(f"s3://{bucket}/m").ok
    flip_object(s3, bucket, base + EXPERT, header_end(artifact / EXPERT) - 1, digests=False)
    report = check(f"s3://{bucket}/m")
    assert one(report, "digest").path == EXPERT
    assert report.counts["files_failed"] == 1


@pytest.mark.parametrize("name", ["config.json", INDEX, TENSORS_NAME, "tokenizer.json"])
@pytest.mark.parametrize("level", ["structure", "digest"])
def test_flipped_bit_in_a_small_file(check, store, made, name, level) -> None:
    """Without any help of the store, and without reading the weights."""
    s3, bucket = store
    base = publish(s3, bucket, made, digests=False)
    flip_object(s3, bucket, base + name, -1, bit=1, digests=False)
    assert one(check(f"s3://{bucket}/m", level), "digest").path == name


def test_the_old_checksum_over_new_bytes(check, proxy, published, made) -> None:
    """A store whose disks rot still knows the right checksum."""
    proxy.add(Flip(-1), "GetObject", key=f"*/{EXPERT}", where=payload)
    assert check(f"s3://{published}/m", "structure").ok
    assert one(check(f"s3://{published}/m"), "digest").path == EXPERT


# --------------------------------------------------------------- which artifact it is


@pytest.mark.parametrize("version", ["", "@latest", "@ID"])
def test_replaced_manifest(check, store, made, artifact, version) -> None:
    """The manifest of another artifact in the folder: in itself consistent, and not the one."""
    s3, bucket = store
    base = publish(s3, bucket, made)
    edit_json(artifact / "config.json", lambda d: d.update(extra=1))
    rebuild(artifact)
    put_file(s3, bucket, base + MANIFEST_NAME, (artifact / MANIFEST_NAME).read_bytes())
    put_file(s3, bucket, base + "config.json", (artifact / "config.json").read_bytes())
    wanted = artifact_id(made)
    report = check(f"s3://{bucket}/m{version.replace('ID', wanted)}")
    assert codes(report) == {"other-artifact": 1}
    finding = one(report, "other-artifact")
    assert (finding.expected, finding.found) == (wanted, artifact_id(artifact))
    assert report.findings[0].check == "manifest"
    report = check(f"s3://{bucket}/{base}")
    assert one(report, "other-artifact").message.startswith(
        f"the artifact ids differ from the folder's name: expected {wanted[:16]}, found"
    )


def test_damaged_manifest(check, s3, bucket, made) -> None:
    base = publish(s3, bucket, made)
    put_file(s3, bucket, base + MANIFEST_NAME, b"{}")
    report = check(f"s3://{bucket}/m")
    assert codes(report) == {"bad-manifest": 1}
    assert report.artifact_id is None
    report = check(f"s3://{bucket}/m", manifest=made / MANIFEST_NAME)
    assert codes(report) == {"bad-manifest": 1}
    assert report.counts["files_read"] == report.counts["files_listed"]


def test_expected_id_and_given_manifest(check, published, made, shared_source, tmp_path) -> None:
    url, found = f"s3://{published}/m", artifact_id(made)
    assert check(url, "structure", expect_id=found[:20], manifest=made / MANIFEST_NAME).ok
    assert codes(check(url, "structure", expect_id="0" * 16)) == {"other-artifact": 1}
    other = make_artifact(shared_source, tmp_path / "B", scale_rule="floor")
    report = check(url, manifest=other / MANIFEST_NAME)
    assert "; 10 of 17 files differ: expected" in report.findings[0].message
    differing = {f.path for f in report.findings if f.code in ("digest", "size")}
    assert len(differing) == 10


def failure(check, url: str, **options) -> StoreError:
    with pytest.raises(StoreError) as caught:
        check(url, **options)
    assert caught.value.exit_status == ExitStatus.STORE
    return caught.value


def test_no_such_version(check, s3, bucket, made) -> None:
    publish(s3, bucket, made)
    put_ref(s3, bucket, "m", "nothing", "0" * 64)
    for version, words in (
        ("@nothing", "the tag 'nothing' points at 0000"),
        ("@other", "no tag 'other'"),
        ("@" + "1" * 16, "no version 1111"),
    ):
        error = failure(check, f"s3://{bucket}/m{version}")
        assert words in error.message
        assert f"{artifact_id(made)[:16]} (latest)" in error.hint
    assert "nothing was pushed there" in failure(check, f"s3://{bucket}/elsewhere").hint
    assert failure(check, "s3://no-such-bucket-at-all/m").fault is StoreFault.NO_BUCKET


def test_a_bad_pointer(check, s3, bucket, made) -> None:
    publish(s3, bucket, made)
    s3.put(bucket, "m/refs/latest.json", b"{}")
    from mxconvert.errors import VerificationError

    with pytest.raises(VerificationError):
        check(f"s3://{bucket}/m")


# ------------------------------------------- consistent digests, wrong structure


STRUCTURE_FAULTS: dict[str, tuple[str, Callable]] = {
    "index names another file": (
        "index-file",
        lambda a: edit_json(a / INDEX, lambda d: d["weight_map"].update({PACKED: DENSE})),
    ),
    "a scale is lost": (
        "missing-scale",
        lambda a: edit_tensors(a / EXPERT, lambda tensors: tensors.pop(SCALE)),
    ),
    "codes are lost": (
        "missing-codes",
        lambda a: edit_tensors(a / EXPERT, lambda tensors: tensors.pop(PACKED)),
    ),
    "a tensor twice": (
        "duplicate-tensor",
        lambda a: edit_tensors(
            a / EXPERT, lambda t: t.update({"model.norm.weight": Tensor("BF16", (2,), b"abcd")})
        ),
    ),
    "config ignores what is packed": (
        "packed-but-ignored",
        lambda a: edit_json(
            a / "config.json",
            lambda d: d["quantization_config"]["ignore"].append("re:.*experts.3.up_proj$"),
        ),
    ),
    "no quantization_config": (
        "no-quantization-config",
        lambda a: edit_json(a / "config.json", lambda d: d.pop("quantization_config")),
    ),
    "total size": (
        "total-size",
        lambda a: edit_json(a / INDEX, lambda d: d["metadata"].update(total_size=1)),
    ),
}


@pytest.mark.parametrize("name", STRUCTURE_FAULTS)
def test_wrong_structure(check, s3, bucket, artifact, name) -> None:
    """The same findings as in the folder."""
    code, change = STRUCTURE_FAULTS[name]
    change(artifact)
    rebuild(artifact)
    publish(s3, bucket, artifact)
    report = check(f"s3://{bucket}/m", "structure")
    assert code in codes(report)
    local = verify_artifact(artifact, VerifyOptions(level=Level.STRUCTURE))
    assert report.findings == local.findings


def test_nan_scale(check, s3, bucket, artifact) -> None:
    def spoil(tensors: dict) -> None:
        dtype, shape, data = tensors[SCALE]
        tensors[SCALE] = Tensor(dtype, shape, data[:7] + b"\xff" + data[8:])

    edit_tensors(artifact / EXPERT, spoil)
    rebuild(artifact)
    publish(s3, bucket, artifact)
    report = check(f"s3://{bucket}/m")
    assert codes(report) == {"nan-scale": 1}
    assert "scale 7 is 255" in report.findings[0].message


def test_malformed_header(check, s3, bucket, made) -> None:
    base = publish(s3, bucket, made)
    flip_object(s3, bucket, base + EXPERT, 6, bit=7, digests=False)
    assert one(check(f"s3://{bucket}/m", "structure"), "header-too-large").path == EXPERT


# ------------------------------------------------------------------ listings, extras


def test_a_stale_listing_loses_nothing(check, proxy, published) -> None:
    proxy.add(HideKeys(where=lambda _key: True), ("ListObjectsV2", "ListObjects"))
    for level in ("structure", "digest"):
        assert check(f"s3://{published}/m", level, strict=True).ok


def test_a_listing_shows_what_is_gone(check, s3, bucket, proxy, made) -> None:
    """Only what HEAD confirms is an extra object."""
    from tests.support.faults import Respond

    base = publish(s3, bucket, made)
    s3.put(bucket, base + "modeling_ghost.py", b"x")
    gone = Respond(404, "NoSuchKey")
    proxy.add(gone, "HeadObject", key="*/modeling_ghost.py")
    assert check(f"s3://{bucket}/m", "structure", strict=True).ok


def test_extra_objects(check, s3, bucket, made) -> None:
    base = publish(s3, bucket, made)
    for name in ("notes.txt", ".DS_Store", ".git/x.py", "config.json~"):
        s3.put(bucket, base + name, b"x")
    s3.put(bucket, base + "folder/", b"")
    url = f"s3://{bucket}/m"
    report = check(url, "structure")
    assert report.ok
    noted = [".DS_Store", ".git", "config.json~", "notes.txt"]  # a marker of a folder is nothing
    assert [note.path for note in report.notes] == noted
    assert codes(check(url, "structure", strict=True)) == {"extra-file": 4}
    for name in ("modeling_evil.py", "sub/model.safetensors", "sub/tokenizer.json"):
        s3.put(bucket, base + name, b"x")
    report = check(url, "digest")
    assert codes(report) == {"extra-file": 3}
    assert "modeling_evil.py: not in the manifest, and a loader may read it" in (
        report.findings[0].message
    )
    assert check(url, "structure", ignore=("*.py", "sub/")).ok


def test_objects_that_no_folder_can_hold(check, proxy, published) -> None:
    """They are not asked for: a client may make another key of `..`."""
    from tests.support.faults.listing import edit

    class Rename(Action):
        def response(self, exchange, response) -> None:
            edit(response, self._rename)

        def _rename(self, root) -> None:
            for key in root.iter("{http://s3.amazonaws.com/doc/2006-03-01/}Key"):
                key.text = key.text.replace("config.json", "../config.json")
                key.text = key.text.replace("README.md", "a//README.md")

    proxy.add(Rename(), ("ListObjectsV2", "ListObjects"))
    report = check(f"s3://{published}/m", "structure")
    assert codes(report) == {"special-file": 2}
    assert check(f"s3://{published}/m", "structure", ignore=("*",)).ok


def test_a_store_that_does_not_list(check, proxy, published) -> None:
    proxy.add(access_denied(), ("ListObjectsV2", "ListObjects"))
    report = check(f"s3://{published}/m", "structure")
    assert report.ok
    assert any("extra objects were not looked for" in text for text in report.not_checked)


# ------------------------------------------------------------- odd stores, bad lines


@pytest.mark.parametrize(
    "make", [etag_of_parts, etag_base64, etag_none, etag_random, lambda real: f"W/{real}"]
)
def test_odd_etags(check, proxy, published, make) -> None:
    proxy.add(ChangeETag(make))
    assert check(f"s3://{published}/m").ok


def test_a_store_without_checksums(check, proxy, published) -> None:
    """SHA-256 as metadata is still there."""
    proxy.add(StripChecksums())
    report = check(f"s3://{published}/m", "structure")
    assert report.ok
    assert not any("keeps neither" in text for text in report.not_checked)


def test_nothing_is_kept_at_the_store(check, s3, bucket, made) -> None:
    publish(s3, bucket, made, digests=False)
    report = check(f"s3://{bucket}/m", "structure")
    assert report.ok
    (text,) = [text for text in report.not_checked if "keeps neither" in text]
    assert text.startswith("of 17 files")
    assert not any("keeps neither" in text for text in check(f"s3://{bucket}/m").not_checked)


def test_ranges_are_ignored(check, proxy, published) -> None:
    proxy.add(IgnoreRange(), "GetObject")
    assert check(f"s3://{published}/m").ok


@pytest.mark.parametrize("offset", [0, 5000, -1])
def test_a_bit_that_flips_on_the_wire(check, store, proxy, artifact, offset) -> None:
    """The chunk is fetched once more; what was right before and behind it counts once."""
    s3, bucket = store
    rechunk(artifact, CHUNK)
    publish(s3, bucket, artifact)
    bad = proxy.add(Flip(offset), "GetObject", key=f"*/{EXPERT}", where=payload, times=1)
    report = check(f"s3://{bucket}/m")
    assert bad.fired == 1
    assert report.ok, report.findings
    (note,) = report.notes
    assert (note.code, note.path) == ("read-again", EXPERT)
    assert report.counts["bytes_read"] == sum(
        (artifact / entry.path).stat().st_size
        for entry in parse_manifest((artifact / MANIFEST_NAME).read_bytes(), "M").files
    )


@pytest.mark.parametrize("name", [MANIFEST_NAME, TENSORS_NAME, "config.json"])
def test_a_bit_of_a_small_file_that_flips_on_the_wire(check, proxy, published, name) -> None:
    bad = proxy.add(Flip(200, bit=1), "GetObject", key=f"*/{name}", times=1)
    assert check(f"s3://{published}/m", "structure").ok
    assert bad.fired == 1


def test_several_wrong_chunks(check, s3, bucket, artifact) -> None:
    """Each is fetched again, once, and all are counted."""
    rechunk(artifact, CHUNK)
    base = publish(s3, bucket, artifact, digests=False)
    size = (artifact / EXPERT).stat().st_size
    assert size > 4 * CHUNK
    for at in (CHUNK + 1, 2 * CHUNK, size - 1):
        flip_object(s3, bucket, base + EXPERT, at, digests=False)
    report = check(f"s3://{bucket}/m")
    finding = one(report, "digest")
    total = -(-size // CHUNK)
    assert f"3 of {total} chunks differ, the first is chunk 1 (bytes 4096 to 8192" in (
        finding.message
    )
    flip_all = bytearray((artifact / EXPERT).read_bytes())
    for at in (CHUNK + 1, 2 * CHUNK, size - 1):
        flip_all[at] ^= 1
    (artifact / EXPERT).write_bytes(flip_all)
    local = verify_artifact(artifact, VerifyOptions())
    assert report.findings == local.findings


def test_bodies_that_break_and_a_busy_store(check, proxy, published) -> None:
    proxy.add(CutBody(0.5, reset=True), "GetObject", key="*.safetensors", times=4)
    proxy.add(slow_down("0"), times=3)
    report = check(f"s3://{published}/m")
    assert report.ok
    assert report.notes == ()


def test_an_object_that_vanishes_meanwhile(check, s3, bucket, proxy, made) -> None:
    from tests.support.faults import Call

    base = publish(s3, bucket, made)
    proxy.add(
        Call(lambda _: s3.delete(bucket, base + EXPERT)), "GetObject", key=f"*/{EXPERT}", times=1
    )
    finding = one(check(f"s3://{bucket}/m"), "unreadable")
    assert finding.path == EXPERT
    assert "it is no longer there" in finding.message


def test_an_object_that_shrinks_meanwhile(check, s3, bucket, proxy, made) -> None:
    from tests.support.faults import Call

    base = publish(s3, bucket, made)
    short = (made / EXPERT).read_bytes()[:-9]
    proxy.add(
        Call(lambda _: s3.put(bucket, base + EXPERT, short)),
        "GetObject", key=f"*/{EXPERT}", where=payload, times=1,
    )  # fmt: skip
    finding = one(check(f"s3://{bucket}/m"), "unreadable")
    assert "it changed while it was being verified" in finding.message


@pytest.mark.parametrize("op", ["HeadObject", "GetObject"])
def test_denied_is_trouble_with_the_store(check, proxy, published, op) -> None:
    """And ends quickly, whatever the other threads do."""
    proxy.add(access_denied(), op, key=f"*/{EXPERT}")
    error = failure(check, f"s3://{published}/m")
    assert error.fault is StoreFault.DENIED
    assert "gave up" not in str(error)


def test_a_signal_ends_it(check, published) -> None:
    stop = StopToken()

    def report(event: object) -> None:
        if isinstance(event, FileFinished):
            stop.set(15)

    with pytest.raises(Interrupted) as caught:
        check(f"s3://{published}/m", reporter=report, stop=stop, jobs=1)
    assert caught.value.exit_status == 143


@pytest.mark.parametrize("name", [MANIFEST_NAME, "*.safetensors"])
def test_a_signal_ends_it_though_the_store_hangs(check, proxy, published, name) -> None:
    """Long before the time limit of a read."""
    stop = StopToken()
    stall = proxy.add(Stall(100), "GetObject", key=f"*/{name}", where=payload)
    begin = time.monotonic()
    threading.Timer(3.0, stop.set, (2,)).start()
    with pytest.raises(Interrupted):
        check(f"s3://{published}/m", stop=stop)
    assert stall.fired
    assert time.monotonic() - begin < 20


# ------------------------------------------------------------------------- samples


def ranges(proxy: FaultProxy, key: str) -> list[tuple[int, int]]:
    found = []
    for record in proxy.requests("GetObject", key=key):
        begin, end = record.range.removeprefix("bytes=").split("-")
        found.append((int(begin), int(end) + 1))
    return found


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_samples_cover_every_chunk_once(check, store, proxy, artifact, parts) -> None:
    s3, bucket = store
    rechunk(artifact, CHUNK)
    publish(s3, bucket, artifact)
    weights = list(artifact.glob("*.safetensors"))
    total = read = 0
    for number in range(1, parts + 1):
        report = check(f"s3://{bucket}/m", sample=f"{number}/{parts}")
        assert report.ok
        assert any(f"part {number} of {parts}" in text for text in report.not_checked)
        read += report.counts.get("chunks_read", 0)
    for path in weights:
        size, header = path.stat().st_size, header_end(path)
        found = ranges(proxy, f"*/{path.name}")
        for _ in range(parts):
            found.remove((0, 8))
            found.remove((8, header))
        chunks = [(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK)]
        assert sorted(found) == chunks
        total += len(chunks)
    assert read == total


def test_a_sample_finds_a_wrong_chunk(check, s3, bucket, proxy, artifact) -> None:
    rechunk(artifact, CHUNK)
    base = publish(s3, bucket, artifact, digests=False)
    at = header_end(artifact / EXPERT) + CHUNK
    flip_object(s3, bucket, base + EXPERT, at, digests=False)
    flip(artifact / EXPERT, at)
    reports = [check(f"s3://{bucket}/m", sample=f"{n}/4") for n in (1, 2, 3, 4)]
    (bad,) = [report for report in reports if not report.ok]
    finding = one(bad, "digest")
    index = at // CHUNK
    assert f"chunk {index} (bytes {index * CHUNK} to {(index + 1) * CHUNK}), which holds" in (
        finding.message
    )
    assert finding.found in finding.message
    assert bad.counts["chunks_differing"] == 1
    number = reports.index(bad) + 1
    local = verify_artifact(artifact, VerifyOptions(sample=f"{number}/4"))
    assert local.findings == bad.findings
    assert local.counts == bad.counts


def test_a_sample_asks_again_for_what_is_wrong(check, s3, bucket, proxy, artifact) -> None:
    rechunk(artifact, CHUNK)
    publish(s3, bucket, artifact)
    wire = proxy.add(
        Flip(9), "GetObject", key=f"*/{EXPERT}", times=1,
        where=lambda request: request.headers.get("range") == f"bytes={CHUNK}-{2 * CHUNK - 1}",
    )  # fmt: skip
    report = check(f"s3://{bucket}/m", sample="1/1")
    assert wire.fired == 1
    assert report.ok
    assert [note.code for note in report.notes] == ["read-again"]


def test_local_samples_cover_every_chunk_once(artifact: Path) -> None:
    rechunk(artifact, CHUNK)
    reports = [
        verify_artifact(artifact, VerifyOptions(sample=f"{number}/5")) for number in range(1, 6)
    ]
    assert all(report.ok for report in reports)
    chunks = sum(-(-path.stat().st_size // CHUNK) for path in artifact.glob("*.safetensors"))
    assert sum(report.counts["chunks_read"] for report in reports) == chunks


# ------------------------------------------------------------------- other stores


def test_a_store_in_memory(made: Path) -> None:
    """Not S3: no checksums, other tags."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(made), "/verify-remote/m", recursive=True)
    try:
        with open_client("memory://verify-remote/m", reporter=ignore, stop=StopToken()) as (
            url,
            client,
        ):
            report = verify_remote(client, url, VerifyOptions())
        assert report.ok, report.findings
        assert report.counts["tensors_hashed"] == 113
    finally:
        memory.rm("/verify-remote", recursive=True)


# ------------------------------------------------------------------- command line


def test_command_line(s3, bucket, made, monkeypatch, tmp_path) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    base = publish(s3, bucket, made)
    url = f"s3://{bucket}/m@latest"
    result = shell("verify", url, "--jobs", 3, "--limit-rate", "1GB").ok()
    assert "ok" in result.stdout
    assert artifact_id(made) in result.stdout
    result = shell("verify", url, "--remote").ok()
    assert NO_WEIGHTS in result.stdout
    document = shell("verify", url, "--sample", "1/2", "--json").ok().json()
    assert (document["target"], document["level"]) == (url, "digest")
    flip_object(s3, bucket, base + EXPERT, -1, digests=False)
    junit = tmp_path / "junit.xml"
    result = shell("verify", url, "--junit", junit, "--json")
    assert result.status == ExitStatus.VERIFY
    assert result.json()["ok"] is False
    assert 'classname="mxconvert.verify.digest"' in junit.read_text()
    assert shell("verify", f"s3://{bucket}/m@none").status == ExitStatus.STORE
    assert shell("verify", "s3://no-such-bucket-at-all/m").status == ExitStatus.STORE


@pytest.mark.parametrize(
    "arguments",
    [
        ["s3://b/m", "--level", "numeric", "--source", "S"],
        ["s3://b/m", "--source", "S"],
        ["s3://b/m", "--level", "numeric"],
        ["s3://b/m", "--foreign"],
        ["s3://b/m", "--remote", "--sample", "1/2"],
        ["s3://b/m", "--level", "structure", "--sample", "1/2"],
        ["s3://b/m", "--retry-for", "soon"],
        ["s3://b/m", "--limit-rate", "fast"],
        ["s3://b/m", "--store-option", "regoin=x"],
        ["s3://b/m", "--store-option", "x"],
        ["s3://", "--remote"],
        ["folder", "--remote"],
        ["folder", "--store-option", "region=x"],
        ["folder", "--limit-rate", "1MB"],
    ],
)
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    result = shell("verify", *arguments)
    assert result.status == ExitStatus.USAGE
    assert result.stderr


def test_a_path_with_a_tag_is_a_folder(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "m@latest"))
    shell("verify", folder, "--level", "structure").ok()
    assert shell("verify", tmp_path / "x@latest").status == ExitStatus.USAGE


def test_numbers_need_a_folder(published, check) -> None:
    for options in ({"foreign": True}, {"source": Path("x")}):
        with pytest.raises(UsageError):
            check(f"s3://{published}/m", **options)
