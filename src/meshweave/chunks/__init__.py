"""Ops in chunks: how each kind of op is cut, chains of ops, and the nodes of a chunk."""
