"""Pods on Google Compute Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes.providers.cloud.gcp.cloud import GcpCloud
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common import config

__all__ = ["create"]


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> CloudProvider:
    """The provider of Compute Engine's instances (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source="configuration", prefix="providers.gcp")
    prices()  # a large file of libcloud's, read before the reactor runs
    return CloudProvider(reactor, GcpCloud(settings, context), settings, context)
