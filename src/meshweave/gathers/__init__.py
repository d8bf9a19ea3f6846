"""When parameters are gathered and gradients are waited for: blocks ahead, in the previous step, a block later."""

from meshweave.gathers.prefetch import prefetch
from meshweave.gathers.settle import settle

__all__ = ["prefetch", "settle"]
