# SPDX-License-Identifier: Apache-2.0
"""An identity is applied to the machine, in namespaces made for the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.identity import Identity, Network
from tests.harness.needs import needs_mounts
from tests.support.own_network import in_own_network
from vmserver.identity import apply as machine
from vmserver.identity import network
from vmserver.identity.apply import write_if_changed

ROOT = Path(__file__).resolve().parents[3]
IDENTITY = Identity(
    sandbox_id="5a" * 16, certificate_pem="c", key_pem="k", ca_pem="a", hostname="pod-1", machine_id="0a" * 16
)
NETWORK = Network(mac="02:00:00:00:00:07", address="10.88.0.7/16", gateway="10.88.0.1", mtu=1400)

# Runs as root in network and UTS namespaces of its own, with a network card called eth0.
CHILD = """
import json, socket, subprocess, sys
from pathlib import Path
from infranetes_common.identity import Identity, Network
from tests.vmserver.fake_clock import FakeClock
from vmserver.identity.apply import IdentityApplier
from vmserver.machine.clock import MachineClock
ip = lambda *words: json.loads(subprocess.run(["ip", "-j", *words], capture_output=True, check=True).stdout)
run = lambda *words: subprocess.run(["ip", *words], check=True)
run("link", "add", "eth0", "type", "veth", "peer", "name", "peer")
run("link", "set", "peer", "up")
neighbour = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
neighbour.bind(("peer", 0x0806))
neighbour.settimeout(5)
given = json.loads(sys.argv[1])
clock = FakeClock(10**18)
this = IdentityApplier(Path(sys.argv[2]), "eth0", clock=MachineClock(clock))
seen, events, watching = [], [], False
sys.addaudithook(lambda event, _: watching and events.append(event))
for document in given:
    network = document.pop("network")
    identity = Identity(**document, network=Network(**network))
    for first in (True, False):
        watching = True
        this.apply(identity, first=first)
        watching = False
    link, = ip("-4", "addr", "show", "dev", "eth0")
    card, = ip("link", "show", "dev", "eth0")
    seen.append({
        "mac": card["address"], "mtu": card["mtu"], "flags": card["flags"], "events": sorted(set(events)),
        "addresses": [f"{one['local']}/{one['prefixlen']}" for one in link["addr_info"]],
        "broadcast": [one["broadcast"] for one in link["addr_info"]],
        "routes": [[one["dst"], one.get("gateway")] for one in ip("-4", "route")],
        "hostname": socket.gethostname(),
        "arp": neighbour.recv(100).hex(),
    })
