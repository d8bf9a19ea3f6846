"""What a program depends on after capture, its key; and the programs of earlier starts under their keys."""

from __future__ import annotations

import json
import platform
import secrets
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from meshweave.disk_cache import CacheEntry, cache_directory, package_digest
from meshweave.errors import MeshweaveError
from meshweave.interop.ops import OpOverload, is_operator
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.ops.registry import registrations
from meshweave.passes import Optimized
from meshweave.program import PlanInputs, Planned
from meshweave.search import Gathered
from meshweave.sharding.decide import Placement
from meshweave.stored.codec import Decoder, Encoder, KeyEncoder, NoFormError
from meshweave.stored.graphs import role_form, role_of, step_form, step_of

_MOST_ENTRIES = 64
_MOST_BYTES = 1 << 30  # of an entry's text; that of a 32-layer 8B step has 15 MB
_NO_ENTRY = (ArithmeticError, LookupError, MeshweaveError, RecursionError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Storage:
    """The program of an earlier start with the same inputs, if `entry` has it on every process: they read, agree and
    write together."""

    entry: CacheEntry
    inputs: PlanInputs
    gathered: Gathered

    def read(self) -> tuple[Planned | None, str]:
        """The program, if every process has the same, and why the entry was of no use, else an empty text."""
        text, trouble = self.entry.read()
        mark = 1 + int.from_bytes(sha256(text.encode()).digest()[:7]) if text else 0
        if len(set(self.gathered(mark))) > 1 or not text:
            return None, trouble
        planned = None
        try:
            planned = planned_of(_unpacked(text), self.inputs)
        except _NO_ENTRY as error:
            trouble = f"{self.entry.path} has no program of this step ({type(error).__name__}: {error})"
        return (planned if all(self.gathered(int(planned is not None))) else None), trouble

    def write(self, planned: Planned) -> str:
        """Store a program for the next start, once per host. Returns why that was not possible, else an empty text. A
        search that was cut short is not stored: the next start may have more time."""
        if any(variant.is_untried for variant in planned.optimized.variants) or not self._is_writer():
            return ""
        try:
            text = _packed(planned_form(planned, self.inputs))
        except NoFormError as error:
            return f"it could not be stored ({error})"
        trouble = self.entry.write(text)
        if not trouble:
            self.entry.prune(_MOST_ENTRIES)
        return trouble

    def _is_writer(self) -> bool:
        """Whether this process is the first of its host."""
        own, host = secrets.randbits(62), int.from_bytes(sha256(platform.node().encode()).digest()[:7])
        index = list(self.gathered(own)).index(own)
        return host not in self.gathered(host)[:index]


def storage_of(inputs: PlanInputs) -> tuple[Storage | None, str]:
    """Where the program of these inputs would be; None if the pipeline stores none, or if the program depends on code
    that is neither torch's nor meshweave's (passes, costs, rules as functions); and that reason."""
    gathered = inputs.pipeline.recalls
    if gathered is None:
        return None, ""
    digest, trouble = "", ""
    try:
        digest = sha256(key_text(inputs).encode()).hexdigest()
    except NoFormError as error:
        trouble = f"it depends on code that the key cannot contain ({error})"
    if len(set(gathered(int(digest[:15] or "0", 16)))) > 1:
        return None, trouble or "other processes have other keys"
    if trouble:
        return None, trouble
    key = f"{package_digest()} torch {torch.__version__} {digest}"
    return Storage(CacheEntry(cache_directory() / "programs", key, ".program"), inputs, gathered), ""


def key_text(inputs: PlanInputs) -> str:
    """All that the program depends on. Raises NoFormError for code that is neither torch's nor meshweave's."""
    encoder, pipeline = KeyEncoder(operators=_operators(inputs)), inputs.pipeline
    captured = step_form(inputs.captured, encoder)
    lasting = inputs.lasting
    read = (
        (inputs.mesh, inputs.resolved, inputs.costs, inputs.options),
        (pipeline.passes, pipeline.memory_cap_bytes, pipeline.keeps_gradients, pipeline.least_gain),
        pipeline.is_default,
        None if lasting is None else (dict(lasting.stored), dict(lasting.used)),
        _registered(),
        _settings(),
    )
    return json.dumps([captured, encoder.value(read), encoder.table])


def _registered() -> tuple[str, ...]:
    """The rules and costs that the user registered, as text."""
    texts = registrations()
    if None in texts:
        raise NoFormError("a registered rule or cost is a function")
    return tuple(sorted(filter(None, texts)))


def _settings() -> tuple[Any, ...]:
    """The settings of torch that rules and kernels read."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return platform.python_version(), torch.get_default_dtype(), kernels, cuda.cudnn_sdp_enabled()


def _operators(inputs: PlanInputs) -> Mapping[str, OpOverload]:
    """The operators of the captured step, by name: among them those of the user."""
    return {str(node.target): node.target for node in inputs.captured.graph.nodes if is_operator(node.target)}


def _known(inputs: PlanInputs) -> dict[str, Any]:
    constants = inputs.captured.constants
    return {"costs": inputs.costs, **{f"constants/{name}": value for name, value in constants.items()}}


def _packed(form: Any) -> str:
    return b64encode(zlib.compress(json.dumps(form, separators=(",", ":")).encode(), 1)).decode()


def _unpacked(text: str) -> Any:
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not reader.eof:
        raise ValueError("it is cut off")
    return json.loads(plain)


def planned_form(planned: Planned, inputs: PlanInputs) -> dict[str, Any]:
    """A program as JSON. Raises NoFormError if it has no form."""
    encoder = Encoder(_known(inputs), _operators(inputs))
    optimized, placement = planned.optimized, planned.placement
    roles = {id(role): role for role in (*optimized.expanded, *optimized.unscheduled, *optimized.roles)}
    numbers = {key: number for number, key in enumerate(roles)}
    if list(placement.homes) != list(planned.captured.graph.nodes):
        raise NoFormError("the placement is of another graph")
    is_captured = planned.captured is inputs.captured
    return {
        "captured": None if is_captured else step_form(planned.captured, encoder),
        "placed": step_form(planned.placed, encoder),
        "roles": [role_form(role, encoder) for role in roles.values()],
        "stages": [
            [numbers[id(role)] for role in stage]
            for stage in (optimized.expanded, optimized.unscheduled, optimized.roles)
        ],
        "outcome": encoder.value((dict(optimized.reports), optimized.name, optimized.variants)),
        "placement": encoder.value(
            (
                placement.mesh,
                dict(placement.stored),
                dict(placement.used),
                list(placement.homes.values()),
                placement.kept,
                placement.accumulate_in,
                placement.attention,
            )
        ),
        "accumulation": planned.accumulation,
        "table": encoder.table,
    }


def planned_of(form: Mapping[str, Any], inputs: PlanInputs) -> Planned:
    """The program of a form, after the verifier. Raises the errors of `Decoder` for what is no form, and VerifyError
    for a graph that breaks an invariant."""
    decoder = Decoder(_known(inputs), _operators(inputs))
    decoder.read_table(form["table"])
    captured = inputs.captured
    if form["captured"] is not None:
        captured = verify_step(step_of(form["captured"], decoder))
    placed = verify_placed(step_of(form["placed"], decoder))
    roles = [_verified(role_of(each, decoder)) for each in form["roles"]]
    stages: list[tuple[RankGraph, ...]] = []
    for number, indices in enumerate(form["stages"]):
        same = form["stages"].index(indices)  # stages between which no pass changed a role are the same tuple
        stages.append(stages[same] if same < number else tuple(roles[index] for index in indices))
    expanded, unscheduled, done = stages
    reports, name, variants = decoder.value(form["outcome"])
    mesh, stored, used, homes, *rest = decoder.value(form["placement"])
    placement = Placement(mesh, stored, used, dict(zip(captured.graph.nodes, homes, strict=True)), *rest)
    optimized = Optimized(
        roles=done, expanded=expanded, unscheduled=unscheduled, reports=reports, name=name, variants=variants
    )
    return Planned(
        captured=captured,
        placed=placed,
        optimized=optimized,
        placement=placement,
        accumulation=str(form["accumulation"]),
    )


def _verified(role: RankGraph) -> RankGraph:
    if role.prologue is not None:
        verify_rank(role.prologue)
    return verify_rank(role)
