"""Run vLLM's own model class and weight loader over a folder. Needs vLLM.

Stops before ``process_weights_after_loading``, where the kernels of a GPU take over.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.support.engines.watch import Watch, fill_with_sentinels, untouched

if TYPE_CHECKING:
    from pathlib import Path


def load(
    folder: Path, scratch: Path, load_format: str = "safetensors", **extra: Any
) -> dict[str, Any]:
    """Load a folder and return what became of it.

    Args:
        folder: The model's.
        scratch: For the rendezvous.
        load_format: vLLM's.
        extra: The loader's extra configuration.

    Returns:
        ``parameters`` by name, ``sources`` (names of the tensors that were copied into each),
        ``methods`` (each module's quantization method by vLLM's own matching), ``offered`` and
        ``unread`` tensors, and ``untouched`` elements by parameter.
    """
    watch = Watch()
    model = _model(folder, scratch, watch, load_format, extra)
    watch.adopted(model)
    parameters = dict(model.named_parameters())
    return {
        "class": type(model).__name__,
        "parameters": {name: value.detach().clone() for name, value in parameters.items()},
        "sources": {
            name: watch.copies.get(value.untyped_storage().data_ptr(), [])
            for name, value in parameters.items()
        },
        "methods": _methods(model),
        "offered": watch.offered,
        "unread": [name for name in watch.offered if name not in watch.read],
        "untouched": {name: n for name, value in parameters.items() if (n := untouched(value))},
    }


def _model(
    folder: Path, scratch: Path, watch: Watch, load_format: str, extra: dict[str, Any]
) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_mxfp4,
    )
    from vllm.model_executor.model_loader import base_loader, get_model
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms.cpu import CpuPlatform

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        load_format=load_format,
        model_loader_extra_config=extra,
    ).create_engine_config()
    offer, create = DefaultModelLoader.get_all_weights, base_loader.initialize_model
    read = DefaultModelLoader.load_weights

    def created(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = create(*args, **kwargs)
        fill_with_sentinels(model)
        return model

    def watched(loader: Any, *args: Any) -> Any:
        with watch:
            return read(loader, *args)

    with (
        set_current_vllm_config(config),
        mock.patch.object(torch.accelerator, "empty_cache"),  # there is none
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(compressed_tensors_w4a4_mxfp4, "init_mxfp4_linear_kernel"),
        mock.patch.object(
            unquantized_fused_moe_method,
            "select_unquantized_moe_backend",
            _any_backend(unquantized_fused_moe_method.select_unquantized_moe_backend),
        ),
        mock.patch.object(FusedMoEConfig, "__post_init__", _ungated(FusedMoEConfig.__post_init__)),
        mock.patch.object(CpuPlatform, "get_attn_backend_cls", _dense_attention),
        mock.patch.object(base_loader, "initialize_model", created),
        mock.patch.object(base_loader, "process_weights_after_loading"),
        mock.patch.object(DefaultModelLoader, "load_weights", watched),
        mock.patch.object(
            DefaultModelLoader, "get_all_weights", lambda *args: watch.tag(offer(*args))
        ),
    ):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def _dense_attention(*args: Any, **options: Any) -> str:
    """Return a backend whatever the attention is: CPUs have none for sparse ones."""
    named = [*args, *options.values()]
    [selector] = [each for each in named if type(each).__name__ == "AttentionSelectorConfig"]
    name = "mla.cpu_mla.CPUMLABackend" if selector.use_mla else "cpu_attn.CPUAttentionBackend"
    return f"vllm.v1.attention.backends.{name}"


def _ungated(check: Any) -> Any:
    """Return a check without its end: CPUs have no kernel for experts without a gate."""

    def checked(config: Any) -> None:
        with suppress(NotImplementedError):
            check(config)

    return checked


def _any_backend(select: Any) -> Any:
    """Return a selection that falls back on a backend that is never run."""

    def selected(**options: Any) -> Any:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        try:
            return select(**options)
        except NotImplementedError:
            return UnquantizedMoeBackend.CPU, None

    return selected


def _methods(model: torch.nn.Module) -> dict[str, str]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found = {}
    for name, module in model.named_modules():
        experts = any(part in {"w2_weight", "w2_weight_packed"} for part in module._parameters)
        if experts or isinstance(module, LinearBase | VocabParallelEmbedding):
            found[name] = type(module.quant_method).__name__
    return found


def serve(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return what vLLM continues each prompt with, always taking the likeliest token."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
    )
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(done.outputs[0].token_ids) for done in engine.generate(inputs, wanted)]
