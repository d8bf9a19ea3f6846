"""Functional all-gathers of CPU tensors, by a Gloo op of which several may be in flight.

Gloo's threads write the name of each finished op into the same string, without a lock (ProcessGroupGloo::runLoop, seen
in torch 2.11 and 2.13). A functional all-gather runs as Gloo's coalesced all-gather, the only op behind functional
collectives whose name is too long for the string's inline buffer: when two finish at the same time, a block of memory
is freed twice, and the process crashes sooner or later. The variants with `out` run as the plain all-gather, with the
same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ops = torch.ops._c10d_functional
_UNUSED_TAG = 1 << 20  # no message has it


@cache
def let_gathers_overlap() -> torch.library.Library:
    """From now on all-gathers of CPU tensors in this process are of the plain kind, on any group. Calling it once is
    enough. For code that is about to run a graph in this process, never for code that only plans one."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    library.impl("all_gather_into_tensor_coalesced", _all_gather_each, "CPU")
    return library  # its registrations end with it


def let_gathers_overlap_in(module: nn.Module) -> None:
    """Call `let_gathers_overlap` whenever `module` is about to run, by a hook on its forward."""
    module.register_forward_pre_hook(_before_forward)


def _before_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():  # tracers of the module run it in their own way
        let_gathers_overlap()


def break_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of a Gloo group of this process, so that whatever waits for its other members fails.

    A receive whose wait times out closes all of them (gloo/transport/tcp/unbound_buffer.cc); `abort()` releases nobody
    (torch 2.13). A rank outside of the group does nothing."""
    own, size = dist.get_rank(group), dist.get_world_size(group)
    if size < 2:  # -1 of a rank outside
        return
    with suppress(RuntimeError):  # they are broken already
        work = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=(own + 1) % size, tag=_UNUSED_TAG)
        if work is not None:
            work.wait(timedelta(milliseconds=1))


def _all_gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
    if x.is_complex():  # Gloo is unknown
        return torch.view_as_complex(_all_gather(torch.view_as_real(x.resolve_conj()), group_size, group_name))
    rows, *others = x.shape or (1,)
    whole = x.new_empty(group_size * rows, *others)
    gathered: Tensor = _ops.all_gather_into_tensor_out.default(x, group_size, group_name, out=whole)
    return gathered


def _all_gather_each(parts: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [_all_gather(x, group_size, group_name) for x in parts]
