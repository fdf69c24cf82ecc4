"""How requests are repeated, how many go at once, how fast bytes go: without a store."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mxconvert.errors import Interrupted, StoreError, StoreFault
from mxconvert.stop import StopToken
from mxconvert.store import Client, ClientOptions
from mxconvert.store.gate import Gate, RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable

NO_STORE: Any = type("NoStore", (), {"renew": lambda _: None})()


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the client."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


class Failing:
    """Work that fails so often, then succeeds; notes when it was tried."""

    def __init__(self, clock: Clock, times: int, fault: StoreFault, **more: Any) -> None:
        self.clock, self.left = clock, times
        self.error: Callable[[], StoreError] = lambda: StoreError(fault, "it failed", **more)
        self.tried: list[float] = []

    def __call__(self) -> str:
        self.tried.append(self.clock.now)
        self.left -= 1
        if self.left >= 0:
            raise self.error()
        return "done"

    @property
    def waits(self) -> list[float]:
        """Seconds between tries."""
        return [b - a for a, b in zip(self.tried, self.tried[1:], strict=False)]


def client(**options: Any) -> Client:
    return Client(NO_STORE, ClientOptions(**options))


@pytest.mark.parametrize(
    "fault", [StoreFault.THROTTLED, StoreFault.TRANSIENT, StoreFault.STALLED, StoreFault.EXPIRED]
)
def test_waits_double_up_to_a_limit_with_jitter(clock: Clock, fault: StoreFault) -> None:
    """OBJ-01: each wait is random within its upper half, so that clients do not come at once."""
    limits = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8]
    runs = []
    for _ in range(20):
        work = Failing(clock, 7, fault)
        assert client().call(work) == "done"
        for wait, limit in zip(work.waits, limits, strict=True):
            assert limit / 2 - 1e-6 <= wait <= limit + 1e-6
        runs.append(work.waits)
    assert len({round(waits[3], 6) for waits in runs}) > 15


@pytest.mark.parametrize(
    "fault",
    [
        StoreFault.DENIED,
        StoreFault.MISSING,
        StoreFault.NO_BUCKET,
        StoreFault.NO_CREDENTIALS,
        StoreFault.CHANGED,
        StoreFault.UNSUPPORTED,
        StoreFault.REFUSED,
    ],
)
def test_what_will_not_pass_is_not_repeated(clock: Clock, fault: StoreFault) -> None:
    work = Failing(clock, 1, fault)
    with pytest.raises(StoreError, match="it failed"):
        client().call(work)
    assert len(work.tried) == 1
    assert clock.slept == []


@pytest.mark.parametrize(("fault", "tries"), [(StoreFault.SKEWED, 3), (StoreFault.CORRUPT, 4)])
def test_what_seldom_passes_is_repeated_seldom(clock: Clock, fault: StoreFault, tries: int) -> None:
    work = Failing(clock, 100, fault)
    with pytest.raises(StoreError, match="it failed"):
        client().call(work)
    assert len(work.tried) == tries


@pytest.mark.parametrize("retry_after", [None, 5.0, 7200.0])
def test_giving_up(clock: Clock, retry_after: float | None) -> None:
    """After the time without progress that was allowed, whatever the store asks for."""
    begin = clock.now
    work = Failing(clock, 10_000, StoreFault.TRANSIENT, retry_after=retry_after)
    with pytest.raises(StoreError, match="gave up after 60 s without progress") as caught:
        client(retry_for=60).call(work)
    assert 60 <= clock.now - begin <= 81
    assert "run the same command again" in str(caught.value.hint)


def test_progress_begins_the_time_anew(clock: Clock) -> None:
    """A body that breaks off again and again, but each time later, is read to its end."""

    class Body:
        skip = 0

        def __init__(self) -> None:
            self.left = 1

        def read(self, _most: int) -> bytes:
            self.left -= 1
            return b"x" if self.left >= 0 else b""

        def close(self) -> None:
            pass

    def opened(*_: object) -> Body:
        clock.sleep(3)
        return Body()

    store: Any = type("Store", (), {"open": opened, "url": lambda _, key: key})()
    reader = Client(store, ClientOptions(retry_for=5))
    assert b"".join(bytes(piece) for piece in reader.pieces("key", 0, 50)) == b"x" * 50


@pytest.mark.parametrize("grows", [True, False])
def test_a_body_that_gets_further_is_progress(clock: Clock, *, grows: bool) -> None:
    """A large file over a slow line may take long; the same bytes again and again may not."""
    sender, tries = client(retry_for=60), 0

    def send(reached: Callable[[int], None]) -> str:
        nonlocal tries
        tries += 1
        for position in range(1, 10):
            clock.sleep(10)
            reached(position + 9 * tries if grows else position)
        if tries == 8:
            return "done"
        raise StoreError(StoreFault.TRANSIENT, "it broke")

    if grows:
        assert sender.send(send) == "done"
        return
    with pytest.raises(StoreError, match="without progress"):
        sender.send(send)
    assert tries == 2


def test_waiting_for_a_place_is_no_failure() -> None:
    """A request that failed once and then waits for others is not given up because of that."""
    busy = client(jobs=1, retry_for=0.5)
    release = threading.Event()
    failed = threading.Event()
    found: list[object] = []

    def work() -> str:
        if not failed.is_set():
            failed.set()
            raise StoreError(StoreFault.TRANSIENT, "once")
        if release.is_set():
            return "done"
        raise StoreError(StoreFault.TRANSIENT, "too early")

    def occupy() -> None:
        failed.wait()
        busy.call(lambda: time.sleep(1.0))
        release.set()

    threads = [
        threading.Thread(target=occupy),
        threading.Thread(target=lambda: found.append(busy.call(work))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["done"]


def test_an_error_after_a_signal_is_the_signal() -> None:
    """What breaks because the command ends is not reported as the store's fault."""
    stop = StopToken()

    def work() -> None:
        stop.set(15)
        raise StoreError(StoreFault.TRANSIENT, "the connection was closed")

    with pytest.raises(Interrupted):
        Client(NO_STORE, ClientOptions(retry_for=0.001), stop=stop).call(work)


