"""`mxconvert.open`: verified tensors straight from a store or a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mxconvert
from mxconvert.errors import MissingExtraError, StoreError, UsageError, VerificationError
from mxconvert.reading import runs
from mxconvert.reading.fetch import Fetcher
from mxconvert.reading.runs import runs_of, units_of
from tests.rank_base import RankArtifact, expert_of, list_of, make, pull, stored
from tests.support import bf16_model, fp8_model, shell
from tests.support.faults import CutBody, Flip, Respond

if TYPE_CHECKING:
    from tests.pull_base import Place

OPTIONS = {"retry_for": 2.0, "store_options": {"read_timeout": "2"}}


@pytest.fixture
def made(place: Place) -> RankArtifact:
    return make(place, bf16_model(layers=2, experts=8), "--experts-per-file", 4)


def read(where: object, **options: Any) -> dict[str, bytes]:
    """Return the bytes of every tensor; each name comes once."""
    with mxconvert.open(where, **(OPTIONS if isinstance(where, str) else {})) as artifact:
        pairs = [(name, tensor.tobytes()) for name, tensor in artifact.tensors(**options)]
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


# ----------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("order", ["arrival", "names", "files"])
@pytest.mark.parametrize("max_bytes", [1, 20_000, 1 << 30])
def test_every_tensor(made: RankArtifact, order: str, max_bytes: int) -> None:
    """From the store and from the folder, in any order, whatever may be held."""
    for where in (made.url, made.folder):
        found = read(where, order=order, max_bytes=max_bytes)
        assert found == made.tensors
        if order == "names":
            assert list(found) == sorted(found)
        if order == "files":
            assert list(found) == [record.name for record in list_of(made)]


def test_shapes_and_dtypes(made: RankArtifact) -> None:
    """As stored; numpy gets the bits of what it has no type for."""
    with mxconvert.open(made.url) as artifact:
        assert len(artifact) == len(made.tensors) == len(artifact.names())
        assert artifact.id == made.id
        for name, tensor in artifact.tensors():
            info = artifact.info(name)
            assert tensor.shape == info.shape
            assert tensor.dtype == {"U8": np.uint8, "BF16": np.uint16}[info.dtype]
            assert name in artifact


def test_a_rank_reads_its_experts_only(
    place: Place, made: RankArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as `pull` would give it, and no more bytes than that, counted at the server.

    Small gaps between wanted tensors are read along otherwise.
    """
    monkeypatch.setattr(runs, "GAP_BYTES", 0)
    for options, experts in (
        ({"rank": 1, "world_size": 4}, {2, 3}),
        ({"rank": 1, "world_size": 4, "placement": "round-robin"}, {1, 5}),
        ({"experts": "6-7"}, {6, 7}),
        ({"experts": [0, 7]}, {0, 7}),
    ):
        with mxconvert.open(made.url, **OPTIONS) as artifact:
            place.proxy.settle()
            place.proxy.log.clear()
            found = {name: t.tobytes() for name, t in artifact.tensors(**options)}
        whole = made.tensors
        wanted = {name for name in whole if expert_of(name) is None or expert_of(name) in experts}
        assert found == {name: whole[name] for name in wanted}
        assert place.fetched("*.safetensors") == sum(map(len, found.values()))


def test_one_tensor(place: Place, made: RankArtifact) -> None:
    with mxconvert.open(made.url, **OPTIONS) as artifact:
        place.proxy.settle()
        place.proxy.log.clear()
        for name in list(made.tensors)[::17]:
            assert artifact.get(name).tobytes() == made.tensors[name]
        with pytest.raises(UsageError, match=r"no tensor 'x\.weight'"):
            artifact.get("x.weight")
        name = next(n for n in made.tensors if n.endswith(".weight_packed"))
        with pytest.raises(UsageError) as error:
            artifact.get(name.replace("_packed", ""))
        assert "dequantize=True" in str(error.value.hint)


@pytest.mark.parametrize("make_model", [bf16_model, fp8_model])
def test_dequantized_is_what_dequantize_makes(place: Place, make_model: Any) -> None:
    """`X.weight` for codes and scales, in BF16, bit for bit; all else as it is."""
    made = make(place, make_model())
    shell("dequantize", made.folder, place.folder / "plain").ok()
    expected = stored(place.folder / "plain")
    assert read(made.url, dequantize=True) == expected
    assert read(made.url, dequantize=True, order="names", max_bytes=5000) == expected
    name = next(n for n in expected if expert_of(n) is not None)
    with mxconvert.open(made.url) as artifact:
        tensor = artifact.get(name, dequantize=True)
        info = artifact.info(name + "_packed")
        assert tensor.shape == (info.shape[0], 2 * info.shape[1])
        assert tensor.tobytes() == expected[name]


