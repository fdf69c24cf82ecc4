"""`mxconvert push`: in which order, what is sent, which folders are refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.push_base import WRITES, Site, changed_sidecar, copy_of, flip, manifest_size
from tests.support import fail_cleanly
from tests.support.faults import Call, Respond, access_denied, internal_error
from tests.support.large import CHUNK, INDEX, MANIFEST, PART, LargeArtifact, summary

if TYPE_CHECKING:
    from pathlib import Path

# ------------------------------------------------------------------------------- order


def test_files_then_index_then_manifest_then_tag(site: Site, large: LargeArtifact) -> None:
    """Each file is confirmed at the store before what lists it is written."""
    site.push(large).ok()
    site.assert_published(large)
    base, whole = site.base(large), ("PutObject", "CompleteMultipartUpload")
    order = [r for r in site.done(whole) if ".probe-" not in r.key]
    keys = [r.key.removeprefix(base) for r in order]
    assert keys[-3:] == [INDEX, MANIFEST, f"{site.prefix}/refs/latest.json"]
    assert set(keys[:-3]) == large.files.keys() - {INDEX}
    index, manifest = order[-3], order[-2]
    for record in order[:-2]:
        [asked] = [
            r for r in site.done("HeadObject", key=record.key) if r.began > (record.ended or 0)
        ]
        following = manifest if record is index else index
        assert (asked.ended or 0) <= following.began


@pytest.mark.parametrize("path", ["model-dense-*", "config.json", INDEX, MANIFEST])
def test_no_manifest_when_a_file_fails(site: Site, large: LargeArtifact, path: str) -> None:
    """Whichever file it is; the next push goes on."""
    site.proxy.add(access_denied(), WRITES, key=site.base(large) + path)
    site.fails(large, 6, "AccessDenied", site.base(large), "check the credentials")
    site.proxy.remove()
    site.push(large).ok()
    site.assert_published(large)


def test_failure_to_move_a_tag(site: Site, large: LargeArtifact) -> None:
    """The version is there; the same command moves the tag and sends no file."""
    site.proxy.add(internal_error(), "PutObject", key="*/latest.json")
    fail_cleanly(site.push(large, retry="1s"), 6, "refs/latest.json", "run the same command again")
    site.assert_published(large, tag=None)
    site.proxy.remove()
    site.proxy.log.clear()
    site.push(large).ok()
    assert site.sent(large) == 0
    site.assert_published(large)


# ------------------------------------------------------------------ what is sent, and once


def test_nothing_is_sent_twice(site: Site, published: LargeArtifact) -> None:
    """Another push of a published artifact asks, and writes nothing but its probes."""
    result = summary(site.push(published))
    assert result["present_files"] == len(published.digests)
    assert result["sent_files"] == result["sent_bytes"] == 0
    assert site.sent(published) == 0
    assert [r.key for r in site.done() if ".probe-" not in r.key] == []


def test_an_unfinished_upload_is_continued(site: Site, large: LargeArtifact) -> None:
    """After a failure within a large file only its missing part is sent."""
    site.proxy.add(access_denied(), "UploadPart", where=lambda r: r.query["partNumber"] == "2")
    site.fails(large, 6, "AccessDenied", options=("--jobs", "1"))
    [upload] = site.s3.uploads(site.bucket)
    done = {part["PartNumber"] for part in site.s3.parts(site.bucket, upload)}
    assert done == {1}
    site.proxy.remove()
    site.proxy.log.clear()
    result = summary(site.push(large))
    assert sorted(site.parts_done()) == [2, 3]
    assert site.sent(large, "*-dense-*") == large.files[large.largest] - PART
    assert result["sent_bytes"] == result["bytes"] - PART
    site.assert_published(large)


def test_parts_of_other_bytes_are_not_kept(site: Site, large: LargeArtifact) -> None:
    """An upload that is there under the file's key, with a part that is not the file's."""
    client: Any = site.s3.client()
    key = site.base(large) + large.largest
    upload = client.create_multipart_upload(Bucket=site.bucket, Key=key)["UploadId"]
    data = (large.folder / large.largest).read_bytes()
    bodies = {1: data[:PART], 2: bytes(PART), 3: data[2 * PART : -1]}
    for number, body in bodies.items():
        client.upload_part(
            Bucket=site.bucket, Key=key, UploadId=upload, PartNumber=number, Body=body
        )
    site.push(large).ok()
    assert sorted(site.parts_done()) == [2, 3]
    site.assert_published(large)


def test_a_file_that_is_removed_during_the_push(site: Site, large: LargeArtifact) -> None:
    """By a `gc` that saw it as left over: no manifest without it; the next push sends it."""
    key = site.base(large) + "config.json"
    gone = Call(lambda _: site.s3.delete(site.bucket, key))
    refusal = site.proxy.add(access_denied(), "PutObject", key=f"*/{INDEX}")
    site.fails(large, 6, INDEX, "AccessDenied")
    site.proxy.remove(refusal)
    smallest = min(large.files, key=lambda path: large.files[path])  # the last of them
    site.proxy.add(gone, "HeadObject", key=f"*/{smallest}", times=1)
    says = (key, "was removed during the push", "run the same command again")
    site.fails(large, 6, *says, options=("--jobs", "1"))
    site.push(large).ok()
    site.assert_published(large)


def _begun(site: Site, large: LargeArtifact, size: int) -> str:
    """Begin an upload of the largest file with a first part of so many bytes; return its id."""
    client: Any = site.s3.client()
    where = {"Bucket": site.bucket, "Key": site.base(large) + large.largest}
    upload = client.create_multipart_upload(**where)["UploadId"]
    data = (large.folder / large.largest).read_bytes()[:size]
    client.upload_part(**where, UploadId=upload, PartNumber=1, Body=data)
    return str(upload)


def test_an_upload_of_other_parts_is_left_alone(site: Site, large: LargeArtifact) -> None:
    """It may belong to a push under way; once the object is right it goes."""
    other = _begun(site, large, PART + CHUNK)
    site.push(large).ok()
    used = {r.query["uploadId"] for r in site.proxy.requests("UploadPart")}
    assert used
    assert other not in used
    site.assert_published(large)


def test_parts_that_another_push_has_replaced(site: Site, large: LargeArtifact) -> None:
    """The store does not know their tags any more: what is right is kept, the push goes on."""
    bad = site.proxy.add(Respond(400, "InvalidPart"), "CompleteMultipartUpload", times=1)
    found = summary(site.push(large))
    assert bad.fired == 1
    assert sorted(site.parts_done()) == [1, 2, 3]
    assert found["sent_bytes"] == found["bytes"]
    site.assert_published(large)


def test_the_slower_of_two_pushes_drops_its_upload(site: Site, large: LargeArtifact) -> None:
    """The object is there when it wants to complete its own."""
    key = site.base(large) + large.largest
    data = (large.folder / large.largest).read_bytes()

    def overtake(_: object) -> None:
        digest = {"mxconvert-sha256": large.digests[large.largest]}
        site.s3.put(site.bucket, key, data, Metadata=digest)

    site.proxy.add(Call(overtake), "CompleteMultipartUpload", times=1)
    site.proxy.add(Respond(404, "NoSuchUpload"), "CompleteMultipartUpload", times=1)
    site.push(large).ok()
    site.assert_published(large)


@pytest.mark.parametrize("data", [b"", b"another", None], ids=["empty", "shorter", "same-size"])
def test_other_objects_under_the_keys_are_replaced(
    site: Site, large: LargeArtifact, data: bytes | None
) -> None:
    """By their content: what has the right size may still be something else."""
    for path in ("config.json", large.largest):
        content = bytes(large.files[path]) if data is None else data
        site.s3.put(site.bucket, site.base(large) + path, content)
    site.push(large).ok()
    site.assert_published(large)


def test_files_of_other_versions_are_copied(site: Site, published: LargeArtifact, tmp_path) -> None:
    """A second version sends its changed files only; the store copies the others."""
    second = changed_sidecar(published, tmp_path / "second")
    result = summary(site.push(second))
    assert result["copied_files"] == len(second.files) - 1
    assert result["sent_files"] == 2  # README.md and the manifest
    assert site.sent(second) == second.files["README.md"] + manifest_size(second)
    copied = {r.key.removeprefix(site.base(second)) for r in site.done("CopyObject")}
    assert copied == second.files.keys() - {"README.md"}
    site.assert_published(second)
    site.assert_published(published, tag=None)


def test_no_reuse_sends_everything(site: Site, published: LargeArtifact, tmp_path: Path) -> None:
    second = changed_sidecar(published, tmp_path / "second")
    assert summary(site.push(second, "--no-reuse"))["copied_files"] == 0
    assert site.sent(second) == second.payload + manifest_size(second)
    site.assert_published(second)


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_copy_that_does_not_work_is_sent(
    site: Site, published: LargeArtifact, tmp_path: Path, damage: str
) -> None:
    """The other version was damaged at the store: its bytes are not taken over."""
    second = changed_sidecar(published, tmp_path / "second")
    key = site.base(published) + published.largest
    if damage == "gone":
        site.s3.delete(site.bucket, key)
    else:
        site.s3.put(site.bucket, key, bytes(published.files[published.largest]))
    site.push(second).ok()
    site.assert_published(second)


# ------------------------------------------------------------------- the folder is not right


@pytest.mark.parametrize("checksum", ["auto", "when-required"])
@pytest.mark.parametrize("offset", [0, PART + CHUNK + 3, -1])
def test_wrong_bytes_on_disk_are_not_published(
    site: Site, large: LargeArtifact, tmp_path: Path, checksum: str, offset: int
) -> None:
    """Whatever the store checks itself; the file and the chunk are named."""
    damaged = copy_of(large, tmp_path / "copy")
    size = damaged.files[damaged.largest]
    flip(tmp_path / "copy" / damaged.largest, offset % size)
    chunk = f"chunk {offset % size // CHUNK}"
    result = site.fails(
        damaged, 4, damaged.largest, chunk, "expected", options=("--checksum", checksum)
    )
    assert "was not sent" in result.stderr
    shutil.copyfile(large.folder / large.largest, tmp_path / "copy" / large.largest)
    site.push(damaged).ok()
    site.assert_published(large)


def test_wrong_bytes_of_a_small_file_are_not_even_sent(
    site: Site, large: LargeArtifact, tmp_path: Path
) -> None:
    damaged = copy_of(large, tmp_path / "copy")
    flip(tmp_path / "copy" / "config.json", 30)
    site.fails(damaged, 4, "config.json", "chunk 0")
    assert site.sent(large, "config.json") == 0


def _truncate(path: Path) -> str:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    return "bytes, expected"


def _link(path: Path) -> str:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return "is a link"


def _remove(path: Path) -> str:
    path.unlink()
    return "is missing"


@pytest.mark.parametrize("change", [_truncate, _link, _remove])
def test_a_folder_that_is_not_whole_is_refused(
    site: Site, large: LargeArtifact, tmp_path: Path, change: Any
) -> None:
    """Found out before anything is sent."""
    damaged = copy_of(large, tmp_path / "copy")
    says = change(tmp_path / "copy" / damaged.largest)
    result = site.push(damaged)
    fail_cleanly(result, 4, damaged.largest, says, "nothing was sent")
    assert site.proxy.settle() == []


@pytest.mark.parametrize(
    ("name", "says"), [(None, "no such folder"), ("empty", "not an artifact"), ("file", "not a fo")]
)
def test_no_artifact_is_refused(site: Site, tmp_path: Path, name: str | None, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    result = site.run("push", tmp_path / (name or "nothing"), site.url)
    fail_cleanly(result, 2, says)
    assert site.proxy.settle() == []


def test_a_damaged_manifest_is_refused(site: Site, large: LargeArtifact, tmp_path: Path) -> None:
    damaged = copy_of(large, tmp_path / "copy")
    (tmp_path / "copy" / MANIFEST).write_text("{}")
    fail_cleanly(site.push(damaged), 4, MANIFEST)
    assert site.proxy.settle() == []
