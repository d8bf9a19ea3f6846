"""The step on a microbatch: captured on the whole batch and cut in time, or, where ops couple microbatches, captured on
one as in a training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshweave.capture.batch import Batch
from meshweave.capture.contract import Contract
from meshweave.capture.step import CaptureOptions
from meshweave.errors import CaptureError, RuleError
from meshweave.ir.graph import StepGraph, origin_of
from meshweave.ir.verify import verify_step
from meshweave.place.microbatches import Microbatches, NoCutError, microbatches_of
from meshweave.place.over_time import CutOverTime, cut_over_time
from meshweave.place.row_lookups import check_rows_in_time

_NOTES = logging.getLogger("meshweave")
Capture = Callable[..., tuple[StepGraph, Contract]]


@dataclass(frozen=True, slots=True)
class MicrobatchStep:
    """The captured step on a microbatch.

    `rows`: the entries of the batch that microbatches cut (None: those with as many rows as the first). `ahead`: what
    they need of the whole batch, on the whole batch. `coupling`: why each is a batch of its own.
    """

    captured: StepGraph
    contract: Contract
    rows: frozenset[str] | None = None
    ahead: StepGraph | None = None
    coupling: str = ""


def capture_microbatch(capture: Capture, example: Any, options: CaptureOptions, own_parts: int = 1) -> MicrobatchStep:
    """The step on a microbatch of `example`, of which there are `options.accumulate`. The example has the rows of
    `own_parts` ranks, and a microbatch a part of each rank's.

    `capture(example=, options=)` captures a step. The sums over microbatches of loss, metrics and gradients are those
    of the whole batch; else a warning says what couples microbatches, or a CaptureError with `exact_microbatches`.
    Raises PlanError for a batch that does not divide, and for numbers of rows of the whole batch."""
    if options.accumulate == 1:
        return MicrobatchStep(*capture(example=example, options=options))
    rows: frozenset[str] | None = None
    try:
        whole, contract = capture(example=example, options=replace(options, is_whole=True))
        cut = cut_over_time(verify_step(whole), options.accumulate)
        rows = cut.rows or None
        parts = _cut_or_error(whole, cut, options.accumulate, own_parts)
    except (NoCutError, RuleError, CaptureError) as error:
        return _loop(capture, example, rows, error, options)
    if cut.averaged:
        lines = ", ".join(sorted({str(origin_of(node)) for node in cut.averaged}))
        _NOTES.warning(
            "with accumulate=%d a metric is the mean over microbatches, each computed on rows of its own: at %s",
            options.accumulate, lines,
        )  # fmt: skip
    ahead = None if parts.ahead is None else verify_step(parts.ahead)
    return MicrobatchStep(parts.step, contract, cut.rows, ahead)


def _cut_or_error(whole: StepGraph, cut: CutOverTime, accumulate: int, own_parts: int) -> Microbatches:
    """The step on a microbatch. Raises PlanError where neither it nor a loop would be right: rows by their number."""
    try:
        return microbatches_of(whole, cut, own_parts)
    except NoCutError:
        check_rows_in_time(whole, cut.rows, accumulate)
        raise


def _loop(
    capture: Capture,
    example: Any,
    rows: frozenset[str] | None,
    error: NoCutError | RuleError | CaptureError,
    options: CaptureOptions,
) -> MicrobatchStep:
    """Each microbatch as a batch of its own, because of `error`: of the entries `rows`, or, if an op without a rule for
    rows is between them, of all with as many rows. Raises CaptureError where neither can run."""
    failures: list[CaptureError] = []
    for names in dict.fromkeys((rows, None)):
        try:
            micro = Batch.of(example).micros(options.accumulate, names)[0]
            return MicrobatchStep(
                *capture(example=micro, options=options), rows=names, coupling=_coupling(error, options)
            )
        except CaptureError as alone:
            if isinstance(error, CaptureError) or alone.__cause__ is error:  # wrong with the model, or asked for
                raise
            failures.append(alone)
    raise CaptureError(
        "the step cannot be cut into microbatches, and does not run on a microbatch by itself",
        where=error.where,
        got=f"{error.what} ({error.got}); on a microbatch: {failures[0].got}",
        expected="ops that take row by row, or sums over rows",
        hint="accumulate=1",
    ) from failures[0]


def _coupling(error: NoCutError | RuleError | CaptureError, options: CaptureOptions) -> str:
    """Log, or raise, what is not that of the whole batch, and return it."""
    what = "loss, metrics and gradients are means over microbatches, not those of the whole batch"
    if options.exact_microbatches:
        raise CaptureError(
            what,
            where=error.where,
            got=f"accumulate={options.accumulate}, and {error.what} ({error.got})",
            expected="an op that takes row by row, or sums over rows, between the batch and the loss",
            hint="accumulate=1; or run=mw.RunOptions(exact_microbatches=False): each microbatch is a batch of its own",
        ) from error
    _NOTES.warning(
        "with accumulate=%d %s, as in a training loop: %s (%s), at %s",
        options.accumulate, what, error.what, error.got, error.where,
    )  # fmt: skip
    return f"{what}: {error.what} ({error.got}), at {error.where}"
