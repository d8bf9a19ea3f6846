"""What a graph in Inductor's cache on disk depends on beside the graph, and setting it in another process.

Holds for torch 2.11 to 2.13 (torch/_inductor/config.py, `FxGraphHashDetails` in torch/_inductor/codecache.py), without
importing Inductor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MATMUL = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def settings() -> dict[str, Any] | None:
    """Those of this process; None if Inductor does not cache on disk."""
    from torch._inductor import config

    if not config.fx_graph_cache or config.force_disable_caches:
        return None
    return {
        "config": config.save_config_portable(ignore_private_configs=False),
        "matmul": {name: getattr(torch.backends.cuda.matmul, name) for name in _MATMUL},
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
    }


@contextmanager
def with_settings(settings: dict[str, Any]) -> Iterator[None]:
    """A context in a process that does nothing else, with the `settings` of another."""
    from torch._inductor import config

    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(settings["dtype"])
    mode, warn_only = settings["deterministic"]
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    if settings["device"] is not None:
        torch.cuda.set_device(settings["device"])
    for name, value in settings["matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)
    with config.patch(settings["config"]):
        yield
