# SPDX-License-Identifier: Apache-2.0
"""Makes specifications of containers, for tests of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers.oci.image import ImageDefaults
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.limits import linux_resources
from vmserver.containers.oci.lookup import Lookup, Source
from vmserver.containers.oci.spec import NewContainer, container_spec

KERNEL = Kernel(hugepages=frozenset({"2MB"}))
SHELL = ImageDefaults(command=("sh",))


def wanted(config: cri.ContainerConfig, **others: Any) -> NewContainer:
    """Return the `NewContainer` of a configuration whose mounts are all directories."""
    found = Lookup(hostname="vm", mounts=tuple(Source(mount.host_path) for mount in config.mounts))
    values = {
        "id": "c1",
        "config": config,
        "sandbox_config": cri.PodSandboxConfig(),
        "image": SHELL,
        "rootfs": Path("/run/c1/rootfs"),
        "lookup": found,
        "kernel": KERNEL,
        "cgroup": "/infranetes/c1",
    }
    return NewContainer(**{**values, **others})


def spec(config: cri.ContainerConfig | None = None, others: Any = None, **fields: Any) -> Any:
    """Return the specification of a container with these fields of its configuration."""
    return container_spec(wanted(config or cri.ContainerConfig(**fields), **(others or {})))


def secured(others: Any = None, **fields: Any) -> Any:
    """Return the specification of a container with these fields of the security context."""
    context = cri.LinuxContainerSecurityContext(**fields)
    return spec(others=others, linux=cri.LinuxContainerConfig(security_context=context))


def limited(**fields: Any) -> Any:
    """Return `linux.resources` with these limits."""
    return linux_resources(cri.LinuxContainerResources(**fields), KERNEL)


def destinations(found: Any) -> list[str]:
    return [mount["destination"] for mount in found["mounts"]]


class Refusing(SynchronousTestCase):
    def refused(self, word: str, work: Any, **fields: Any) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            work(**fields)
        self.assertIn(word, str(caught.exception))
