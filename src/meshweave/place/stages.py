"""The stages of a pipeline: where a microbatch is on its way through the model, whatever the devices.

A plan that cuts a list of layers numbers its stages as forward comes to them. Without one, a microbatch enters the next
stage whenever it comes to other devices. A device may have several stages; a backward op belongs to the stage of its
forward op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import fx, nn

from meshweave.engine.schedules.form import place_stages
from meshweave.errors import PlanError
from meshweave.ir import ops
from meshweave.ir.graph import PARTS, StepGraph, origin_of
from meshweave.ir.mesh import Mesh
from meshweave.place.mapping import Homes, stage_of, stage_of_module
from meshweave.place.plans import Resolved
from meshweave.place.resolve import place_modules
from meshweave.place.stage_layout import StageLayout
from meshweave.place.stage_split import LayerChain, balanced_sizes, chain_of_layers

_FORWARD, _BACKWARD = PARTS["forward"], PARTS["backward"]


def assign_stages(
    step: StepGraph,
    resolved: Resolved,
    model: nn.Module,
    mesh: Mesh,
    by_operators: Collection[str] = (),
    usual: Callable[[int], Sequence[int]] = range,
) -> None:
    """Cut the layers into the stages that the plan asks for (`Plan.stages`), and put them on devices; without a plan,
    unless operators in the model use that axis. `usual`: for an axis of a size the index that has each stage, where the
    plan leaves it open. Raises PlanError for a layout that does not fit the model or the axis."""
    for axis, wanted, order in resolved.staged:
        if resolved.is_default and axis in by_operators:
            continue
        chain, where = chain_of_layers(step, model), f"axis {axis} of mesh {mesh}"
        layout, indices = lay_out_stages(chain, wanted, order, usual, (model, mesh.size(axis), where))
        for stage, (index, modules) in enumerate(zip(indices, _parts(layout, chain), strict=True)):
            place_modules(resolved, modules, mesh.at(**{axis: index}), mesh, f"stages over {axis}")
            resolved.stages.update(dict.fromkeys(modules, stage))


def lay_out_stages(
    chain: LayerChain,
    wanted: StageLayout | int,
    order: str,
    usual: Callable[[int], Sequence[int]],
    where: tuple[nn.Module, int, str],
) -> tuple[StageLayout, Sequence[int]]:
    """The layout of the stages of a chain that a plan asks for, a layout or a number for each index of an axis (0:
    open), and the index of each. `usual` as for `assign_stages`; `where`: the model, and the size and name of the axis.
    Raises PlanError for a layout that does not fit them."""
    model, size, name = where
    open_indices = usual(size)
    if isinstance(wanted, StageLayout):
        layout = wanted
    else:
        layout = _balanced(chain, size * wanted or len(open_indices), name, model)
    _check_fit(layout, chain, name)
    is_usual = not order and len(layout.stages) == len(open_indices)
    return layout, open_indices if is_usual else _in_order(layout, size, order, name)


def _in_order(layout: StageLayout, size: int, order: str, where: str) -> Sequence[int]:
    """The index of each stage on an axis of this size. PlanError unless each index has equally many."""
    count = len(layout.stages)
    if count % size:
        raise PlanError(
            "the stages of the layout do not divide over the axis",
            where=f"layout {layout}, {where}",
            got=f"{count} stages",
            expected=f"a multiple of {size}, as every index has equally many",
            hint="| separates stages",
        )
    return place_stages(size, count // size, "v" if order == "v" else "looped")


def _balanced(chain: LayerChain, count: int, where: str, model: nn.Module) -> StageLayout:
    if len(chain.layers) < count:
        raise PlanError(
            "the model has fewer layers than there are stages",
            where=f"{type(model).__name__}, {where}",
            got=f"{len(chain.layers)} layers with parameters that forward calls"
            + (f", in {chain.list_name}" if chain.list_name else ""),
            expected=f"at least {count}",
            hint=_more_layers(model, count),
        )
    return StageLayout.of_sizes(balanced_sizes(chain.work, count))


def _parts(layout: StageLayout, chain: LayerChain) -> list[tuple[str, ...]]:
    """The modules of each stage: its layers, or those beside the layers if it has none."""
    cuts = [0, *accumulate(layout.sizes)]
    beside = {"E": chain.before, "L": chain.after}
    return [chain.layers[i:j] or beside[text] for text, (i, j) in zip(layout.stages, pairwise(cuts), strict=True)]


def _check_fit(layout: StageLayout, chain: LayerChain, where: str) -> None:
    """Raise PlanError unless a layout has the model's layers."""
    count, layers = len(layout.stages), sum(layout.sizes)
    where = f"layout {layout}, {where}"
    if layers != len(chain.layers):
        of_list = chain.list_name or "the model"
        balanced = count <= len(chain.layers)
        raise PlanError(
            "the layout has another number of layers than the model",
            where=where,
            got=f"{layers} layers",
            expected=f"{len(chain.layers)}: those with parameters in {of_list} that forward calls",
            hint=f"balanced: {StageLayout.of_sizes(balanced_sizes(chain.work, count))}" if balanced else "t is a layer",
        )
    if () in _parts(layout, chain):
        alone, side = ("L", "after") if _parts(layout, chain)[0] else ("E", "before")
        raise PlanError(
            f"no module with parameters of its own runs {side} the layers",
            where=where,
            got=f"a stage with {alone} alone",
            expected=f"{'Et' if alone == 'E' else 'tL'}: {alone} with layers",
            hint="what else is beside the layers runs where its operands are",
        )


