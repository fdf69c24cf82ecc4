"""Options and fixtures for all tests.

Plain ``pytest`` runs the fast tier; ``--slow`` adds tests that take minutes. ``--interop``
runs, instead of all others, those that need torch and the libraries that read our output:
torch's memory and threads stay out of the other tests. With ``TRITON_INTERPRET=1`` in the
environment only the tests of kernels run, and Triton's interpreter is their only backend.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.kernels.interpreter import INTERPRETING
from tests.support import Model, bf16_model
from tests.support.runs import Reference, make_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.pull_base import Place
    from tests.push_base import Site
    from tests.support.faults import FaultProxy
    from tests.support.large import LargeArtifact
    from tests.support.seaweed import S3Server

settings.register_profile("mxconvert", derandomize=True, deadline=None)
settings.load_profile("mxconvert")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--interop", action="store_true", help="run the tests marked interop only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, left = [], []
    for item in items:
        (wanted if _is_wanted(item, config) else left).append(item)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="needs --slow"))
    if left:
        items[:] = wanted
        config.hook.pytest_deselected(items=left)


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test belongs to this run: each needs a process of its own kind."""
    interop, interpreter = (
        item.get_closest_marker(name) is not None for name in ("interop", "interpreter")
    )
    if INTERPRETING:
        return not interop and (interpreter or "triton" in item.nodeid.partition("[")[2])
    return not interpreter and interop == config.getoption("--interop")


@pytest.fixture(autouse=True, scope="session")
def _small_process() -> Iterator[None]:
    """Runs within this process are not charged for what pytest and earlier tests take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxconvert.pipeline.resources.resident_bytes", lambda: 100 << 20)
        yield


@pytest.fixture
def model() -> Model:
    """F-BF16, not yet written; change it, then `Model.write` it."""
    return bf16_model()


@pytest.fixture(scope="session")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F-BF16 on disk, once for all tests of a worker: read it, never change it."""
    return bf16_model().write(tmp_path_factory.mktemp("shared") / "F-BF16")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """F-BF16 and what a run makes of it that nothing disturbs, once for all tests of a worker."""
    return make_reference(bf16_model(), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def made(reference: Reference) -> Path:
    """The artifact of `reference`: read it, never change it."""
    return reference.target


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy of a finished artifact, to damage."""
    return Path(shutil.copytree(made, tmp_path / "artifact"))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> LargeArtifact:
    """An artifact one of whose files goes in three parts, once for all tests of a worker."""
    from tests.support.large import make_large

    return make_large(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The S3 server that all workers of this run share; see `tests.support.seaweed`."""
    from tests.support.seaweed import shared_server

    root, watched = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root, watched = root.parent, os.getppid()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)  # the user's own settings reach no command
        server = shared_server(root, watched)
        yield server
    server.close()


@pytest.fixture(scope="session")
def next_bucket(s3: S3Server) -> Iterator[Callable[[], str]]:
    """Gives new buckets; the next one is made, and has had its slow first object, meanwhile."""

    def make() -> str:
        name = s3.make_bucket()
        s3.put(name, "first", b"")
        s3.delete(name, "first")
        return name

    with ThreadPoolExecutor(1) as pool:
        ready = [pool.submit(make)]

        def take() -> str:
            ready.append(pool.submit(make))
            return ready.pop(0).result()

        yield take


@pytest.fixture
def bucket(next_bucket: Callable[[], str]) -> str:
    """A new, empty bucket."""
    return next_bucket()


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of ``s3`` that logs requests and, told so, disturbs them."""
    from tests.support.faults import FaultProxy

    with FaultProxy(s3) as proxy:
        yield proxy


@pytest.fixture
def place(
    s3: S3Server,
    bucket: str,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """Where artifacts are published and pulled from, through ``proxy``, also in this process."""
    from tests.pull_base import Place

    for name, value in proxy.environment().items():
        monkeypatch.setenv(name, value)
    return Place(s3=s3, bucket=bucket, proxy=proxy, folder=tmp_path, target=tmp_path / "target")


@pytest.fixture
def site(s3: S3Server, bucket: str, proxy: FaultProxy) -> Site:
    """A bucket behind the proxy, to push to."""
    from tests.push_base import Site

    return Site(s3=s3, bucket=bucket, proxy=proxy)


@pytest.fixture
def published(site: Site, large: LargeArtifact) -> LargeArtifact:
    """``large`` in ``site``; the proxy's log is empty."""
    site.push(large).ok()
    site.proxy.settle()
    site.proxy.log.clear()
    return large
