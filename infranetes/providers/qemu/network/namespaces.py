# SPDX-License-Identifier: Apache-2.0
"""VMs in network namespaces that another program made, such as a CNI: a VM takes the place of a link there.

Its tap is moved into the namespace, and every frame that the link receives is redirected to the tap, and the
reverse, by the kernel's traffic control: an ingress qdisc and one filter with the action mirred on each. The
VM has the link's hardware address, its addresses, routes and MTU, so that to the link's other end on the node
nothing differs from a pod of containers: what is counted, shaped or forbidden there holds for the VM. The
link keeps its addresses, for plug-ins that check them, and its network stack hears nothing more.

What was made here is gone with the tap or with the namespace.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import time
from collections.abc import Iterable, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import Neighbour, Network, Route, check_network
from infranetes_common.reactors import IReactor

_SECONDS = 15.0  # for each command
_TEST_SECONDS = 5.0
_QUEUED = 1000  # frames that wait for QEMU; the system's default qdisc (fq) may drop frames or hold them back
_KIND = "veth"
_RIGHTS = (
    "the daemon may not enter network namespaces: it needs CAP_SYS_ADMIN, which its unit does not give; give "
    "it by the drop-in systemd-cni.conf (docs/networking.md) and restart it"
)
_TABLE = "infranetes"
# What waits for the daemon, which reads a few frames a second.
_DHCP_QUEUED, _DHCP_MTU = 16, 1500
# Behind a header of IPv4, in words of u32: the ports of DHCP's requests, and of answers.
_REQUEST, _ANSWER = ("0x00000043", "0x0000ffff"), ("0x00430044", "0xffffffff")
_LENGTHS = range(5, 16)  # that IPv4's header may have, in words
# Of IPv6, behind its header: ICMPv6's solicitation of routers and their advertisement, DHCPv6's ports.
_REQUESTS6 = (
    "match u8 58 0xff at 6 match u8 133 0xff at 40",
    "match u8 17 0xff at 6 match u16 547 0xffff at 42",
)
_ANSWERS6 = (
    "match u8 58 0xff at 6 match u8 134 0xff at 40",
    "match u8 17 0xff at 6 match u16 546 0xffff at 42",
)
_SIXTH = 0x100  # the number of the first of their filters
_IPV6 = Path("/proc/sys/net/ipv6")  # does not exist if the kernel was started without IPv6


class Namespaces:
    """Reads the link whose place a VM takes, and connects the VM's tap. See the module."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor

    async def read(self, attachment: Attachment) -> Network:
        """Read the guest's network configuration: addresses, routes and MTU of the link whose place it takes.

        :raise FailedPrecondition: a VM can't take its place; the message says what to change.
        """
        link = attachment.interface
        show = f"address show dev {link}\nroute show table main\n"
        described = await self._ip(attachment, ["-d"], show + f"neighbour show dev {link} nud permanent\n")
        routes = await self._ip(attachment, ["-6"], "route show table main\n")
        try:
            [[card], fourth, neighbours], [sixth] = described, routes
            ways = [*_routes(fourth, link, "0.0.0.0/0"), *_routes(sixth, link, "::/0")]
            return _network(card, ways, neighbours)
        except _Unfit as error:
            raise FailedPrecondition(f"the pod's link {link} in {attachment.namespace} {error}") from None
        except (InvalidArgument, LookupError, TypeError, ValueError) as error:
            raise FailedPrecondition(
                f"the pod's link {link} in {attachment.namespace} can't be a VM's: {error!r}"[:500]
            ) from error

    async def join(self, attachment: Attachment, tap: str, mtu: int) -> None:
        """Move a tap into the namespace and exchange all frames between it and the link. Idempotent.

        :raise InfranetesError: not all is done; the namespace is as good as before once the tap is gone.
        """
        await self._move(attachment, tap)
        link = attachment.interface
        plain = " addrgenmode none" if _has_ipv6() else ""
        await self._batch(
            attachment,
            "ip",
            [f"link set dev {tap} mtu {mtu} txqueuelen {_QUEUED}{plain}", f"link set dev {tap} up"],
        )
        qdiscs = [f"qdisc replace dev {tap} root pfifo limit {_QUEUED}"]
        for device in (link, tap):
            if not await self._has_ingress(attachment, device):
                qdiscs.append(f"qdisc add dev {device} ingress")
        filters = [_redirection(link, tap), _redirection(tap, link)]
        await self._batch(attachment, "tc", [*qdiscs, *(f"filter replace {each}" for each in filters)])
        await self._verify(attachment, link, tap)

    async def divert_dhcp(self, attachment: Attachment | None, tap: str, to: str) -> None:
        """Hand what a VM asks of DHCP to another tap, and what is sent by that to the VM alone. Idempotent.

        In a CNI's network, that includes routers' advertisements and DHCPv6, and what others answer is kept
        from the VM.

        :param attachment: where the VM's tap is; None: in the node's own namespace. :param to: the other tap.
        :raise InfranetesError: it can't be done.
        """
        if attachment is not None:
            await self._move(attachment, to)
        plain = " addrgenmode none" if _has_ipv6() else ""
        set_up = f"link set dev {to} mtu {_DHCP_MTU} txqueuelen {_DHCP_QUEUED} arp off{plain}"
        await self._batch(attachment, "ip", [set_up, f"link set dev {to} up"])
        commands = [f"qdisc replace dev {to} root pfifo limit {_DHCP_QUEUED}"]
        for device in (to, tap):
            if not await self._has_ingress(attachment, device):
                commands.append(f"qdisc add dev {device} ingress")
        commands.append(f"filter replace {_redirection(to, tap)}")
        commands.append(f"filter replace {_of_udp(tap, _REQUEST, 5)} action mirred egress redirect dev {to}")
        if attachment is not None:
            link = attachment.interface
            commands += [f"filter replace {_of_udp(link, _ANSWER, words)} flowid 1:1" for words in _LENGTHS]
            for number, request in enumerate(_REQUESTS6, _SIXTH):
                hand_over = f"action mirred egress redirect dev {to}"
                commands.append(f"filter replace {_of_six(tap, number, request)} {hand_over}")
            for number, answer in enumerate(_ANSWERS6, _SIXTH):
                commands.append(f"filter replace {_of_six(link, number, answer)} flowid 1:1")
        await self._batch(attachment, "tc", commands)
        if attachment is not None:
            # These frames are not redirected, and end where the namespace's own network stack begins.
            hook = f'type filter hook ingress device "{attachment.interface}" priority 0; policy drop;'
            script = f"""table netdev {_TABLE} {{}}
            delete table netdev {_TABLE}
            table netdev {_TABLE} {{
                chain left-there {{
                    {hook}
                }}
            }}
            """
            await self._inside(attachment, ["nft", "-f", "-"], script.encode())

    async def self_test(self) -> None:
        """Send a frame from a tap to a link's other end and back, in a namespace of its own.

        :raise FailedPrecondition: this kernel does not pass it, or the daemon may not try.
        """
        name = f"infranetes-test-{secrets.token_hex(4)}"
        attachment = Attachment(Path("/run/netns") / name)
        made = await run(self._reactor, Command(["ip", "netns", "add", name], _SECONDS))
        if made.code != 0:
            raise FailedPrecondition(_RIGHTS if _no_right(made.message()) else made.message())
        try:
            await self._batch(
                attachment,
                "ip",
                ["link add eth0 type veth peer name other", "link set eth0 up", "link set other up"],
            )
            await self._batch(
                attachment,
                "tc",
                ["qdisc add dev other ingress", f"filter add {_redirection('other', 'other')}"],
            )
            await self._pass_a_frame(attachment)
        finally:
            await run(self._reactor, Command(["ip", "netns", "delete", name], _SECONDS))

    async def _pass_a_frame(self, attachment: Attachment) -> None:
        tap = f"inft{secrets.token_hex(4)}"
        descriptor = await run_in_thread(self._reactor, open_tap, tap)
        try:
            await self.join(attachment, tap, 1500)
            if not await run_in_thread(self._reactor, _thd_comes_back, descriptor):
                raise FailedPrecondition(
                    "this kernel does not hand redirected frames to a tap (tc's action mirred), which VMs "
                    'in a CNI\'s network need: use network = "bridge", or another kernel'
                )
        finally:
            # With it the tap goes, for which the kernel waits.
            await run_in_thread(self._reactor, os.close, descriptor)

    # ---- Steps

    async def _move(self, attachment: Attachment, tap: str) -> None:
        path = str(attachment.namespace)
        moved = await run(self._reactor, Command(["ip", "link", "set", "dev", tap, "netns", path], _SECONDS))
        if moved.code == 0:
            return
        words = moved.message()
        if "Cannot find device" in words:  # it may have been moved already
            await self._inside(attachment, ["ip", "link", "show", "dev", tap])
            return
        raise self._error(attachment, words)

    async def _has_ingress(self, attachment: Attachment | None, device: str) -> bool:
        """Return whether the device has a place for filters already, perhaps another program's (clsact)."""
        shown = json.loads(await self._inside(attachment, ["tc", "-j", "qdisc", "show", "dev", device]))
        return any(each.get("kind") in ("ingress", "clsact") for each in shown)

    async def _verify(self, attachment: Attachment, link: str, tap: str) -> None:
        for device, other in ((link, tap), (tap, link)):
            command = ["tc", "-j", "filter", "show", "dev", device, "ingress"]
            shown = json.loads(await self._inside(attachment, command))
            targets = [
                action.get("to_dev")
                for each in shown
                for action in each.get("options", {}).get("actions", ())
                if action.get("mirred_action") == "redirect"
            ]
            if targets[:1] != [other]:
                raise Unavailable(f"{device} in {attachment.namespace} does not hand its frames to {other}")

    # ---- Programs

    async def _ip(
        self, attachment: Attachment, options: Sequence[str], script: str
    ) -> list[Any]:  # Any: JSON
        output = await self._inside(attachment, ["ip", "-j", *options, "-batch", "-"], script.encode())
        return [json.loads(line) for line in output.decode().splitlines() if line.strip()]

    async def _batch(self, attachment: Attachment | None, program: str, commands: Iterable[str]) -> None:
        script = "".join(command + "\n" for command in commands)
        await self._inside(attachment, [program, "-batch", "-"], script.encode())

    async def _inside(
        self, attachment: Attachment | None, command: Sequence[str], script: bytes = b""
    ) -> bytes:
        """Run a program in the namespace. :raise InfranetesError: it failed, or the namespace is no more."""
        if attachment is None:
            return await check(self._reactor, Command(command, _SECONDS, script))
        whole = ["nsenter", f"--net={attachment.namespace}", "--", *command]
        done = await run(self._reactor, Command(whole, _SECONDS, script))
        if done.code != 0:
            raise self._error(attachment, done.message())
        return done.stdout

    def _error(self, attachment: Attachment, words: str) -> InfranetesError:
        if _no_right(words):
            return FailedPrecondition(_RIGHTS)
        if not attachment.namespace.exists():
            return Unavailable(
                f"the pod's network namespace {attachment.namespace} is not there; if it is for the node's "
                "runtime, the daemon does not see its mounts (MountFlags and PrivateMounts of the unit)"
            )
        return Unavailable(f"the VM can't join {attachment.namespace}: {words}")


