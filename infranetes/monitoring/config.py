# SPDX-License-Identifier: Apache-2.0
"""The daemon's configuration of its metrics, the table ``[metrics]``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import attrs
from attrs import Attribute

from infranetes_common import config_outside as outside
from infranetes_common.addresses import parse_address

_AUDIENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,252}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9._-]{1,253}")


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``127.0.0.1:9475`` or ``[::1]:9475``. :raise ValueError: it is neither."""
    host, _, port = text.rpartition(":")
    address = parse_address(host.removeprefix("[").removesuffix("]"))
    if not port.isdecimal() or not int(port) < 65536 or host.startswith("[") != (address.version == 6):
        raise ValueError(text)
    return str(address), int(port)


def _is_address(instance: object, attribute: Attribute[str], value: str) -> None:
    try:
        if value:
            split_address(value)
    except ValueError:
        raise ValueError(f"{value[:80]!r} is no address such as 127.0.0.1:9475 or [::1]:9475") from None


def _is_path(instance: object, attribute: Attribute[str], value: str) -> None:
    if value and not os.path.isabs(value):
        raise ValueError(f"{value[:80]!r} is not an absolute path")


def _are_hosts(instance: object, attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for each in value:
        if not _HOST.fullmatch(each):
            raise ValueError(f"{each[:80]!r} is no host name such as node1.example.com or *.example.com")


def _is_audience(instance: object, attribute: Attribute[str], value: str) -> None:
    if value and not _AUDIENCE.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is no audience of tokens such as infranetes")


@attrs.frozen
class MetricsConfig:
    """Where the daemon's metrics are served, and to whom. Without `listen` they are not."""

    listen: str = attrs.field(default="", validator=_is_address)  # an address with a port; port 0: any
    page: bool = False  # true: a page for people too, at the same address
    screens: bool = False  # true: pages with screen and keyboard of VMs, for those who send the token
    # PEM files: the server's certificate followed by the intermediate ones, and its key. Empty: no TLS.
    certificate_file: str = attrs.field(default="", validator=_is_path)
    key_file: str = attrs.field(default="", validator=_is_path)
    token_file: str = attrs.field(default="", validator=_is_path)  # clients have to send the token in it
    # Not empty: `kubectl infranetes` is answered here, for tokens of this audience.
    kubectl_audience: str = attrs.field(default="", validator=_is_audience)
    # The names by which clients may ask, besides addresses, localhost, the node's and the certificate's.
    hosts: tuple[str, ...] = attrs.field(default=(), validator=_are_hosts)

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look at the address and the files."""
        from infranetes.monitoring.access import thd_read_tls, thd_read_token  # late: with it comes OpenSSL

        if self.listen:
            yield from (attrs.evolve(said, key="listen") for said in outside.listening(*self.address))
        if self.token_file:
            for said in outside.tried(lambda: thd_read_token(self.token_file), "metrics.token_file"):
                yield attrs.evolve(said, key="token_file")
        if self.certificate_file and self.key_file:
            for said in outside.tried(lambda: thd_read_tls(self.certificate_file, self.key_file)):
                keys, _, words = said.words.partition(": ")  # of one of the files, or of both
                key = keys.rpartition("metrics.")[2] if "," not in keys else "certificate_file"
                yield attrs.evolve(said, key=key, words=words)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`, which must not be empty."""
        return split_address(self.listen)


def metrics_faults(metrics: MetricsConfig) -> list[str]:
    """Return what is wrong with the table as a whole."""
    faults = []
    if bool(metrics.certificate_file) != bool(metrics.key_file):
        faults.append("metrics.certificate_file: it and metrics.key_file have to be given together")
    wants = metrics.page or metrics.screens or metrics.certificate_file or metrics.token_file
    wants = wants or metrics.kubectl_audience
    if not metrics.listen and wants:
        faults.append("metrics.listen: it is missing; give the address at which this is served")
    elif metrics.page and not metrics.token_file and not ip_address(metrics.address[0]).is_loopback:
        faults.append(
            "metrics.page: the page shows the names of pods and the errors; at an address that is not the "
            "node's own, such as 127.0.0.1:9475, it needs metrics.token_file"
        )
    if metrics.listen and metrics.screens and not metrics.token_file:
        faults.append(
            "metrics.screens: who sees a VM's screen has its keyboard, so that it needs metrics.token_file"
        )
    if metrics.listen and metrics.kubectl_audience and not metrics.certificate_file:
        faults.append(
            "metrics.kubectl_audience: users' tokens are sent to this address, so that it needs "
            "metrics.certificate_file and metrics.key_file"
        )
    return faults
