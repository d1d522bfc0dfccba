"""The ContainerProvider whose one container is the machine itself, for pods whose image is the VM.

It runs for as long as the machine does. Commands run in the machine, its log is the machine's journal, and to
stop it is to switch the machine off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes_common import config as common
from vmserver.containers import ProviderContext
from vmserver.containers.machine.provider import MachineConfig, MachineProvider


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> MachineProvider:
    """The ProviderFactory of `machine`."""
    config = common.structure(table, MachineConfig, source="configuration", prefix="providers.machine")
    return MachineProvider(reactor, config)