def _more_layers(model: nn.Module, count: int) -> str:
    """How a model gets a layer for each of `count` stages."""
    explicitly = "place modules explicitly: mw.Plan.on({...}), or mw.on in the model"
    if not hasattr(getattr(model, "config", None), "num_hidden_layers"):
        return explicitly
    return f"?num_hidden_layers={count} after MODEL on the command line (config.num_hidden_layers); or {explicitly}"


def number_stages(step: StepGraph, homes: Homes, plan: Resolved) -> StepGraph:
    """The step, with the stage of every node in its origin. `homes` are the devices of its nodes."""
    of_module = plan.stages
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    ahead = [node for node in nodes if PARTS[origin_of(node).phase] == _FORWARD]
    if not of_module and len({homes[node] for node in ahead}) < 2:
        return step
    stages: dict[fx.Node, int] = {}
    for node in ahead:
        before = [stages[n] for n in node.all_input_nodes if n in stages]
        stage = stage_of(node, stages, homes, of_module)
        stages[node] = _stage_there(plan, homes[node], stage, max(before, default=0), is_ahead=True)
    for node in reversed(ahead):
        users = [user for user in node.users if user in stages]
        is_own = all(homes[user] == homes[node] for user in users)
        if users and is_own and stage_of_module(origin_of(node).module, of_module) is None:
            stages[node] = max(stages[node], min(stages[user] for user in users))
    of_call: dict[int, int] = {}
    for node in ahead:
        call = origin_of(node).call
        of_call[call] = max(of_call.get(call, 0), stages[node])
    last = max(stages.values(), default=0)
    for node in nodes:
        if PARTS[origin_of(node).phase] == _BACKWARD:
            before = [stages[n] for n in node.all_input_nodes if n in stages and PARTS[origin_of(n).phase] == _BACKWARD]
            call = origin_of(node).call
            stage = min([of_call.get(call, last) if call else last, *before])
            stages[node] = _stage_there(plan, homes[node], stage, min(before, default=stage), is_ahead=False)
    for node in reversed(nodes):  # constants of backward, of no op of forward
        users = [stages[user] for user in node.users if user in stages]
        if users and not node.all_input_nodes and PARTS[origin_of(node).phase] == _BACKWARD:
            stages[node] = max(users)
    for node in step.sources:
        users = [stages[user] for user in node.users if user in stages and homes[user] == homes[node]]
        stages[node] = min(users, default=0)
    for node, stage in stages.items():
        in_stage(node, stage)
    return step


def stage_of_move(move: fx.Node) -> int:
    """The stage of a move: that of the first op of its part of the step that uses its result on its devices, of the
    last one in backward. If it is only sent on, that of the value before all moves."""
    part, mesh = PARTS[origin_of(move).phase], move.meta["layout"].mesh
    users = [user for user in move.users if user.op == "call_function" and PARTS[origin_of(user).phase] == part]
    stages = [origin_of(user).stage for user in users if user.target is not ops.move]
    stages += [stage_of_move(user) for user in users if user.target is ops.move and user.meta["layout"].mesh == mesh]
    return (min if part == _FORWARD else max)(stages, default=origin_of(ops.unmoved(move)).stage)


def in_stage(node: fx.Node, stage: int) -> fx.Node:
    """The node, whose stage is now this one."""
    node.meta["origin"] = replace(origin_of(node), stage=stage)
    return node


def _stage_there(plan: Resolved, home: Mesh, stage: int, ready: int, is_ahead: bool) -> int:
    """The first stage of a plan from this one on, in the direction of the pass, that these devices have.

    If they have only others, the nearest in which all operands are there, those of stage `ready` the last: of a cast of
    a parameter that a later stage uses, or of a sum of gradients for a stage before all of theirs."""
    numbers = [its for module, its in plan.stages.items() if plan.homes[module] == home]
    if is_ahead:
        nearest = max((its for its in numbers if its >= ready), default=stage)
        return min((its for its in numbers if its >= stage), default=nearest)
    nearest = min((its for its in numbers if its <= ready), default=stage)
    return max((its for its in numbers if its <= stage), default=nearest)
