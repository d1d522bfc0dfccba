# SPDX-License-Identifier: Apache-2.0
"""The provider and the image store, the sources of VMs and images, as the configuration chooses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import attrs

from infranetes.config import Config
from infranetes.daemon.delegate import images_beside, make_delegate
from infranetes.daemon.machine_disks import NodeDisks
from infranetes.delegate.channel import Delegate
from infranetes.delegate.node_images import NodeImages
from infranetes.images import ImageStore
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.executables import Executables
from infranetes.images.interface import IImageCatalogue
from infranetes.images.machine.catalogue import MachineCatalogue
from infranetes.images.machine.registry_disks import RegistryDisks
from infranetes.images.preload import Preload, gather, gather_disks
from infranetes.images.several import SeveralStores, Store, as_one, container_images
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.pods.images.layer_loads import disk_name
from infranetes.pods.node.handler_config import CNI, DOCKER, MACHINE, SYSTEMD
from infranetes.providers.address_ranges import AddressRanges
from infranetes.providers.hypervisor import IBootsImages
from infranetes.providers.interface import (
    IHasCatalogue,
    IPodProvider,
    Progress,
    ProviderContext,
    ReadOnlyDisk,
)
from infranetes.providers.tenants import split
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor

MakeProvider = Callable[[IReactor, str, Mapping[str, object], ProviderContext], IPodProvider]
"""Makes the provider of a name; see `infranetes.providers.registry.create`."""

Images = Store | SeveralStores | NodeImages


@attrs.frozen
class Backends:
    """The configured providers, the node's own first, and the image store; not yet started.

    :ivar cri_images: the images that we list to kubelet. :ivar make: makes a further provider, by its name.
    :ivar delegate: the node's own runtime; None: none.
    :ivar machines: the disks in images that VMs boot copies of; None: no pods are made of such images."""

    providers: Sequence[IPodProvider]
    images: Images
    cri_images: Store | SeveralStores | CatalogueSet
    make: Callable[[str], IPodProvider]
    delegate: Delegate | None = None
    machines: NodeDisks | None = None

    async def start_images(self) -> None:
        """Start what has images. :raise ConfigError: a directory can't be used."""
        await self.images.start()
        if self.machines is not None:
            await self.machines.start()

    async def stop_images(self) -> None:
        """Stop what has images. Idempotent."""
        if self.machines is not None:
            await self.machines.stop()
        await self.images.stop()


def _key_of(config: Config, provider: str) -> str:
    """Return the key by which the configuration names a provider first."""
    if provider == config.provider:
        return "provider"
    named = [name for name, handler in config.handlers.items() if handler.provider == provider]
    return f"handlers.{named[0]}.provider" if named else "provider"  # none: a record names it


def make_backends(
    reactor: IReactor,
    config: Config,
    make_provider: MakeProvider,
    source: str,
    observer: Observer = NULL_OBSERVER,
) -> Backends:
    """Make them; nothing outside the process is touched.

    :param source: the configuration's file, which errors name. :param observer: for the providers.
    :raise ConfigError: they can't be made of this configuration."""

    async def preload(progress: Progress) -> Preload | None:
        if isinstance(images, NodeImages) or (store := container_images(images)) is None:
            return None
        directory = config.state_dir / "preload"
        return await gather(reactor, store, config.images.preload, directory, progress)

    async def preload_disks(progress: Progress) -> Sequence[ReadOnlyDisk]:
        store = images.delegate if isinstance(images, NodeImages) else container_images(images)
        if store is None:
            return ()
        disks = await gather_disks(store, config.images.preload, progress)
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
        observer=observer,
        ranges=AddressRanges(config.state_dir, config.offered_node_providers) if config.has_tenants else None,
    )
    joining = {
        config.provider_of(name) for name, handler in config.handlers.items() if handler.network == CNI
    }

    def make(name: str) -> IPodProvider:
        its_own = attrs.evolve(context, joins_namespaces=name in joining)
        try:
            return make_provider(reactor, name, config.providers.get(split(name)[0], {}), its_own)
        except ConfigError as error:  # which blames `provider`, if the name itself is wrong
            blamed = f"{source}: {_key_of(config, name)}: "
            raise ConfigError(str(error).replace(f"{source}: provider: ", blamed, 1)) from error

    providers: dict[str, IPodProvider] = {}
    wrong: list[str] = []
    for name in config.offered_node_providers:
        if split(name)[0] not in (*providers, name):
            continue  # its provider's table is wrong, which is told already
        try:
            providers[name] = make(name)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    catalogue = make_catalogue(reactor, config, providers)
    stores = make_stores(reactor, config, providers, source, catalogue)
    delegate = make_delegate(reactor, config, source)
    images: Images
    cri_images: Store | SeveralStores | CatalogueSet
    if delegate is None:
        images = cri_images = as_one(stores)
    else:
        images, cri_images = images_beside(reactor, config, delegate, stores)
    machines = None
    if catalogue is not None:
        store = container_images(as_one(stores)) if delegate is None else None
        qemu_img = _qemu_img(config, catalogue.name)
        registries = None if store is None else RegistryDisks(reactor, store, qemu_img)
        machines = NodeDisks(registries, catalogue)
    return Backends(list(providers.values()), images, cri_images, make, delegate, machines)


