"""Credentials that expire on the way, and clocks that differ."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.pull_base import manifest_of, small_files, write_folder
from tests.push_base import Site, assert_pulled
from tests.support import fail_cleanly
from tests.support.faults import Call, expired_token, skewed_clock
from tests.support.large import MIB, PART, LargeArtifact, describe

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Exchange, Request, Respond

# -------------------------------------------- OBJ-06: credentials expire on the way

OLD = "AKIDEXPIRES"


class Expiry:
    """Credentials in a file, of which the first expire after some requests of a kind."""

    def __init__(self, site: Site, folder: Path, op: str, after: int, *, fresh: bool) -> None:
        self.site, self.file, self.fresh = site, folder / "credentials", fresh
        self.left = after
        self.write(OLD, "anything")
        site.proxy.trusted.add(OLD)
        site.proxy.add(expired_token(), access_key=OLD, where=self._expired)
        site.proxy.add(Call(self._count, after=True), op)

    def write(self, key: str, secret: str) -> None:
        """Put credentials into the file."""
        lines = ("[default]", f"aws_access_key_id={key}", f"aws_secret_access_key={secret}")
        self.file.write_text("\n".join((*lines, "aws_session_token=token", "")))

    def renew(self) -> None:
        """Put the server's own credentials into the file."""
        lines = (self.site.s3.access_key, self.site.s3.secret_key)
        text = "[default]\naws_access_key_id={}\naws_secret_access_key={}\n"
        self.file.write_text(text.format(*lines))

    @property
    def environment(self) -> dict[str, str]:
        """What makes a command use the file."""
        return {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.file),
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
        }

    def _expired(self, _request: Request) -> bool:
        return self.left <= 0

    def _count(self, _exchange: Exchange) -> None:
        self.left -= 1
        if self.left == 0 and self.fresh:
            self.renew()


def of_parts(folder: Path, parts: int) -> LargeArtifact:
    """Make an artifact one of whose files goes in so many parts."""
    files = small_files((parts - 1) * PART + 77)
    return describe(write_folder(folder, files, manifest_of(files, MIB)))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> LargeArtifact:
    """An artifact one of whose files goes in 7 parts."""
    return of_parts(tmp_path_factory.mktemp("many") / "artifact", 7)


@pytest.mark.parametrize(
    ("op", "after"), [("UploadPart", 5), ("UploadPart", 7), ("PutObject", 6), ("HeadObject", 3)]
)
def test_credentials_that_are_renewed_during_a_push(
    site: Site, many: LargeArtifact, tmp_path: Path, op: str, after: int
) -> None:
    """OBJ-06: after 5 parts, between the last part and completion, at any other time."""
    expiry = Expiry(site, tmp_path, op, after, fresh=True)
    site.push(many, **expiry.environment).ok()
    assert [r for r in site.proxy.log if r.status == 400]
    assert sorted(site.parts_done()) == list(range(1, 8))  # none twice
    site.assert_published(many)


def test_credentials_that_are_renewed_during_a_pull(
    site: Site, many: LargeArtifact, tmp_path: Path
) -> None:
    """OBJ-06: as for a push; nothing is fetched twice."""
    site.push(many).ok()
    site.proxy.log.clear()
    expiry = Expiry(site, tmp_path, "GetObject", 5, fresh=True)
    site.pull(tmp_path / "target", **expiry.environment).ok()
    assert_pulled(tmp_path / "target", many)
    site.proxy.settle()
    assert [r for r in site.proxy.log if r.status == 400]
    assert site.proxy.sent("GetObject", key="*.safetensors") <= many.payload + MIB


@pytest.mark.parametrize("after", [5, 7])
def test_credentials_that_stay_expired(
    site: Site, many: LargeArtifact, tmp_path: Path, after: int
) -> None:
    """OBJ-06: the message says so and that a rerun goes on; it does."""
    expiry = Expiry(site, tmp_path, "UploadPart", after, fresh=False)
    says = ("the credentials have expired", "renew the credentials", "goes on where it stopped")
    result = site.fails(many, 6, *says, retry="2s", **expiry.environment)
    assert result.seconds < 15
    done = len(site.parts_done())
    assert done >= min(after, 5)
    expiry.renew()
    site.proxy.log.clear()
    site.push(many, **expiry.environment).ok()
    assert len(site.parts_done()) == 7 - done
    site.assert_published(many)


def test_expired_credentials_are_waited_for_less_than_a_minute(monkeypatch: Any) -> None:
    """OBJ-06: however long other faults are waited for."""
    from mxconvert.errors import StoreError, StoreFault
    from mxconvert.store import Client, ClientOptions

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    store: Any = type("Store", (), {"renew": lambda _: None})()

    def work() -> None:
        raise StoreError(StoreFault.EXPIRED, "expired")

    with pytest.raises(StoreError, match="expired"):
        Client(store, ClientOptions(retry_for=3600)).call(work)
    assert 30 < now[0] < 60


# ------------------------------------------------------------ OBJ-07: clocks that differ


def _skewed() -> Respond:
    """RequestTimeTooSkewed by a server whose clock is 20 minutes ahead."""
    action = skewed_clock()
    action.headers.set("Date", email.utils.formatdate(time.time() + 1200, usegmt=True))
    return action


def test_requests_that_waited_too_long_are_signed_anew(site: Site, tmp_path: Path) -> None:
    """OBJ-07: all 16 parts are refused once, each is sent again with a signature of its own."""
    artifact = of_parts(tmp_path / "artifact", 16)
    refused = site.proxy.add(_skewed(), "UploadPart", times=16)
    site.push(artifact).ok()
    assert refused.fired == 16
    site.assert_published(artifact)
    parts = site.proxy.requests("UploadPart")
    assert len({r.headers.get("amz-sdk-invocation-id") for r in parts}) == len(parts) == 32


def test_pulled_requests_are_signed_anew(
    site: Site, published: LargeArtifact, tmp_path: Path
) -> None:
    """OBJ-07: GET and HEAD, whose error has no body that says what it is."""
    seen = set()

    def first(request: Request) -> bool:
        """Whether the same was not asked for before."""
        asked = request.method, request.target, request.headers.get("range")
        return not (asked in seen or seen.add(asked))

    refused = site.proxy.add(_skewed(), ("GetObject", "HeadObject"), where=first)
    site.pull(tmp_path / "target").ok()
    assert refused.fired >= 2 * len(published.files)
    assert_pulled(tmp_path / "target", published)


@pytest.mark.parametrize("op", ["UploadPart", "HeadObject", ()], ids=["part", "head", "all"])
def test_a_clock_that_is_wrong(
    site: Site, large: LargeArtifact, tmp_path: Path, op: str | tuple[()]
) -> None:
    """OBJ-07: a push says both times and what to do, soon; so does a pull."""
    site.proxy.add(_skewed(), op)
    if op == "HeadObject":
        site.proxy.add(_skewed(), "GetObject")
    results = [site.push(large)]
    if op != "UploadPart":
        results.append(site.pull(tmp_path / "target"))
    for result in results:
        fail_cleanly(result, 6, "RequestTimeTooSkewed", "set this machine's clock")
        own = re.search(r"this machine says (\S+ \S+) UTC, the store (\w.*? GMT)", result.stderr)
        assert own, result.stderr
        here = dt.datetime.fromisoformat(f"{own[1]}+00:00").timestamp()
        there = email.utils.parsedate_to_datetime(own[2]).timestamp()
        assert 1100 < there - here < 1300
        assert result.seconds < 10
    site.proxy.remove()
    site.assert_unpublished(large)
