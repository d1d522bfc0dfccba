# SPDX-License-Identifier: Apache-2.0
"""All of a booted node that an installation may change: files, units, tables, links, routes, processes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tests.e2e import cleanroot
from tests.e2e.booted import Booted

_CHANGING = (*cleanroot.FLEETING, "var/lib/systemd")
# Others are told by their sizes.
_READ = ("etc", "usr/lib/systemd", "var/lib/kubelet/config.yaml", "var/lib/kubelet/kubeadm-flags.env")
_COUNTED = re.compile(r"(packets|bytes) \d+")
_LISTED: Mapping[str, str] = {
    "unit file": "systemctl list-unit-files --no-legend --no-pager",
    "service": "systemctl list-units --all --no-legend --no-pager --plain --type=service",
    "link": "ip -o link | cut -d ' ' -f 2",
    "route": "ip route show table all | grep -v fe80::",  # the kernel has those for each link, a moment later
    "rule": "ip rule",
    "mount": "cut -d ' ' -f 2,3 /proc/self/mounts",
    "process": "cat /proc/[0-9]*/comm 2>/dev/null",
    "in /run": "ls -A /run",
    "setting": "grep -r . /proc/sys/net/ipv4/conf /proc/sys/net/ipv4/ip_forward",
}


def of(system: Booted, root: Path, but: Collection[str] = ()) -> set[str]:
    """Return what a node is, each thing in words of its own.

    :param root: its files. :param but: files and directories that change anyway.
    """
    found = set(_files(root, (*_CHANGING, *but)))
    for what, script in _LISTED.items():
        said = system.run("sh", "-c", script).stdout
        found |= {f"{what}: {' '.join(line.split())}" for line in said.splitlines()}
    return found


def tables(said: str) -> set[str]:
    """Return the lines of `nft list ruleset`, each with its table and without what the kernel has counted."""
    found, table = set(), ""
    for line in said.splitlines():
        if line.startswith("table "):
            table = line
        found.add(f"{table} {_COUNTED.sub('', line).strip()}")
    return found


def _files(root: Path, but: Collection[str]) -> Iterator[str]:
    for directory, directories, names in os.walk(root):
        inside = Path(directory).relative_to(root)
        directories[:] = [each for each in directories if str(inside / each) not in but]
        for name in (*directories, *(each for each in names if str(inside / each) not in but)):
            path, relative = Path(directory) / name, str(inside / name)
            status = path.lstat()
            words = f"file: /{relative} {status.st_mode:o} {status.st_uid}:{status.st_gid}"
            if path.is_symlink():
                words += f" leads to {os.readlink(path)}"
            elif path.is_file():
                words += f" of {status.st_size} bytes"
                if relative.startswith(_READ):
                    words += f", {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
            yield words
