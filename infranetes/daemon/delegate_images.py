# SPDX-License-Identifier: Apache-2.0
"""The images of a node with a delegate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from infranetes.config import Config
from infranetes.delegate.channel import IMAGES, Delegate
from infranetes.delegate.containerd_api import ContainerdApi
from infranetes.delegate.containerd_content import ContainerdContent
from infranetes.delegate.crio_content import CrioContent
from infranetes.delegate.images import DelegateImages
from infranetes.delegate.layer_source import SourceByKind
from infranetes.delegate.node_images import NodeImages
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes_common.reactors import IReactor

DIRECTORY = "delegate-images"  # in the state directory


def make_node_images(
    reactor: IReactor, config: Config, delegate: Delegate, catalogues: Sequence[CatalogueStore] = ()
) -> NodeImages:
    """Make the images of a node with this delegate; nothing outside the process is touched.

    :param catalogues: of the handlers whose pods are not made of containers' images."""
    directory = config.state_dir / DIRECTORY
    platform = config.images.effective_platform
    sources = {
        "containerd": ContainerdContent(
            reactor, ContainerdApi(reactor, delegate.stub), directory / "copies", platform
        ),
        "cri-o": CrioContent(reactor, delegate, directory / "tars", platform),
    }
    images = DelegateImages(
        reactor,
        delegate,
        SourceByKind(delegate, sources),
        directory / "disks",
        config.images,
        config.times.sweep,
        refuse=partial(delegate.refuse, IMAGES),
    )
    return NodeImages(CatalogueSet(catalogues), images)
