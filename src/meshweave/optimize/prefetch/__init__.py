"""When parameters are gathered and gradients are waited for: blocks ahead, a block later."""

from meshweave.optimize.prefetch.delay_waits import delay_gradient_waits
from meshweave.optimize.prefetch.gather_ahead import prefetch

__all__ = ["delay_gradient_waits", "prefetch"]
