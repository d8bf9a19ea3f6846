"""Small programs as several starts build or load them, and all that can be read from a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.experts import mixture, own_loss, tokens
from tests.models import hugging_face, mlp
from tests.sequences import Shape, plain
from torch import fx

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.ir.rank import RankGraph
from meshweave.passes import Decompose, Keep, Overlap, Split, pass_list_of
from meshweave.place.plan_text import plan_of
from meshweave.program import Program
from meshweave.search import Gathered, alone


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a small job: model, mesh and options."""

    model: Callable[[], tuple[Any, Any, Any]]
    mesh: str
    plan: Any = None
    passes: Any = "default"
    options: CaptureOptions = field(default_factory=CaptureOptions)
    profile: Any = "h100"
    pass_list: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.1

    def program(self, gathered: Gathered = alone, like: Program | None = None, **changes: Any) -> Program:
        model, batch, loss = self.model()
        optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=self.learning_rate), model)
        costs = mw.load_profile(self.profile) if isinstance(self.profile, str) else self.profile
        pass_list = replace(pass_list_of(self.passes, **self.pass_list), recalls=gathered, **changes)
        target = Target(mw.Mesh(self.mesh), plan_of(self.plan), costs)
        return build_program(StepSource(model, loss), batch, optimizer, target, self.options, pass_list, like=like)


def mlp_of_four() -> tuple[Any, Any, Any]:
    return mlp(batch=4)


def experts() -> tuple[Any, Any, Any]:
    return mixture("mixtral"), tokens(), own_loss


def sequences() -> tuple[Any, Any, Any]:
    return plain(Shape(tokens=8))


CHUNKED = [Keep(), Split((2,)), Decompose("always"), Overlap()]
STARTS = {
    "mlp dp": Start(mlp, "dp=2"),
    "llama fsdp+tp": Start(
        lambda: hugging_face("llama", batch=4),
        "fsdp=2,tp=2",
        options=CaptureOptions(precision=mw.Precision(autocast=torch.bfloat16), clip_grad_norm=1.0),
    ),
    "gpt2 recomputed": Start(lambda: hugging_face("gpt2", batch=4), "fsdp=2", passes="default,recompute=full"),
    "gpt2 chunks": Start(lambda: hugging_face("gpt2", batch=4, heads=4), "tp=2", passes=CHUNKED),
    "pipeline": Start(
        lambda: hugging_face("llama", batch=4), "pp=2,dp=2", passes="exact", options=CaptureOptions(accumulate=2)
    ),
    "accumulate": Start(mlp_of_four, "fsdp=2", options=CaptureOptions(accumulate=2)),
    "experts": Start(experts, "ep=2", plan="ep:ep"),
    "ring attention": Start(sequences, "cp=2", plan="cp:cp:ring"),
    "without passes": Start(mlp_of_four, "dp=2,tp=2", passes="none", profile=mw.AlphaBeta()),
}


def read_from(program: Program) -> dict[str, Any]:
    """All that can be read from a program after capture."""
    optimized = program.optimized
    stages = {"roles": optimized.roles, "expanded": optimized.expanded, "unscheduled": optimized.unscheduled}
    placement = program.placement
    return {
        "captured": _graph(program.captured.graph),
        "placed": _graph(program.placed.graph),
        "interfaces": [
            (step.inputs, step.outputs, list(step.constants)) for step in (program.captured, program.placed)
        ],
        **{name: [_role(role) for role in stage] for name, stage in stages.items()},
        "same": [optimized.roles is optimized.expanded, optimized.unscheduled is optimized.expanded],
        "reports": dict(optimized.reports),
        "report texts": {name: list(map(str, reports)) for name, reports in optimized.reports.items()},
        "variants": (optimized.name, optimized.variants),
        "placement": (placement.mesh, placement.stored, placement.used, placement.kept, placement.attention),
        "homes": {node.name: mesh for node, mesh in placement.homes.items()},
        "notes": program.notes,
        "rest": (program.options, program.recompute, program.resolved),
    }


def _role(role: RankGraph) -> Any:
    names = ("mesh", "inputs", "layouts", "outputs", "output_layouts", "devices", "meshes", "transfers")
    return role.text(), _graph(role.graph), [getattr(role, name) for name in names]


def _graph(graph: fx.Graph) -> list[Any]:
    return [(n.op, n.name, n.target, _plain(n.args), _plain(n.kwargs), dict(n.meta)) for n in graph.nodes]


def _plain(value: Any) -> Any:
    """Arguments with types, so that 1, 1.0 and True differ; nodes by name."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return isinstance(value, tuple), [_plain(each) for each in value]
    return type(value), value
