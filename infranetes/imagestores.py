"""Where the images of the configured `imgprovider` are."""

from __future__ import annotations

from typing import Any

from infranetes.config import Config
from infranetes.images import ImageStore
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.executables import Executables
from infranetes.providers.interface import IHasCatalogue
from infranetes_common.errors import ConfigError


def image_store(reactor: Any, config: Config, provider: Any) -> ImageStore | CatalogueStore:
    """Not yet started. :param provider: the configured provider, which may have images of its own.

    :raise ConfigError: it has none, or the configuration does not go with them."""
    wanted = config.imgprovider
    if wanted == "docker":
        return ImageStore(reactor, config.state_dir / "images", config.images)
    if wanted == Executables.name:
        catalogue: Any = Executables()
    elif IHasCatalogue.providedBy(provider):
        catalogue = provider.catalogue
    else:
        raise ConfigError(
            f"imgprovider: provider {wanted!r} has no catalogue of machine images; use docker or systemd"
        )
    if catalogue.boots and config.pool.sizes:
        raise ConfigError(
            f"pool.sizes: with imgprovider = {wanted!r} each pod's image is its VM, so none can wait for it; "
            "leave the pool out"
        )
    return CatalogueStore(reactor, config.state_dir / f"images-{catalogue.name}", catalogue)
