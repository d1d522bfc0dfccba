"""The tools that tests run. One that is missing fails its test; it is not skipped."""

from __future__ import annotations

import shutil

# What has another name than its Debian package.
PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "go": "golang-go",
    "ip": "iproute2",
    "journalctl": "systemd",
    "nft": "nftables",
    "protoc": "protobuf-compiler",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "dpkg-buildpackage": "dpkg-dev",
    "ps": "procps",
}


def need(command: str) -> str:
    """The path of `command`.

    :raise AssertionError: it is not there; says what to install."""
    path = shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")
    if path is None:
        raise AssertionError(f"{command} is missing: apt-get install {PACKAGES.get(command, command)}")
    return path
