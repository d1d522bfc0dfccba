# SPDX-License-Identifier: Apache-2.0
"""A VM's tap replaces a link in a network namespace, on this machine's kernel."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.network import namespaces
from infranetes.providers.qemu.network.bridge import open_tap
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.identity import Neighbour, Route
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.frames import ARP, BROADCAST, IPV4, IPV6, VLAN, arp, ethernet, tagged, udp
from tests.support.spaces import Space

reactor = installed()
ROOT = Path(__file__).resolve().parents[5]
MAC, GUEST = "0a:58:0a:04:00:01", "0a:58:0a:04:00:07"
_SECONDS = 30.0
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 1, 2
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ALL = 0x0003
_PLAIN = bytes(10)  # a frame's header without offloads


async def failed(work: Awaitable[object]) -> InfranetesError:
    """Return the error with which it fails."""
    try:
        await work
    except InfranetesError as error:
        return error
    raise AssertionError("it has not failed")


@needs_netns
class NamespaceCase(TestCase):
    """A pod's namespace with a link eth0, whose other end, host0, is in the node's namespace."""

    def setUp(self) -> None:
        self.namespaces = Namespaces(reactor)
        self.node, self.pod = Space("node"), Space("pod")
        self.addCleanup(self.node.end)
        self.addCleanup(self.pod.end)
        self.pod.ip(
            f"link add eth0 address {GUEST} type veth peer name host0 address {MAC} netns {self.node.name}",
            "link set eth0 up",
        )
        self.node.ip("link set host0 up")
        self.attachment = Attachment(Path("/run/netns") / self.pod.name)

    def tap(self) -> tuple[str, int]:
        name = f"inft{secrets.token_hex(4)}"
        descriptor = open_tap(name)
        self.addCleanup(_close, descriptor)
        return name, descriptor

    def packets(self) -> socket.socket:
        """Return a socket that receives everything that leaves host0."""

        def opened() -> socket.socket:
            found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
            found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            found.bind(("host0", _ALL))
            return found

        found = thd_in_namespace(self.node.name, opened)
        self.addCleanup(found.close)
        return found


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def arrivals(descriptor: int, frame: bytes, count: int = 1) -> int:
    """Read until a frame has arrived so often, then whatever else is there. Blocks."""
    seen, deadline = 0, time.monotonic() + _SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left if seen < count else 0.2)[0]:
            break
        if os.read(descriptor, 1 << 17)[len(_PLAIN) :] == frame:
            seen += 1
    return seen


class FrameTests(NamespaceCase):
    """Frames in both directions."""

    async def joined(self) -> int:
        name, tap = self.tap()
        await self.namespaces.join(self.attachment, name, 1500)
        return tap

    async def passes(self, tap: int, frame: bytes) -> None:
        """Check that a frame passes once in each direction."""
        host = self.packets()
        os.write(tap, _PLAIN + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, host.fileno(), frame), 1)
        host.send(_PLAIN + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, tap, frame), 1)

    async def test_of_every_kind_pass_once(self) -> None:
        tap = await self.joined()
        packet = udp("10.4.0.7", "10.4.0.1", b"hello")
        plain = ethernet(BROADCAST, GUEST, IPV4, packet)
        for frame in (
            plain,
            ethernet(MAC, GUEST, IPV6, bytes(60)),
            ethernet("33:33:00:00:00:01", GUEST, IPV6, bytes(60)),
            ethernet(MAC, "02:00:00:00:00:99", 0x88B5, bytes(60)),
        ):
            await self.passes(tap, frame)

    async def test_a_tag_is_kept(self) -> None:
        tap = await self.joined()
        host = self.packets()
        frame = tagged(ethernet(MAC, GUEST, IPV4, udp("10.4.0.7", "10.4.0.1", b"x")), (VLAN, 7))
        host.send(_PLAIN + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, tap, frame), 1)

    async def test_a_large_segment_passes_whole(self) -> None:
        tap = await self.joined()
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        host = self.packets()
        payload = os.urandom(60 << 10)
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 0, 0, 64, 6, 0,
                           bytes([10, 4, 0, 7]), bytes([10, 4, 0, 1]))  # fmt: skip
        segment = struct.pack("!HHIIBBHHH", 1000, 2000, 1, 1, 5 << 4, 0x10, 1000, 0, 0)
        frame = ethernet(MAC, GUEST, IPV4, head + segment + payload)
        # A virtio header: checksum from byte 34 on, at offset 16 of that; TCP over IPv4, segments of 1460.
        offload = struct.pack("=BBHHHH", 1, 1, 54, 1460, 34, 16)
        os.write(tap, offload + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, host.fileno(), frame), 1)
        host.send(offload + frame)
        self.assertEqual(await run_in_thread(reactor, arrivals, tap, frame), 1)

    async def test_a_second_time_changes_nothing(self) -> None:
        name, tap = self.tap()
        for _ in range(2):
            await self.namespaces.join(self.attachment, name, 1400)
        await self.passes(tap, ethernet(MAC, GUEST, IPV4, udp("10.4.0.7", "10.4.0.1", b"x")))
        shown = self.pod.said("ip", "link", "show", "dev", name)
        self.assertIn("mtu 1400 qdisc pfifo", shown)

    async def test_somebody_elses_place_for_filters_is_used(self) -> None:
        self.pod.said("tc", "qdisc", "add", "dev", "eth0", "clsact")
        await self.passes(await self.joined(), ethernet(MAC, GUEST, IPV4, udp("10.4.0.7", "10.4.0.1", b"x")))

    async def test_a_link_of_the_pod_that_has_the_taps_name_is_not_taken_for_it(self) -> None:
        name, _ = self.tap()
        self.pod.ip(f"link add {name} type veth peer name other")
        self.assertIsInstance(await failed(self.namespaces.join(self.attachment, name, 1400)), Unavailable)
        self.assertIn("mtu 1500", self.pod.said("ip", "link", "show", "dev", name))

    async def test_a_tap_that_ends_makes_place_for_another(self) -> None:
        name, first = self.tap()
        await self.namespaces.join(self.attachment, name, 1500)
        os.close(first)
        self.assertNotIn(name, self.pod.said("ip", "link"))
        await self.passes(await self.joined(), ethernet(MAC, GUEST, IPV4, udp("10.4.0.7", "10.4.0.1", b"x")))

    async def test_the_pods_own_network_stack_hears_nothing(self) -> None:
        self.pod.ip("address add 10.4.0.7/24 dev eth0")
        host = self.packets()
        question = ethernet(BROADCAST, MAC, ARP, arp(1, (MAC, "10.4.0.1"), ("00:00:00:00:00:00", "10.4.0.7")))
        host.send(_PLAIN + question)
        answer = arp(2, (GUEST, "10.4.0.7"), (MAC, "10.4.0.1"))
        answers = partial(arrivals, host.fileno(), ethernet(MAC, GUEST, ARP, answer)[: 14 + len(answer)])
        self.assertEqual(await run_in_thread(reactor, answers), 1)
        tap = await self.joined()
        host.send(_PLAIN + question)
        self.assertEqual(await run_in_thread(reactor, arrivals, tap, question), 1)
        self.assertEqual(await run_in_thread(reactor, answers, 0), 0)

    async def test_the_tap_of_the_self_test_ends_in_a_thread(self) -> None:
        """For which the kernel takes its time."""
        descriptors: list[int] = []
        threads: list[int] = []
        close = os.close

        def opened(name: str) -> int:
            descriptors.append(open_tap(name))
            return descriptors[-1]

        def closed(descriptor: int) -> None:
            if descriptor in descriptors:
                descriptors.remove(descriptor)  # others get its number
                threads.append(threading.get_ident())
            close(descriptor)

        self.patch(namespaces, "open_tap", opened)
        self.patch(os, "close", closed)
        await self.namespaces.self_test()
        self.assertEqual(len(threads), 1)
        self.assertNotIn(threading.get_ident(), threads)

    async def test_the_kernel_passes_the_test_of_the_start(self) -> None:
        word = secrets.token_hex(4)
        self.patch(secrets, "token_hex", lambda count: word)
        await self.namespaces.self_test()
        self.assertFalse(Path(f"/run/netns/infranetes-test-{word}").exists())

    async def test_a_kernel_that_drops_what_is_redirected_is_refused(self) -> None:
        self.patch(namespaces, "_thd_comes_back", lambda tap: False)
        error = await failed(self.namespaces.self_test())
        self.assertIsInstance(error, FailedPrecondition)
        self.assertIn("does not hand redirected frames to a tap", str(error))


class ReadTests(NamespaceCase):
    """The network configuration that the guest gets."""

    async def test_what_the_link_has(self) -> None:
        self.pod.ip(
            "address add 10.4.0.7/24 dev eth0",
            "address add 10.4.0.8/32 dev eth0",
            "address add fd00:4::7/64 dev eth0 nodad",
            "link set eth0 mtu 1450",
            "route add default via 10.4.0.1 dev eth0 mtu 1400",
            "-6 route add default via fd00:4::1 dev eth0",
            "link add other type bridge",
            "link set other up",
            "address add 10.9.0.1/24 dev other",
        )
        network = await self.namespaces.read(self.attachment)
        self.assertEqual((network.mac, network.mtu, network.gateway), (GUEST, 1450, ""))
        self.assertEqual((network.address, network.more), ("10.4.0.7/24", ("10.4.0.8/32", "fd00:4::7/64")))
        self.assertCountEqual(
            network.routes,
            [
                Route("0.0.0.0/0", "10.4.0.1", mtu=1400),
                Route("10.4.0.0/24", source="10.4.0.7"),
                Route("fd00:4::/64"),
                Route("::/0", "fd00:4::1"),
            ],
        )

    async def test_calicos_and_awss(self) -> None:
        self.pod.ip(
            "address add 10.4.0.7/32 dev eth0",
            "route add 169.254.1.1 dev eth0 scope link",
            "route add default via 169.254.1.1 dev eth0",
            "neigh add 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent",
            "neigh add 10.9.9.9 lladdr ee:ee:ee:ee:ee:e0 dev eth0 nud reachable",
        )
        network = await self.namespaces.read(self.attachment)
        self.assertEqual(network.routes, (Route("0.0.0.0/0", "169.254.1.1"), Route("169.254.1.1/32")))
        self.assertEqual(network.neighbours, (Neighbour("169.254.1.1", "ee:ee:ee:ee:ee:ee"),))

    async def test_a_router_that_no_route_leads_to(self) -> None:
        self.pod.ip("address add 10.4.0.7/32 dev eth0", "route add default via 10.9.9.9 dev eth0 onlink")
        network = await self.namespaces.read(self.attachment)
        self.assertEqual(network.routes, (Route("0.0.0.0/0", "10.9.9.9", onlink=True),))

    async def refused(self, attachment: Attachment) -> InfranetesError:
        return await failed(self.namespaces.read(attachment))

    async def test_links_that_are_no_veth_are_refused_in_words(self) -> None:
        self.pod.ip(
            "link add one link eth0 type macvlan",
            "link set one up",
            "address add 10.4.1.7/24 dev one",
        )
        error = await self.refused(Attachment(self.attachment.namespace, "one"))
        self.assertIsInstance(error, FailedPrecondition)
        self.assertIn("the pod's link one in", str(error))
        self.assertIn("is of the kind macvlan, and VMs take the place of veth links alone", str(error))

    def test_netkits_are_refused_though_they_look_like_veths(self) -> None:
        card = {"linkinfo": {"info_kind": "netkit"}, "link_type": "ether", "address": "00:00:00:00:00:00"}
        with self.assertRaises(namespaces._Unfit) as caught:
            namespaces._network(card, [], [])
        self.assertIn("bpf.datapathMode=veth", str(caught.exception))

    async def test_a_pod_without_an_address_is_refused(self) -> None:
        self.assertIn("has no IPv4 address", str(await self.refused(self.attachment)))
        self.pod.ip("address add 10.4.0.7/32 dev eth0")
        self.assertIn("has no routes", str(await self.refused(self.attachment)))

    async def test_routes_that_can_not_be_told_are_refused(self) -> None:
        self.pod.ip(
            "address add 10.4.0.7/24 dev eth0",
            "route add default nexthop via 10.4.0.1 dev eth0 nexthop via 10.4.0.2 dev eth0",
        )
        self.assertIn(
            "has a route to 0.0.0.0/0 that a VM can't be told", str(await self.refused(self.attachment))
        )

    async def test_a_namespace_that_is_gone_is_told(self) -> None:
        gone = Attachment(Path("/run/netns/infranetes-nowhere"))
        error = await self.refused(gone)
        self.assertIsInstance(error, Unavailable)
        self.assertIn("/run/netns/infranetes-nowhere is not there", str(error))
        name, _ = self.tap()
        self.assertIsInstance(await failed(self.namespaces.join(gone, name, 1500)), Unavailable)

    def test_a_daemon_without_the_right_says_what_to_install(self) -> None:
        script = (
            "import sys\n"
            "from pathlib import Path\n"
            "from twisted.internet import reactor\n"
            "from twisted.internet.defer import Deferred\n"
            "from infranetes.providers.interface import Attachment\n"
            "from infranetes.providers.qemu.network.namespaces import Namespaces\n"
            "async def main():\n"
            "    for work in (lambda: Namespaces(reactor).read(Attachment(Path(sys.argv[1]))),\n"
            "                 Namespaces(reactor).self_test):\n"
            "        try:\n"
            "            await work()\n"
            "        except Exception as error:\n"
            "            print(type(error).__name__, error)\n"
            "    reactor.stop()\n"
            "reactor.callWhenRunning(lambda: Deferred.fromCoroutine(main()))\n"
            "reactor.run()\n"
        )
        done = subprocess.run(
            ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", script,
             str(self.attachment.namespace)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        words = "FailedPrecondition the daemon may not enter network namespaces: it needs CAP_SYS_ADMIN"
        self.assertEqual([line[: len(words)] for line in done.stdout.splitlines()], [words] * 2, done.stderr)
