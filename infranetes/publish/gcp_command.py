# SPDX-License-Identifier: Apache-2.0
"""The publisher to the project of Google's cloud that the configuration names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from infranetes.providers.cloud.gcp import credentials
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.publish import gcp_storage
from infranetes.publish.gcp import GcpPublisher
from infranetes_common import config

_NO_IMAGE = "none-yet"  # stands for the image that is yet to be published


def connect(table: Mapping[str, object], source: str, options: argparse.Namespace) -> GcpPublisher:
    """See `Connect`."""
    settings = config.structure(
        {"image": _NO_IMAGE, **table}, Settings, source=source, prefix="providers.gcp"
    )
    who = credentials.Credentials(settings, gcp_storage.SCOPES)
    driver = Driver(settings.project, who, settings.call_seconds, settings.endpoint)
    storage = gcp_storage.Storage(options.bucket, who, options.storage_endpoint) if options.bucket else None
    return GcpPublisher(driver, storage, settings.zones, settings.image)
