# SPDX-License-Identifier: Apache-2.0
"""What is written into a cloud's disk, as the agent and systemd have it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import cloud_recipe, disk_maker, recipe
from infranetes.guest.image import GuestImage
from infranetes_common.errors import FailedPrecondition
from vmserver import config as agent

MTU = 1460  # of Compute Engine's networks
SERVER = (
    "[Match]\nName=other\n[Network]\nAddress=10.77.0.1/24\nDHCPServer=yes\n"
    f"[DHCPServer]\nSendOption=26:uint16:{MTU}\n"
)
# One networkd, which sees no other files than its unit. Without udev it takes cards as they are.
NETWORKD = """\
mount -t sysfs -o ro sysfs /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd/network
mkdir -p /run/systemd/network /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
cp "$1" /etc/systemd/network/
exec /lib/systemd/systemd-networkd
"""
# A server and a client in networks of their own; prints the client's card once it has an address.
CHILD = """\
set -eu
ip link add eth0 type veth peer name other
unshare --net --mount sh -c '
    echo $$ >pid
    until ip link show other; do sleep 0.1; done
    exec sh networkd "$PWD/server.network"' >server.log 2>&1 &
until [ -s pid ]; do sleep 0.1; done
server=$(cat pid)
until [ "$(readlink /proc/$server/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link set other netns "$server"
unshare --mount sh -c 'echo $$ >client.pid; exec sh networkd "$1"' sh "$1" >client.log 2>&1 &
for _ in $(seq 600); do
    ip -4 addr show dev eth0 | grep -q 'inet 10[.]77[.]' && break
    sleep 0.1
done
for _ in $(seq 50); do
    ip link show dev eth0 | grep -q 'mtu 1500' || break
    sleep 0.1
done
ip addr show dev eth0
kill "$server" "$(cat client.pid)"
wait || true
"""


def guest(providers: tuple[str, ...]) -> GuestImage:
    return GuestImage(Path("/images/one"), "one", 0.0, "bookworm", "6.1.0", (), providers)


class FilesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()

    def agent(self, source: str, kind: str, providers: tuple[str, ...]) -> agent.Config:
        file = self.directory / "vmserver.toml"
        _, text = cloud_recipe.files(source, kind, guest(providers), "uuid")[recipe.AGENT]
        file.write_text(text)
        return agent.load(file)

    def test_the_agent_finds_its_identity_in_each_cloud_and_runs_what_the_pod_is(self) -> None:
        for source in cloud_recipe.SOURCES:
            for kind in cloud_recipe.KINDS:
                config = self.agent(source, kind, recipe.BOTH.providers)
                self.assertEqual((config.identity.source, config.provider), (source, kind))

    def test_pods_may_choose_what_they_may_in_the_guest_image(self) -> None:
        for containers in (recipe.BOTH, recipe.OCI):
            config = self.agent("aws", "oci", containers.providers)
            self.assertEqual((config.provider, *config.choices), containers.providers)
        both = self.agent("aws", "oci", recipe.BOTH.providers)
        self.assertIn("start_command", both.providers["docker"])

    def test_a_guest_image_without_what_shall_run_containers_is_refused(self) -> None:
        for kind, containers in (("docker", recipe.OCI), ("oci", recipe.DOCKER)):
            with self.assertRaises(FailedPrecondition) as caught:
                self.agent("aws", kind, containers.providers)
            self.assertIn(f"--containers {kind}", str(caught.exception))
        self.assertEqual(self.agent("aws", "machine", recipe.OCI.providers).provider, "machine")
        self.assertEqual(self.agent("aws", "docker", ()).provider, "docker", "images of before don't say")

    def test_the_root_is_found_by_what_no_other_disk_has(self) -> None:
        for source in cloud_recipe.SOURCES:
            files = cloud_recipe.files(source, "machine", guest(()), "0-1-2")
            for path in ("etc/fstab", "boot/grub/grub.cfg"):
                self.assertIn("UUID=0-1-2", files[path][1])
                self.assertNotIn("LABEL", files[path][1])
        self.assertIn("--fs-uuid --set=root 0-1-2\n", cloud_recipe.esp_menu("0-1-2"))

    def test_a_card_has_the_mtu_that_dhcp_tells(self) -> None:
        unit = self.directory / "50-dhcp.network"
        unit.write_text(cloud_recipe.files("gcp", "machine", guest(()), "uuid")[cloud_recipe.DHCP_UNIT][1])
        (self.directory / "server.network").write_text(SERVER)
        (self.directory / "networkd").write_text(NETWORKD)
        done = subprocess.run(
            ["unshare", "--net", "--fork", "--kill-child", "sh", "-c", CHILD, "sh", str(unit)],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        logs = [(self.directory / f"{name}.log").read_text()[-2000:] for name in ("server", "client")]
        self.assertIn("inet 10.77.0.", done.stdout, (done.stderr, logs))
        self.assertIn(f" mtu {MTU} ", done.stdout)


class DriverTests(SynchronousTestCase):
    """Whether a kernel can be a cloud's."""

    def setUp(self) -> None:
        self.modules = Path(self.mktemp())
        self.modules.mkdir()

    def lacking(self, *built_in: str) -> list[str]:
        wanted = [*cloud_recipe.DISK_DRIVERS, *cloud_recipe.CARD_DRIVERS]
        loaded = [name for name in wanted if name not in (*built_in, "gve")]
        lines = "".join(
            f"kernel/drivers/{name.replace('_', '-')}.ko.xz: kernel/other.ko\n" for name in loaded
        )
        (self.modules / "modules.dep").write_text(lines)
        (self.modules / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in built_in))
        return list(disk_maker.lacking_drivers(self.modules))

    def test_what_it_lacks_is_found_whether_others_are_modules_or_built_in(self) -> None:
        self.assertEqual(self.lacking("nvme"), ["gve"])
        self.assertEqual(self.lacking("nvme", "gve"), [])