def test_gate_lowers_its_limit_once_a_second_and_raises_it_slowly() -> None:
    clock = Clock()
    gate = Gate(16, lambda: clock.now)
    limits = []
    for _ in range(6):
        for _ in range(10):  # one burst
            gate.overloaded(None)
        limits.append(gate.limit)
        clock.sleep(1.5)
    assert limits == [9, 5, 3, 2, 1, 1]
    for _ in range(300):
        gate.succeeded()
    assert gate.limit == 16


def test_gate_stays_closed_as_long_as_the_store_asks() -> None:
    clock = Clock()
    gate = Gate(4, lambda: clock.now)
    gate.overloaded(10.0)
    begin = clock.now
    with gate.slot(lambda: clock.sleep(0.5)):
        assert clock.now - begin >= 10


def test_rate_limit() -> None:
    """The sum keeps to the rate, in whatever pieces."""
    clock = Clock()
    rate = RateLimit(1000, lambda: clock.now)
    begin = clock.now
    for size in (500, 1, 2499, 1000, 1000):
        rate.take(size, clock.sleep)
    assert clock.now - begin == pytest.approx(4.0)
    RateLimit(None, lambda: clock.now).take(10**12, clock.sleep)
    assert clock.now - begin == pytest.approx(4.0)


def test_the_reason_of_errors_that_wrap_one_another() -> None:
    """A signal that comes while botocore handles an error makes a ring of them."""
    from botocore.exceptions import HTTPClientError

    from mxconvert.store.s3.faults import translated

    inner = OSError("the line is dead")
    outer = HTTPClientError(error=inner)
    inner.__context__ = outer
    with pytest.raises(StoreError, match="key: "), translated("key"):
        raise outer
