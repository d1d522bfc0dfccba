# SPDX-License-Identifier: Apache-2.0
"""The network of simulated VMs that have namespaces of their own, in a network namespace of the test's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_simulation.machine import network
from infranetes_simulation.machine.network import bridge_of, cable_of
from tests.harness.needs import needs_netns

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, socket, subprocess, sys
from pathlib import Path
from infranetes_simulation.machine.network import plug_in, unplug

lock, bridge, gateway = Path(sys.argv[1]), "inftestbr", "198.18.0.1/24"

def links():
    return sorted(name for _, name in socket.if_nameindex() if name != "lo")

vms = [subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; cat"], stdin=-1, stdout=-1) for _ in range(2)]
for number, vm in enumerate(vms):
    vm.stdout.readline()
    plug_in(lock, bridge, f"cable{number}", gateway, vm.pid)
print(links())
for number in (0, 0, 1, 1):
    unplug(lock, bridge, f"cable{number}")
    print(links())
for vm in vms:
    vm.communicate()
"""


class NetworkTests(SynchronousTestCase):
    """The bridge comes with the first VM and goes with the last, whatever network /sys shows."""

    @needs_netns
    def test_the_bridge_is_there_for_as_long_as_there_are_vms(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            command = ["unshare", "--net", sys.executable, "-c", SCRIPT, f"{directory}/lock"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        both, one = "['cable0', 'cable1', 'inftestbr']", "['cable1', 'inftestbr']"
        self.assertEqual(done.stdout.splitlines(), [both, one, one, "[]", "[]"])

    def test_a_vms_cable_and_its_own_side_take_one_program_each(self) -> None:
        started: list[str] = []

        def run(command: list[str], input: str, **_: object) -> subprocess.CompletedProcess[str]:
            started.append(input)
            return subprocess.CompletedProcess(command, 0, "", "")

        self.patch(subprocess, "run", run)
        network.set_up("198.18.0.2/24", "198.18.0.1/24")
        network.set_up("", "")
        [whole, cards] = started
        self.assertEqual(cards.splitlines(), ["link set lo up", "link set eth0 up"])
        self.assertIn("route add default via 198.18.0.1", whole.splitlines())

    @needs_netns
    def test_what_failed_is_named(self) -> None:
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            network.ip("link show lo", "link set nothing-there up", "link show lo")
        self.assertIn("link set nothing-there up", " ".join(caught.exception.cmd))
        self.assertIn("nothing-there", caught.exception.stderr)

    def test_names_are_such_as_links_can_have(self) -> None:
        bridges = [bridge_of(Path("/a")), bridge_of(Path("/b"))]
        names = {*bridges, *(cable_of(bridge, id) for bridge in bridges for id in ("a", "b"))}
        self.assertEqual(len(names), 6)
        for name in names:
            self.assertLessEqual(len(name), 15)
