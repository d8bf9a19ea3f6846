"""The pass on roles: collectives beside matmuls become rings, where the costs say that it is worth it."""

from __future__ import annotations

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.from_role import rewrite_role
from meshweave.ir.rank import RankGraph
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.report import DecomposeReport
from meshweave.rings.rewriter import by_gain, first, take_apart


def decompose(
    role: RankGraph, costs: object = None, options: DecomposeOptions | None = None
) -> tuple[RankGraph, DecomposeReport]:
    """A new rank graph in which collectives beside matmuls are taken apart, and what became of each; the role is
    untouched, and itself what comes back where none is.

    An all-gather whose value goes to matmuls (past views, casts and what goes element by element) becomes a ring of
    permutes with a product for each chunk; so does a reduce-scatter of matmuls' results, and an all-reduce as a
    reduce-scatter and an all-gather. Message i + 1 is started before product i. `costs` is a MachineProfile (with
    when="always": not asked). Raises MeshweaveError for costs that do not say what compute takes, and for unknown
    algorithms.
    """
    options = options or DecomposeOptions()
    if options.when == "gain" and not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "to take collectives apart needs costs of compute and of links",
            got=type(costs).__name__,
            expected='a MachineProfile, such as load_profile("h100")',
            hint='or DecomposeOptions(when="always")',
        )
    profile = costs if isinstance(costs, MachineProfile) and options.when == "gain" else None
    pick = first if profile is None else by_gain(options.margin)

    def rewrite(program: DeviceProgram) -> tuple[fx.Graph | None, DecomposeReport]:
        report, _ = take_apart(program, options, pick, profile)
        return program.graph if report.num_taken else None, report

    return rewrite_role(role, rewrite)
