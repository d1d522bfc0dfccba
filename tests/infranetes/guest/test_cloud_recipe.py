# SPDX-License-Identifier: Apache-2.0
"""The configuration that is written to a cloud's disk, as read by the agent and systemd."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import cloud_recipe, cloud_time, disk_maker, quiet, recipe
from infranetes.guest.image import GuestImage
from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import needs_netns, needs_programs
from vmserver import config as agent

MTU = 1460  # of Compute Engine's networks
# PersistLeases is unknown to systemd 252; 257 waits for a disk on which to keep leases.
SERVER = (
    "[Match]\nName=other\n[Network]\nAddress=10.77.0.1/24\nDHCPServer=yes\n"
    f"[DHCPServer]\nSendOption=26:uint16:{MTU}\nEmitNTP=yes\nNTP=10.77.0.1 10.77.0.2\n"
    "PersistLeases=no\n"
)
# A networkd that sees no files but its unit. Without udev it takes network cards as they are.
NETWORKD = """\
mount -t sysfs -o ro sysfs /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd/network
mkdir -p /run/systemd/network /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
chown -R systemd-network:systemd-network /run/systemd/netif
cp "$1" /etc/systemd/network/
exec /lib/systemd/systemd-networkd
"""
# A server and a client in separate networks; prints the client's card once it has an address.
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
for _ in $(seq 100); do
    cat "/proc/$(cat client.pid)/root/run/systemd/netif/state" >state || true
    grep -q '^NTP=10[.]77' state && break
    sleep 0.1
done
kill "$server" "$(cat client.pid)"
wait || true
"""


# chronyc's output up to the leap second.
UNKNOWN = "00000000,,0,0.000000000,0.000000000,0.0,0.0,0.000,0.000,0.000,1.0,1.0,0.0,Not synchronised"
TRACKING = "7F000001,127.0.0.1,2,1795681273.707115406,{:.9f},-0.1,0.1,0.000,-1.0,1.0,0.0005,1.7,0.0,{}"
# Each pause makes the next line chronyc's output; after the last one the script ends.
CHRONYC = """\
#!/bin/sh
case $* in
    "-c tracking") head -n 1 tracking ;;
    *) echo "$*" >>commands ;;
esac
"""
SLEEP = """\
#!/bin/sh
echo "$1" >>pauses
sed -i 1d tracking
[ -s tracking ] || kill $PPID
"""


