"""Rows of a batch in chunks, so that the communication of one runs under the compute of another."""

from meshweave.rows.roles import SplitOptions, split_role
from meshweave.rows.split import SplitReport, split_batch

__all__ = ["SplitOptions", "SplitReport", "split_batch", "split_role"]
