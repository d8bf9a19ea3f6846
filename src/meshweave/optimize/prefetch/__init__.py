"""When parameters are gathered and gradients are waited for: blocks ahead, once a step, a block later."""

from meshweave.optimize.prefetch.gather_ahead import delay_gradient_waits, prefetch
from meshweave.optimize.prefetch.keep import gather_once

__all__ = ["delay_gradient_waits", "gather_once", "prefetch"]
