# SPDX-License-Identifier: Apache-2.0
"""The pod's settings of the machine: host name, /etc/hosts, resolv.conf, sysctls.

All of them are checked before the first is applied. Applying is idempotent.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.user_namespaces import user_namespace
from infranetes_common.wire import cri
from vmserver.identity.apply import IdentityApplier, write_if_changed

HOSTS = "hosts"
SEEN_BY_CONTAINERS = (HOSTS, "hostname", "resolv.conf")  # in place of what their images have in /etc
RESOLV_CONF = "resolv.conf"

_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
_WORD = re.compile(r"[!-~]{1,255}")  # one word of printable ASCII
_MAX_WORDS = 32
_MAX_SYSCTLS = 256
_MAX_VALUE = 1024
_SYSCTL = re.compile(r"[a-z0-9_][a-zA-Z0-9_-]*(?:[./][a-zA-Z0-9_-]+)+")
# The sysctls that belong to a pod, not to a node, according to the OCI runtimes.
_POD_SYSCTLS = re.compile(
    r"net\..+|kernel\.(?:shm(?:max|all|mni|_rmid_forced)|msg(?:max|mnb|mni)|sem)|fs\.mqueue\..+"
)


# The VM's network is its pod's alone. So allow every user what containerd and Docker allow in a container's
# network; root of a user namespace, which has no privileges over it, needs that most.
_FOR_CONTAINERS = {
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 2147483647",
}


class PodSettings:
    """Applies a PodSandboxConfig to the machine.

    :param etc: the directory of hosts and resolv.conf. :param check_only: change nothing.
    """

    def __init__(
        self,
        applier: IdentityApplier,
        etc: Path,
        *,
        check_only: bool = False,
        proc_sys: Path = Path("/proc/sys"),
    ) -> None:
        self._applier = applier
        self._etc = etc
        self._check_only = check_only
        self._proc_sys = proc_sys

    def apply(
        self, config: cri.PodSandboxConfig, node_dns: cri.DNSConfig | None = None, *, containers: bool = True
    ) -> None:
        """Check `config` and apply it. Synchronous; takes some milliseconds.

        :param node_dns: used where neither `config` nor the machine's own resolv.conf names a DNS server.
        :param containers: whether the pod is containers, and not the machine with users of its own.
        :raise InvalidArgument: a field is malformed or not offered; names it.
        :raise FailedPrecondition: the machine refuses; says what.
        """
        hostname = check_hostname(config.hostname)
        resolv = resolv_conf(config.dns_config)
        if resolv is None and node_dns is not None and not self._has_dns():
            resolv = resolv_conf(node_dns)
        user_namespace(config.linux.security_context.namespace_options, "config")
        sysctls = [(self._sysctl_file(name), check_value(name, value)) for name, value in _sysctls(config)]
        if self._check_only:
            return
        try:
            if hostname:
                self._applier.set_hostname(hostname)
            write_if_changed(self._etc / HOSTS, hosts(hostname, _own_address()), 0o644)
            if resolv is not None:
                write_if_changed(self._etc / RESOLV_CONF, resolv, 0o644)
        except OSError as error:
            raise FailedPrecondition(f"the sandbox's names can't be set: {error}") from error
        if containers:
            for name, value in _FOR_CONTAINERS.items():
                with suppress(OSError):  # a kernel that has no such limit
                    self._sysctl_file(name).write_text(value + "\n")
        for file, value in sysctls:
            try:
                file.write_text(value + "\n")
            except OSError as error:
                name = str(file.relative_to(self._proc_sys))
                raise InvalidArgument(f"linux.sysctls: {name} = {value!r}: {error.strerror}") from error

    def _has_dns(self) -> bool:
        """Return whether the machine's resolv.conf names a DNS server."""
        try:
            lines = (self._etc / RESOLV_CONF).read_text(errors="replace").splitlines()
        except OSError:
            return False
        return any(line.split()[:1] == ["nameserver"] for line in lines)

    def _sysctl_file(self, name: str) -> Path:
        """Return a sysctl's file. The first of . and / in a name is its separator (sysctl(8))."""
        if len(name) > 255 or not _SYSCTL.fullmatch(name):
            raise InvalidArgument(f"linux.sysctls: {name[:255]!r} is no name of a sysctl")
        first = min((name.index(mark) for mark in "./" if mark in name), default=0)
        parts = (
            name.split("/") if name[first] == "/" else [part.replace("/", ".") for part in name.split(".")]
        )
        if not _POD_SYSCTLS.fullmatch(".".join(parts)):
            raise InvalidArgument(
                f"linux.sysctls: {name} is not a pod's to set; these are: net.*, kernel.shm*, kernel.msg*, "
                "kernel.sem, fs.mqueue.*"
            )
        return self._proc_sys.joinpath(*parts)


