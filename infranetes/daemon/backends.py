# SPDX-License-Identifier: Apache-2.0
"""Where VMs and images come from, as the configuration chooses: the provider and the image store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from infranetes.config import Config
from infranetes.images import ImageStore
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.executables import Executables
from infranetes.images.interface import IImageCatalogue
from infranetes.images.preload import Preload, gather, gather_disks
from infranetes.pods.layer_loads import disk_name
from infranetes.providers.interface import (
    IHasCatalogue,
    IPodProvider,
    Progress,
    ProviderContext,
    ReadOnlyDisk,
)
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

# Any: a provider's own table, which only the provider knows.
MakeProvider = Callable[[IReactor, str, Mapping[str, Any], ProviderContext], IPodProvider]
"""Makes the provider of a name; see `infranetes.providers.registry.create`."""

Images = ImageStore | CatalogueStore


@attrs.frozen
class Backends:
    """The configured providers, the node's own first, and the image store; not yet started.

    :ivar make: makes a further provider, by its name."""

    providers: Sequence[IPodProvider]
    images: Images
    make: Callable[[str], IPodProvider]


def make_backends(reactor: IReactor, config: Config, make_provider: MakeProvider, source: str) -> Backends:
    """Make them; nothing outside the process is touched.

    :param source: the configuration's file, which errors name.
    :raise ConfigError: they can't be made of this configuration."""

    async def preload(progress: Progress) -> Preload | None:
        if not isinstance(images, ImageStore):
            return None
        directory = config.state_dir / "preload"
        return await gather(reactor, images, config.images.preload, directory, progress)

    async def preload_disks(progress: Progress) -> Sequence[ReadOnlyDisk]:
        if not isinstance(images, ImageStore):
            return ()
        disks = await gather_disks(images, config.images.preload, progress)
        return [ReadOnlyDisk(disk_name(disk.diff_id), disk.path) for disk in disks]

    context = ProviderContext(
        config.state_dir,
        config.run_dir,
        config.cluster,
        config.node,
        preload,
        preload_disks,
        source,
        config.kubernetes.networks,
        config.kubernetes.network_policies,
    )

    def make(name: str) -> IPodProvider:
        return make_provider(reactor, name, config.providers.get(name, {}), context)

    providers = [make(name) for name in (config.provider,)]
    images = make_images(reactor, config, providers[0], source)
    return Backends(providers, images, make)


def make_images(
    reactor: IReactor, config: Config, provider: IPodProvider, source: str = "configuration"
) -> Images:
    """Make the image store of the configured `imgprovider`.

    :raise ConfigError: it is the provider's, which has no images."""
    name = config.imgprovider
    if name == "docker":
        return ImageStore(reactor, config.state_dir / "images", config.images)
    if name == Executables.name:
        catalogue = cast(IImageCatalogue, Executables())
    elif IHasCatalogue.providedBy(provider):
        catalogue = cast(IHasCatalogue, provider).catalogue
    else:
        raise ConfigError(
            f"{source}: imgprovider: provider {name!r} has no catalogue of machine images; "
            "use docker or systemd"
        )
    return CatalogueStore(reactor, config.state_dir / f"images-{catalogue.name}", catalogue)
