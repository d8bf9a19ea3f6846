"""Nested lists, tuples and dicts of tensors, as torch itself takes them apart.

Holds for torch 2.11 to 2.13 (torch/utils/_pytree.py). What users register there for classes of their own is honoured,
which a package of another name would not do.
"""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
