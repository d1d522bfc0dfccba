# SPDX-License-Identifier: Apache-2.0
"""The publisher to the vCenter that the configuration names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from infranetes.providers.cloud.vsphere.deployments import LibraryDeployments
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.inventory import VCenterInventory
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.session import VOLUMES_API, VCenterSession
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.storage import Storage
from infranetes.publish.vsphere import VspherePublisher
from infranetes.publish.vsphere_library import Shelf
from infranetes_common import config
from infranetes_common.errors import ConfigError

_NO_IMAGE = "none-yet"  # stands for the template that is yet to be published


def connect(table: Mapping[str, object], source: str, options: argparse.Namespace) -> VspherePublisher:
    """See `Connect`. :raise ConfigError: there is no library to publish to."""
    settings = config.structure(
        {"image": _NO_IMAGE, **table}, Settings, source=source, prefix="providers.vsphere"
    )
    if not settings.content_library:
        raise ConfigError(
            f"{source}: providers.vsphere.content_library: name the library that images are published to, "
            f"and image_folder, where their templates are"
        )
    return publisher(settings)


def publisher(settings: Settings) -> VspherePublisher:
    """Return the publisher. Nothing is asked before it publishes."""
    who = (settings.host, settings.username, settings.password_file, settings.ca_file)

    def rest(timeout: float) -> Rest:
        return Rest(*who, timeout)

    seconds = settings.call_seconds
    storage = Storage(VCenterSession(*who, seconds, api=VOLUMES_API))
    driver = Driver(VCenterSession(*who, seconds), rest(seconds), storage)
    deployments = LibraryDeployments(settings, VCenterInventory(settings), rest)

    def shelf() -> Shelf:
        return Shelf(driver.rest, settings.host, settings.ca_file, settings.content_library)

    def deploy(name: str, version: str) -> None:
        deployments._thd_deploy(driver, name, version)

    return VspherePublisher(shelf, deploy, settings.image_folder, settings.image, driver.close)
