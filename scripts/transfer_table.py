"""What `bench_transfer` measured, as rows, a table, and beside the goals."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MB, GB = 10**6, 10**9
PEAK_MB, CPU_FACTOR, SPEED, FACTOR_S3FS = 400, 1.3, 0.9, 2.5


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one client.

    Attributes:
        server: Its name.
        case: ``push``, ``memory``, ``tmpfs`` or ``disk``.
        client: Its name.
        number: Of the round, from 0.
        num_bytes: What was moved.
        wall_s: From start to end of the process.
        synced_s: The same, until the disk has it; other cases: as ``wall_s``.
        cpu_s: User and system seconds of the process and its children.
        peak_mb: Largest resident memory of the process tree, 10^6 bytes.
        load: Load average before.
    """

    server: str
    case: str
    client: str
    number: int
    num_bytes: int
    wall_s: float
    synced_s: float
    cpu_s: float
    peak_mb: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the rounds of a client in a case.

    Attributes:
        mb_s: Bytes over the whole process.
        synced_mb_s: The same until the disk has them.
        net_mb_s: As ``synced_mb_s``, without the time that moving a small model took in the
            same round: what a long transfer sees.
        cpu_s_per_gb: Of the whole process.
        net_cpu_s_per_gb: Without those of the small model.
        start_s: What the small model takes.
        peak_mb: The largest of all rounds.
    """

    server: str
    case: str
    client: str
    runs: int
    mb_s: float
    synced_mb_s: float
    net_mb_s: float
    cpu_s_per_gb: float
    net_cpu_s_per_gb: float
    start_s: float
    peak_mb: float
    load: float


def row(samples: list[Sample], starts: dict[int, Sample]) -> Row:
    """Return the medians of a client in a case.

    Args:
        samples: Its runs.
        starts: Its runs with the small model, by round; load changes, so each is compared
            with the run beside it.
    """
    first = samples[0]
    pairs = [(sample, starts[sample.number]) for sample in samples]
    size = first.num_bytes - pairs[0][1].num_bytes

    def median(of: Callable[[Sample, Sample], float]) -> float:
        return statistics.median(of(*pair) for pair in pairs)

    return Row(
        server=first.server,
        case=first.case,
        client=first.client,
        runs=len(samples),
        mb_s=median(lambda s, _: s.num_bytes / MB / s.wall_s),
        synced_mb_s=median(lambda s, _: s.num_bytes / MB / s.synced_s),
        net_mb_s=median(lambda s, start: size / MB / max(s.synced_s - start.synced_s, 1e-9)),
        cpu_s_per_gb=median(lambda s, _: s.cpu_s / s.num_bytes * GB),
        net_cpu_s_per_gb=median(lambda s, start: max(s.cpu_s - start.cpu_s, 0) / size * GB),
        start_s=median(lambda _, start: start.synced_s),
        peak_mb=max(s.peak_mb for s in samples),
        load=median(lambda s, _: s.load),
    )


def rows(samples: list[Sample], starts: list[Sample]) -> list[Row]:
    """Return a row for each client of each case of each server, in the order of the runs."""

    def key(sample: Sample) -> tuple[str, str, str]:
        return sample.server, sample.case, sample.client

    start_of: dict[tuple[str, str, str], dict[int, Sample]] = {}
    for sample in starts:
        start_of.setdefault(key(sample), {})[sample.number] = sample
    by_key: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        if sample.number in start_of.get(key(sample), {}):
            by_key.setdefault(key(sample), []).append(sample)
    found = [row(group, start_of[place]) for place, group in by_key.items()]
    order = list(dict.fromkeys((r.server, r.case) for r in found))
    return sorted(found, key=lambda r: (order.index((r.server, r.case)), -r.mb_s))


def table(found: list[Row], versions: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a Markdown table, the fastest of each case first."""
    yield (
        "| server, direction | client | MB/s | MB/s, synced | MB/s without start | CPU s/GB "
        "| CPU s/GB without start | start s | peak MB | load |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for each in found:
        cells = (
            f"{each.server}, {WORDS[each.case]}",
            f"{each.client} {versions.get(each.client, '')}".strip(),
            f"{each.mb_s:.0f}",
            f"{each.synced_mb_s:.0f}" if each.case == "disk" else "",
            f"{each.net_mb_s:.0f}",
            f"{each.cpu_s_per_gb:.2f}",
            f"{each.net_cpu_s_per_gb:.2f}",
            f"{each.start_s:.2f}",
            f"{each.peak_mb:.0f}",
            f"{each.load:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


WORDS = {
    "push": "up",
    "memory": "down to memory",
    "tmpfs": "down to tmpfs",
    "disk": "down to disk",
}


# ----------------------------------------------------------------------------- goals


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A figure of ours beside what it should be; ``least`` says on which side."""

    server: str
    what: str
    figure: float
    wanted: float
    least: bool

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.figure >= self.wanted if self.least else self.figure <= self.wanted


def goals(found: list[Row], ours: str) -> Iterator[Goal]:
    """Yield every goal whose figures are there."""
    for server in dict.fromkeys(row.server for row in found):
        for case in WORDS:
            beside = {r.client: r for r in found if (r.server, r.case) == (server, case)}
            mine = beside.pop(ours, None)
            if mine is not None:
                yield from _goals_of_case(mine, beside)


def _goals_of_case(mine: Row, peers: dict[str, Row]) -> Iterator[Goal]:
    where, side = WORDS[mine.case], {"server": mine.server}
    wanted = {"push": {"boto3": SPEED}}
    wanted["disk"] = {"obstore": SPEED, "obstore-ranges": SPEED, "s5cmd": SPEED}
    wanted["disk"] |= {"s3fs": FACTOR_S3FS, "s3fs-streams": FACTOR_S3FS}
    for peer, factor in wanted.get(mine.case, {}).items():
        if peer in peers:
            for word, field in SPEEDS.items() if mine.case == "disk" else WHOLE.items():
                figure = getattr(mine, field) / getattr(peers[peer], field)
                what = f"{where}: MB/s{word}, times {peer}'s"
                yield Goal(what=what, figure=figure, wanted=factor, least=True, **side)
    yield Goal(what=f"{where}: peak MB", figure=mine.peak_mb, wanted=PEAK_MB, least=False, **side)
    if peers:
        for word, field in CPUS.items():
            best = min(peers.values(), key=lambda row: getattr(row, field))
            figure = getattr(mine, field) / max(getattr(best, field), 1e-9)
            what = f"{where}: CPU s/GB{word}, times the best's ({best.client})"
            yield Goal(what=what, figure=figure, wanted=CPU_FACTOR, least=False, **side)


WHOLE = {"": "mb_s", " without start": "net_mb_s"}
SPEEDS = {"": "mb_s", " synced": "synced_mb_s", " without start": "net_mb_s"}
CPUS = {"": "cpu_s_per_gb", " without start": "net_cpu_s_per_gb"}


def goal_table(found: list[Goal]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| server | goal | figure | wanted | met |"
    yield "|---|---|--:|--:|---|"
    for goal in found:
        bound = f"{'at least' if goal.least else 'at most'} {goal.wanted:g}"
        met = "yes" if goal.met else "no"
        figure = f"{goal.figure:.0f}" if goal.wanted > 100 else f"{goal.figure:.2f}"
        yield f"| {goal.server} | {goal.what} | {figure} | {bound} | {met} |"
