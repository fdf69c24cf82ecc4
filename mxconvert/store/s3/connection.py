"""One botocore client with every option in it, renewed when credentials or region change.

Listing, transfer and probes all go through this one client, so that no option reaches
one of them and not the others.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore import exceptions as boto
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.session import Session

from mxconvert.errors import LocalError, StoreError, StoreFault, UsageError
from mxconvert.store.s3.faults import translated

if TYPE_CHECKING:
    from mxconvert.store.options import StoreOptions

Result = TypeVar("Result")

_DEFAULT_REGION = "us-east-1"
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 30.0
_RENEW_EVERY_SECONDS = 1.0
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_STYLES = {"path": "path", "virtual": "virtual"}
_REDIRECTS = frozenset({"301", "307", "PermanentRedirect", "TemporaryRedirect"})
_SCHEMES = frozenset({"http", "https"})
_USER = re.compile(r"[^/\s\"']*@")
_OTHER_REGION = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})


@functools.cache
def _loader(path: str | None) -> Any:
    """Return what reads botocore's descriptions of services: 0.3 s, for all clients once."""
    return create_loader(path)


class Connection:
    """Makes requests of S3; may be used from many threads."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._region: str | None = options.text("region")
        self._renewed_at = 0.0
        self._client: Any = self._make()
        self._first_region = str(self._client.meta.region_name)

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return str(self._client.meta.endpoint_url)

    @property
    def is_amazon(self) -> bool:
        """Whether the server is Amazon's own."""
        host = urlsplit(self.endpoint).hostname or ""
        return host.endswith(_AMAZON)

    def call(self, name: str, where: str, **arguments: Any) -> dict[str, Any]:
        """Make one request; follow the store to another region once.

        Args:
            name: botocore's name of the operation, in snake case.
            where: What messages name.
            **arguments: Of the operation; ``None`` leaves one out.
        """
        given = {key: value for key, value in arguments.items() if value is not None}
        client = self._client
        with translated(where):
            try:
                result: dict[str, Any] = getattr(client, name)(**given)
            except boto.ClientError as error:
                region = _other_region(error, client.meta.region_name)
                if region is None:
                    self._refuse_redirect(error, client, where)
                    raise
                self._move(client, region, where)
                result = self._again(name, where, given)
        return result

    def _again(self, name: str, where: str, given: dict[str, Any]) -> dict[str, Any]:
        """Make a request in the region that the store has named."""
        client = self._client
        try:
            result: dict[str, Any] = getattr(client, name)(**given)
        except boto.ClientError as error:
            self._refuse_redirect(error, client, where)
            raise
        return result

    def _refuse_redirect(self, error: boto.ClientError, client: Any, where: str) -> None:
        """Say between which regions a store sends to and fro; other errors pass.

        Raises:
            StoreError: Naming both.
        """
        status = str(error.response["ResponseMetadata"].get("HTTPStatusCode"))
        here = client.meta.region_name
        region = _other_region(error, here)
        if status in _REDIRECTS or region:
            raise StoreError(
                StoreFault.REFUSED,
                f"{where}: the store sends from region {self._first_region} to {here}, and there "
                f"it answers {status}, {f'go to {region}' if region else 'go elsewhere'}",
                hint="pass --store-option region=REGION, and endpoint=URL if that has its own",
            ) from error

    def _move(self, client: Any, region: str, where: str) -> None:
        if not region:
            raise StoreError(
                StoreFault.REFUSED,
                f"{where}: the bucket is in another region than {client.meta.region_name}, and "
                "the store does not say which",
                hint="pass --store-option region=REGION",
            )
        with self._lock:
            if self._client is client:
                self._region = region
                self._client = self._make()

    def renew(self) -> None:
        """Read the configuration and the credentials again."""
        with self._lock:
            if time.monotonic() - self._renewed_at >= _RENEW_EVERY_SECONDS:
                self._renewed_at = time.monotonic()
                self._client = self._make()

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()

    # ------------------------------------------------------------------------- the client

    def _make(self) -> Any:
        style = self._options.text("addressing")
        if style is not None and style not in _STYLES:
            raise UsageError(f"--store-option addressing={style}: expected path or virtual")
        try:
            guess = _STYLES[style] if style else self._likely_style()
            client = self._create(guess)
            host = urlsplit(str(client.meta.endpoint_url)).hostname or ""
            # Buckets as host names need DNS and certificates that private stores lack.
            right = "auto" if host.endswith(_AMAZON) else "path"
            if style is None and guess != right:
                client.close()
                client = self._create(right)
        except (boto.ProfileNotFound, boto.ConfigParseError, boto.ConfigNotFound) as error:
            raise UsageError(str(error), code="bad-profile") from error
        except boto.BotoCoreError as error:
            raise UsageError(f"s3: {error}", code="bad-store-option") from error
        except ValueError as error:
            raise UsageError(
                f"s3: {_without_secrets(str(error))}",
                hint="an endpoint is a URL with its scheme, for example https://s3.example.com",
                code="bad-endpoint",
            ) from None
        parts = urlsplit(str(client.meta.endpoint_url))
        if parts.scheme not in _SCHEMES:
            raise UsageError(
                f"s3: the endpoint is no URL of http or https: {parts.scheme}://{parts.hostname}",
                code="bad-endpoint",
            )
        if "@" in parts.netloc:
            raise UsageError(
                "s3: the endpoint's URL has a user or a password, which would not be used",
                hint="S3 takes keys from AWS_PROFILE or AWS_ACCESS_KEY_ID",
                code="bad-endpoint",
            )
        return client

    def _likely_style(self) -> str:
        """Guess the style without asking the configuration: making a client takes a while."""
        stated = (self._options.text("endpoint"), *map(os.environ.get, _ENDPOINT_VARIABLES))
        endpoint = next(filter(None, stated), None)
        return "auto" if endpoint is None else "path"

    def _create(self, addressing: str) -> Any:
        options = self._options
        session = Session(profile=options.text("profile"))
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        region = self._region or session.get_config_variable("region") or _DEFAULT_REGION
        proxy = options.text("proxy")
        return session.create_client(
            "s3",
            region_name=region,
            endpoint_url=options.text("endpoint"),
            verify=self._certificates(),
            config=Config(
                signature_version=UNSIGNED if options.flag("anonymous") else None,
                s3={"addressing_style": addressing, "payload_signing_enabled": False},
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=options.connections + 2,
                connect_timeout=options.number("connect_timeout", _CONNECT_SECONDS),
                read_timeout=options.number("read_timeout", _READ_SECONDS),
                tcp_keepalive=True,
                proxies={"http": proxy, "https": proxy} if proxy else None,
                user_agent_extra="mxconvert",
            ),
        )

    def _certificates(self) -> str | None:
        path = self._options.text("ca_bundle")
        if path is not None:
            try:
                with open(path, "rb"):  # noqa: PTH123  (only whether it opens)
                    pass
            except OSError as error:
                raise LocalError.unreadable(path, error) from error
        return path


def _without_secrets(text: str) -> str:
    """Take what may be user and password of a URL out of a text."""
    return _USER.sub("", text)


def _other_region(error: boto.ClientError, region: str) -> str | None:
    """Return the region that a redirect names, empty if it names none, ``None`` if none is."""
    response: Any = error.response
    details, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), str(meta.get("HTTPStatusCode", ""))
    if code not in _REDIRECTS | _OTHER_REGION and status not in _REDIRECTS:
        return None
    headers = meta.get("HTTPHeaders", {})
    named = str(details.get("Region") or headers.get("x-amz-bucket-region") or "")
    return None if named == region else named
