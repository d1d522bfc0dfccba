# SPDX-License-Identifier: Apache-2.0
"""The node's own names, for pods that bring none: its host name, and the DNS of its resolv.conf."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from infranetes_common.wire import cri

#: Where the first file names only resolvers at the node's loopback, such as systemd-resolved's 127.0.0.53,
#: the second one names those that systemd-resolved asks itself.
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_HOST_NAME = re.compile(r"(?=.{1,64}\Z)[0-9A-Za-z](?:[0-9A-Za-z.-]*[0-9A-Za-z])?")
_WORD = re.compile("[!-~]{1,255}")  # what agents accept
MAX_BYTES = 64 * 1024
_MAX = {"nameserver": 3, "search": 32, "options": 32}  # as many servers as resolvers ask


def with_host_name(config: cri.PodSandboxConfig) -> cri.PodSandboxConfig:
    """`config` with the node's host name, for a pod on the node's network that names none."""
    shares = config.linux.security_context.namespace_options.network == cri.NODE
    name = socket.gethostname()
    if config.hostname or not shares or not _HOST_NAME.fullmatch(name):
        return config
    copy = cri.PodSandboxConfig()
    copy.CopyFrom(config)
    copy.hostname = name
    return copy


def node_dns(files: Sequence[Path] = RESOLV_CONF) -> cri.DNSConfig:
    """The DNS settings of the first file that has a server which VMs can reach; else none. Blocks."""
    for file in files:
        try:
            with open(file, "rb") as opened:
                found = parse_resolv_conf(opened.read(MAX_BYTES).decode("utf-8", "replace"))
        except OSError:
            continue
        if found.servers:
            return found
    return cri.DNSConfig()


def parse_resolv_conf(text: str) -> cri.DNSConfig:
    """The settings of a resolv.conf(5), without loopback and link-local servers, which a VM can't reach.

    The last of several `search` and `domain` lines counts."""
    servers: list[str] = []
    searches: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        words = [word for word in line.split() if _WORD.fullmatch(word)]
        if len(words) < 2 or words[0][0] in "#;":
            continue
        if words[0] == "nameserver" and _reachable(words[1]):
            servers.append(words[1])
        elif words[0] in ("search", "domain"):
            searches = words[1:]
        elif words[0] == "options":
            options += words[1:]
    return cri.DNSConfig(
        servers=servers[: _MAX["nameserver"]],
        searches=searches[: _MAX["search"]],
        options=options[: _MAX["options"]],
    )


def _reachable(server: str) -> bool:
    try:
        address = ip_address(server)
    except ValueError:
        return False
    link_local = address.version == 6 and address.is_link_local
    return not (address.is_loopback or address.is_unspecified or link_local)
