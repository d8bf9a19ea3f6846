"""Collectives that run as one: which may be merged, the merged graph, and taken apart again."""
