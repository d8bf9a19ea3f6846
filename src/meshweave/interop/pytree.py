"""Nested lists, tuples and dicts of tensors, flattened by torch's own pytree. Holds for torch 2.11 to 2.13
(torch/utils/_pytree.py). User classes registered there are supported, which another package would not do."""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
