# SPDX-License-Identifier: Apache-2.0
"""The ownership of sandboxes, containers and images on a node with a delegate, by the inventory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from infranetes.delegate.channel import IMAGES, refused_name
from infranetes.delegate.owners import Owned
from infranetes.pods.node.inventory import Inventory

ID_LENGTH = 32  # digits of our own ids; the delegate's have 64


class InventoryOwners:
    """`infranetes.delegate.owners.Owners`, from the inventory.

    :param handlers: our runtime handlers, and whether their pods are made of container images.
    :param image: returns whether an image's name is ours.
    """

    def __init__(
        self,
        inventory: Inventory,
        handlers: Mapping[str, bool],
        image: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._inventory = inventory
        self._handlers = handlers
        self._image = image

    def sandbox(self, id: str) -> Owned:
        return _owned(self._inventory.sandboxes, id)

    def container(self, id: str) -> Owned:
        return _owned(self._inventory.containers, id)

    def handler(self, name: str) -> bool:
        return name in self._handlers

    def needs(self, handler: str) -> Sequence[str]:
        return (refused_name(handler), IMAGES) if self._handlers[handler] else (refused_name(handler),)

    def image(self, name: str) -> bool:
        return self._image(name)


def _owned(ours: Collection[str], id: str) -> Owned:
    if id in ours:
        return Owned.OURS
    if not id or len(id) >= ID_LENGTH:
        return Owned.THEIRS
    return Owned.MAYBE if any(own.startswith(id) for own in ours) else Owned.THEIRS
