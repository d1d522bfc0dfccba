# SPDX-License-Identifier: Apache-2.0
"""The ContainerProvider whose containers are those of the VM's Docker, over its Engine API."""

from __future__ import annotations

from collections.abc import Mapping

from infranetes_common import config as common
from infranetes_common.reactors import IReactor
from vmserver.containers import ProviderContext
from vmserver.containers.docker.provider import DockerConfig, DockerProvider


def create(reactor: IReactor, table: Mapping[str, object], context: ProviderContext) -> DockerProvider:
    """Make the provider: the ProviderFactory of `docker`."""
    config = common.structure(table, DockerConfig, source=context.source, prefix="providers.docker")
    return DockerProvider(reactor, config, context.etc_dir, context.run_dir)
