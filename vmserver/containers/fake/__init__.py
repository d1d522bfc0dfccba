"""The ContainerProvider whose containers are the machine itself: nothing is unpacked or isolated.

It serves pods whose image *is* the VM, and simulated VMs. A container with a command runs it as a
plain process of the machine; one without runs until it is stopped and costs no process at all.
User, mounts, namespaces, devices and limits are recorded and have no effect. Images are recorded by
name; no layer is ever wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes_common import config as common
from vmserver.containers import ProviderContext
from vmserver.containers.fake.provider import FakeConfig, FakeProvider


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> FakeProvider:
    """The ProviderFactory of `fake`."""
    config = common.structure(table, FakeConfig, source="configuration", prefix="providers.fake")
    return FakeProvider(reactor, config.state_dir or context.run_dir / "fake")
