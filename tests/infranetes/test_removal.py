# SPDX-License-Identifier: Apache-2.0
"""Removing the package ends QEMU's VMs and the pods' networks, names other VMs, and touches nothing else."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

from twisted.trial.unittest import SynchronousTestCase

from infranetes import removal
from infranetes.firewalls.agent_ports import table_name as agents_table
from infranetes.hostports.hostports import table_name
from infranetes.hostports.mappings import HostPort
from infranetes.hostports.table import Routes, script
from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.pods.sleeping.probe_table import table_name as probes_table
from infranetes.pods.store import database
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.pods.store.store import FILE
from infranetes.providers.qemu.cgroups import placement
from infranetes.providers.qemu.network import bridge
from infranetes.providers.qemu.vm.record import RECORD
from infranetes.providers.qemu.volumes.files import VolumeFiles
from infranetes.providers.qemu.volumes.room import UNIT
from infranetes.providers.qemu.volumes.snapshot_files import SnapshotFiles
from infranetes.providers.volumes import FromSnapshot
from infranetes_common import commands
from infranetes_common.errors import Unavailable
from infranetes_common.overlay import NODE_MAC
from tests.harness.needs import needs_mounts, needs_netns, needs_root
from tests.support.spaces import ROOT, Space

SECONDS = 10.0
Done: TypeAlias = "subprocess.CompletedProcess[str]"


def command(*words: str, inside: Space | None = None, by: tuple[str, ...] = ()) -> Done:
    """Run the module as the maintainer script does, in a network namespace if one is given.

    :param by: a command that runs it."""
    whole = [*by, sys.executable, "-m", "infranetes.removal", *words]
    if inside is not None:
        whole = inside.command(*whole)
    return subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, check=False)


class RemovalCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.state_dir = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.state_dir)
        self.config = self.state_dir / "infranetes.toml"
        self.config.write_text(f'state_dir = "{self.state_dir}"\n')


@needs_root
class VmTests(RemovalCase):
    def vm(self, uid: int = 0, script: str = "echo; read line") -> subprocess.Popen[bytes]:
        """Start a process that is named like a VM's QEMU. There is no record of it yet."""
        self.token = secrets.token_hex(16)
        started = subprocess.Popen(
            ["sh", "-c", script, f"guest=infranetes-{self.token}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            user=uid,
            extra_groups=[],
        )
        self.addCleanup(started.wait)
        self.addCleanup(started.kill)
        assert started.stdout is not None and started.stdin is not None
        self.addCleanup(started.stdin.close)
        self.addCleanup(started.stdout.close)
        started.stdout.readline()
        return started

    def record(self, **fields: object) -> None:
        directory = self.state_dir / "qemu" / "vms" / self.token
        directory.mkdir(parents=True)
        known = {"sandbox_id": "1", "cluster": "c", "node": "n", "address": "10.0.0.2", "created_at": 1.0}
        (directory / RECORD).write_text(json.dumps({**known, "phase": "ready", **fields}))

    def running(self, uid: int) -> list[str]:
        """Return the states of a user's processes that have not ended."""
        listed = ["ps", "-o", "stat=", "-u", str(uid)]
        states = subprocess.run(listed, check=False, capture_output=True, text=True).stdout.split()
        return [state for state in states if not state.startswith("Z")]

    def test_vms_with_a_record_end_and_others_go_on(self) -> None:
        ours = self.vm()
        self.record()
        others = self.vm()
        self.assertEqual(removal.end_vms(self.state_dir), 1)
        self.assertEqual(ours.wait(SECONDS), -9)
        self.assertIsNone(others.poll())
        self.assertEqual(removal.end_vms(self.state_dir), 0)

    def test_what_a_vm_has_started_ends_too(self) -> None:
        uid = 3_999_000_000 + secrets.randbelow(10_000)
        ours = self.vm(uid, "sleep 600 & echo; wait")
        self.record(uid=uid)
        self.assertEqual(len(self.running(uid)), 2)
        removal.end_vms(self.state_dir)
        ours.wait(SECONDS)
        until = time.monotonic() + SECONDS
        while self.running(uid):
            self.assertLess(time.monotonic(), until)

    def test_a_vm_whose_record_is_damaged_ends(self) -> None:
        ours = self.vm()
        self.record(phase="?")
        removal.end_vms(self.state_dir)
        self.assertEqual(ours.wait(SECONDS), -9)

    def test_a_node_that_never_had_a_vm(self) -> None:
        self.assertEqual(removal.end_vms(self.state_dir), 0)


@needs_netns
class NetworkTests(RemovalCase):
    def test_bridges_devices_and_tables_go_and_others_stay(self) -> None:
        space = Space("rm")
        self.addCleanup(space.end)
        space.ip(
            f"link add infranetes0 address {bridge.MAC} type bridge",
            f"link add infvx0 address {NODE_MAC} type bridge",
            "link add other0 type bridge",
        )
        hostports = table_name(self.state_dir)
        ours = (
            "ip infranetes_infranetes0",
            "bridge infranetes_infranetes0",
            "inet infranetes_infranetes0_firewalls",
            "ip infranetes_infranetes0_shares",
            "ip infranetes_infranetes0_fragments",
        )
        overlay = tuple(f"ip infranetes_infvx0{kind}" for kind in ("", "_firewalls", "_shares", "_fragments"))
        probes = probes_table(self.state_dir)
        ports = (
            f"ip {hostports}",
            f"inet {agents_table(self.state_dir)}",
            f"ip {probes}",
            f"bridge {probes}",
        )
        others = ("ip infranetes_other0", "ip infranetes_hostports_00000000", "inet filter")
        for table in (*ours, *overlay, *ports, *others):
            space.said("nft", "add", "table", *table.split())
        done = command("--config", str(self.config), inside=space)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        left = space.said("nft", "list", "tables").replace("table ", "").splitlines()
        self.assertEqual(sorted(left), sorted(others))
        links = {link["ifname"] for link in json.loads(space.said("ip", "-j", "link"))}
        self.assertEqual(links, {"lo", "other0"})

    def test_a_bridge_that_another_daemon_uses_stays(self) -> None:
        space = Space("rm")
        self.addCleanup(space.end)
        space.ip(
            f"link add infranetes0 address {bridge.MAC} type bridge",
            "link add port0 type veth peer name vm0",
            "link set port0 master infranetes0",
        )
        space.said("nft", "add", "table", "ip", "infranetes_infranetes0")
        done = command("--config", str(self.config), inside=space)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("infranetes_infranetes0", space.said("nft", "list", "tables"))
        self.assertIn("infranetes0", space.said("ip", "link"))

    def node_without(self, *missing: str) -> tuple[Space, Done]:
        """Return a node with a bridge and tables, and the outcome of a removal without these programs."""
        space = Space("rm")
        self.addCleanup(space.end)
        space.ip(f"link add infranetes0 address {bridge.MAC} type bridge")
        space.said("nft", "add", "table", "ip", table_name(self.state_dir))
        programs = self.state_dir / "programs"
        programs.mkdir()
        for name in {"ip", "nft"} - set(missing):
            (programs / name).symlink_to(shutil.which(name) or name)
        by = ("env", f"PATH={programs}")
        return space, command("--config", str(self.config), inside=space, by=by)

    def test_without_ip_the_tables_go(self) -> None:
        space, done = self.node_without("ip")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(space.said("nft", "list", "tables"), "")

    def test_without_nft_the_bridges_go(self) -> None:
        space, done = self.node_without("nft")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertNotIn("infranetes0", space.said("ip", "link"))

    def test_a_node_that_has_neither(self) -> None:
        _, done = self.node_without("ip", "nft")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_program_that_hangs_keeps_nothing_else_from_going(self) -> None:
        programs = self.state_dir / "programs"
        programs.mkdir()
        calls = self.state_dir / "calls"
        link = json.dumps([{"ifname": "infranetes0", "address": bridge.MAC}])
        tables = json.dumps({"nftables": [{"table": {"family": "ip", "name": "infranetes_infranetes0"}}]})
        for name, listed in (("ip", link), ("nft", tables)):
            (programs / name).write_text(
                f"#!/bin/sh\necho {name} $* >>{calls}\n"
                f"case $* in *list*|'-j link') echo '{listed}';; *) exec /bin/sleep 60;; esac\n"
            )
            (programs / name).chmod(0o755)
        self.patch(commands, "PATH", str(programs))
        self.patch(removal, "_COMMAND_SECONDS", 0.5)
        with self.assertRaises(Unavailable) as caught:
            removal.remove_network(self.state_dir)
        deletions = ["ip link delete dev infranetes0", "nft delete table ip infranetes_infranetes0"]
        called = calls.read_text().splitlines()
        for each in deletions:
            self.assertIn(each, called)
            self.assertIn(f"`{each}` did not end", str(caught.exception))


# What was asked is in `calls`, and each line of `scopes` is listed once.
SYSTEMCTL = """\
#!/bin/sh
echo "$*" >>{top}/calls
case $* in
list-units*)
    head -n 1 {top}/scopes
    sed -i 1d {top}/scopes;;
show*) cat {top}/slice;;
esac
exit 0
"""


class SliceTests(RemovalCase):
    """The slice of VMs that count in no pod, by a systemctl of the test's."""

    def setUp(self) -> None:
        super().setUp()
        programs = self.state_dir / "programs"
        programs.mkdir()
        (programs / "systemctl").write_text(SYSTEMCTL.format(top=self.state_dir))
        (programs / "systemctl").chmod(0o755)
        self.patch(commands, "PATH", f"{programs}:/usr/bin:/bin")
        self.patch(commands, "ENVIRONMENT", {"PATH": f"{programs}:/usr/bin:/bin"})
        self.patch(placement, "BOOTED", self.state_dir)

    def stopped(self, scopes: str, state: str = "active") -> bool:
        """Return whether the slice was, with these lines of scopes one after the other."""
        (self.state_dir / "calls").write_text("")
        (self.state_dir / "scopes").write_text(scopes)
        (self.state_dir / "slice").write_text(f"ActiveState={state}\n")
        removal.end_slice(self.state_dir)
        return "stop infranetes.slice" in (self.state_dir / "calls").read_text().splitlines()

    def test_it_goes_once_the_vms_have(self) -> None:
        scope = "infranetes-vm-abc.scope loaded active running\n"
        self.assertTrue(self.stopped(scope * 2))
        self.assertEqual((self.state_dir / "calls").read_text().count("list-units"), 3)

    def test_one_in_which_another_daemon_has_vms_stays(self) -> None:
        self.patch(removal, "_END_SECONDS", 0.3)
        self.assertFalse(self.stopped("infranetes-vm-abc.scope loaded active running\n" * 1000))

    def test_a_node_that_has_none_or_no_systemd(self) -> None:
        self.assertFalse(self.stopped("", "inactive"))
        self.patch(placement, "BOOTED", self.state_dir / "absent")
        self.assertFalse(self.stopped(""))


@needs_netns
class LoopbackTests(RemovalCase):
    """route_localnet, with which neighbours reach services on 127.0.0.1 unless the host ports' table guards
    it."""

    def setUp(self) -> None:
        super().setUp()
        self.space = Space("rm")
        self.addCleanup(self.space.end)
        self.space.ip("link add wire0 type bridge")
        self.name = table_name(self.state_dir)

    def run_with(self, localnet: dict[str, bool], by: tuple[str, ...] = ()) -> Done:
        """Remove a node that forwards one port, by wire0 whose route_localnet is 1."""
        self.set("1")
        ports = {HostPort("tcp", "", 8080, 80): "10.0.0.2"}
        file = self.state_dir / "script"
        file.write_text(script(self.name, ports, Routes(), localnet))
        self.space.said("nft", "-f", str(file))
        return self.again(by)

    def again(self, by: tuple[str, ...] = ()) -> Done:
        return command("--config", str(self.config), inside=self.space, by=by)

    def set(self, value: str) -> None:
        self.space.said("sh", "-c", f"echo {value} >/proc/sys/net/ipv4/conf/wire0/route_localnet")

    @property
    def setting(self) -> str:
        return self.space.said("cat", "/proc/sys/net/ipv4/conf/wire0/route_localnet").strip()

    def check_guarded(self, ours: bool) -> None:
        """Check that of the table only what the guard needs is left."""
        table = self.space.said("nft", "list", "table", "ip", self.name)
        self.assertIn('iifname != "lo" ip daddr 127.0.0.0/8 drop', table)
        self.assertIn(f'"wire0" : 0x0000000{ours:d}', table)
        self.assertNotIn("8080", table)

    def test_it_is_set_back_before_the_table_goes(self) -> None:
        done = self.run_with({"wire0": True, "gone0": True, "gone1": False})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.setting, "0")
        self.assertEqual(self.space.said("nft", "list", "tables"), "")

    def test_the_setting_of_a_bridge_ends_with_the_bridge(self) -> None:
        self.space.ip(f"link set wire0 address {bridge.MAC}")
        done = self.run_with({"wire0": False})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.space.said("nft", "list", "tables"), "")

    def test_somebody_elses_setting_stays_and_is_guarded(self) -> None:
        done = self.run_with({"wire0": False})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"the nftables table ip {self.name} stays", done.stderr)
        self.assertIn("wire0", done.stderr)
        self.assertEqual(self.setting, "1")
        self.check_guarded(ours=False)
        self.set("0")
        done = self.again()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.space.said("nft", "list", "tables"), "")

    def test_the_guard_stays_where_the_setting_can_not_be_set_back(self) -> None:
        read_only = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
        done = self.run_with({"wire0": True}, by=("sh", "-ec", f'{read_only} && exec "$@"', "sh"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("route_localnet of wire0 can't be set back to 0: Read-only file system", done.stderr)
        self.assertIn(f"the nftables table ip {self.name} stays", done.stderr)
        self.assertEqual(self.setting, "1")
        self.check_guarded(ours=True)
        done = self.again()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual((self.setting, self.space.said("nft", "list", "tables")), ("0", ""))


@needs_mounts
class PurgeTests(SynchronousTestCase):
    """The maintainer script that runs after the removal, with other paths."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        script = (ROOT / "debian/infranetes.postrm").read_text()
        for path in ("/var/lib/infranetes", "/run/infranetes"):
            self.assertIn(path, script)
            script = script.replace(path, f"{self.root}{path}")
        (self.root / "postrm").write_text(script)
        self.state = self.root / "var/lib/infranetes"
        for file in ("store/infranetes.sqlite", "qemu/lock", "images/blobs/a"):
            self.write(file)
        (self.state / "qemu/volumes/snapshots").mkdir(parents=True)
        (self.root / "run/infranetes/qemu").mkdir(parents=True)
        self.deleted = set(self.left()) - {"postrm"}

    def write(self, file: str) -> None:
        (self.state / file).parent.mkdir(parents=True, exist_ok=True)
        (self.state / file).write_text("data")

    def purge(self, before: str = "true") -> str:
        """Run the script after another command, in mounts of its own, and return what it says."""
        script = f"{before} && exec sh -e {self.root}/postrm purge"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir())

    def test_nothing_is_left(self) -> None:
        self.assertEqual(self.purge(), "")
        self.assertEqual(self.left(), ["postrm"])
        self.assertFalse(self.state.exists())
        self.assertFalse((self.root / "run/infranetes").exists())

    def test_persistent_volumes_stay(self) -> None:
        self.write("qemu/volumes/db.raw")
        self.write("qemu/volumes/snapshots/db.snapshot/data")
        self.assertIn(f"{self.state}/qemu/volumes has persistent volumes", self.purge())
        kept = ["qemu/volumes/db.raw", "qemu/volumes/snapshots/db.snapshot/data"]
        self.assertEqual(self.left(), ["postrm", *(f"var/lib/infranetes/{file}" for file in kept)])

    def test_volumes_stay_wherever_state_dir_and_volumes_dir_were(self) -> None:
        usual, chosen = self.state / "node2/qemu/volumes", self.state / "pv"
        for directory in (usual, chosen):
            volumes, snapshots = VolumeFiles(directory), SnapshotFiles(directory)
            snapshots.begin("before").write_text("data")
            snapshots.finish("before", "db", 1.0)
            for name in ("db", "disk", "my.cloud-disk-1"):
                volumes.begin(name, UNIT)
                volumes.finish(name, UNIT, FromSnapshot("before"))
            (directory / "device.raw").symlink_to("/dev/sdb")
        (usual / "notes").touch()
        kept = self.left()
        for file in ("node2/store/infranetes.sqlite", "node2/qemu/vms/1/disk.qcow2", "pv/.mounts"):
            self.write(file)
        said = self.purge()
        self.assertEqual(self.left(), [file for file in kept if file not in self.deleted])
        told = [line for line in said.splitlines() if "has persistent volumes" in line]
        self.assertEqual(told, [f"infranetes: {each} has persistent volumes" for each in (usual, chosen)])

    def test_disks_of_images_are_no_volumes(self) -> None:
        for directory in ("guest", "node2/guest"):
            for part in ("disk.raw", "vmlinuz", "initrd", "manifest.json"):
                self.write(f"{directory}/key/{part}")
            (self.state / directory / "current").symlink_to("key")
            for name in (
                ".build-1/disk.raw",
                ".build-1/root/README.source",
                "clouds/aws-docker-1.raw",
                "clouds/.aws-docker-1.raw.cloud-disk-1/disk.raw",
                "clouds/.aws-docker-1.raw.cloud-disk-1/tree/README.source",
            ):
                self.write(f"{directory}/{name}")
        self.assertEqual(self.purge(), "")
        self.assertFalse(self.state.exists())

    def test_what_is_mounted_there_stays(self) -> None:
        (self.root / "other").mkdir()
        (self.root / "other/file").write_text("data")
        (self.state / "disk").mkdir()
        said = self.purge(f"mount --bind {self.root}/other {self.state}/disk")
        self.assertIn(f"{self.state} stays, because something is mounted in it", said)
        self.assertTrue((self.root / "other/file").exists())

    def test_a_state_directory_that_is_a_mount_is_emptied(self) -> None:
        said = self.purge(f"mount --bind {self.state} {self.state}")
        self.assertIn(str(self.state), said)
        self.assertEqual(self.left(), ["postrm"])


@needs_netns
class CommandTests(RemovalCase):
    def sandbox(
        self, number: int, provider: str, state: SandboxState = SandboxState.READY, id: str = ""
    ) -> None:
        """Put a sandbox into the daemon's store; number 1 gets the token t1. :param id: of its VM."""
        record = SandboxRecord(
            f"{number}" * 32, f"t{number}", state, f"p{number}", b"", "", number,
            provider, "docker", instance_id=id,
        )  # fmt: skip
        self.put("sandboxes", record)

    def pool(self, number: int, provider: str, state: PoolState, id: str = "") -> None:
        record = PoolRecord(f"{number}", f"t{number}", state, provider, "", 0, 0, 1, instance_id=id)
        self.put("pool", record)

    def put(self, table: str, record: SandboxRecord | PoolRecord) -> None:
        with contextlib.closing(database.open_database(self.state_dir / FILE)) as connection:
            self.assertEqual(database.apply(connection, [database.put(table, record)]), [None])

    def run_in_a_network_of_its_own(self) -> subprocess.CompletedProcess[str]:
        space = Space("rm")
        self.addCleanup(space.end)
        return command("--config", str(self.config), inside=space)

    def named(self) -> list[str]:
        """Return what a removal says of VMs."""
        done = self.run_in_a_network_of_its_own()
        self.assertEqual(done.returncode, 0)
        return [line.removeprefix("infranetes: ") for line in done.stderr.splitlines()]

    def test_vms_at_clouds_are_named(self) -> None:
        self.sandbox(1, "aws", id="i-1")
        self.sandbox(2, "qemu", id="i-2")
        self.sandbox(3, "aws", SandboxState.LOST, id="i-3")
        self.sandbox(4, "aws", SandboxState.STOPPED, id="i-4")
        self.pool(5, "gcp", PoolState.IDLE, id="i-5")
        words = "may still run and cost money; end them there"
        self.assertEqual(self.named(), [f"VMs of aws {words}: i-1, i-3", f"VMs of gcp {words}: i-5"])

    def test_vms_that_were_being_launched_are_named_by_their_tokens(self) -> None:
        """The provider had not answered yet, so nobody knows the id."""
        self.sandbox(1, "aws", SandboxState.LAUNCHING)
        self.sandbox(2, "aws", SandboxState.BOOTING)
        self.sandbox(3, "aws", SandboxState.ABANDONED)
        self.sandbox(4, "aws", SandboxState.STOPPING)
        self.sandbox(5, "aws", SandboxState.VACANT)
        self.sandbox(6, "aws", id="i-6")
        self.sandbox(7, "qemu", SandboxState.LAUNCHING)
        self.pool(8, "gcp", PoolState.BOOTING)
        words = "may still run and cost money; end them there"
        tagged = ", ".join(f"the one tagged infranetes-token=t{number}" for number in (1, 2, 3, 4))
        self.assertEqual(
            self.named(),
            [f"VMs of aws {words}: i-6, {tagged}", f"VMs of gcp {words}: the one tagged infranetes-token=t8"],
        )

    def test_a_store_that_cant_be_read_is_told_and_the_rest_goes_on(self) -> None:
        (self.state_dir / FILE).parent.mkdir()
        (self.state_dir / FILE).write_text("no database" * 1000)
        done = self.run_in_a_network_of_its_own()
        self.assertEqual(done.returncode, 1)
        self.assertIn("VMs at clouds may still run", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_a_broken_configuration_leaves_the_default_directory(self) -> None:
        self.config.write_text("no_such_key = 1\n")
        default = Path("/var/lib/infranetes")
        self.assertEqual(removal._configuration(str(self.config)).state_dir, default)
        self.assertEqual(removal._configuration(str(self.state_dir / "none")).state_dir, default)
