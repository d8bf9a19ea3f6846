"""The ranks of a job compile together: a difference between them, or a failure of any, is an error on every rank."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.optimizer_groups import parts_of
from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import store_of_job
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.runtime.cluster import init_from_env, shutdown
from meshweave.runtime.coordinator import names_of_ranks
from meshweave.runtime.fingerprint import fingerprint, is_comparable
from meshweave.runtime.watch import watch_of_job

_SHOWN = 300  # the most characters of a line that an error shows
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # addresses of objects, which differ between processes


@contextmanager
def together(device: torch.device | str | None = None) -> Iterator[None]:
    """A block that every rank of the job completes, or none. Joins torchrun's job if this process has not done so."""
    join(device)
    if store_of_job() is None:
        yield
        return
    with watch_of_job().call("mw.compile", meets=False):
        yield
        watch_of_job().gather("the end of mw.compile", None)


def join(device: torch.device | str | None) -> None:
    """Initialise torch.distributed if torchrun (or another launcher that sets RANK and WORLD_SIZE) started several
    processes and the script has not: NCCL for CUDA, Gloo for cpu. The job is left when the process ends."""
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if "RANK" not in os.environ:
        return
    init_from_env("gloo" if str(device or "").startswith("cpu") else None)
    atexit.register(shutdown)


def agree(texts: Callable[[], Mapping[str, str]]) -> None:
    """Check that every rank has the same texts. Each is a topic, described line by line.

    Digests are compared; the first topic that differs is then shown. Raises MeshweaveError with the topic, the ranks
    that differ from the first rank, and the first line that differs.
    """
    if store_of_job() is None:
        return
    watch, own = watch_of_job(), texts()
    digests = {topic: hashlib.sha256(text.encode()).hexdigest()[:24] for topic, text in own.items()}
    answers = watch.gather("mw.compile", digests)
    for topic in dict.fromkeys(topic for its in answers.values() for topic in its):
        others = [rank for rank in sorted(answers) if answers[rank].get(topic) != answers[0].get(topic)]
        if others:
            is_shown = watch.rank in (0, others[0])
            shown = watch.gather(f"mw.compile: {topic}", own.get(topic, "") if is_shown else None)
            raise _difference(topic, others, shown[0], shown[others[0]])


def _difference(topic: str, others: Sequence[int], expected: str, got: str) -> MeshweaveError:
    want, have = expected.splitlines(), got.splitlines()
    longer = (want[len(have) :] or ["nothing more"])[0], (have[len(want) :] or ["nothing more"])[0]
    first, other = next(((a, b) for a, b in zip(want, have, strict=False) if a != b), longer)
    return MeshweaveError(
        f"ranks differ in their {topic}: they would not train one model",
        where=names_of_ranks(others),
        got=f"{other[:_SHOWN]}, on rank {others[0]}",
        expected=f"{first[:_SHOWN]}, as on rank 0",
        hint="every rank runs the same script with the same arguments; only the rows of the batch depend on the rank",
    )


def argument_texts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    settings: Mapping[str, Any],
) -> dict[str, str]:
    """By topic, what a step is compiled from. Values of tensors are not included, files and Python functions are
    named: what a function computes is in the captured step."""
    return {
        **{name: _setting_text(value) for name, value in settings.items()},
        "versions": f"torch {torch.__version__}, Python {sys.version}",
        "model": _model_text(model),
        "optimizer": _optimizer_text(optimizer, model),
        **{name: _function_text(function) for name, function in functions.items()},
        **{name: _batch_text(Batch.of(batch)) for name, batch in batches.items()},
    }


def program_texts(captured: StepGraph, roles: Sequence[RankGraph]) -> dict[str, str]:
    """By topic, what was compiled: the step, with its constants, and the graph of every role."""
    constants = [f"{name} = {int(fingerprint(value))}" for name, value in captured.constants.items()]
    runs = [f"devices {role.devices}\n{role.text()}" for role in roles]
    return {"captured step": captured.text() + "\n".join(constants), "program": "\n".join(runs)}


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
        return _function_text(value)
    return _ADDRESS.sub("", repr(value))


def _function_text(function: Any) -> str:
    if isinstance(function, partial):
        return f"partial of {_function_text(function.func)} with {_plain(function.args)} {_plain(function.keywords)}"
    code = getattr(function, "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    return getattr(function, "__qualname__", type(function).__qualname__) + place