def test_a_folder_with_a_part(place: Place, made: RankArtifact) -> None:
    """What `pull --experts` left is read as it is; what is not there is not missed."""
    pull(place, made, place.target, "--experts", "1,5").ok()
    assert read(place.target) == stored(place.target)
    with mxconvert.open(place.target, expect_id=made.id[:16]) as artifact:
        assert artifact.id == made.id


def test_another_artifact_is_refused(made: RankArtifact) -> None:
    with pytest.raises(VerificationError, match="expected ffff"):
        mxconvert.open(made.url, expect_id="f" * 16)


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    "fault", [Flip(700), CutBody(100), Respond(503)], ids=["flipped bit", "cut body", "503"]
)
def test_what_arrives_wrong_is_read_again(place: Place, made: RankArtifact, fault: Any) -> None:
    with mxconvert.open(made.url, **{**OPTIONS, "retry_for": 20.0}) as artifact:
        rule = place.proxy.add(fault, "GetObject", key="*.safetensors", times=2)
        found = {name: tensor.tobytes() for name, tensor in artifact.tensors()}
    assert rule.fired
    assert found == made.tensors


def test_damage_at_the_store_is_an_error(place: Place, made: RankArtifact) -> None:
    """Key and tensor are named; nothing wrong was handed over before."""
    record = list_of(made)[-1]
    data = bytearray((made.folder / record.file).read_bytes())
    data[record.begin] ^= 4
    place.s3.put(place.bucket, f"models/m/{made.id[:16]}/{record.file}", bytes(data))
    seen: dict[str, bytes] = {}
    with mxconvert.open(made.url, **OPTIONS) as artifact, pytest.raises(StoreError) as error:
        seen.update((name, tensor.tobytes()) for name, tensor in artifact.tensors())
    assert record.file in error.value.message
    assert record.name in error.value.message
    assert seen.items() <= made.tensors.items()


def test_a_reader_that_leaves_early(made: RankArtifact) -> None:
    """No thread stays behind."""
    with mxconvert.open(made.url, **OPTIONS) as artifact:
        stream = artifact.tensors(max_bytes=2000)
        next(stream)
        stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mxconvert-read")]


BAD: tuple[dict[str, Any], ...] = (
    {"order": "random"},
    {"rank": 1},
    {"rank": 8, "world_size": 8},
    {"experts": "8"},
    {"placement": "spread", "rank": 0, "world_size": 2},
    {"framework": "jax"},
    {"framework": "numpy", "device": "cuda:0"},
)


@pytest.mark.parametrize("options", BAD, ids=str)
def test_options_that_make_no_sense(made: RankArtifact, options: dict[str, Any]) -> None:
    with mxconvert.open(made.folder) as artifact, pytest.raises(UsageError):
        list(artifact.tensors(**options))


def test_without_torch(made: RankArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        mxconvert.open(made.folder) as artifact,
        pytest.raises(MissingExtraError, match="torch is not installed") as error,
    ):
        list(artifact.tensors(framework="torch"))
    assert error.value.exit_status == 8


# ------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("in_order", [False, True])
def test_no_more_is_held_than_allowed(
    made: RankArtifact, *, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was read and not yet taken, however slow the taker; one larger run goes alone."""
    limit, most = 6000, 0
    take = Fetcher._take

    def watched(self: Fetcher) -> Any:
        nonlocal most
        run = take(self)
        with self._changed:
            most = max(most, self._held)
        return run

    monkeypatch.setattr(Fetcher, "_take", watched)
    sizes = []
    with mxconvert.open(made.folder) as artifact:
        order = "files" if in_order else "arrival"
        for _, tensor in artifact.tensors(max_bytes=limit, order=order):
            sizes.append(tensor.nbytes)
    assert max(sizes) > limit, "some tensor is larger"
    assert most <= max(limit, *sizes)


def test_neighbours_share_requests(made: RankArtifact) -> None:
    """One request for each file of this size, codes and their scales always in one."""
    records = list_of(made)
    whole = runs_of(units_of(records, decoded=True))
    assert len(whole) == len(made.weights)
    small = runs_of(units_of(records, decoded=True), 1)
    assert [u for run in small for u in run.units] == list(units_of(records, decoded=True))
    assert all(len(run.units) == 1 for run in small)
    assert any(len(run.units[0].records) == 2 for run in small)


def test_the_import_is_cheap() -> None:
    """`import mxconvert` loads neither numpy nor a store's client."""
    code = (
        "import sys, mxconvert; "
        "print([m for m in ('numpy', 'botocore', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
