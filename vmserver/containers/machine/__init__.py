# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider whose one container is the VM itself, for pods whose image is the VM.

The container runs for as long as the VM. Commands run in the VM, the log is the VM's journal, and stopping
the container powers the VM off.
"""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common import config as common
from infranetes_common.reactors import IReactor
from vmserver.containers import ProviderContext
from vmserver.containers.machine.provider import MachineConfig, MachineProvider


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> MachineProvider:
    """Make the provider: the ProviderFactory of `machine`."""
    config = common.structure(table, MachineConfig, source=context.source, prefix="providers.machine")
    return MachineProvider(reactor, config)
