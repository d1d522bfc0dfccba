# SPDX-License-Identifier: Apache-2.0
"""The node's images: pulled once by skopeo, kept as OCI blobs, loaded into the VMs that need them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infranetes.images.auth import RegistryCredentials, credentials
    from infranetes.images.config import ImagesConfig
    from infranetes.images.index import Image
    from infranetes.images.layer_disk import LayerDisk
    from infranetes.images.store import ImageStore
    from infranetes.images.usage import FsUsage

__all__ = [
    "FsUsage",
    "Image",
    "ImageStore",
    "ImagesConfig",
    "LayerDisk",
    "RegistryCredentials",
    "credentials",
]

_HOMES = {
    "FsUsage": "usage",
    "Image": "index",
    "ImageStore": "store",
    "ImagesConfig": "config",
    "LayerDisk": "layer_disk",
    "RegistryCredentials": "auth",
    "credentials": "auth",
}


def __getattr__(name: str) -> object:
    """Import what is asked for: the children that make layers' disks start without Twisted."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
