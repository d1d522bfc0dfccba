# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider of simulated VMs, called "fake": nothing is unpacked or isolated.

A container with a command runs it as a plain process of this machine, watched over by a shim that outlives
the agent. One without a command runs until it is stopped and costs no process at all, so a test can have
thousands. User, mounts, namespaces, devices and limits are recorded and have no effect. Images are recorded
by name, and no layer is asked for; or, with `layers`, are made of layers that the node brings.
"""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common import config as common
from infranetes_common.reactors import IReactor
from infranetes_simulation.containers.layered import LayeredFakeProvider
from infranetes_simulation.containers.provider import FakeConfig, FakeProvider
from vmserver.containers import ProviderContext

__all__ = ["FakeProvider", "create"]


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> FakeProvider:
    """Make the provider (see `vmserver.containers.ProviderFactory`)."""
    config = common.structure(table, FakeConfig, source=context.source, prefix="providers.fake")
    kind = LayeredFakeProvider if config.layers else FakeProvider
    return kind(reactor, config.state_dir or context.run_dir / "fake")
