# SPDX-License-Identifier: Apache-2.0
"""What docs/cloud-image.sh writes into a cloud's image, as systemd has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).resolve().parents[2]
UNIT = "etc/systemd/network/50-dhcp.network"
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
ip link add card type veth peer name other
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
    ip -4 addr show dev card | grep -q 'inet 10[.]77[.]' && break
    sleep 0.1
done
for _ in $(seq 50); do
    ip link show dev card | grep -q 'mtu 1500' || break
    sleep 0.1
done
ip addr show dev card
kill "$server" "$(cat client.pid)"
wait || true
"""


class CloudImageTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        (self.directory / UNIT).parent.mkdir(parents=True)

    def written(self) -> Path:
        """Run the line of the script that writes the unit; return that."""
        script = (ROOT / "docs" / "cloud-image.sh").read_text()
        [line] = [each for each in script.splitlines() if each.endswith(f">{UNIT}")]
        subprocess.run(["sh", "-euc", line], cwd=self.directory, check=True)
        return self.directory / UNIT

    def test_a_card_has_the_mtu_that_dhcp_tells(self) -> None:
        unit = self.written()
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
