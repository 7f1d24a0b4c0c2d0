"""Containers in leaves, as torch's pytree has them, and nothing left for the collector.

``torch.utils._pytree.tree_flatten`` (2.11 to 2.13) makes a function that refers to itself at each
call. Nothing but the collector frees it, and services keep the collector off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, _get_node_type, tree_structure

_LEAF: Final[TreeSpec] = tree_structure(0)


def tree_flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of nested containers, and what ``tree_unflatten`` builds them again by.

    Args:
        tree: The containers.
        is_leaf: Says of a container that it is to be one leaf.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, is_leaf, leaves)


def _flatten(tree: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any]) -> TreeSpec:
    node = SUPPORTED_NODES.get(kind := _get_node_type(tree))
    if node is None or (is_leaf is not None and is_leaf(tree)):
        leaves.append(tree)
        return _LEAF
    children, context = node.flatten_fn(tree)
    return TreeSpec(kind, context, [_flatten(child, is_leaf, leaves) for child in children])
