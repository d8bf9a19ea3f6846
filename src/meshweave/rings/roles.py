"""The pass on roles: collectives beside matmuls become rings, where the costs say that it is worth it."""

from __future__ import annotations

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.ir.from_role import role_program
from meshweave.ir.graph import Spec
from meshweave.ir.rank import SYMBOLS, RankGraph, copied
from meshweave.ir.values import Local, local_values, uneven_dims
from meshweave.ir.verify import verify_rank
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.price import Kernels
from meshweave.rings.report import DecomposeReport
from meshweave.rings.rewriter import Costing, Pick, by_gain, first, take_apart
from meshweave.rings.share import share_gathers
from meshweave.simulate.kernels import Fusion, kernels_of


def decompose(
    role: RankGraph, costs: object = None, options: DecomposeOptions | None = None
) -> tuple[RankGraph, DecomposeReport]:
    """A new rank graph in which collectives beside matmuls are taken apart, and what became of each; the role is
    untouched.

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
    made = copied(role)
    shared = share_gathers(role_program(made, {}, {})) if options.share else ()
    local = local_values(made)
    program = role_program(made, local.values, uneven_dims(made))
    costing: Costing | None = None
    pick: Pick = first
    if options.when == "gain":
        assert isinstance(costs, MachineProfile)
        costing, pick = (costs, _kernels(made, costs, local)), by_gain(options.margin)
    report, _ = take_apart(program, options, pick, costing, shared)
    _tell_specs(made)
    return verify_rank(made), report


def _kernels(role: RankGraph, profile: MachineProfile, local: Local) -> Kernels:
    """The kernels of a role, as the simulator has them."""
    fusion: Fusion = "compiled" if profile.fusion == "pointwise" else "ops"
    kernels, _ = kernels_of(role, local, fusion)
    return [(one.position, sum(map(profile.compute_seconds, one.works))) for one in kernels]


def _tell_specs(role: RankGraph) -> None:
    """What the new nodes make, for people to read; that every op fits its operands shows on the way."""
    for node, values in local_values(role).values.items():
        if "spec" not in node.meta and len(values) == 1 and node.target not in SYMBOLS:
            node.meta["spec"] = Spec(values[0].shape, values[0].dtype)
