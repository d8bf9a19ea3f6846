"""What forward must not do to parameters and buffers: replace them, leave hooks on them, bypass them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor, nn

from meshweave.capture.record import storage_of
from meshweave.errors import CaptureError
from meshweave.interop.hooks import tensor_hooks
from meshweave.interop.modules import own_parameters
from meshweave.interop.tracing import leaves


def check_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raises CaptureError if forward has left a hook on a parameter: PyTorch would add another in every step."""
    for name, parameter in parameters.items():
        if hooks := tensor_hooks(parameter):
            raise CaptureError(
                f"every step leaves a hook on the parameter '{name}'",
                got=f"{hooks[0]} in forward",
                expected="hooks registered before compile, or removed within the step",
                hint="keep the handle that it returns and call its remove() before forward returns",
            )


def check_leaves(value: Tensor, parameters: Mapping[int, str]) -> None:
    """Raises CaptureError if the loss depends on a parameter (`parameters` are their names by id) directly instead of
    on its substitute in the trace: its gradient would be lost."""
    for leaf in leaves(value):
        if id(leaf) in parameters:
            raise CaptureError(
                f"an autograd.Function gets the parameter '{parameters[id(leaf)]}' from a list, a dict or a closure",
                got="a gradient that would not reach the parameter",
                expected="parameters that the module passes as its attributes",
                hint="keep it as an attribute or in an nn.ParameterList, and pass self.name to apply()",
            )


def check_parameters(
    model: nn.Module, tensors: Mapping[str, Tensor], storages: Mapping[str, int], params: Set[str]
) -> None:
    """Raises CaptureError for a parameter that forward has replaced, and for a parameter or buffer whose values it has
    changed by `.data`."""
    for name, storage in storages.items():
        path, _, key = name.rpartition(".")
        is_replaced = name in params and own_parameters(model.get_submodule(path)).get(key) is not tensors[name]
        if is_replaced or storage_of(tensors[name]) != storage:
            raise CaptureError(
                f"the model replaces its {'parameter' if name in params else 'buffer'} '{name}'",
                got="another tensor, or other values by .data, after forward",
                expected="parameters that only the optimizer changes, buffers that are assigned or changed in place",
                hint="compute a new tensor from the parameter, or keep state between steps in a buffer (self.k = "
                "..., without .data)",
            )
