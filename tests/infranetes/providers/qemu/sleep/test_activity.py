# SPDX-License-Identifier: Apache-2.0
"""What a VM does: the processor time of its process, and what it sends."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import Attachment
from infranetes.providers.qemu.sleep import activity
from infranetes.providers.qemu.sleep.activity import thd_activity
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes_common.errors import Unavailable
from tests.harness.needs import needs_netns, needs_programs

RECORD = VmRecord("0" * 32, "sandbox", "cluster", "node", "10.0.0.2", 1.0, phase=Phase.READY)


class ActivityTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.networks = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.networks)
        self.patch(activity, "_NETWORKS", self.networks)
        self.statistics = self.networks / RECORD.tap / "statistics"
        self.statistics.mkdir(parents=True)
        (self.statistics / "rx_packets").write_text("5\n")
        (self.statistics / "tx_packets").write_text("7\n")

    def test_packets_are_those_that_the_node_receives_from_it(self) -> None:
        self.assertEqual(thd_activity(RECORD, os.getpid()).packets, 5)

    def test_the_time_is_that_of_the_program_and_of_the_kernel_for_it(self) -> None:
        before = os.times()
        while os.times().user - before.user < 0.05:
            pass
        while os.times().system - before.system < 0.05:
            os.stat("/")
        own, seen = os.times(), thd_activity(RECORD, os.getpid())
        self.assertAlmostEqual(seen.cpu_nanos / 1e9, own.user + own.system, delta=0.045)

    def test_without_its_process_or_its_tap_it_is_not_known(self) -> None:
        shutil.rmtree(self.networks / RECORD.tap)
        self.assertRaises(Unavailable, thd_activity, RECORD, os.getpid())
        self.setUp()
        child = subprocess.Popen(["true"])
        child.wait()
        self.assertRaises(Unavailable, thd_activity, RECORD, child.pid)


@needs_netns
@needs_programs("ip", "nsenter", "unshare")
class NamespaceTests(SynchronousTestCase):
    """A VM whose tap is in a namespace of its own."""

    def test_packets_are_those_of_the_tap_there(self) -> None:
        script = (
            f"ip link add {RECORD.tap} type veth peer name other && ip link set {RECORD.tap} up && "
            "ip link set other up && ip link set other arp off && ip address add 10.9.0.1/24 dev other && "
            "echo ready && exec cat"
        )
        inside = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.addCleanup(inside.wait)
        assert inside.stdin is not None and inside.stdout is not None
        self.addCleanup(inside.stdout.close)
        self.addCleanup(inside.stdin.close)
        self.assertEqual(inside.stdout.readline(), b"ready\n")
        namespace = Path(f"/proc/{inside.pid}/ns/net")
        record = attrs.evolve(RECORD, attachment=Attachment(namespace))
        before = thd_activity(record, inside.pid).packets
        send = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(1, 6, 1); "
        send += "[s.sendto(b'x', ('10.9.0.255', 9)) for _ in range(50)]"
        subprocess.run(["nsenter", f"--net={namespace}", "python3", "-c", send], check=True)
        deadline = time.monotonic() + 10
        while thd_activity(record, inside.pid).packets < before + 50 and time.monotonic() < deadline:
            pass
        self.assertGreaterEqual(thd_activity(record, inside.pid).packets, before + 50)
