"""Backends of torch.compile that partition forward and backward themselves.

Holds for torch 2.11 to 2.13 (torch/_dynamo/backends, torch/_functorch). `aot_autograd` is what torch's own tutorial on
custom backends imports; nothing public replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

min_cut_partition = min_cut_rematerialization_partition


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gets its arguments in a list, which it may empty."""
    return function if getattr(function, "_boxed_call", False) else make_boxed_func(function)
