# SPDX-License-Identifier: Apache-2.0
"""The node's host name and DNS settings, for pods that have none of their own."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from infranetes_common.wire import cri

#: The first file may name only a resolver at the node's loopback, such as systemd-resolved's 127.0.0.53. The
#: second one then names the servers that systemd-resolved asks.
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
_HOST_NAME = re.compile(r"(?=.{1,64}\Z)[0-9A-Za-z](?:[0-9A-Za-z.-]*[0-9A-Za-z])?")
_WORD = re.compile("[!-~]{1,255}")  # the words that agents accept
MAX_BYTES = 64 * 1024
_MAX = {"nameserver": 3, "search": 32, "options": 32}  # resolvers ask no more than three servers


def with_host_name(config: cri.PodSandboxConfig) -> cri.PodSandboxConfig:
    """Return `config`, with the node's host name if the pod is on the node's network and names none."""
    shares = config.linux.security_context.namespace_options.network == cri.NODE
    name = socket.gethostname()
    if config.hostname or not shares or not _HOST_NAME.fullmatch(name):
        return config
    copy = cri.PodSandboxConfig()
    copy.CopyFrom(config)
    copy.hostname = name
    return copy


def node_dns(files: Sequence[Path] = RESOLV_CONF) -> cri.DNSConfig:
    """Return the DNS settings of the first file with a server that VMs can reach, or empty ones. Blocks."""
    for file in files:
        try:
            with open(file, "rb") as opened:
                dns = parse_resolv_conf(opened.read(MAX_BYTES).decode("utf-8", "replace"))
        except OSError:
            continue
        if dns.servers:
            return dns
    return cri.DNSConfig()


def parse_resolv_conf(text: str) -> cri.DNSConfig:
    """Return the settings of a resolv.conf(5), without loopback and link-local servers: VMs can't reach them.

    The last of several `search` and `domain` lines counts."""
    servers: list[str] = []
    searches: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        words = [word for word in line.split() if _WORD.fullmatch(word)]
        if len(words) < 2:
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
