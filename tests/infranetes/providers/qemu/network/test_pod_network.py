# SPDX-License-Identifier: Apache-2.0
"""The pods' subnet and firewalls outlive the daemon."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.network.pod_network import load_subnet, save_firewall, save_subnet
from infranetes_common.pod_firewall import CLOSED


class SavedTests(SynchronousTestCase):
    """What is saved of the network."""

    def test_the_subnet_of_update_runtime_config_outlives_the_daemon_but_not_the_configuration(self) -> None:
        path = Path(self.mktemp()) / "network.json"
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))
        save_subnet(path, "10.1.0.0/16", IPv4Network("10.2.0.0/24"))
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.2.0.0/24"))
        self.assertEqual(load_subnet(path, "10.3.0.0/16"), IPv4Network("10.3.0.0/16"))
        path.write_text("[")
        self.assertEqual(load_subnet(path, "10.1.0.0/16"), IPv4Network("10.1.0.0/16"))

    def test_the_saved_subnet_is_the_daemons_alone_and_a_firewall_goes_twice_as_once(
        self,
    ) -> None:
        path = Path(self.mktemp()) / "network.json"
        save_subnet(path, "10.1.0.0/16", IPv4Network("10.2.0.0/24"))
        self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
        for firewall in (CLOSED, None, None):
            save_firewall(path.parent, firewall)
            self.assertEqual((path.parent / "firewall.json").exists(), firewall is not None)
