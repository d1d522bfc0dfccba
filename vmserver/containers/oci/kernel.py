# SPDX-License-Identifier: Apache-2.0
"""The features of the VM's kernel that containers can use."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from infranetes_common.huge_pages import limit_name
from vmserver.containers.oci.capabilities import NAMES, in_mask
from vmserver.machine.huge_pages import huge_page_sizes

_RELEASE = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_OPEN_FILES = 1024 * 1024  # the limit of Docker's own service
_UNLIMITED = 2**64 - 1  # as the OCI runtime-spec represents it
_LIMITS = {
    "RLIMIT_NOFILE": (resource.RLIMIT_NOFILE, _OPEN_FILES),
    "RLIMIT_NPROC": (resource.RLIMIT_NPROC, _UNLIMITED),
    "RLIMIT_CORE": (resource.RLIMIT_CORE, _UNLIMITED),
}
_RAISES_LIMITS = "CAP_SYS_RESOURCE"


@attrs.frozen
class Kernel:
    """The kernel and its settings.

    `mqueue`: True if it can mount its message queues at /dev/mqueue.
    `hugepages` are the page sizes that can be limited, as a cgroup's files name them. `rlimits` apply to
    every container, soft and hard. `capabilities` are those that can be granted."""

    cgroup2: bool = True
    apparmor: bool = False
    architecture: str = "x86_64"
    release: tuple[int, int] = (6, 1)
    capabilities: frozenset[str] = frozenset(NAMES)
    hugepages: frozenset[str] = frozenset()
    mqueue: bool = True
    rlimits: Mapping[str, int] = MappingProxyType({name: value for name, (_, value) in _LIMITS.items()})


def find_kernel(root: Path = Path("/")) -> Kernel:
    """Read the kernel's features from /proc and /sys. Blocks for some milliseconds."""
    system = os.uname()
    release = _RELEASE.match(system.release)
    cgroup2 = (root / "sys/fs/cgroup/cgroup.controllers").exists()
    capabilities = in_mask(_capability_mask(root / "proc/self/status"))
    return Kernel(
        cgroup2=cgroup2,
        apparmor=_text(root / "sys/module/apparmor/parameters/enabled") == "Y",
        architecture=system.machine,
        release=(int(release[1]), int(release[2])) if release else (0, 0),
        capabilities=capabilities,
        hugepages=_hugepages(root / "sys", cgroup2),
        mqueue=os.path.ismount(root / "dev/mqueue"),
        rlimits=MappingProxyType(_rlimits(root / "proc/sys/fs/nr_open", _RAISES_LIMITS in capabilities)),
    )


def _capability_mask(status: Path) -> int:
    """Return the bounding set of this process: no process it starts can have more."""
    for line in _text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "CapBnd":
            return int(value.strip(), 16)
    return 0


def _rlimits(nr_open: Path, raise_them: bool) -> dict[str, int]:
    """Return the limits of containers: Docker's, as far as this process may set them."""
    found = {}
    for name, (kind, value) in _LIMITS.items():
        own = resource.getrlimit(kind)[1]
        allowed = _UNLIMITED if raise_them or own == resource.RLIM_INFINITY else own
        found[name] = min(value, allowed)
    most = _text(nr_open)
    if most.isdecimal():
        found["RLIMIT_NOFILE"] = min(found["RLIMIT_NOFILE"], int(most))
    return found


def _hugepages(sys: Path, cgroup2: bool) -> frozenset[str]:
    group = sys / "fs/cgroup"
    if cgroup2 and "hugetlb" not in _text(group / "cgroup.controllers").split():
        return frozenset()
    if not cgroup2 and not (group / "hugetlb").is_dir():
        return frozenset()
    return frozenset(map(limit_name, huge_page_sizes(sys / "kernel/mm/hugepages")))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
