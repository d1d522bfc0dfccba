# SPDX-License-Identifier: Apache-2.0
"""A simulated IaaS: pods whose VMs are real agents, for tests, benches and trying things out.

Its parts run in two processes, and both daemons find them by entry point, as they do any plug-in:

`provider`
    In the node daemon: the PodProvider called "simulated". It starts a farm and asks it for VMs.
`farm`
    A process of its own: holds the VMs, each a whole agent (`vmserver`) with its own directory.
`machine`
    For VMs that resemble a cloud's: the processes of one VM, in namespaces of its own.
`containers`
    In the agents of all other VMs: the ContainerProvider called "fake". Containers are plain processes of
    this machine.
`protocol`
    The messages between provider and farm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infranetes.providers.interface import ProviderContext
    from infranetes_common.reactors import IReactor
    from infranetes_simulation.provider.provider import SimulatedProvider

__all__ = ["create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> SimulatedProvider:
    """Make the provider of simulated VMs (see `infranetes.providers.registry.ProviderFactory`)."""
    # Imported late: a farm and its agents need none of the node's code.
    from infranetes_simulation import provider

    return provider.create(reactor, table, context)
