"""Ops done chunk by chunk: how each kind is cut, chains of them, and the nodes of one chunk."""
