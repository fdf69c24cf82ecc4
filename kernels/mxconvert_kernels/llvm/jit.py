"""Compiles modules of LLVM IR: into memory for this processor, or into assembly for any."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import llvmlite
from llvmlite import binding

if TYPE_CHECKING:
    from collections.abc import Iterable

_lock: Final = threading.Lock()
_OLDEST_LLVM: Final = 20
"""Its IR, unlike that of LLVM 15, has pointers without a type by default (llvmlite 0.45)."""


class Compiled(NamedTuple):
    """Machine code in memory; it stays valid as long as this object lives."""

    address: int
    engine: binding.ExecutionEngine


class Target(NamedTuple):
    """What to emit assembly for."""

    triple: str
    cpu: str
    features: str = ""


def check_version() -> None:
    """Refuse a release of llvmlite that does not read the kernels.

    Raises:
        RuntimeError: llvmlite is older than 0.45.
    """
    if binding.llvm_version_info[0] < _OLDEST_LLVM:
        raise RuntimeError(f"llvmlite is too old: expected 0.45, found {llvmlite.__version__}")


def compile_for_host(module_text: str) -> Compiled:
    """Compile a module and return its one function.

    Raises:
        RuntimeError: LLVM rejects the module or cannot generate code for this processor.
    """
    with _lock:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(),
            features=binding.get_host_cpu_features().flatten(),
            opt=3,
        )
        module = _optimize(module_text, machine)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        return Compiled(engine.get_function_address(_function_name(module)), engine)


def host_has(features: Iterable[str]) -> bool:
    """Whether this processor has all of LLVM's features of these names."""
    found = binding.get_host_cpu_features()
    return all(found.get(name, False) for name in features)


def emit_assembly(module_text: str, target: Target) -> str:
    """The assembly of a module for a target, which need not be this machine.

    Raises:
        RuntimeError: LLVM does not know the target or cannot generate code for it.
    """
    with _lock:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        machine = binding.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=target.features, opt=3
        )
        assembly: str = machine.emit_assembly(_optimize(module_text, machine, target.triple))
        return assembly


def describe_host() -> str:
    """The versions and the processor that kernels are compiled with and for."""
    llvm_version = ".".join(map(str, binding.llvm_version_info))
    cpu = binding.get_host_cpu_name()
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm_version}, compiled for {cpu}"


def _optimize(
    module_text: str, machine: binding.TargetMachine, triple: str | None = None
) -> binding.ModuleRef:
    module = binding.parse_assembly(module_text)
    module.triple = triple or machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = binding.PipelineTuningOptions(speed_level=2)
    options.loop_unrolling = False  # a block is plenty for one iteration
    options.loop_vectorization = False
    options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _function_name(module: binding.ModuleRef) -> str:
    """The name of the function that the module defines."""
    names: list[str] = [item.name for item in module.functions if not item.is_declaration]
    return names[0]
