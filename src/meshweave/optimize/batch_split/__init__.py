"""Rows of a batch in chunks, so that the communication of a chunk runs under the compute of another."""

from meshweave.optimize.batch_split.split import SplitReport, split_batch, split_program

__all__ = ["SplitReport", "split_batch", "split_program"]
