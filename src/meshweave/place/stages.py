"""The stages of a pipeline: where a microbatch is on its way through the model, whatever the devices.

A plan that cuts a list of layers numbers its stages. Without one, a microbatch enters the next stage whenever it comes
to other devices. A device may have several stages; a backward op belongs to the stage of its forward op.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from meshweave.ir import ops
from meshweave.ir.graph import PARTS, StepGraph, origin_of
from meshweave.ir.mesh import Mesh
from meshweave.place.mapping import Homes, stage_of, stage_of_module
from meshweave.place.plans import Resolved

_FORWARD, _BACKWARD = PARTS["forward"], PARTS["backward"]


def in_order_of_use(step: StepGraph, plan: Resolved) -> None:
    """Number the stages of a plan as forward comes to them: a model may run its list of layers in another order."""
    ahead = (node for node in step.graph.nodes if node.op == "call_function" and PARTS[origin_of(node).phase] == 0)
    of_ops = (stage_of_module(origin_of(node).module, plan.stages) for node in ahead)
    order = {stage: at for at, stage in enumerate(dict.fromkeys(stage for stage in of_ops if stage is not None))}
    if order.keys() == set(plan.stages.values()):
        plan.stages = {module: order[stage] for module, stage in plan.stages.items()}


def number_stages(step: StepGraph, homes: Homes, plan: Resolved) -> StepGraph:
    """The step, with the stage of every node in its origin. `homes` are the devices of its nodes."""
    of_module = plan.stages
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    ahead = [node for node in nodes if PARTS[origin_of(node).phase] == _FORWARD]
    if not of_module and len({homes[node] for node in ahead}) < 2:
        return step
    stages: dict[fx.Node, int] = {}
    for node in ahead:
        stages[node] = _stage_there(plan, homes[node], stage_of(node, stages, homes, of_module), is_ahead=True)
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
            stages[node] = _stage_there(plan, homes[node], stage, is_ahead=False)
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


def _stage_there(plan: Resolved, home: Mesh, stage: int, is_ahead: bool) -> int:
    """The first stage of a plan from this one on, in the direction of the pass, that these devices have."""
    numbers = [its for module, its in plan.stages.items() if plan.homes[module] == home]
    if is_ahead:
        return min((its for its in numbers if its >= stage), default=stage)
    return max((its for its in numbers if its <= stage), default=stage)
