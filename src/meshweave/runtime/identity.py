"""What must be equal on every rank of a job, as text, line by line: arguments, model, optimizer, program."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.optimizer_several import parts_of
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.runtime.fingerprint import fingerprint

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # addresses of objects, which differ between processes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def argument_texts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    settings: Mapping[str, Any],
) -> dict[str, str]:
    """By topic, what a step is compiled from. Values of tensors are not included; files are named by their path. Python
    code is compared by its bytecode and the plain values in its closure."""
    return {
        **{name: _setting_text(value) for name, value in settings.items()},
        "versions": f"torch {torch.__version__}, Python {sys.version}",
        "model": _model_text(model),
        "optimizer": _optimizer_text(optimizer, model),
        **{name: _code_text(function) for name, function in functions.items()},
        **{name: _batch_text(Batch.of(batch)) for name, batch in batches.items()},
    }


def program_texts(captured: StepGraph, roles: Sequence[RankGraph]) -> dict[str, str]:
    """By topic, what was compiled: the step, with its constants, and the graph of every role."""
    constants = [f"{name} = {int(fingerprint(value))}" for name, value in captured.constants.items()]
    runs = [f"devices {role.devices}\n{role.text()}" for role in roles]
    return {"captured step": captured.text() + "\n".join(constants), "program": "\n".join(runs)}


def is_comparable(value: Any) -> bool:
    """Whether a tensor is whole and has values: not a DTensor, and not on the meta device."""
    return isinstance(value, Tensor) and not (value.is_meta or hasattr(value, "placements") or value.is_sparse)


def _model_text(model: nn.Module) -> str:
    modules = [
        f"module '{path}' is a {type(module).__qualname__}, {'train' if module.training else 'eval'} mode"
        for path, module in model.named_modules()
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join([*modules, *(f"'{name}' {_tensor_text(value)}" for name, value in tensors)])


def _tensor_text(value: Tensor) -> str:
    kind = "a meta tensor" if value.is_meta else "real"
    grad = ", trained" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}, {kind}{grad}"


def _optimizer_text(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> str:
    if optimizer is None:
        return "none"
    names = {id(p): name for name, p in model.named_parameters()}
    lines = [f"class {type(part).__module__}.{type(part).__qualname__}" for part in parts_of(optimizer)]
    for index, group in enumerate(optimizer.param_groups):
        lines += [f"param_groups[{index}] {key} = {_plain(group[key])}" for key in sorted(group) if key != "params"]
        lines += [f"param_groups[{index}] has '{names.get(id(p), '?')}'" for p in group["params"]]
    for param, slots in optimizer.state.items():
        shown = {k: _tensor_text(v) if isinstance(v, Tensor) else _plain(v) for k, v in slots.items()}
        lines.append(f"state of '{names.get(id(param), '?')}': {shown}")
    return "\n".join(lines)


def _batch_text(batch: Batch) -> str:
    tensors = zip(batch.names, batch.tensors, strict=True)
    shown = [f"entry '{n}' {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for n, t in tensors]
    # Its other contents (texts, indices of rows) may differ; if the step depends on them, the captured step differs.
    return "\n".join([*shown, *(f"entry '{name}'" for name in batch.rest)])


def _setting_text(value: Any) -> str:
    """Mappings and dataclasses as a line per entry, anything else as a single line."""
    if is_dataclass(value) and not isinstance(value, type):
        return "\n".join(f"{f.name} = {_plain(getattr(value, f.name))}" for f in fields(value) if f.repr)
    if isinstance(value, Mapping):
        lines = ((name, _setting_text(inner).splitlines()) for name, inner in value.items())
        return "\n".join(f"{name}: {line}" for name, inner in lines for line in inner)
    return _plain(value)


def _plain(value: Any) -> str:
    """The repr of a plain value, without addresses."""
    if isinstance(value, Tensor):
        return f"{value.tolist()}" if value.numel() < 16 and is_comparable(value) else _tensor_text(value)
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return _code_text(value)
    return _ADDRESS.sub("", repr(value))


def _code_text(function: Any) -> str:
    if isinstance(function, partial):
        return f"partial of {_code_text(function.func)} with {_plain(function.args)} {_plain(function.keywords)}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{name}"
    cells = [cell.cell_contents for cell in function.__closure__ or () if _has_contents(cell)]
    closed = [f"closes over {value!r}" for value in cells if isinstance(value, _PLAIN)]
    digest = hashlib.sha256(_bytecode(code).encode()).hexdigest()[:12]
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return "\n".join([f"{name} ({place}), bytecode {digest}", *closed, *_defaults(function)])


def _defaults(function: Any) -> list[str]:
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [f"default {value!r}" for value in values if isinstance(value, _PLAIN)]


def _has_contents(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # an empty cell
        return False
    return True


def _bytecode(code: types.CodeType) -> str:
    """Bytecode, names and constants; sets in a fixed order, which their repr lacks."""
    inner = [
        _bytecode(c) if isinstance(c, types.CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()}, {code.co_names}, {inner}"
