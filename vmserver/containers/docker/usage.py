# SPDX-License-Identifier: Apache-2.0
"""The places to measure the resource usage of Docker's containers, without asking Docker."""

from __future__ import annotations

from vmserver.containers.docker.api import ContainerInspect
from vmserver.stats.reader import UsageSource


def usage_source(container: ContainerInspect) -> UsageSource:
    """Return a container's usage source. Only overlay2 has a directory of just the container's own files."""
    driver = container.get("GraphDriver")
    data = (driver.get("Data") if driver else None) or {}
    return UsageSource(group=str(container.get("Id", "")), layer=str(data.get("UpperDir", "")))
