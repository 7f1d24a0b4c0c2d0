"""Flatten containers as torch's pytree does, but without creating reference cycles.

``torch.utils._pytree.tree_flatten`` in torch 2.11 to 2.13 creates a self-referencing function in
each call. Only the garbage collector frees this function, and services often disable the collector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, _get_node_type, tree_structure

_LEAF: Final[TreeSpec] = tree_structure(0)


def tree_flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of nested containers, and the spec for ``tree_unflatten``.

    Args:
        tree: Nested containers.
        is_leaf: Function that returns whether to treat a container as a leaf.
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
