"""``--load-format mxconvert`` for vLLM: weights by `mxconvert.open`, every one checked.

vLLM finds `register` through the entry point ``vllm.general_plugins``. The loader is vLLM's default
one with another source of tensors: they come from the model's folder, or from the artifact that
``--model-loader-extra-config '{"url": "s3://..."}'`` names, and with expert parallelism only those
of the rank's own experts are read. Tried with vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mxconvert.reading import open_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD_FORMAT = "mxconvert"
_OPTIONS = ("url", "expect_id", "jobs", "retry_for", "store_options", "max_bytes")


def register() -> None:
    """Tell vLLM of the load format; several processes of it call this, each once or more."""
    from vllm.model_executor import model_loader  # noqa: PLC0415

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:  # noqa: SLF001
        model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())


def _loader_class() -> type:
    from vllm.config import get_current_vllm_config  # noqa: PLC0415
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: PLC0415

    class MxConvertModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's default loader over `mxconvert.open`."""

        def __init__(self, load_config: Any) -> None:
            extra = dict(load_config.model_loader_extra_config or {})
            self._options = {key: extra.pop(key) for key in _OPTIONS if key in extra}
            super().__init__(replace(load_config, model_loader_extra_config=extra))

        def download_model(self, model_config: Any) -> None:
            """Nothing is fetched ahead."""

        def _init_ep_weight_filter(self, model_config: Any) -> None:
            parallel = get_current_vllm_config().parallel_config
            if parallel.enable_expert_parallel:
                parallel.enable_ep_weight_filter = True
            super()._init_ep_weight_filter(model_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
            experts = None if self.local_expert_ids is None else sorted(self.local_expert_ids)
            return _weights(self._options, source.model_or_path, source.prefix, experts)

    return MxConvertModelLoader


def _weights(
    options: dict[str, Any], folder: str, prefix: str, experts: list[int] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that vLLM's model takes, under its names for them."""
    opening = dict(options)
    where = opening.pop("url", folder)
    reading = {key: opening.pop(key) for key in ("max_bytes",) if key in opening}
    with open_artifact(where, **opening) as artifact:
        for name, tensor in artifact.tensors(experts=experts, framework="torch", **reading):
            yield prefix + name, tensor
