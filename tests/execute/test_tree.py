"""Containers in leaves match torch's own, and leave nothing for the collector."""

from __future__ import annotations

import collections
import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as torch_tree  # noqa: E402

from dispatchkit.execute.io.tree import tree_flatten  # noqa: E402

Point = collections.namedtuple("Point", "x y")


class Size(tuple):
    """A kind of tuple that is not registered with torch: a leaf."""


TREES = [
    3,
    None,
    (),
    [],
    {},
    (1, [2, {"b": 3, "a": (4,)}], None),
    Point(1, [2, Point(3, 4)]),
    collections.OrderedDict(z=1, a=[2]),
    collections.defaultdict(list, k=[1, 2]),
    collections.deque([1, (2, 3)], maxlen=4),
    [Size((1, 2)), torch.Size((3, 4))],
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_leaves_and_structure_are_those_of_torch(tree):
    for is_leaf in (None, lambda node: isinstance(node, (torch.Size, dict))):
        leaves, spec = tree_flatten(tree, is_leaf)
        assert (leaves, spec) == torch_tree.tree_flatten(tree, is_leaf)
        assert torch_tree.tree_unflatten(leaves, spec) == tree


def test_nothing_is_left_for_the_collector():
    gc.collect()
    gc.disable()
    try:
        for tree in TREES:
            tree_flatten(tree)
        assert gc.collect() == 0
    finally:
        gc.enable()
