"""Plans: layouts that a user asks for. Plans can be added; a plan that matches nothing in the model is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from meshweave.errors import PlanError
from meshweave.ir.mesh import Mesh
from meshweave.place.stage_layout import StageLayout

STYLES = ("colwise", "rowwise", "sequence", "replicate")
ATTENTION = ("auto", "gather", "heads", "ring")  # how queries meet keys of other devices
BALANCE = ("auto", "head_tail", "none")  # in which order devices store a sequence
Devices = Mesh | int | Sequence[int] | str


STAGE_ORDERS = ("looped", "v")  # in which the indices of an axis take turns


@dataclass(frozen=True, slots=True)
class Entry:
    """One statement: `kind` is batch, state, zero, context, style, layout, on, stages, hf_tp, auto_tp, experts,
    sequence, keep or idle."""

    kind: str
    axis: str = ""
    glob: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A sum of entries.

    `Plan({"layers.*.mlp.up": "[{tp}, {}]"})` maps globs over parameter and module names to layouts (or a Mesh);
    `Plan.tp("tp", {"*.q_proj": "colwise"})` applies the usual tensor-parallel styles to modules; `Plan.on({"layers.0":
    mesh["pp"][1]})` assigns modules to devices; `dp`, `fsdp`, `zero1`, `zero2`, `cp`, `shard_state`, `hf_tp`,
    `auto_tp`, `sequence_parallel` and `stages` are the usual schemes over an axis. `a + b` contains the entries of
    both.
    """

    entries: tuple[Entry, ...] = ()

    def __init__(self, layouts: Mapping[str, str | Mesh] | Iterable[Entry] = ()) -> None:
        if isinstance(layouts, Mapping):
            entries = tuple(
                Entry("on", glob=glob, text=layout.text)
                if isinstance(layout, Mesh)
                else Entry("layout", "", glob, str(layout))
                for glob, layout in layouts.items()
            )
        else:
            entries = tuple(layouts)
        object.__setattr__(self, "entries", entries)

    def __add__(self, other: Plan) -> Plan:
        return Plan((*self.entries, *other.entries))

    @staticmethod
    def dp(axis: str) -> Plan:
        """Data parallel: the batch is sharded over `axis`, parameters are whole everywhere."""
        return Plan([Entry("batch", axis)])

    @staticmethod
    def fsdp(axis: str) -> Plan:
        """ZeRO-3: batch, parameters, gradients and optimizer state sharded over `axis`; parameters gathered where used,
        in forward and again in backward, and freed after use."""
        return Plan([Entry("batch", axis), Entry("state", axis)])

    @property
    def says_sums(self) -> bool:
        """Whether it says where gradients of microbatches are added up, as `zero1` and `zero2` do."""
        return any(entry.kind == "zero" for entry in self.entries)

    @staticmethod
    def zero1(axis: str) -> Plan:
        """ZeRO-1, Megatron's distributed optimizer: the batch is sharded over `axis`; optimizer state and stored
        parameters are sharded over `axis` and the axes of `cp` together.

        Once a step parameters are gathered, in the dtype in which they compute, under the first forward, and stay whole
        to the end of the last backward. Gradients of microbatches are added up whole, and reduce-scattered once a step.
        """
        return Plan([Entry("batch", axis), Entry("zero", axis, text="whole")])

    @staticmethod
    def zero2(axis: str) -> Plan:
        """ZeRO-2: as `zero1`, but gradients are reduce-scattered in every microbatch and added up in shards."""
        return Plan([Entry("batch", axis), Entry("zero", axis, text="shards")])

    @staticmethod
    def shard_state(axis: str) -> Plan:
        """Parameters, gradients and optimizer state sharded over `axis`, as in ZeRO-3, independent of other uses of the
        axis: with `cp` it shards them over the devices of a sequence; `fsdp` is `dp` plus this."""
        return Plan([Entry("state", axis)])

    @staticmethod
    def cp(axis: str, attention: str = "auto", balance: str = "auto") -> Plan:
        """Context parallel: the sequence, dim 1 of batch and activations, is sharded over `axis`.

        attention: "gather" brings all keys and values to the queries of each device; "heads" exchanges sequences for
        heads and back (Ulysses; key heads must divide); "ring" sends pieces of keys and values from device to device
        and merges the results, so that no device has them whole; "auto" takes the cheaper of the first two, and a ring
        in place of gathers where the passes "ring" or "default" simulate that faster.
        balance: "head_tail" cuts the sequence into two chunks per device, of which device i has the i-th from the
        beginning and the i-th from the end, so that all have equal work under a causal mask; "none" into a single piece
        per device; "auto" is "head_tail" where attention is causal and the sequence divides by 2 x the devices.
        `program.sequence` reports the choice and its reason.
        """
        for value, known, what in ((attention, ATTENTION, "way to do attention"), (balance, BALANCE, "balance")):
            if value not in known:
                raise PlanError(f"unknown {what}", where="Plan.cp", got=value, expected=", ".join(known))
        return Plan([Entry("context", axis, text=f"{attention}:{balance}")])

    @staticmethod
    def tp(axis: str, styles: Mapping[str, str]) -> Plan:
        """Tensor parallel: module globs to colwise, rowwise, sequence or replicate."""
        for glob, style in styles.items():
            if style not in STYLES:
                near = difflib.get_close_matches(style, STYLES, 1)
                hint = f"did you mean {near[0]}?" if near else ""
                raise PlanError(
                    f"'{style}' is not a style", where=glob, got=style, expected=", ".join(STYLES), hint=hint
                )
        return Plan([Entry("style", axis, glob, style) for glob, style in styles.items()])

    @staticmethod
    def hf_tp(axis: str) -> Plan:
        """Tensor parallel as in the Hugging Face model's own tp plan."""
        return Plan([Entry("hf_tp", axis)])

    @staticmethod
    def ep(axis: str, *, batch: bool = True) -> Plan:
        """Expert parallel: parameters stacked over experts are cut over `axis` in their first dim; the batch is cut
        over `axis`, too, as in data parallel. With `batch=False` it is not: `axis` is shared with another scheme, such
        as tp, or the tokens stay whole. Other parameters are replicated over `axis`. Experts need not divide evenly.
        The expert parameters are those in the Hugging Face model's expert plan, else those of modules named `experts`.
        """
        return Plan([*([Entry("batch", axis)] if batch else []), Entry("experts", axis)])

    @staticmethod
    def auto_tp(axis: str) -> Plan:
        """Tensor parallel with the column or row choice of each weight with the least time of moves."""
        return Plan([Entry("auto_tp", axis)])

    @staticmethod
    def sequence_parallel(axis: str) -> Plan:
        """Shard activations between layers over `axis` along dim 1, the sequence."""
        return Plan([Entry("sequence", axis)])

    @staticmethod
    def on(devices: Mapping[str, Devices]) -> Plan:
        """Layers on devices: module globs to a mesh, to device ids, or to text ("pp=1": index 1 of axis pp).

        A module's forward, loss and backward run there, and its parameters live and are updated there. Ops that no glob
        matches run where their operands are.
        """
        return Plan([Entry("on", glob=glob, text=_device_text(where)) for glob, where in devices.items()])

    @staticmethod
    def stages(
        axis: str, per_device: int | str | None = None, order: str | None = None, layout: str | None = None
    ) -> Plan:
        """The model's longest list of layers as consecutive stages, `per_device` of them for each index of `axis`
        (default: as many as the schedule of `pipeline=` needs, else one).

        They are cut so that the stage with the most work has the least: FLOPs of matmuls and attentions, with those of
        the embedding in the first and those of head and loss in the last; in a model without matmuls, by parameters.
        Modules before the layers run with the first stage, modules after them with the last.

        `layout` says it instead, in Megatron's text: "Et*3|t*5|t*3L" has a `t` for each layer that has parameters, in
        the order in which forward comes to them; "E|t*5|t*5|L" has the modules before and after the layers in stages of
        their own (`stage_layout.StageLayout`).

        `order` says which index has which stage: "looped", index i of n has stages i, n + i, ...; in a "v" the order
        turns round after every n, so that index 0 has the first stage and the last of two. Default: that of the
        schedule, else looped.

        Raises PlanError for other values, and `per_device` beside `layout`.
        """
        is_number = per_device is None or str(per_device).isdecimal()
        if not is_number or order not in (None, *STAGE_ORDERS) or (layout is not None and per_device is not None):
            raise PlanError(
                "invalid stages",
                got=f"per_device={per_device!r}, order={order!r}, layout={layout!r}",
                expected=f"a number of stages or a layout, and {' or '.join(STAGE_ORDERS)}",
                hint="for example stages:pp, stages:pp:2, stages:pp:2:v or stages:pp:layout=Et|t|t|tL:order=v",
            )
        count = "" if per_device is None else int(per_device)
        return Plan(
            [Entry("stages", axis, text=f"{count if layout is None else StageLayout.parse(layout)}:{order or ''}")]
        )

    @staticmethod
    def keep(glob: str) -> Plan:
        """Keep parameters (or those of modules) gathered from the first forward to the last backward: less
        communication, more memory. FSDP2 does so for its root module."""
        return Plan([Entry("keep", glob=glob)])

    @staticmethod
    def replicate(axis: str) -> Plan:
        """Every device along `axis` does the same work: for an axis that is deliberately unused."""
        return Plan([Entry("idle", axis)])


