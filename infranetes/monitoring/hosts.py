# SPDX-License-Identifier: Apache-2.0
"""The names by which the server may be asked for.

A web page can have a browser send requests to any address, by a name of its own that it points there (DNS
rebinding), and read the answers as its own. Such a request has that name in its Host header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
MAX_SHOWN = 80


class Hosts:
    """Names that requests may have: these, localhost, and all IP addresses, which nobody can point elsewhere.

    :param names: host names; one of the form ``*.example.com`` stands for all with one more label."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    def refusal(self, headers: Sequence[bytes], required: bool) -> str:
        """Return why a request is refused, or "".

        :param headers: the values of its Host headers. :param required: whether there must be one."""
        if len(headers) != 1:
            return "the request needs one Host header" if headers or required else ""
        text = headers[0].decode("latin-1")
        if (match := _HOST.fullmatch(text)) is None:
            return f"the Host header {text[:MAX_SHOWN]!a} is neither a host nor host:port"
        host = match[1].lower().rstrip(".")
        if host in self._names or f"*.{host.partition('.')[2]}" in self._names or _is_address(host):
            return ""
        return f"{host[:MAX_SHOWN]} is no name of this node: ask by its address, or add it to metrics.hosts"


def _is_address(host: str) -> bool:
    try:
        ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
