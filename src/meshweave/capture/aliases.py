"""Detects tensors that share memory with a value that the step changes: a compiled step gives each its own value."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from meshweave.errors import CaptureError
from meshweave.interop.storages import sharing
from meshweave.ir.graph import StepGraph


def check_aliases(model: nn.Module, step: StepGraph) -> None:
    """Raises CaptureError if a trained parameter, or a buffer that forward changes, is visible through a second tensor:
    another parameter or buffer, or a constant of the graph (an attribute such as `self.w = self.a.weight.detach()`)."""
    named = {("param", n): p for n, p in model.named_parameters()} | {
        ("buffer", n): b for n, b in model.named_buffers()
    }
    constants = {("constant", n): t for n, t in step.constants.items()}
    changed = _changed(step, named)
    tensors = {key: x.to_local() if hasattr(x, "to_local") else x for key, x in (named | constants).items()}
    for other, key in sharing(tensors, _memory):
        if other in changed or key in changed:
            seen = f"the {key[0]} '{key[1]}'" if key[0] != "constant" else "a tensor that forward or the loss reads"
            raise CaptureError(
                f"{seen} shares memory with the {'parameter' if other[0] == 'param' else 'buffer'} '{other[1]}'",
                got="two tensors on the same storage, and the step changes one of them",
                expected="a storage of its own for each value",
                hint="use the parameter or buffer itself (tie weights by assigning the same Parameter), or clone it",
            )


def _changed(step: StepGraph, named: Mapping[tuple[str, str], Tensor]) -> set[tuple[str, str]]:
    """The parameters that are trained or that forward changes, and the buffers whose final value differs from the
    initial value."""
    inputs = step.sources
    changed = {key for key, value in step.results.items() if key[0] in ("buffer", "param") and value not in inputs}
    return changed | {key for key, tensor in named.items() if key[0] == "param" and tensor.requires_grad}


def _memory(tensor: Tensor) -> int:
    """The address of a strided tensor's storage, which several storages may have (of an array of NumPy); 0 if it is
    empty or, as that of a fake tensor, on the meta device."""
    storage = tensor.untyped_storage()
    return 0 if storage.device.type == "meta" or not storage.nbytes() else storage.data_ptr()
