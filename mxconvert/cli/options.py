"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mxconvert.cli import runtime
from mxconvert.cli.runtime import parse_size
from mxconvert.errors import UsageError
from mxconvert.model import Activations, Layout, Options, ScaleRule, Scope, Unindexed
from mxconvert.recipes.engines import Engine
from mxconvert.safetensors_format import is_utf8

if TYPE_CHECKING:
    from collections.abc import Callable


def _set_debug(value: bool) -> bool:
    runtime.state.debug = value
    return value


def _set_json(value: bool) -> bool:
    runtime.state.json = value
    return value


Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder.")]
Json = Annotated[
    bool, typer.Option("--json", callback=_set_json, is_eager=True, help="Machine-readable output.")
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, is_eager=True, help="Tracebacks with errors."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only warnings and errors.")]
Jobs = Annotated[
    int | None,
    typer.Option("-j", "--jobs", min=1, help="Worker threads [default: all processors]."),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="auto|triton|llvm|numpy",
        help="Kernels; same bytes. triton: on GPUs alone.",
    ),
]
HostBackend = Annotated[
    str,
    typer.Option("--backend", metavar="auto|llvm|numpy", help="CPU kernels; same bytes."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cpu|all|cuda:0,...",
        help="Use these GPUs beside the CPU [default: all, for 32 GiB and more].",
    ),
]
MaxMemory = Annotated[
    str,
    typer.Option("--max-memory", metavar="SIZE", help="Memory the process may take, e.g. 512MiB."),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse what is otherwise a warning about the source.")
]
EngineOption = Annotated[
    Engine | None,
    typer.Option("--engine", help="Refuse a family that this engine is known not to load."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Make what no engine, or not --engine, is known to load."),
]
RuleOption = Annotated[
    ScaleRule,
    typer.Option(
        "--scale-rule",
        help="How a block's scale is chosen: smallest error; as compressed-tensors; OCP; "
        "rounded up.",
    ),
]
ScopeOption = Annotated[
    Scope,
    typer.Option("--scope", help="Quantize routed experts only, or all Linear weights."),
]
LayoutOption = Annotated[
    Layout,
    typer.Option("--layout", help="Files by expert range, by layer, or as in the source."),
]
ActivationsOption = Annotated[
    Activations,
    typer.Option("--activations", help="What the written config says about activations."),
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="Treat the model as one of this family."),
]
ExpertWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--expert-weights",
        metavar="TEMPLATE",
        help="With --recipe generic, what expert weights are called: "
        "'layers.{layer}.moe.experts.{expert}.{projection}', or of fused ones "
        "'layers.{layer}.moe.experts.w13=w1,w3'. Repeatable.",
    ),
]
FromInt4 = Annotated[
    bool,
    typer.Option("--from-int4", help="Convert compressed-tensors' INT4, which was rounded before."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Quantize these Linear modules too: a name, a glob, or re:REGEX. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        "--ignore",
        metavar="PATTERN",
        help="Keep these modules in their dtype: a name, a glob, or re:REGEX. Repeatable.",
    ),
]
ExpertsPerFile = Annotated[
    int | None,
    typer.Option("--experts-per-file", min=1, help="Experts per file with --layout experts."),
]
MaxFileSize = Annotated[
    str | None,
    typer.Option(
        "--max-file-size",
        metavar="SIZE",
        help="Cap of an output file [default: 5GB dense, 5GiB experts].",
    ),
]
UnindexedOption = Annotated[
    Unindexed | None,
    typer.Option("--unindexed", help="Stored tensors that the index does not list."),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="NAME", help="The hub's name of the source, for the card."
    ),
]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="GLOB",
        help="Make only these output files now; a later run makes the rest. Repeatable.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model files that are in DST.")
]
Recheck = Annotated[
    bool,
    typer.Option("--recheck", help="On resume, compare the source's content with finished files."),
]
BreakLock = Annotated[
    bool, typer.Option("--break-lock", help="Take over the lock of a run on another host.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a plan has to be good for, beside its bytes."""

    engine: Engine | None = None
    force: bool = False
    strict: bool = False


def check_backend(name: str, *, host_only: bool = False) -> str:
    """Return ``name`` if ``--backend`` takes it."""
    from mxconvert.quantize import backend_names

    known = [known for known in backend_names() if not (host_only and known == "triton")]
    if name not in known:
        raise typer.BadParameter(
            f"{name!r} is not one of {', '.join(known)}", param_hint="--backend"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanOptions:
    """The options that change bytes, as typer sees them."""

    scale_rule: RuleOption = ScaleRule.MSE
    scope: ScopeOption = Scope.EXPERTS
    include: Include = None
    exclude: Exclude = None
    recipe: RecipeOption = None
    expert_weights: ExpertWeights = None
    from_int4: FromInt4 = False
    layout: LayoutOption = Layout.EXPERTS
    experts_per_file: ExpertsPerFile = None
    max_file_size: MaxFileSize = None
    activations: ActivationsOption = Activations.NONE
    unindexed: UnindexedOption = None
    base_model: BaseModel = None

    def collect(self) -> Options:
        """Return the options that plans are made from.

        Raises:
            UsageError: Text that the manifest cannot hold.
        """
        lists = (self.include, self.exclude, self.expert_weights)
        for text in (
            self.recipe,
            self.base_model,
            *(item for texts in lists for item in texts or ()),
        ):
            if text is not None and not is_utf8(text):
                raise UsageError(f"{text!a} is not UTF-8", hint="check the shell's encoding")
        return Options(
            scale_rule=self.scale_rule,
            scope=self.scope,
            layout=self.layout,
            activations=self.activations,
            recipe=self.recipe,
            expert_weights=tuple(self.expert_weights or ()),
            from_int4=self.from_int4,
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
            experts_per_file=self.experts_per_file,
            max_file_size=parse_size(self.max_file_size) if self.max_file_size else None,
            unindexed=self.unindexed,
            base_model=self.base_model,
        )


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``options: Options`` by one option for each field.

    Both ``plan`` and ``quantize`` take them, and they must not drift apart.
    """
    hints = get_type_hints(_PlanOptions, include_extras=True)
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(_PlanOptions)
    ]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=own_hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "options"
    ]
    arguments = sum(parameter.default is inspect.Parameter.empty for parameter in own)
    parameters = [*own[:arguments], *added, *own[arguments:]]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen = _PlanOptions(**{p.name: values.pop(p.name) for p in added})
        command(options=chosen.collect(), **values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def collect(**values: Any) -> Options:
    """Return the options that plans are made from, of some of them; the others are defaults.

    Raises:
        UsageError: Text that the manifest cannot hold.
    """
    return _PlanOptions(**values).collect()
