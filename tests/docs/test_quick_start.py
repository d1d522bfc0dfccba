# SPDX-License-Identifier: Apache-2.0
"""The files of the quick start are what the programs that read them take, and fit each other."""

from __future__ import annotations

import json
import re
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import load
from infranetes.providers.qemu.settings import QemuSettings
from tests.harness.needs import needs_programs
from tests.harness.tools import need

TREE = Path(__file__).resolve().parents[2]
FILES = TREE / "docs" / "quick-start"
ETC = FILES / "etc"


class QuickStartTests(SynchronousTestCase):
    def setUp(self) -> None:
        page = (TREE / "docs" / "install.md").read_text()
        section = page.split("\n## Quick start")[1].split("\n## ")[0]
        self.commands = re.findall(r"^ {4}(\S.*)$", section, flags=re.M)
        self.config = load(str(ETC / "infranetes/infranetes.toml.d/10-cluster.toml"), {})
        self.network = json.loads((ETC / "cni/net.d/10-pods.conflist").read_text())
        self.runtime_class, self.pod = yaml.safe_load_all((FILES / "hello.yaml").read_text())

    def test_it_takes_ten_commands(self) -> None:
        self.assertEqual(len(self.commands), 10)

    def test_the_daemon_offers_the_pods_handler_and_has_the_delegates_network(self) -> None:
        handler = self.runtime_class["handler"]
        self.assertEqual(self.pod["spec"]["runtimeClassName"], self.runtime_class["metadata"]["name"])
        self.assertEqual(self.config.handlers[handler].network, "cni")
        self.assertEqual(self.config.delegate.socket, "/run/containerd/containerd.sock")

    def test_kubeadm_is_led_to_the_daemon_and_has_the_cnis_subnet(self) -> None:
        (init,) = (each for each in self.commands if each.startswith("kubeadm init"))
        self.assertIn(f"--cri-socket unix://{self.config.socket}", init)
        bridge, _ = self.network["plugins"]
        ((addresses,),) = bridge["ipam"]["ranges"]
        self.assertIn(f"--pod-network-cidr {addresses['subnet']}", init)
        self.assertFalse(
            IPv4Network(addresses["subnet"]).overlaps(IPv4Network(str(QemuSettings().pod_cidr))),
            "the bridge of VMs outside of the CNI has a subnet of its own",
        )

    @needs_programs("containerd")
    def test_containerd_reads_its_file_and_finds_the_cni(self) -> None:
        file = ETC / "containerd/config.toml"
        done = subprocess.run(
            [need("containerd"), "--config", str(file), "config", "dump"], capture_output=True, check=True
        )
        said = done.stdout.decode()
        for line in ("SystemdCgroup = true", 'bin_dir = "/usr/lib/cni"', 'conf_dir = "/etc/cni/net.d"'):
            self.assertIn(line, said)

    def test_each_file_that_is_named_is_there(self) -> None:
        for path in re.findall(r"infranetes/(docs/\S+?)(?:[;\s]|$)", "\n".join(self.commands)):
            self.assertTrue((TREE / path).exists(), path)
