"""A store behind retries, adapting concurrency, a rate limit and counters."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mxconvert.errors import Interrupted, StoreError, StoreFault
from mxconvert.events import Notice, ignore
from mxconvert.stop import StopToken
from mxconvert.store.base import PartStore
from mxconvert.store.gate import Gate, RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from mxconvert.events import Reporter
    from mxconvert.store.base import Blob, Body, Condition, Identity, ObjectInfo, Store

Result = TypeVar("Result")

DEFAULT_JOBS = 16
DEFAULT_RETRY_FOR = 300.0
PIECE_SIZE = 2**20
"""Bytes taken from a body at once: small enough to stay in a core's cache while hashed."""

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 20.0
_CREDENTIALS_PATIENCE = 40.0
_SKEW_TRIES = 3
_CORRUPT_TRIES = 4
_SLICE_SECONDS = 0.2
_SLOWER = frozenset({StoreFault.THROTTLED, StoreFault.STALLED})
_REPEATABLE = frozenset(
    {
        StoreFault.THROTTLED,
        StoreFault.TRANSIENT,
        StoreFault.STALLED,
        StoreFault.EXPIRED,
        StoreFault.SKEWED,
        StoreFault.CORRUPT,
    }
)


@dataclass(slots=True)
class Counters:
    """What has crossed the wire so far.

    Bytes are payload: received, also of requests that failed; sent, in whole parts.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waited_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to several counters at once."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How hard a store is worked.

    Attributes:
        jobs: Most requests at once.
        limit_rate: Bytes per second over all requests; ``None`` sets no limit.
        retry_for: Seconds without any progress after which to give up.
    """

    jobs: int = DEFAULT_JOBS
    limit_rate: int | None = None
    retry_for: float = DEFAULT_RETRY_FOR