class _Unfit(Exception):
    """A property of a link that a VM can't take over, in words that follow the link's name."""


def _has_ipv6() -> bool:
    return _IPV6.exists()


def _no_right(words: str) -> bool:
    return os.strerror(errno.EPERM) in words


def _redirection(device: str, to: str) -> str:
    """Return the filter that sends all frames that a device receives out by another one. Its handle makes
    adding it idempotent, and has it come after those of `_of_udp`."""
    return (
        f"dev {device} ingress pref 1 protocol all handle 800::800 "
        f"u32 match u8 0 0 action mirred egress redirect dev {to}"
    )


def _of_udp(device: str, ports: tuple[str, str], words: int) -> str:
    """Return the begin of the filter for datagrams with these ports that a device receives.

    :param words: the length of their header of IPv4."""
    first_fragment = f"match u8 {0x40 | words:#x} 0xff at 0 match u16 0 0x1fff at 6"
    udp = f"match u8 17 0xff at 9 match u32 {' '.join(ports)} at {4 * words}"
    return f"dev {device} ingress pref 1 protocol all handle 800::{words:x} u32 {first_fragment} {udp}"


def _of_six(device: str, number: int, match: str) -> str:
    """Return the begin of a filter for packets of IPv6 that a device receives."""
    place = f"dev {device} ingress pref 1 protocol all handle 800::{number:x}"
    return f"{place} u32 match u8 0x60 0xf0 at 0 {match}"


