"""When communication starts, relative to compute."""

from meshweave.overlap.prefetch import prefetch

__all__ = ["prefetch"]
