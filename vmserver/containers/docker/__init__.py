"""Containers run by the machine's Docker, over its Engine API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes_common import config as common
from vmserver.containers import ProviderContext
from vmserver.containers.docker.provider import DockerConfig, DockerProvider


def create(reactor: Any, table: Mapping[str, Any], context: ProviderContext) -> DockerProvider:
    """The ProviderFactory of `docker`."""
    config = common.structure(table, DockerConfig, source="configuration", prefix="providers.docker")
    return DockerProvider(reactor, config, context.etc_dir, context.run_dir)
