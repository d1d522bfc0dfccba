"""Simulated VMs: real agents on loopback, in a farm that outlives the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from infranetes.providers.interface import ProviderContext
from infranetes.providers.simulated.farm import SOCKET
from infranetes.providers.simulated.provider import SimulatedProvider
from infranetes.providers.simulated.settings import Settings
from infranetes_common import config
from infranetes_common.errors import ConfigError

_MAX_SOCKET_PATH = 107  # unix(7)

__all__ = ["SimulatedProvider", "create"]


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> SimulatedProvider:
    """The provider of simulated VMs (see `registry.ProviderFactory`)."""
    settings = config.structure(table, Settings, source="configuration", prefix="providers.simulated")
    socket = context.run_dir / SimulatedProvider.name / SOCKET
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"run_dir: {socket} is too long for a socket's path (at most {_MAX_SOCKET_PATH} bytes); "
            "choose a shorter directory"
        )
    return SimulatedProvider(reactor, settings, context)
