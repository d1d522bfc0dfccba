# SPDX-License-Identifier: Apache-2.0
"""What guests are told by CDs, and by vSphere's guestinfo, as Debian's cloud-init understands them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.cloud_init.document import GuestDocument, GuestVolume
from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.cloud.vsphere import guest_info
from infranetes.providers.machine_annotations import (
    CloudInit,
    GuestChoices,
    MountedFile,
    NetworkConfig,
)
from infranetes_common.identity import Network
from tests.harness.needs import TOOLS, needs, tool
from tests.infranetes.cloud_init.cases import HOST_KEY, NODE_KEY, PRIVATE, PUBLIC, files
from tests.infranetes.cloud_init.test_network import BRIDGED, DNS, ROUTED
from tests.infranetes_common.test_ssh_keys import ED25519

PEER = Path(__file__).with_name("cloud_init_peer.py")
OWN = """\
#cloud-config
hostname: chosen
bootcmd: [own]
runcmd: [date]
ssh_keys: {ed25519_private: a, ed25519_public: b}
write_files:
- {path: /own, content: x}
"""
WHOLE = GuestDocument(
    "s1",
    GuestChoices(user_data=OWN, ssh_keys=(ED25519,)),
    hostname="web-0",
    node_key=NODE_KEY,
    host_key=HOST_KEY,
    environment={"A": "b c"},
    files={"/etc/tls/key": GuestFile(b"\0\xff", 0o400)},
    volumes=(GuestVolume("vol1", "/data"),),
    resolvers=DNS,
)


@needs(tool("cloud-init"))
class CloudInitTests(SynchronousTestCase):
    def both(self, *documents: GuestDocument, network: Network = BRIDGED) -> list[Any]:
        """Return what cloud-init makes of guests' NoCloud and of their ConfigDrive. Any: JSON."""
        asked = []
        for document in documents:
            for kind in (CloudInit.NOCLOUD, CloudInit.CONFIG_DRIVE):
                choices = attrs.evolve(document.choices, cloud_init=kind)
                top = Path(self.mktemp())
                for name, content in files(attrs.evolve(document, choices=choices), network).items():
                    (top / name).parent.mkdir(parents=True, exist_ok=True)
                    (top / name).write_bytes(content)
                asked += [kind.value, str(top)]
        return self.understood(*asked)

    def understood(self, *asked: str) -> list[Any]:
        """Return what cloud-init makes of these. Any: JSON.

        :param asked: a kind, its directory, and so on."""
        done = subprocess.run(
            ["/usr/bin/python3", str(PEER), *asked],
            env={**os.environ, "PYTHONPATH": str(TOOLS / "cloud-init/usr/lib/python3/dist-packages")},
            capture_output=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        return list(json.loads(done.stdout.splitlines()[-1]))

    def test_all_of_it_is_valid_and_joins_what_the_pod_has(self) -> None:
        for found in self.both(WHOLE):
            self.assertEqual(found["faults"], "")
            self.assertEqual(found["meta"]["instance-id"], "s1")
            self.assertEqual(found["meta"]["local-hostname"], "web-0")
            self.assertIn(ED25519, str(found["meta"]))
            config = found["config"]
            self.assertEqual(config["hostname"], "chosen")
            self.assertEqual(config["runcmd"], ["date"])
            self.assertEqual(config["ssh_keys"], {"ed25519_private": PRIVATE, "ed25519_public": PUBLIC})
            paths = [each["path"] for each in config["write_files"]]
            self.assertEqual(paths, ["/own", "/etc/cloud/environment", "/etc/tls/key"])
            self.assertEqual(config["bootcmd"][0], "own")
            self.assertIn("\nmount_disk vol1 /data ext4 rw\n", config["bootcmd"][1])
            self.assertEqual(len(config["bootcmd"]), 2)

    def test_what_vsphere_has_in_guestinfo(self) -> None:
        top = Path(self.mktemp())
        top.mkdir()
        for key, value in guest_info.options("vm-1", OWN.encode(), BRIDGED).items():
            (top / key).write_text(value)
        [found] = self.understood("guestinfo", str(top))
        self.assertEqual((found["faults"], found["meta"]["instance-id"]), ("", "vm-1"))
        self.assertEqual(found["config"]["hostname"], "chosen")
        network = found["network"]
        self.assertIn("address 10.88.0.7/16", network["eni"])
        self.assertIn("route add default gw 10.88.0.1", network["eni"])
        self.assertIn("via: 10.88.0.1", network["netplan"])
        self.assertIn("GATEWAY=10.88.0.1", network["sysconfig"])

    def test_a_root_that_stays_is_valid_too(self) -> None:
        for found in self.both(attrs.evolve(WHOLE, instance_id="root-7")):
            self.assertEqual((found["faults"], found["meta"]["instance-id"]), ("", "root-7"))

    def test_what_the_schema_does_not_have_is_noticed(self) -> None:
        wrong = attrs.evolve(WHOLE, choices=GuestChoices(user_data="#cloud-config\nruncmd: 7\n"))
        for found in self.both(wrong):
            self.assertIn("runcmd", found["faults"])

    def test_a_script_stays_a_script(self) -> None:
        script = "#!/bin/sh\necho 'ü'\n"
        document = attrs.evolve(WHOLE, choices=GuestChoices(user_data=script))
        for found in self.both(document):
            self.assertEqual(found["others"], [["text/x-shellscript", script]])
            self.assertIn("bootcmd", found["config"])

    def test_two_documents_of_the_pod_are_merged_as_virtlet_did(self) -> None:
        source = b"#cloud-config\nruncmd: [first]\nhostname: other\nntp: {enabled: true}\n"
        choices = attrs.evolve(WHOLE.choices, user_data_source=MountedFile("/etc/ud"))
        document = attrs.evolve(WHOLE, choices=choices, files={"/etc/ud": GuestFile(source)})
        for found in self.both(document):
            config = found["config"]
            self.assertEqual(config["runcmd"], ["first", "date"])
            self.assertEqual((config["hostname"], config["ntp"]), ("chosen", {"enabled": True}))

    def test_every_kind_of_system_is_given_dhcp(self) -> None:
        for found in self.both(WHOLE):
            network = found["network"]
            self.assertIn("iface ens3 inet dhcp", network["eni"])
            self.assertIn("dhcp4: true", network["netplan"])
            self.assertIn("BOOTPROTO=dhcp", network["sysconfig"])

    def test_every_kind_of_system_is_given_addresses_routes_and_resolvers(self) -> None:
        static = attrs.evolve(WHOLE, choices=GuestChoices(network_config=NetworkConfig.STATIC))
        for found in self.both(static):
            network = found["network"]
            self.assertIn("address 10.88.0.7/16", network["eni"])
            self.assertIn("route add default gw 10.88.0.1", network["eni"])
            self.assertIn("dns-nameservers 10.96.0.10 fd00::a", network["eni"])
            self.assertIn("- 10.88.0.7/16", network["netplan"])
            self.assertIn("via: 10.88.0.1", network["netplan"])
            for line in ("IPADDR=10.88.0.7", "NETMASK=255.255.0.0", "GATEWAY=10.88.0.1"):
                self.assertIn(line, network["sysconfig"])

    def test_every_kind_of_system_is_given_ipv6(self) -> None:
        static = attrs.evolve(WHOLE, choices=GuestChoices(network_config=NetworkConfig.STATIC))
        for found in self.both(WHOLE, static, network=ROUTED):
            network = found["network"]
            self.assertIn("address fd00:1::7/64", network["eni"])
            self.assertIn("fe80::1", network["eni"])
            self.assertNotIn("::/64 gw", network["eni"])
            self.assertIn("fe80::1", network["netplan"])
            self.assertIn("IPV6_DEFAULTGW=fe80::1", network["sysconfig"])
            self.assertIn("MTU=1450", network["sysconfig"])

    def test_windows_user_data_is_valid(self) -> None:
        for found in self.both(attrs.evolve(WHOLE, choices=GuestChoices(windows=True))):
            self.assertEqual((found["faults"], set(found["config"])), ("", {"write_files"}))
