"""The process groups and the store of `torch.distributed` in this process.

Holds for torch 2.11 to 2.13 (torch/distributed/distributed_c10d.py). Graphs contain names of groups, but public
functions look up groups only by ranks.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import Store

# Collectives under their names in torch 2.13, which deprecates those of 2.11 and 2.12: (output, input, group, async_op)
# and (output, input, op, group, async_op), as under the older names.
all_gather_single: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


c10d: Any = dist.distributed_c10d  # its private functions are untyped


def is_in_job() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def default_store() -> Store:
    """The store of the initialised job."""
    return c10d._get_default_store()


def store_of_job() -> Store | None:
    """The store of this job; None if this process is alone: without torch.distributed, in a world of size 1, or on the
    `fake` backend, which has no other ranks."""
    if not is_in_job() or dist.get_backend() == "fake":
        return None
    return default_store() if dist.get_world_size() > 1 else None


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return c10d._get_default_group()


def ranks_of_group(group: Any) -> tuple[int, ...]:
    """The ranks of a process group, or of the group of this name in graphs. Raises RuntimeError, ValueError or KeyError
    for an unknown name."""
    resolved = c10d._resolve_process_group(group) if isinstance(group, str) else group
    return tuple(dist.get_process_group_ranks(resolved))


def ranks_of_groups() -> list[tuple[str, tuple[int, ...]]]:
    """Name and ranks of every group in this process, sorted; empty without a job."""
    if not is_in_job():
        return []
    names = c10d._world.pg_names
    return sorted((str(name), tuple(dist.get_process_group_ranks(group))) for group, name in names.items())


_FOLDER = Path(dist.__file__).parent
# Functions that look up the group of a query or a collective.
_LOOKUPS = ((c10d, "_rank_not_in_group"), (functional, "_resolve_group"), (functional, "_resolve_group_name"))


@contextmanager
def refused_communication(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """A context in which a query or a collective of this thread (`get_rank`, `all_reduce`, also differentiable and
    functional ones) is a call of `refuse` with its name. `is_initialized` is no such query."""
    thread = threading.get_ident()

    def guarded(lookup: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return lookup(*args, **kwargs) if threading.get_ident() != thread else refuse(_name_of_call())

        return call

    with ExitStack() as restored:
        for owner, name in _LOOKUPS:
            if (lookup := getattr(owner, name, None)) is not None:
                restored.callback(setattr, owner, name, lookup)
                setattr(owner, name, guarded(lookup))
        yield


def _name_of_call() -> str:
    """The function of torch.distributed that was called from outside of it."""
    name = ""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        folder, function = Path(frame.f_code.co_filename).parent, frame.f_code.co_name
        if not folder.is_relative_to(_FOLDER.parent):
            break
        if folder.is_relative_to(_FOLDER):  # most are in a wrapper that logs errors
            name = frame.f_locals["func"].__name__ if function == "wrapper" else function
    return name
