"""`mxconvert.open` with torch: dtypes, values, and the example of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mxconvert
from mxconvert.errors import MissingExtraError
from tests.rank_base import stored
from tests.support import bf16_model, shell

pytestmark = pytest.mark.interop

torch = pytest.importorskip("torch")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("open")
    source = bf16_model(layers=1, experts=4).write(root / "source")
    shell("quantize", source, root / "out").ok()
    return root / "out"


def bits(tensor: Any) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_tensors_have_their_dtypes(artifact: Path) -> None:
    """BF16 is BF16 there; bytes and shapes are those of the files."""
    with mxconvert.open(artifact) as opened:
        found = dict(opened.tensors(framework="torch"))
        for name, tensor in found.items():
            info = opened.info(name)
            assert tensor.dtype == {"U8": torch.uint8, "BF16": torch.bfloat16}[info.dtype]
            assert tuple(tensor.shape) == info.shape
    assert {name: bits(tensor) for name, tensor in found.items()} == stored(artifact)


def test_a_device_that_is_not_there(artifact: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with mxconvert.open(artifact) as opened, pytest.raises(MissingExtraError, match="cuda"):
        list(opened.tensors(device="cuda:0"))


def test_the_example_computes_the_layer(artifact: Path, tmp_path: Path) -> None:
    """The shares of two ranks of the documented router add up to what transformers computes."""
    from transformers import AutoModelForCausalLM

    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(compile(code[1], str(DOCUMENT), "exec"), names)  # noqa: S102  (our own document)
    plain = tmp_path / "plain"
    shell("dequantize", artifact, plain).ok()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp
    hidden = torch.randn(1, 20, model.config.hidden_size, generator=torch.manual_seed(0))
    hidden = hidden.to(torch.bfloat16)
    with torch.no_grad():
        expected = layer(hidden)
        expected = expected[0] if isinstance(expected, tuple) else expected
        shares = [
            names["RankExperts"](artifact, 0, rank, 2, model.config.num_experts_per_tok)(hidden[0])
            for rank in range(2)
        ]
    assert all(share.abs().max() > 0 for share in shares)
    torch.testing.assert_close(sum(shares), expected[0], rtol=0.03, atol=1e-4)