class Clock:
    """The script that runs beside chrony, with stand-ins for chronyc and for sleep."""

    def __init__(self, directory: Path, clock: str = "") -> None:
        self.directory = directory
        for each in ("bin", "run/systemd/netif", "run/infranetes-clock", "etc/infranetes"):
            (directory / each).mkdir(parents=True)
        for name, text in (("chronyc", CHRONYC), ("sleep", SLEEP)):
            (directory / "bin" / name).write_text(text)
            (directory / "bin" / name).chmod(0o755)
        files = cloud_time.files(clock)
        (directory / cloud_time.CONFIGURATION).write_text(files[cloud_time.CONFIGURATION][1])
        self.dhcp = directory / "run/systemd/netif/state"
        script = files[cloud_time.SCRIPT][1]
        for place in ("/run/", "/etc/"):
            script = script.replace(place, f"{directory}{place}")
        (directory / "script").write_text(script)

    def run(self, *tracking: str) -> None:
        (self.directory / "tracking").write_text("".join(line + "\n" for line in tracking))
        for name in ("commands", "pauses"):
            (self.directory / name).write_text("")
        path = f"{self.directory}/bin:/usr/bin:/bin"
        done = subprocess.run(
            ["sh", "script"], cwd=self.directory, env={"PATH": path}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr == "", done.stderr

    def words(self, name: str) -> list[str]:
        return (self.directory / name).read_text().splitlines()

    def servers(self) -> list[str]:
        told = self.directory / "run/infranetes-clock/dhcp.sources"
        return [line.split()[1] for line in told.read_text().splitlines()]


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

    def test_the_agent_finds_its_identity_in_each_cloud_and_in_qemu_and_runs_what_the_pod_is(self) -> None:
        for source in cloud_recipe.SOURCES:
            found = agent.VIRTIO_SERIAL if source == "qemu" else source
            for kind in cloud_recipe.KINDS:
                config = self.agent(source, kind, recipe.BOTH.providers)
                self.assertEqual((config.identity.source, config.provider), (found, kind))

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

    def test_udevd_and_the_journal_are_awake_in_a_cloud(self) -> None:
        """There udevd names the volumes, and the console, which the cloud keeps, has what the agent says."""
        tree = {**recipe.FILES, **recipe.BOTH.files, **cloud_recipe.files("aws", "oci", guest(()), "uuid")}
        self.assertEqual(tree[f"etc/systemd/system/{quiet.UNIT_NAME}"][1], "", "masked")
        self.assertNotIn("ReadKMsg", "".join(text for _, text in tree.values()))
        directory = self.directory / "agent"
        (directory / "vmserver.toml.d").mkdir(parents=True)
        for path, (_, text) in tree.items():
            if path.startswith("etc/infranetes/"):
                (directory / path.removeprefix("etc/infranetes/")).write_text(text)
        config = agent.load(directory / "vmserver.toml")
        self.assertEqual((config.hotplug, config.log_file, config.mount_namespace), (False, "", ""))

    def test_the_root_is_found_by_what_no_other_disk_has(self) -> None:
        for source in cloud_recipe.SOURCES:
            files = cloud_recipe.files(source, "machine", guest(()), "0-1-2")
            for path in ("etc/fstab", "boot/grub/grub.cfg"):
                self.assertIn("UUID=0-1-2", files[path][1])
                self.assertNotIn("LABEL", files[path][1])
        self.assertIn("--fs-uuid --set=root 0-1-2\n", cloud_recipe.esp_menu("0-1-2"))

    @needs_netns
    @needs_programs("systemd-analyze")
    def test_a_card_has_the_mtu_that_dhcp_tells_and_chrony_its_time_servers(self) -> None:
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
        clock = Clock(self.directory / "clock")
        clock.dhcp.write_bytes((self.directory / "state").read_bytes())
        clock.run(UNKNOWN)
        self.assertEqual(clock.servers(), ["10.77.0.1", "10.77.0.2"])


class TimeTests(SynchronousTestCase):
    """The machine's time service."""

    def setUp(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        self.clock = Clock(directory, cloud_time.GCP)

    def test_it_is_a_client_alone_that_sets_no_clock(self) -> None:
        for source in cloud_recipe.SOURCES:
            files = cloud_recipe.files(source, "machine", guest(()), "uuid")
            _, text = files[cloud_time.CONFIGURATION]
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            self.assertLessEqual({"port 0", "cmdport 0", "rtcsync"}, set(lines))
            allowed = {"makestep", "initstepslew", "allow", "pool", "local", "manual"}
            self.assertEqual(allowed & {line.split()[0] for line in lines}, set())
            _, unit = files["etc/systemd/system/chrony.service.d/infranetes.conf"]
            self.assertIn(f"-f /{cloud_time.CONFIGURATION}\n", unit)

    def test_each_cloud_is_asked_for_its_own_time(self) -> None:
        for source, clock in (
            ("aws", "server 169.254.169.123 "),
            ("gcp", "server 169.254.169.254 "),
            ("azure", "refclock PHC /dev/ptp_hyperv "),
        ):
            files = cloud_recipe.files(source, "machine", guest(()), "uuid")
            self.assertIn("\n" + clock, files[cloud_time.CONFIGURATION][1])

    def test_a_clock_that_is_a_second_behind_is_set_and_no_other(self) -> None:
        for behind, leap, commands in (
            (3600.3, "Normal", ["makestep"]),
            (1.0, "Insert second", ["makestep"]),
            (0.99, "Normal", []),
            (-0.5, "Normal", []),
            (-3600.0, "Normal", []),
            (3600.3, "Not synchronised", []),
        ):
            self.clock.run(TRACKING.format(behind, leap))
            self.assertEqual(self.clock.words("commands"), commands, (behind, leap))

    def test_it_is_looked_at_often_at_first_until_it_is_right(self) -> None:
        self.clock.run(UNKNOWN, "", "506 Cannot talk to daemon", TRACKING.format(0.0, "Normal"), UNKNOWN)
        self.assertEqual(self.clock.words("pauses"), ["5", "10", "15", "30", "30"])

    def test_where_no_server_answers_it_is_looked_at_twice_a_minute(self) -> None:
        self.clock.run(*[UNKNOWN] * 8)
        self.assertEqual(self.clock.words("pauses")[5:], ["30", "30", "30"])

    def test_chrony_hears_of_dhcps_servers_once_and_of_others_later(self) -> None:
        self.clock.dhcp.write_text("OPER_STATE=routable\nNTP=192.0.2.1 192.0.2.2\nDNS=192.0.2.3\n")
        self.clock.run(UNKNOWN, UNKNOWN)
        self.assertEqual(self.clock.servers(), ["192.0.2.1", "192.0.2.2"])
        self.assertEqual(self.clock.words("commands"), ["reload sources"])
        self.clock.dhcp.write_text("NTP=192.0.2.9\n")
        self.clock.run(UNKNOWN)
        self.assertEqual(self.clock.servers(), ["192.0.2.9"])

    def test_what_it_has_already_and_what_is_no_address_is_not_handed_on(self) -> None:
        many = " ".join(f"192.0.2.{number}" for number in range(9))
        self.clock.dhcp.write_text(f"NTP={cloud_time.LINK_LOCAL_GCP} * time.example ;reboot {many}\n")
        self.clock.run(UNKNOWN)
        self.assertEqual(self.clock.servers(), [f"192.0.2.{number}" for number in range(4)])


class DriverTests(SynchronousTestCase):
    """Whether a kernel has the drivers that a cloud needs."""

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
