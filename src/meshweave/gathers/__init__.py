"""When parameters are gathered and gradients are waited for: ahead, in the step before, one block later."""

from meshweave.gathers.prefetch import prefetch
from meshweave.gathers.settle import settle

__all__ = ["prefetch", "settle"]
