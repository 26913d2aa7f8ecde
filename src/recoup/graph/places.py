"""Other operations in the place of one."""

from __future__ import annotations

from typing import Any

from torch import fx

from recoup.graph.functional import computed


class Place:
    """Where a node stands; what is added takes its place."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def add(self, target: Any, *args: Any) -> fx.Node:
        """One more operation before the node."""
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args)
        new.meta = {**self.node.meta, "val": computed(target, new)}
        return new

    def give(self, result: fx.Node) -> None:
        """Let everybody read the result instead of the node, which goes."""
        self.node.replace_all_uses_with(result)
        self.node.graph.erase_node(self.node)