def _device_text(where: Devices) -> str:
    if isinstance(where, str):
        return where
    ids = [where] if isinstance(where, int) else list(where.devices if isinstance(where, Mesh) else where)
    mesh = where if isinstance(where, Mesh) else Mesh("" if isinstance(where, int) else f"d={len(ids)}", devices=ids)
    return mesh.text


@dataclass(slots=True)
class Resolved:
    """A plan resolved for a model, in the form that placement and capture need.

    `shards[param][axis]` is the dim that the axis shards; `pins` are (module, "in" or "out", constraint); `homes` are
    the devices of modules, `stages` their stages, as `staged` asks for them: an axis, a layout or a number of stages
    for each index (0: open), and their order ("": open); `kept` are parameters gathered once. `named` are the axes that
    it uses; `is_default`: the user passed no plan.
    """

    is_default: bool = False

    batch_axes: list[str] = field(default_factory=list)
    context_axes: list[str] = field(default_factory=list)  # that cut the sequence, dim 1 of the batch
    attention: str = "auto"  # of ATTENTION
    balance: str = "auto"  # of BALANCE
    is_balanced: bool = False  # the outcome: whether the sequence is in head-tail order
    state_axes: list[str] = field(default_factory=list)
    accumulate_in: str = "auto"  # where gradients of microbatches are added up, see `capture.step.Precision`
    auto_axes: list[str] = field(default_factory=list)
    shards: dict[str, dict[str, int]] = field(default_factory=dict)
    pins: list[tuple[str, str, str]] = field(default_factory=list)
    homes: dict[str, Mesh] = field(default_factory=dict)
    staged: list[tuple[str, StageLayout | int, str]] = field(default_factory=list)  # axis, its stages, their order
    stages: dict[str, int] = field(default_factory=dict)  # of a pipeline, by module
    named: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def cutting_batch(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes that cut the batch, the outermost first."""
        return tuple(axis for axis in mesh.axis_names if axis in self.batch_axes)

    def data_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The outermost axes that cut the batch and, by name, no parameter: each of their devices has a contiguous part
        of the batch, and all experts between those that share it."""
        sharding = {axis for dims in self.shards.values() for axis, dim in dims.items() if dim >= 0}
        return tuple(takewhile(lambda axis: axis not in sharding, self.cutting_batch(mesh)))

    def stacked(self, mesh: Mesh) -> frozenset[str]:
        """The parameters whose dim 0 is sharded by name: among them those that are stacked over experts."""
        axes = {axis for axis in mesh.axis_names if mesh.size(axis) > 1}
        return frozenset(name for name, dims in self.shards.items() if any(dims.get(axis) == 0 for axis in axes))

    def shard(self, param: str, axis: str, dim: int | None, where: str) -> None:
        """Record that `axis` shards `dim` of a parameter (None: leaves it whole). PlanError if another entry says
        otherwise."""
        dims = self.shards.setdefault(param, {})
        value = -1 if dim is None else dim
        if dims.get(axis, value) != value:
            raise PlanError(
                f"the plan contradicts itself about {param} over {axis}",
                where=where,
                got=f"dim {dims[axis]} and {'replicate' if dim is None else f'dim {dim}'}",
                hint="let a single glob match it",
            )
        dims[axis] = value
