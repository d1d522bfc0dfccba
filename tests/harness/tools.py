# SPDX-License-Identifier: Apache-2.0
"""The programs that tests run. If one is missing, the test that needs it fails and is not skipped."""

from __future__ import annotations

import shutil

# The Debian package of each program, where its name differs from the program's.
PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io (Debian 13: docker-cli)",
    "go": "golang-go",
    "ip": "iproute2",
    "journalctl": "systemd",
    "nbdfuse": "libnbd-bin",
    "nft": "nftables",
    "protoc": "protobuf-compiler",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "dpkg-buildpackage": "dpkg-dev",
    "ps": "procps",
}


def need(command: str) -> str:
    """Find the path of a program.

    :raise AssertionError: it is missing; the message names what to install.
    """
    path = shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")
    if path is None:
        raise AssertionError(f"{command} is missing: apt-get install {PACKAGES.get(command, command)}")
    return path
