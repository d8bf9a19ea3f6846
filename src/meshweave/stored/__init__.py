"""Programs on disk: a start whose captured step, plan, costs and options are those of an earlier start loads its
program."""

from meshweave.stored.programs import Storage, storage_of

__all__ = ["Storage", "storage_of"]
