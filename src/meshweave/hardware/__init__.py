"""Machine profiles: what communication and compute cost."""

from meshweave.hardware.alpha_beta import AlphaBeta

__all__ = ["AlphaBeta"]
