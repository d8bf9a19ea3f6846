"""What the usual styles (colwise, rowwise, ...) mean for the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from meshweave.errors import PlanError
from meshweave.place.plans import Resolved

# The names that Hugging Face tp plans use (transformers/integrations/tensor_parallel.py), and their meaning here.
# "gather output" and the like fix the layout of a module's result, which placement decides by cost; "" stands for a
# style of values only. Packed weights (gate and up in a single matrix) are stored in plain pieces of that dim.
HF_STYLES = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "packed_colwise": "colwise",
    "rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise",
    "sequence_parallel": "sequence",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "mla_kv_a_proj": "replicate",
    "grouped_gemm": "experts",
    **dict.fromkeys(("all_reduce", "moe_tp_experts", "moe_identity_expert", "local_params", "ep_dispatch_experts"), ""),
}

# Module type -> style -> parameter -> the dim that the axis shards. Linear weights are [out, in] (torch.nn.Linear),
# Hugging Face Conv1D weights [in, out] (transformers/pytorch_utils.py), convolutions [out, in, ...].
_OUT_IN = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
_IN_OUT = {"colwise": {"weight": 1, "bias": 0}, "rowwise": {"weight": 0}}
_TABLES = {
    "Linear": _OUT_IN,
    "Embedding": _IN_OUT,
    "Conv1D": _IN_OUT,
    "Conv2d": _OUT_IN,
}


def style_dims(module: nn.Module) -> Mapping[str, Mapping[str, int]] | None:
    """The meaning of colwise and rowwise for a module, or None if they have none."""
    return next((_TABLES[c.__name__] for c in type(module).__mro__ if c.__name__ in _TABLES), None)


def apply_style(resolved: Resolved, model: nn.Module, names: Iterable[str], style: str, axis: str, where: str) -> None:
    """Record what a style requires of the parameters and values of the modules `names`."""
    canonical = {id(p): n for n, p in model.named_parameters()}
    for name in names:
        module = model.get_submodule(name)
        if style == "sequence":
            resolved.pins.append((name, "out", f"{axis}=1"))
            continue
        if style == "replicate":
            for param, _ in module.named_parameters(prefix=name):
                resolved.shard(param, axis, None, where)
            continue
        table = style_dims(module)
        if table is None:
            raise PlanError(
                f"{style} means nothing for a {type(module).__name__}",
                where=f"{name} (from {where})",
                expected=f"a module of type {', '.join(_TABLES)}",
                hint="give its parameters layouts instead",
            )
        for param, value in module.named_parameters(recurse=False):
            resolved.shard(canonical[id(value)], axis, table[style].get(param), where)


def apply_param_style(
    resolved: Resolved, model: nn.Module, names: Iterable[str], style: str, axis: str, where: str
) -> None:
    """Record what a style requires of parameters without a module of their own, such as a stack of matrices [e, out,
    in].

    Colwise cuts the second last dim (a vector's only dim), rowwise the last (no vector), experts the first.
    """
    for name in names:
        rank = model.get_parameter(name).dim()
        dims = {"colwise": max(rank - 2, 0), "rowwise": rank - 1 if rank > 1 else None, "experts": 0}
        resolved.shard(name, axis, dims.get(style), where)


def hugging_face_plan(model: nn.Module, *attributes: str) -> dict[str, str]:
    """A plan of a Hugging Face model, glob -> style: that of `model`, or of the outermost modules in it that have one,
    whose globs then begin with the module's name. `attributes` may have it; the first that does counts."""
    plans: dict[str, str] = {}
    owners: list[str] = []
    for name, module in model.named_modules():
        candidates = (getattr(module, attribute, None) for attribute in attributes)
        plan = next((value for value in candidates if value and isinstance(value, Mapping)), None)
        if plan is not None and not any(f"{name}.".startswith(owner) for owner in owners):
            prefix = f"{name}." if name else ""
            owners.append(prefix)
            plans |= {f"{prefix}{glob}": style for glob, style in plan.items()}
    return plans


def expert_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters stacked over experts on dim 0, and the evidence: the model's own expert plan, or a module named
    `experts` whose parameters all have the same number of rows. Empty for a model without experts."""
    plan = hugging_face_plan(model, "ep_plan")
    stacked = [glob for glob, style in plan.items() if HF_STYLES.get(style) == "experts"]
    by_name = {
        n: g for n, _ in model.named_parameters() for g in stacked if fnmatchcase(n, g) or fnmatchcase(n, f"*.{g}")
    }
    if by_name:
        return by_name
    shown: dict[str, str] = {}
    for name, module in model.named_modules():
        own = list(module.named_parameters(prefix=name, recurse=False))
        is_stack = len({p.shape[:1] for _, p in own}) == 1 and all(p.dim() > 1 for _, p in own)
        if name.rpartition(".")[2] == "experts" and is_stack:
            shown |= {n: f"the module {name}" for n, _ in own}
    return shown
