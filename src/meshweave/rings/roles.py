"""The pass on roles: collectives beside matmuls become rings, if that gains by the costs."""

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
    """A new rank graph in which collectives beside matmuls are decomposed, and the outcome of each; the role is not
    changed, and is itself returned if none is.

    An all-gather whose value is used by matmuls (possibly after views, casts and elementwise ops) becomes a ring of
    permutes with a product for each chunk; so does a reduce-scatter of matmuls' results, and an all-reduce as a
    reduce-scatter and an all-gather. Message i + 1 is started before product i. `costs` is a MachineProfile (unused
    with when="always"). Raises MeshweaveError for costs without compute, and for unknown algorithms.
    """
    options = options or DecomposeOptions()
    if options.when == "gain" and not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "decomposing collectives needs costs of compute and of links",
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
