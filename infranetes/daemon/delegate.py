# SPDX-License-Identifier: Apache-2.0
"""The daemon on a node with a runtime of its own: the parts between kubelet and both runtimes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infranetes.config import Config
from infranetes.cri.events import EventCalls
from infranetes.cri.owners import InventoryOwners
from infranetes.daemon.delegate_images import make_node_images
from infranetes.delegate.channel import Delegate
from infranetes.delegate.events import DelegateEvents
from infranetes.delegate.node_images import NodeImages
from infranetes.delegate.router import Router
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.several import SeveralStores, Store, as_one
from infranetes.pods.node.handler_config import DOCKER
from infranetes.pods.node.inventory import Inventory
from infranetes_common.reactors import IReactor
from infranetes_common.services import StartStop
from txgrpc import Service


def make_delegate(reactor: IReactor, config: Config, source: str) -> Delegate | None:
    """Make the client of the delegate; None: there is no delegate.

    :param source: the configuration's file, which errors name."""
    socket = config.delegate.socket_path
    return Delegate(reactor, socket, source) if socket else None


def images_beside(
    reactor: IReactor, config: Config, delegate: Delegate, stores: Mapping[str, Store]
) -> tuple[NodeImages | Store | SeveralStores, CatalogueSet]:
    """Return the images of a node with this delegate, and those of them that we list to kubelet.

    Containers' images are the delegate's; those of catalogues it does not know.

    :param stores: what the node would have without it."""
    catalogues = {name: store for name, store in stores.items() if isinstance(store, CatalogueStore)}
    if len(catalogues) < len(stores):
        images = make_node_images(reactor, config, delegate, list(catalogues.values()))
        return images, images.catalogues
    return as_one(catalogues), CatalogueSet(list(catalogues.values()))


def delegate_service(delegate: Delegate) -> StartStop:
    """Return the service that meets the delegate, for which nothing waits, and leaves it at the end."""
    return StartStop(delegate.start, delegate.stop)


def make_router(
    reactor: IReactor,
    config: Config,
    delegate: Delegate,
    inventory: Inventory,
    owns_image: Callable[[str], bool],
    ours: Sequence[Service],
    events: EventCalls,
) -> Router:
    """Make the router that answers kubelet in place of `ours`.

    :param owns_image: whether we tell of the image of this name or id.
    :param events: who listens to our events."""
    handlers = {name: config.kind_of(name) == DOCKER for name in config.offered_handlers}
    owners = InventoryOwners(inventory, handlers, owns_image)
    return Router(delegate, owners, ours, DelegateEvents(reactor, delegate, events))