def _sysctls(config: cri.PodSandboxConfig) -> list[tuple[str, str]]:
    if len(config.linux.sysctls) > _MAX_SYSCTLS:
        raise InvalidArgument(f"linux.sysctls: more than {_MAX_SYSCTLS}")
    # One that was copied from sysctl(8) has tabs in it, one that is a block of YAML has the end of a line.
    return sorted(
        (name, value.rstrip("\n").replace("\t", " ")) for name, value in config.linux.sysctls.items()
    )


def _dotted(name: str) -> str:
    """Return a sysctl's name with dots between its parts, if none of these has one."""
    return name.replace("/", ".")


def ipc_sysctls(config: cri.PodSandboxConfig) -> dict[str, str]:
    """Return the sysctls that belong to an IPC namespace, by their dotted names.

    A container that has an IPC namespace of its own does not see the machine's.
    """
    found = {_dotted(name): value for name, value in _sysctls(config)}
    return {name: value for name, value in found.items() if not name.startswith("net.")}


def check_value(name: str, value: str) -> str:
    """Check a sysctl's value. :raise InvalidArgument: not one short line."""
    if len(value) > _MAX_VALUE or not value.isprintable():
        raise InvalidArgument(f"linux.sysctls: the value of {name} is not one line of at most {_MAX_VALUE}")
    return value


def check_hostname(hostname: str) -> str:
    """Check a host name, which may be "". :raise InvalidArgument: not one."""
    if hostname and not _HOSTNAME.fullmatch(hostname):
        raise InvalidArgument(f"hostname {hostname[:80]!r}: expected up to 64 letters, digits, . and -")
    return hostname


def hosts(hostname: str, address: str) -> str:
    """Return the text of /etc/hosts."""
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"]
    lines += ["fe00::0\tip6-localnet", "ff02::1\tip6-allnodes", "ff02::2\tip6-allrouters"]
    if hostname:
        short = hostname.partition(".")[0]
        lines.append(f"{address}\t{hostname}" + (f" {short}" if short != hostname else ""))
    return "\n".join(lines) + "\n"


def resolv_conf(dns: cri.DNSConfig) -> str | None:
    """Return the text of resolv.conf; None where `dns` is empty and the machine's own stays.

    :raise InvalidArgument: a server is not an address, or a name or option is not one word.
    """
    for field in ("servers", "searches", "options"):
        if len(getattr(dns, field)) > _MAX_WORDS:
            raise InvalidArgument(f"dns_config.{field}: more than {_MAX_WORDS}")
    for field, words in (("searches", dns.searches), ("options", dns.options)):
        for word in words:
            if not _WORD.fullmatch(word):
                raise InvalidArgument(f"dns_config.{field}: {word[:80]!r} is not one word")
    for server in dns.servers:
        try:
            if not _WORD.fullmatch(server):  # an IPv6 address may end with a zone of any characters
                raise ValueError
            ipaddress.ip_address(server)
        except ValueError:
            raise InvalidArgument(f"dns_config.servers: {server[:80]!r} is no IP address") from None
    lines = [f"nameserver {server}" for server in dns.servers]
    if dns.searches:
        lines.append("search " + " ".join(dns.searches))
    if dns.options:
        lines.append("options " + " ".join(dns.options))
    return "\n".join(lines) + "\n" if lines else None


def _own_address() -> str:
    """Return the address that the machine is reached at. Nothing is sent to find it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.1.1"
