"""The drop-in's passes in the form of torchtitan's graph trainer (torchtitan/experiments/graph_trainer, 0.3):
`(graph_module, example_inputs) -> graph_module`, over the graph of forward, loss and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from meshweave.torch_compile.backend import backend
from meshweave.torch_compile.scheduling import BackendSettings

GraphPass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]
# Torchtitan's pass that merges and orders the collectives of FSDP: meshweave's pass replaces it.
_BUCKETING = "joint_transformer_block_bucketing_reordering_pass"


def overlap_pass(**options: Any) -> GraphPass:
    """A pass that splits rows, decomposes collectives and orders them, like `mw.backend(**options)`; by default it only
    orders and merges, and values stay the same to the bit."""
    return partial(meshweave_pass, backend(**options).settings)


def meshweave_pass(settings: BackendSettings, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Apply the settings to `gm`, in place. Torchtitan logs a pass, and disables it, by this name."""
    settings.run(gm.graph, "joint graph")
    settings.run(gm.graph, "graph")
    gm.recompile()
    return gm


def register(name: str = "meshweave", **options: Any) -> None:
    """Make `--compile.pass_pipeline meshweave` torchtitan's own list of passes, with `overlap_pass(**options)` instead
    of its bucketing. Call it before the trainer is built, for example in a module that the run imports."""
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
    from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline

    ours = overlap_pass(**options)

    def pipeline(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[GraphPass]:
        usual = construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
        return [ours if _name(graph_pass) == _BUCKETING else graph_pass for graph_pass in usual]

    register_pass_pipeline(name)(pipeline)


def _name(graph_pass: Any) -> str:
    return str(getattr(graph_pass, "func", graph_pass).__name__)
