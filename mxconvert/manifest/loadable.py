"""Which files an inference engine or a tokenizer might read."""

from __future__ import annotations

import re

_LEFTOVER = re.compile(
    r"(?i)(.*~|#.*#|.*\.(swp|swo|swn|bak|orig|rej|tmp)|thumbs\.db|desktop\.ini)$"
)
_SIGNATURE_PREFIX = "mxconvert.manifest."
_LOADED = re.compile(
    r"""(?ix)
    .*\.( safetensors | bin | pt | pth | ckpt | gguf | ggml | h5 | msgpack | onnx | onnx_data | ot
        | npz | npy | pkl | pickle | tflite | mlmodel | distcp | engine | flax
        | py | pyc | pyd | so
        | json | jsonl | jinja | jinja2 | j2 | yaml | yml | toml
        | model | tiktoken | spm | bpe | vocab )
    | ( merges | vocab | added_tokens | special_tokens | tokenizer | chat_template | params ) [^/]*
    """
)


def may_be_loaded(name: str) -> bool:
    """Whether an inference engine or a tokenizer might read a file of that name."""
    if name.startswith(_SIGNATURE_PREFIX) or _LEFTOVER.match(name):
        return False
    return _LOADED.fullmatch(name) is not None
