# SPDX-License-Identifier: Apache-2.0
"""Containers for tests of conmon and crun: a crun that works on this machine, root file systems, bundles."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.oci import BUSYBOX
from vmserver.containers.oci.cgroup import ROOT, is_v2

CGROUPS = f"infranetes-tests-{secrets.token_hex(4)}"  # process ids are not unique among workers
"""The cgroup below which this process's tests have their cgroups."""

_HYBRID = """#!/bin/sh
exec unshare --mount --propagation slave sh -c 'umount {unified}; exec {crun} "$@"' crun "$@"
"""


def crun_for_here(directory: Path) -> str:
    """Return a program that runs crun, even on a machine with cgroups of both versions, which crun refuses.

    There it is a wrapper that shows crun only those of version 1."""
    path = shutil.which("crun")
    assert path is not None, "install crun"
    unified = ROOT / "unified"
    if is_v2() or not unified.exists():
        return path
    wrapper = directory / "crun"
    wrapper.write_text(_HYBRID.format(unified=unified, crun=path))
    wrapper.chmod(0o755)
    return str(wrapper)


def make_rootfs(rootfs: Path) -> None:
    """Make a root file system with busybox and its applets."""
    for name in ("bin", "dev", "proc", "root", "sys", "tmp"):
        (rootfs / name).mkdir(parents=True)
    shutil.copy2(BUSYBOX, rootfs / "bin" / "busybox")
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    for applet in listed.stdout.split():
        if applet != "busybox":
            (rootfs / "bin" / applet).symlink_to("busybox")


def configuration(
    id: str, rootfs: Path, args: Sequence[str], *, terminal: bool = False, memory: int = 0, score: int = 500
) -> dict[str, Any]:
    """Return the smallest OCI configuration with which a shell runs."""
    linux: dict[str, Any] = {
        "cgroupsPath": f"/{CGROUPS}/{id}",
        "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc")],
    }
    if memory:
        linux["resources"] = {"memory": {"limit": memory, "swap": memory}}
    return {
        "ociVersion": "1.0.0",
        "process": {**process(args, terminal=terminal), "oomScoreAdj": score},
        "root": {"path": str(rootfs)},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
        ],
        "linux": linux,
    }


def process(
    args: Sequence[str], *, terminal: bool = False, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the `process` of a configuration: the command and how it is executed."""
    return {
        "terminal": terminal,
        "user": {"uid": 0, "gid": 0},
        "args": list(args),
        "env": ["PATH=/bin", *(f"{name}={value}" for name, value in (env or {}).items())],
        "cwd": "/",
    }


def write_bundle(bundle: Path, document: Mapping[str, Any]) -> None:
    """Make a bundle's directory, if need be, with this configuration."""
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(document))


def remove_cgroups() -> None:
    """Remove the empty cgroups that tests leave."""
    for top in [ROOT, *ROOT.iterdir()]:
        if (top / CGROUPS).is_dir():
            subprocess.run(["find", str(top / CGROUPS), "-depth", "-type", "d", "-delete"], check=False)
