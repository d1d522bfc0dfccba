# SPDX-License-Identifier: Apache-2.0
"""Facts of a node for a maintainer: its releases, kernel, memory and QEMU, its store and its guest image."""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from importlib import metadata
from pathlib import Path

import attrs

from infranetes.guest import image as images
from infranetes.pods.store.database import SCHEMA
from infranetes.pods.store.store import FILE
from infranetes_common import __version__
from infranetes_common.commands import Command, run
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

PROGRAM_SECONDS = 10.0
LIBRARIES = ("Twisted", "attrs", "cattrs", "h2", "protobuf", "pyOpenSSL", "cryptography", "service-identity")
PROGRAMS = (("qemu-system-x86_64", "--version"), ("nft", "--version"), ("skopeo", "--version"))
_MEMORY = (
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "SwapTotal",
    "SwapFree",
    "HugePages_Total",
    "HugePages_Free",
)


def versions() -> dict[str, object]:
    """Return the versions of Infranetes and of what it runs on."""
    found: dict[str, object] = {"infranetes": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


async def programs(reactor: IReactor) -> dict[str, object]:
    """Return the versions that programs print of themselves."""
    found: dict[str, object] = {}
    for name, flag in PROGRAMS:
        try:
            output = await run(reactor, Command([name, flag], PROGRAM_SECONDS))
            found[name] = output.stdout.decode(errors="replace").partition("\n")[0][:200]
        except InfranetesError as error:
            found[name] = str(error)
    return found


def facts(state_dir: Path) -> dict[str, object]:
    """Return facts of the machine: its system, kernel, memory, devices and disk. Blocks."""
    disk = shutil.disk_usage(state_dir) if state_dir.exists() else None
    return {
        "uname": list(os.uname()),
        "os": _pairs("/etc/os-release", "=").get("PRETTY_NAME", "").strip('"'),
        "cpus": os.cpu_count(),
        "load": list(os.getloadavg()),
        "uptime_seconds": _text("/proc/uptime").partition(" ")[0],
        "memory": {key: _pairs("/proc/meminfo", ":").get(key, "") for key in _MEMORY},
        "kvm": os.access("/dev/kvm", os.R_OK | os.W_OK),
        "vhost_vsock": os.path.exists("/dev/vhost-vsock"),
        "cgroup2": os.path.exists("/sys/fs/cgroup/cgroup.controllers"),
        "state_dir": {"path": str(state_dir), "total": disk.total, "free": disk.free} if disk else None,
    }


def schema(state_dir: Path) -> dict[str, object]:
    """Return the schema of the store, and the one that this release knows. Blocks.

    :raise sqlite3.Error: it can't be read."""
    path = state_dir / FILE
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PROGRAM_SECONDS)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    return {"schema": version, "known": SCHEMA, "bytes": path.stat().st_size}


def guest_image(providers: Mapping[str, object]) -> dict[str, object]:
    """Return what is in the guest image in use. Blocks. :param providers: their tables in the configuration.

    :raise FailedPrecondition: there is none, or it is not whole."""
    table = providers.get("qemu")
    directory = table.get("image_dir", images.DEFAULT_DIR) if isinstance(table, dict) else images.DEFAULT_DIR
    image = images.current(Path(str(directory)))
    return {**attrs.asdict(image), "directory": str(image.directory)}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _pairs(path: str, separator: str) -> Mapping[str, str]:
    pairs = (line.partition(separator) for line in _text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
