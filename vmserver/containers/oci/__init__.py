# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider that runs containers with conmon and crun, from images made of mounted layers.

No engine runs in the VM: each container has its own conmon, and the agent keeps its records in files.
"""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common import config as common
from infranetes_common.reactors import IReactor
from vmserver.containers import ProviderContext
from vmserver.containers.oci.config import OciConfig
from vmserver.containers.oci.provider import OciProvider


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> OciProvider:
    """Make the provider: the ProviderFactory of `oci`."""
    config = common.structure(table, OciConfig, source=context.source, prefix="providers.oci")
    return OciProvider(reactor, config, context.etc_dir, context.run_dir)
