"""Sign a request anew once a rule has changed what its signature covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.faults.wire import Request
    from tests.support.seaweed import S3Server

_OLD = ("authorization", "x-amz-date", "x-amz-security-token")


def sign(request: Request, server: S3Server) -> None:
    """Put the server's own user's signature (SigV4, in headers) in place of any other.

    The payload hash that the client sent stays, so a changed body is refused as before. Chunk
    signatures (``STREAMING-AWS4-HMAC-SHA256-PAYLOAD``) cannot be made again.
    """
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    payload = request.headers.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD"

    class Auth(S3SigV4Auth):
        def payload(self, _request: AWSRequest) -> str:
            return payload

    request.headers.remove_field(*_OLD)
    host = request.headers.get("host") or ""
    signed = AWSRequest(request.method, f"http://{host}{request.target}", dict(request.headers))
    user = Credentials(server.access_key, server.secret_key)
    Auth(user, "s3", server.region).add_auth(signed)
    for name in ("X-Amz-Date", "X-Amz-Content-SHA256", "Authorization"):
        request.headers.set(name, signed.headers[name])