print(json.dumps({"seen": seen, "clock": clock.settings}))
"""


def become(directory: Path, *identities: Identity) -> Any:
    """Apply each identity. Return what the machine looks like then."""
    documents = json.dumps([attrs.asdict(identity) for identity in identities])
    done = subprocess.run(
        in_own_network(sys.executable, "-c", CHILD, documents, str(directory.absolute()), also=("--uts",)),
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_mounts
class BecomeTests(SynchronousTestCase):
    """On a real network card, as the kernel describes it."""

    def setUp(self) -> None:
        self.etc = Path(self.mktemp())
        self.etc.mkdir()

    def test_names_addresses_and_clock_are_those_of_the_identity(self) -> None:
        now = 2 * 10**18
        identity = attrs.evolve(IDENTITY, network=NETWORK, entropy="ab" * 32, now_nanos=now)
        found = become(self.etc, identity)
        (seen,) = found["seen"]
        self.assertEqual((seen["mac"], seen["mtu"], seen["hostname"]), (NETWORK.mac, 1400, "pod-1"))
        self.assertEqual((seen["addresses"], seen["broadcast"]), (["10.88.0.7/16"], ["10.88.255.255"]))
        self.assertEqual(seen["routes"], [["default", "10.88.0.1"], ["10.88.0.0/16", None]])
        self.assertIn("UP", seen["flags"])
        self.assertEqual((self.etc / "machine-id").read_text(), "0a" * 16 + "\n")
        self.assertEqual((self.etc / "hostname").read_text(), "pod-1\n")
        # Only the first document's clock counts.
        self.assertEqual(found["clock"], [now])

    def test_neighbours_are_told(self) -> None:
        (seen,) = become(self.etc, attrs.evolve(IDENTITY, network=NETWORK))["seen"]
        frame = bytes.fromhex(seen["arp"])
        self.assertEqual(frame[:12], b"\xff" * 6 + bytes.fromhex("020000000007"))
        self.assertEqual(frame[28:32], frame[38:42])  # sender and target are the one address
        self.assertEqual(frame[28:32], bytes([10, 88, 0, 7]))

    def test_other_addresses_take_the_place_of_the_first(self) -> None:
        other = Network(mac="02:00:00:00:00:08", address="192.168.5.9/24", gateway="192.168.5.1")
        _, seen = become(
            self.etc, attrs.evolve(IDENTITY, network=NETWORK), attrs.evolve(IDENTITY, network=other)
        )["seen"]
        self.assertEqual((seen["mac"], seen["mtu"]), (other.mac, 1500))
        self.assertEqual(seen["addresses"], ["192.168.5.9/24"])
        self.assertEqual(seen["routes"], [["default", "192.168.5.1"], ["192.168.5.0/24", None]])

    def test_it_neither_starts_a_process_nor_sleeps(self) -> None:
        (seen,) = become(self.etc, attrs.evolve(IDENTITY, network=NETWORK))["seen"]
        self.assertIn("open", seen["events"])
        slow = {"os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen", "time.sleep"}
        self.assertEqual(slow & set(seen["events"]), set())


class CheckTests(SynchronousTestCase):
    """Nothing malformed reaches the machine."""

    def test_malformed_fields_are_named_before_anything_is_touched(self) -> None:
        for field, value in (
            ("sandbox_id", "../x"), ("hostname", "a b"), ("hostname", "x" * 70), ("machine_id", "xyz"),
            ("entropy", "zz"), ("entropy", "00" * 5000), ("now_nanos", 5), ("now_nanos", 2**63),
        ):  # fmt: skip
            changed: Any = {field: value}
            with self.assertRaises(InvalidArgument) as caught:
                machine.check(attrs.evolve(IDENTITY, **changed))
            self.assertIn(field, str(caught.exception))

    def test_networks_that_can_not_be(self) -> None:
        for field, value in (
            ("mac", "02:00"), ("mac", "01:00:00:00:00:07"), ("address", "10.0.0.300/8"),
            ("address", "fd00::1/64"),
            ("gateway", "11.0.0.1"), ("gateway", "x"), ("mtu", 5), ("mtu", 10**6),
        ):  # fmt: skip
            changed: Any = {field: value}
            self.assertRaises(InvalidArgument, network.check, attrs.evolve(NETWORK, **changed))

    def test_a_card_that_is_not_there_is_named(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            network.apply(NETWORK, "nocard9")
        self.assertIn("nocard9", str(caught.exception))

    def test_a_machine_without_a_card_says_so(self) -> None:
        empty = Path(self.mktemp())
        empty.mkdir()
        self.assertRaises(FailedPrecondition, network.first_card, empty)

    def test_the_first_card_is_one_with_a_device(self) -> None:
        cards = Path(self.mktemp())
        found = (("docker0", "1", False), ("ens9", "1", True), ("eth0", "1", True), ("a0", "772", True))
        for name, kind, device in found:
            (cards / name).mkdir(parents=True)
            (cards / name / "type").write_text(kind + "\n")
            if device:
                (cards / name / "device").mkdir()
        self.assertEqual(network.first_card(cards), "ens9")


class WriteTests(SynchronousTestCase):
    def test_the_same_again_writes_nothing(self) -> None:
        path = Path(self.mktemp())
        self.assertTrue(write_if_changed(path, "x", 0o644))
        self.assertFalse(write_if_changed(path, "x", 0o644))
        self.assertTrue(write_if_changed(path, "y", 0o644))
        self.assertEqual(path.read_text(), "y")

    def test_a_link_is_replaced_and_not_followed(self) -> None:
        path, target = Path(self.mktemp()), Path(self.mktemp())
        target.write_text("precious")
        path.symlink_to(target)
        write_if_changed(path, "x", 0o644)
        self.assertEqual((path.read_text(), target.read_text()), ("x", "precious"))