def _network(card: dict[str, Any], routes: list[Route], neighbours: list[dict[str, Any]]) -> Network:
    # Any: JSON of `ip`, whose words are checked one by one in `check_network`.
    kind = card.get("linkinfo", {}).get("info_kind", "")
    if kind != _KIND:
        raise _Unfit(
            f"is {'of the kind ' + kind if kind else 'a device of the node'}, and VMs take the place of veth "
            "links alone; have the CNI make those (Cilium: bpf.datapathMode=veth)"
        )
    found = [each for each in card["addr_info"] if each["scope"] == "global"]
    fourth = [f"{each['local']}/{each['prefixlen']}" for each in found if each["family"] == "inet"]
    sixth = [f"{each['local']}/{each['prefixlen']}" for each in found if each["family"] == "inet6"]
    if not fourth:
        raise _Unfit("has no IPv4 address, and VMs need one")
    network = Network(
        card["address"],
        fourth[0],
        "",
        card["mtu"],
        tuple(routes),
        (*fourth[1:], *sixth),
        tuple(Neighbour(each["dst"], each["lladdr"]) for each in neighbours if "lladdr" in each),
    )
    if not network.routes:
        raise _Unfit("has no routes")
    check_network(network)
    return network


def _routes(shown: list[dict[str, Any]], link: str, default: str) -> Iterable[Route]:  # Any: JSON
    seen = set()
    for each in shown:
        if link not in (each.get("dev"), *(hop.get("dev") for hop in each.get("nexthops", ()))):
            continue
        to = default if each["dst"] == "default" else each["dst"]
        subnet = ip_network(to)
        if subnet.version == 6 and (subnet.is_link_local or subnet.is_multicast):
            continue  # the guest's kernel makes these routes itself
        if "nexthops" in each or "via" in each or each.get("type", "unicast") != "unicast":
            raise _Unfit(f"has a route to {to} that a VM can't be told")
        if subnet in seen:
            continue  # the first of several routes has the best metric
        seen.add(subnet)
        yield Route(
            str(subnet),
            each.get("gateway", ""),
            each.get("prefsrc", ""),
            next((metric["mtu"] for metric in each.get("metrics", ()) if "mtu" in metric), 0),
            "onlink" in each.get("flags", ()),
        )


def _thd_comes_back(tap: int) -> bool:
    """Send a frame by a tap, and see whether it comes back. Blocks."""
    header, kind = bytes(10), b"\x88\xb5"  # IEEE's ethertype for experiments
    frame = b"\xff" * 6 + b"\x02" + secrets.token_bytes(5) + kind + secrets.token_bytes(46)
    deadline = time.monotonic() + _TEST_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        os.write(tap, header + frame)
        until = time.monotonic() + min(left, 0.25)
        while (left := until - time.monotonic()) > 0:
            if select.select([tap], [], [], left)[0] and os.read(tap, 4096)[len(header) :] == frame:
                return True
    return False