class Client:
    """Repeats what may be repeated; everything else goes to the store as it is."""

    def __init__(
        self,
        store: Store,
        options: ClientOptions,
        report: Reporter = ignore,
        stop: StopToken | None = None,
    ) -> None:
        self.store = store
        self.parts = store if isinstance(store, PartStore) else None
        self.options = options
        self.counters = Counters()
        self.gate = Gate(options.jobs)
        self.ignores_ranges = False
        """Whether the store has sent a whole object where a range was asked for."""
        self._rate = RateLimit(options.limit_rate)
        self._report = report
        self._stop = stop or StopToken()
        self._failed = threading.Event()
        self._told: set[StoreFault] = set()
        self._random = random.Random()  # noqa: S311  (spreads retries, guards nothing)

    @property
    def dropped_checksums(self) -> bool:
        """Whether the store has refused the checksums of uploads, and gets none any more."""
        return bool(getattr(self.store, "dropped_checksums", False))

    # ------------------------------------------------------------------------- repeating

    def check(self) -> None:
        """Raise if the command was asked to end.

        Raises:
            Interrupted: A signal came, or another thread has failed.
        """
        if self._stop.signum is not None:
            raise Interrupted(self._stop.signum)
        if self._failed.is_set():
            raise Abandoned

    def watched(self) -> AbstractContextManager[None]:
        """Say that the caller calls `check` again and again; see `StopToken`."""
        return self._stop.watched()

    def give_up(self) -> None:
        """Make every thread that still waits for this store end."""
        self._failed.set()

    def sleep(self, seconds: float) -> None:
        """Sleep, but end early with `check`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _SLICE_SECONDS))

    def moved(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Count payload, and keep to the rate limit."""
        self.counters.add(bytes_in=bytes_in, bytes_out=bytes_out)
        if bytes_in:
            self._rate.take(bytes_in, self.sleep)

    def call(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do a request, again and again while that can help.

        Raises:
            StoreError: Something that does not pass, or no progress for ``retry_for``.
            Interrupted: The command was asked to end.
        """
        return self._repeat(_Attempts(self), work, *arguments)

    def send(self, work: Callable[[Callable[[int], None]], Result]) -> Result:
        """Do a request whose body takes a while, as `call`.

        Args:
            work: Makes the request; its argument is to be called with the bytes of the
                body that are gone. More than in any try before is progress.
        """
        attempts = _Attempts(self)
        return self._repeat(attempts, work, attempts.reached)

    def _repeat(self, attempts: _Attempts, work: Callable[..., Result], *arguments: Any) -> Result:
        while True:
            try:
                with self.gate.slot(self.check) as queued:
                    attempts.queued(queued)
                    self.counters.add(requests=1)
                    result = work(*arguments)
            except StoreError as error:
                attempts.failed(error)
            else:
                self.gate.succeeded()
                return result

    # ------------------------------------------------------------------------ requests

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        return self.call(self.store.head, key)

    def find(self, key: str) -> ObjectInfo | None:
        """Return what the store knows about an object, ``None`` if it is not there."""
        try:
            return self.head(key)
        except StoreError as error:
            if error.fault is not StoreFault.MISSING:
                raise
            return None

    def get(self, key: str, limit: int) -> Blob:
        """See `Store.get`."""
        return self.call(self.store.get, key, limit)

    def put(self, key: str, data: bytes, condition: Condition | None = None) -> str | None:
        """See `Store.put`."""
        return self.call(self.store.put, key, data, condition)

    def copy(self, source: str, key: str, identity: Identity) -> None:
        """See `Store.copy`."""
        self.call(self.store.copy, source, key, identity)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.call(self.store.delete, key)

    @contextlib.contextmanager
    def temporary(self, keys: Sequence[str]) -> Iterator[None]:
        """Delete objects at the end, as far as the store lets us.

        After a failure that is tried once: a store that does not answer would otherwise
        be waited for again, for each of them. After a signal nothing is waited for.
        """
        try:
            yield
        except Interrupted:
            raise
        except BaseException:
            with contextlib.suppress(StoreError):
                for key in keys:
                    self.store.delete(key)
            raise
        for key in keys:
            with contextlib.suppress(StoreError):  # who may write may not always delete
                self.delete(key)

    def objects(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.objects`."""
        return self.call(lambda: list(self.store.objects(prefix)))

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        return self.call(lambda: list(self.store.folders()))

    def pieces(
        self,
        key: str,
        begin: int,
        end: int,
        etag: str | None = None,
        *,
        in_ranges: bool = False,
    ) -> Iterator[bytes | memoryview]:
        """Yield bytes ``[begin, end)`` in order, at most `PIECE_SIZE` at once.

        A piece is good until the next one is asked for.

        A body that breaks off is taken up again at the byte where it broke.

        Args:
            key: Of the object.
            begin: First byte.
            end: Byte after the last one.
            etag: The tag that the object must have.
            in_ranges: Whether the caller fetches the object in many ranges, and would
                rather know that the store sends it from its first byte each time.

        Raises:
            StoreError: As `call`; ``CHANGED`` when the object no longer has ``etag``.
            RangeIgnored: The store does so, with ``in_ranges``; nothing was read.
        """
        attempts = _Attempts(self)
        while begin < end:
            try:
                with self.gate.slot(self.check) as queued:
                    attempts.queued(queued)
                    self.counters.add(requests=1)
                    with contextlib.closing(self.store.open(key, begin, end, etag)) as body:
                        if body.skip and in_ranges:
                            self.ignores_ranges = True
                            raise RangeIgnored
                        for _ in self._read(key, body, body.skip):
                            pass  # fetched, but no progress: that would never end
                        for piece in self._read(key, body, end - begin):
                            begin += len(piece)
                            yield piece
                            attempts.progressed()
            except StoreError as error:
                attempts.failed(error)
            else:
                self.gate.succeeded()

    def _read(self, key: str, body: Body, left: int) -> Iterator[bytes | memoryview]:
        """Yield the next ``left`` bytes of a body."""
        while left:
            piece = body.read(min(left, PIECE_SIZE))
            self.check()
            if not piece:
                raise StoreError(
                    StoreFault.TRANSIENT,
                    f"{self.store.url(key)}: the body ended {left} bytes early",
                )
            left -= len(piece)
            self.moved(bytes_in=len(piece))
            yield piece

    def take_rate(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be sent."""
        self._rate.take(num_bytes, self.sleep)

    # ------------------------------------------------------------------- for _Attempts

    def tell(self, error: StoreError) -> None:
        """Say once per kind of trouble that requests are being repeated."""
        if error.fault not in self._told:
            self._told.add(error.fault)
            message = f"{error.message}; trying again, for up to {self.options.retry_for:.0f} s"
            self._report(
                Notice(severity="info", code=f"retry-{error.fault.value}", message=message)
            )

    def jitter(self, most: float) -> float:
        """Return a random wait of half of ``most`` to ``most``."""
        return most * self._random.uniform(0.5, 1.0)


class Abandoned(Exception):  # noqa: N818  (ends a thread quietly; another one has the error)
    """Another thread of the same transfer has failed."""


class RangeIgnored(Exception):  # noqa: N818  (nothing failed: there is another way)
    """The store sends an object from its first byte, whatever range is asked for."""


class _Attempts:
    """The failures of one request, and how long to wait after each."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._count = 0
        self._furthest = 0
        self._progress_at = time.monotonic()

    @property
    def _idle_seconds(self) -> float:
        return time.monotonic() - self._progress_at

    def progressed(self) -> None:
        """Note that the request has got further: the next failure is a first one."""
        self._count = 0
        self._progress_at = time.monotonic()

    def reached(self, position: int) -> None:
        """Note how far a body has been sent: whether it was taken shows at its end only."""
        if position > self._furthest:
            self._furthest = position
            self._progress_at = time.monotonic()

    def queued(self, seconds: float) -> None:
        """Note that the request could not be tried for a while because of others."""
        self._progress_at += seconds

    def failed(self, error: StoreError) -> None:
        """Wait before the next try, or raise ``error``."""
        client = self._client
        client.check()
        if error.fault not in _REPEATABLE:
            raise error
        self._count += 1
        if error.fault in _SLOWER:
            client.gate.overloaded(min(error.retry_after or 0.0, client.options.retry_for))
            client.counters.add(throttled=1)
        if error.fault is StoreFault.EXPIRED:
            client.store.renew()
        if self._is_last(error):
            raise self._final(error) from error
        client.tell(error)
        most = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(self._count - 1, 10))
        wait = max(client.jitter(most), error.retry_after or 0.0)
        wait = min(wait, max(0.0, client.options.retry_for - self._idle_seconds))
        client.counters.add(retries=1, waited_seconds=wait)
        client.sleep(wait)

    def _is_last(self, error: StoreError) -> bool:
        limits = {StoreFault.SKEWED: _SKEW_TRIES, StoreFault.CORRUPT: _CORRUPT_TRIES}
        if self._count >= limits.get(error.fault, self._count + 1):
            return True
        if error.fault is StoreFault.EXPIRED and self._idle_seconds > _CREDENTIALS_PATIENCE:
            return True
        return self._idle_seconds >= self._client.options.retry_for

    def _final(self, error: StoreError) -> StoreError:
        if error.fault in (StoreFault.SKEWED, StoreFault.EXPIRED, StoreFault.CORRUPT):
            return error
        return StoreError(
            error.fault,
            f"{error.message} (gave up after {self._idle_seconds:.0f} s without progress)",
            hint=error.hint
            or "run the same command again to go on where it stopped; --retry-for gives the "
            "store more time",
        )
