"""What is in a checkpoint, and what would it become.

Composes source and plan for ``mxconvert inspect``. A source that cannot be converted is
described all the same, with the reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mxconvert.errors import SourceError, UsageError
from mxconvert.model import Action
from mxconvert.plan import build_plan
from mxconvert.plan.logical import logical_tensors
from mxconvert.recipes import Role, find_recipe, model_type
from mxconvert.recipes.families import DENSE
from mxconvert.safetensors_format import num_elements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mxconvert.model import Checkpoint, Options, Plan, TensorInfo
    from mxconvert.recipes import Recipe

SCHEMA_VERSION = 1


@dataclass(slots=True)
class RoleFigures:
    """Sums over the tensors of one role.

    ``mxfp4_bytes`` is what they take after conversion (equal to ``size_bytes`` where
    nothing is quantized, ``None`` where the source cannot be converted); ``dequantized`` are
    FP8 weights that become BF16.
    """

    tensors: int = 0
    parameters: int = 0
    size_bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    quantized: int = 0
    dequantized: int = 0
    mxfp4_bytes: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts that ``inspect`` shows.

    ``obstacle`` says why the source cannot be converted, ``None`` if it can.
    """

    architectures: tuple[str, ...]
    model_type: str | None
    recipe: str
    num_experts: int | None
    experts_per_token: int | None
    moe_layers: int
    files: int
    tensors: int
    size_bytes: int
    parameters: int
    active_parameters: int | None
    dtypes: dict[str, int]
    roles: dict[str, RoleFigures]
    plan: Plan | None
    obstacle: str | None
    surprises: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``inspect --json`` prints."""
        facts = {
            name: getattr(self, name)
            for name in (
                "model_type", "recipe", "num_experts", "experts_per_token", "moe_layers", "files",
                "tensors", "size_bytes", "parameters", "active_parameters", "dtypes", "obstacle",
            )
        }  # fmt: skip
        roles = {
            name: asdict(figures) | {"dtypes": sorted(figures.dtypes)}
            for name, figures in self.roles.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "type": "inspection",
            "architectures": list(self.architectures),
            **facts,
            "mxfp4_bytes": self.plan.total_size if self.plan else None,
            "roles": roles,
            "surprises": list(self.surprises),
        }


def inspect_checkpoint(checkpoint: Checkpoint, options: Options) -> Inspection:
    """Gather the facts; reads nothing beyond what preflight read."""
    plan, obstacle = _try_plan(checkpoint, options)
    recipe = (
        find_recipe(
            checkpoint.config,
            options.recipe,
            expert_weights=options.expert_weights,
            tensors=checkpoint.tensors,
        )
        or DENSE
    )
    classify = recipe.classifier(checkpoint.config)
    tensors = _tensors_of_the_model(checkpoint, recipe)
    slots = {name: classify(name) for name in tensors}
    mtp = {name for name, slot in slots.items() if classify.is_mtp(name, slot)}
    layers = {s.layer for name, s in slots.items() if s.role is Role.EXPERT and name not in mtp}
    num_experts = recipe.num_experts(checkpoint.config)
    per_token = recipe.experts_per_token(checkpoint.config) if num_experts else None
    role_of = {name: Role.MTP if name in mtp else slot.role for name, slot in slots.items()}
    roles = _figures(tensors, role_of, plan)
    total = sum(figures.parameters for figures in roles.values())
    architectures = checkpoint.config.get("architectures")
    return Inspection(
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        model_type=model_type(checkpoint.config),
        recipe=recipe.name,
        num_experts=num_experts,
        experts_per_token=per_token,
        moe_layers=len(layers),
        files=len(checkpoint.files),
        tensors=len(checkpoint.tensors),
        size_bytes=sum(tensor.size for tensor in checkpoint.tensors.values()),
        parameters=total,
        active_parameters=_active(total, roles, num_experts, per_token),
        dtypes=dict(sorted(Counter(t.dtype for t in checkpoint.tensors.values()).items())),
        roles=roles,
        plan=plan,
        obstacle=obstacle,
        surprises=tuple(
            message for _, message in (*checkpoint.notices, *(plan.notices if plan else ()))
        ),
    )


def _tensors_of_the_model(checkpoint: Checkpoint, recipe: Recipe) -> Mapping[str, TensorInfo]:
    """Return the tensors one by one where the source stores them together; else as stored."""
    try:
        return logical_tensors(checkpoint.tensors, checkpoint.config, recipe).tensors
    except SourceError:
        return checkpoint.tensors


def _try_plan(checkpoint: Checkpoint, options: Options) -> tuple[Plan | None, str | None]:
    try:
        return build_plan(checkpoint, options), None
    except (SourceError, UsageError) as error:
        return None, error.message + (f" ({error.hint})" if error.hint else "")


def _active(
    total: int, roles: dict[str, RoleFigures], num_experts: int | None, per_token: int | None
) -> int | None:
    routed = roles.get(str(Role.EXPERT), RoleFigures()).parameters
    always = total - routed - roles.get(str(Role.MTP), RoleFigures()).parameters
    if not routed:
        return always
    if not num_experts or per_token is None:
        return None
    return always + routed * per_token // num_experts


def _figures(
    tensors: Mapping[str, TensorInfo], role_of: dict[str, Role], plan: Plan | None
) -> dict[str, RoleFigures]:
    roles: dict[str, RoleFigures] = defaultdict(RoleFigures)
    for name, tensor in tensors.items():
        figures = roles[str(role_of[name])]
        figures.tensors += 1
        figures.parameters += num_elements(tensor.shape)
        figures.size_bytes += tensor.size + (tensor.scale.tensor.size if tensor.scale else 0)
        figures.dtypes.add(tensor.dtype)
        if plan is None:
            figures.mxfp4_bytes = None
    for file in plan.files if plan else ():
        for item in file.items:
            figures = roles[str(role_of[item.source.name])]
            figures.quantized += item.action is Action.QUANTIZE
            figures.dequantized += item.action is Action.DEQUANTIZE
            figures.mxfp4_bytes = (figures.mxfp4_bytes or 0) + item.size
    return dict(sorted(roles.items(), key=lambda entry: -entry[1].size_bytes))
