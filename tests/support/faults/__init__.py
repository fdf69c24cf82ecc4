"""A proxy that logs and disturbs the requests to `seaweed`'s server.

The fixture ``proxy`` (of conftest) stands in front of ``s3``; signatures stay valid, since the
client's Host goes through unchanged. Nothing is disturbed before a rule is added::

    def test_pull_retries(s3, bucket, proxy, tmp_path):
        s3.put(bucket, "a/file", data)                      # goes past the proxy
        proxy.add(Respond(503, "SlowDown", headers={"Retry-After": "0"}), "GetObject", times=2)
        cut = proxy.add(CutBody(0.5, reset=True), "GetObject", key="*.safetensors", times=1)
        run_cli("pull", f"s3://{bucket}/a", tmp_path / "a", env=proxy.environment()).ok()
        assert cut.fired == 1
        assert proxy.sent("GetObject") < 2 * len(data)      # bytes that went over the wire
        assert [r.status for r in proxy.requests("GetObject", key="a/file")][:2] == [503, 503]

* `Rule`: which requests (S3 operation, key, method, header, signer, ...), ``skip`` the first,
  how many ``times``, or with what ``probability``. Rules that fire act in the order they were
  added, up to one that answers itself.
* `actions`: transport. `Respond`, `HangUp`, `LoseAnswer`, `NeverAnswer`, `CutBody`, `CutUpload`,
  `Stall`, `Flip`, `FlipUpload`, `Delay`, `Call`, `SetHeaders`.
* `dialect`: S3's errors (`slow_down`, `expired_token`, `moved`, ...) and differences of services:
  `StripChecksums`, `WholeChecksum`, `IgnoreRange`, `IgnoreConditions`,
  `ChangeETag`, `Anonymous`; ``where=conditional`` or ``where=with_checksum`` picks requests.
* `listing`: `PageSize`, `EmptyPage`, `StrangeTokens`, `HideKeys`, for ``"ListObjectsV2"``.
* `listeners`: `SilentListener` (no TLS handshake ever), `closed_endpoint`.
* An action of your own derives from `Action`; `Call` is often enough.
* ``proxy.trusted.add("OTHERKEY")``: take requests signed with a key the server does not know.
* ``proxy.log`` holds a `Record` of each request; ``proxy.requests/sent/received`` filter it.
  Call ``proxy.settle()`` before exact counts: a client may have its answer a moment earlier.
* ``proxy.latency`` (seconds for each request) and ``proxy.rate`` (bytes/s) may be set any time.
"""

from tests.support.faults.actions import (
    Call,
    CutBody,
    CutUpload,
    Delay,
    Flip,
    FlipUpload,
    HangUp,
    LoseAnswer,
    NeverAnswer,
    Respond,
    SetHeaders,
    Stall,
)
from tests.support.faults.dialect import (
    Anonymous,
    ChangeETag,
    IgnoreConditions,
    IgnoreRange,
    StripChecksums,
    WholeChecksum,
    access_denied,
    conditional,
    etag_base64,
    etag_none,
    etag_of_parts,
    etag_random,
    expired_token,
    illegal_location,
    internal_error,
    invalid_range,
    malformed_authorization,
    moved,
    no_checksums,
    not_implemented,
    skewed_clock,
    slow_down,
    with_checksum,
)
from tests.support.faults.exchange import Exchange, Record
from tests.support.faults.listeners import SilentListener, closed_endpoint
from tests.support.faults.listing import EmptyPage, HideKeys, PageSize, StrangeTokens
from tests.support.faults.proxy import FaultProxy
from tests.support.faults.rules import Action, Cut, Rule, operation
from tests.support.faults.wire import Headers, Request, Response

__all__ = [
    "Action",
    "Anonymous",
    "Call",
    "ChangeETag",
    "Cut",
    "CutBody",
    "CutUpload",
    "Delay",
    "EmptyPage",
    "Exchange",
    "FaultProxy",
    "Flip",
    "FlipUpload",
    "HangUp",
    "Headers",
    "HideKeys",
    "IgnoreConditions",
    "IgnoreRange",
    "LoseAnswer",
    "NeverAnswer",
    "PageSize",
    "Record",
    "Request",
    "Respond",
    "Response",
    "Rule",
    "SetHeaders",
    "SilentListener",
    "Stall",
    "StrangeTokens",
    "StripChecksums",
    "WholeChecksum",
    "access_denied",
    "closed_endpoint",
    "conditional",
    "etag_base64",
    "etag_none",
    "etag_of_parts",
    "etag_random",
    "expired_token",
    "illegal_location",
    "internal_error",
    "invalid_range",
    "malformed_authorization",
    "moved",
    "no_checksums",
    "not_implemented",
    "operation",
    "skewed_clock",
    "slow_down",
    "with_checksum",
]
