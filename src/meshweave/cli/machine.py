"""The machine of commands that simulate a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from meshweave.cli.job import MeshStepOptions, StepOptions, compiled_unrun
from meshweave.cli.screen import Screen
from meshweave.hardware import MachineProfile, profile_names
from meshweave.ir.mesh import Mesh
from meshweave.program import Program
from meshweave.simulate.kernels import Fusion


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions(StepOptions):
    """The machine of a simulated step."""

    profile: Annotated[
        str, typer.Option("--profile", help=f"machine: {', '.join(profile_names())}, or a file (profile.toml)")
    ] = "h100"
    scale: Annotated[
        str, typer.Option("--scale", help="what-if factors of the machine: net_bandwidth=2,attention=cudnn")
    ] = ""
    fusion: Annotated[
        Fusion | None,
        typer.Option("--fusion", help="what runs as a single kernel; by default as the machine profile says"),
    ] = None

    def job(self, mesh: str, plan: str) -> MeshStepOptions:
        """The step on a mesh; moves are chosen by the unscaled profile."""
        shared = {f.name: getattr(self, f.name) for f in fields(StepOptions)}
        return MeshStepOptions(mesh=mesh, plan=plan, profile=self.profile, **shared)


def compiled_for(screen: Screen, job: MeshStepOptions, machine: MachineProfile) -> Program:
    """The program of a step on a machine that need not be present."""
    machine.check_mesh(Mesh(job.mesh))
    return compiled_unrun(screen, job)
