# SPDX-License-Identifier: Apache-2.0
"""What benches need, as targets of the Makefile: `make bench` makes what its benches need, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

#: In the order in which they are made.
TARGETS = ("apt-test", "tools", "image", "image-docker", "test-guests", "test-guests-large")
_PROGRAMS = ("apt-test",)
_TOOLS = ("apt-test", "tools")
_VMS = ("apt-test", "image")
_VMS_AND_TOOLS = ("apt-test", "tools", "image")
_DOCKER = ("apt-test", "image-docker")
#: By bench, and by its variants if these need something else.
BY_BENCH: Mapping[str, Sequence[str]] = {
    "waits": _VMS_AND_TOOLS,
    "native": _TOOLS,
    "floor": _VMS,
    "crowd": _VMS,
    "ready": _VMS_AND_TOOLS,
    "blobs": _PROGRAMS,
    "images": _PROGRAMS,
    "pods": _DOCKER,
    "mounts": _DOCKER,
    "fio": _VMS,
    "attach": _VMS,
    "memory": _VMS,
    "memory:docker": _DOCKER,
    "machines": ("apt-test", "image", "test-guests"),
    "machines:ways": ("apt-test", "image", "test-guests-large"),
    "pool": _PROGRAMS,
    "lives": _TOOLS,
    "volumes": _TOOLS,
    "launches": _TOOLS,
    "calls": _TOOLS,
    "quota": _TOOLS,
    "density": _PROGRAMS,
    "conformance": _VMS_AND_TOOLS,
    "streams": _VMS_AND_TOOLS,
    "services": _PROGRAMS,
    "fleet": _PROGRAMS,
    "proxies": _PROGRAMS,
    "hop": _TOOLS,
    "rpc": (),
    "libraries": _PROGRAMS,
}


def needed(names: Iterable[str]) -> list[str]:
    """Return the targets that benches and variants of these names need, in the order to make them in."""
    wanted: set[str] = set()
    for name in names:
        wanted.update(BY_BENCH.get(name, BY_BENCH[name.partition(":")[0]]))
    return [target for target in TARGETS if target in wanted]
