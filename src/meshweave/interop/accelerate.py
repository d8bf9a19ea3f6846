"""What Accelerate says of the loop that calls a step (accelerate 1.15: accelerate/state.py). It is not imported: only
where a script has imported it, it is asked."""

from __future__ import annotations

import sys

from meshweave.errors import StepError


def refuse_accumulation() -> None:
    """StepError for an update while Accelerate accumulates gradients: until the last microbatch it skips
    `optimizer.step()` and the schedule's, which a compiled update would not notice."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or accelerate.GradientState().sync_gradients:
        return
    raise StepError(
        "Accelerate accumulates gradients, but every call of a compiled step is an update",
        where="accelerator.accumulate(...)",
        expected="a call for each update",
        hint="remove accumulate() and gradient_accumulation_steps=n, let the loader give n times the rows, and pass "
        "accumulate=n to mw.compile; if an accumulation was interrupted: "
        "accelerate.Accelerator().sync_gradients = True",
    )
