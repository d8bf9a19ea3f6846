"""Buckets of collectives: which may be merged, the merged graph, and how a merge is undone."""
