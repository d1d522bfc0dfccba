"""Pods on Amazon EC2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes.providers.cloud.aws.cloud import AwsCloud, offers
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config

__all__ = ["create"]


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> CloudProvider:
    """The provider of EC2 instances (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source="configuration", prefix="providers.aws")
    # libcloud's list of sizes and prices is a large file, read before the reactor runs
    cloud = AwsCloud(settings, context, offers(settings.region))
    return CloudProvider(reactor, cloud, settings, context)
