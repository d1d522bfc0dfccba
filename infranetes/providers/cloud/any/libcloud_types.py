# SPDX-License-Identifier: Apache-2.0
"""What is used of `libcloud.compute.base`, which is untyped. What drivers leave out is None, or worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol


class Named(Protocol):
    """A NodeImage or a NodeLocation."""

    id: object
    name: object


class Size(Named, Protocol):
    """A NodeSize."""

    ram: int | None  # MiB
    price: float | str | None
    extra: Mapping[str, object] | None


class Node(Named, Protocol):
    """A VM."""

    state: str  # one of NodeState
    public_ips: Sequence[str] | None
    private_ips: Sequence[str] | None
    size: Size | str | None
    created_at: datetime | str | None
    extra: Mapping[str, object] | None


class Driver(Protocol):
    """A NodeDriver. Each driver's methods take further arguments of its own."""

    def list_nodes(self, **arguments: object) -> Sequence[Node]: ...
    def list_sizes(self, **arguments: object) -> Sequence[Size]: ...
    def list_images(self, **arguments: object) -> Sequence[Named]: ...
    def list_locations(self) -> Sequence[Named]: ...
    def create_node(self, **arguments: object) -> Node: ...
    def destroy_node(self, node: Node) -> bool: ...