def make_catalogue(
    reactor: IReactor, config: Config, providers: Mapping[str, IPodProvider]
) -> MachineCatalogue | None:
    """Make the node's own catalogue of machines' images; None: no pods' VMs boot images of the node."""
    booting = {
        name
        for handler in ("", *config.handlers)
        if config.kind_of(handler) == MACHINE
        and IBootsImages.providedBy(providers[name := config.provider_of(handler)])
    }
    if not booting:
        return None
    (name,) = booting  # QEMU's VMs are the only ones that do
    directory = config.state_dir / f"images-{name}" / "machines"
    qemu_img = _qemu_img(config, name)
    return MachineCatalogue(
        reactor, directory, config.machine_images, config.images, qemu_img=qemu_img, name=name
    )


def _qemu_img(config: Config, provider: str) -> str:
    """Return the program that looks at disks for a provider's VMs."""
    return str(config.providers.get(provider, {}).get("qemu_img", "qemu-img"))


def make_stores(
    reactor: IReactor,
    config: Config,
    providers: Mapping[str, IPodProvider],
    source: str = "configuration",
    catalogue: MachineCatalogue | None = None,
) -> Mapping[str, Store]:
    """Make the image stores of all handlers' pods, by `SeveralStores`' names, the node's own first.

    :param catalogue: of images that VMs boot, beside those of registries.

    :raise ConfigError: the images are to be a provider's that has none."""
    stores: dict[str, Store] = {}
    for handler in ("", *config.handlers):
        kind, name = config.kind_of(handler), config.provider_of(handler)
        if kind == MACHINE and IBootsImages.providedBy(providers[name]):
            kind = DOCKER  # a machine's disk comes in an image of a registry
        key = name if kind == MACHINE else kind
        if key not in stores:
            where = f"handlers.{handler}.images" if handler else "imgprovider"
            stores[key] = _make_store(reactor, config, kind, name, providers[name], f"{source}: {where}")
    if catalogue is not None:
        directory = config.state_dir / f"images-{catalogue.name}"
        stores[catalogue.name] = CatalogueStore(reactor, directory, catalogue)
    return stores


def _make_store(
    reactor: IReactor, config: Config, kind: str, name: str, provider: IPodProvider, where: str
) -> Store:
    if kind == DOCKER:
        return ImageStore(reactor, config.state_dir / "images", config.images)
    if kind == SYSTEMD:
        catalogue = cast(IImageCatalogue, Executables())
    elif IHasCatalogue.providedBy(provider):
        catalogue = cast(IHasCatalogue, provider).catalogue
    else:
        raise ConfigError(
            f"{where}: provider {name!r} has no catalogue of machine images; use docker or systemd"
        )
    return CatalogueStore(reactor, config.state_dir / f"images-{catalogue.name}", catalogue)
