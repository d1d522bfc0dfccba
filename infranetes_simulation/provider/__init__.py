# SPDX-License-Identifier: Apache-2.0
"""The PodProvider of simulated VMs: the node's side of the simulation."""

from __future__ import annotations

import os
from collections.abc import Mapping

from infranetes.providers.interface import ProviderContext
from infranetes_common import config
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from infranetes_simulation.provider.farm_client import SOCKET
from infranetes_simulation.provider.provider import SimulatedProvider
from infranetes_simulation.provider.settings import Settings

_MAX_SOCKET_PATH = 107  # unix(7)

__all__ = ["SimulatedProvider", "create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> SimulatedProvider:
    """Make the provider from its table of the configuration.

    :raise ConfigError: the table is wrong, or the path of the farm's socket is too long.
    """
    settings = config.structure(table, Settings, source=context.source, prefix="providers.simulated")
    socket = context.run_dir / SimulatedProvider.name / SOCKET
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{context.source}: run_dir: {socket} is too long for a socket's path "
            f"(at most {_MAX_SOCKET_PATH} bytes); choose a shorter directory"
        )
    return SimulatedProvider(reactor, settings, context)
