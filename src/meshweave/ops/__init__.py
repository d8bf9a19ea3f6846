"""The table of ops: a record per op, in a file per kind."""

from meshweave.ops import dense, index, linalg, rows, shape, vision

__all__ = ["dense", "index", "linalg", "rows", "shape", "vision"]
