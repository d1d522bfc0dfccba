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

from twisted.trial.unittest import SynchronousTestCase

from infranetes import removal
from infranetes.hostports.hostports import table_name
from infranetes.pods import database
from infranetes.pods.records import SandboxRecord
from infranetes.pods.states import SandboxState
from infranetes.pods.store import FILE
from infranetes.providers.qemu import bridge
from infranetes.providers.qemu.record import RECORD
from infranetes_common.overlay import NODE_MAC
from tests.support.spaces import ROOT, Space

SECONDS = 10.0


def command(*words: str, inside: Space | None = None) -> subprocess.CompletedProcess[str]:
    """Run the module as the maintainer script does, in a network namespace if one is given."""
    whole = [sys.executable, "-m", "infranetes.removal", *words]
    if inside is not None:
        whole = inside.command(*whole)
    return subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, check=False)


class RemovalCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.state_dir = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.state_dir)
        self.config = self.state_dir / "infranetes.toml"
        self.config.write_text(f'state_dir = "{self.state_dir}"\n')


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
        )
        overlay = ("ip infranetes_infvx0", "ip infranetes_infvx0_firewalls", f"ip {hostports}")
        others = ("ip infranetes_other0", "ip infranetes_hostports_00000000", "inet filter")
        for table in (*ours, *overlay, *others):
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
        for file in (
            "store/infranetes.sqlite",
            "qemu/lock",
            "qemu/volumes/snapshots/.none",
            "images/blobs/a",
        ):
            self.write(file)
        (self.state / "qemu/volumes/snapshots/.none").unlink()
        (self.root / "run/infranetes/qemu").mkdir(parents=True)

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


class CommandTests(RemovalCase):
    def sandbox(self, number: int, provider: str, **fields: object) -> None:
        record = SandboxRecord(
            f"{number}" * 32, f"{number + 3}" * 32, SandboxState.READY, f"p{number}", b"", "", number,
            provider=provider, instance_id=f"i-{number}",
        )  # fmt: skip
        with contextlib.closing(database.open_database(self.state_dir / FILE)) as connection:
            database.apply(connection, [database.put("sandboxes", record)])

    def run_in_a_network_of_its_own(self) -> subprocess.CompletedProcess[str]:
        space = Space("rm")
        self.addCleanup(space.end)
        return command("--config", str(self.config), inside=space)

    def test_vms_at_clouds_are_named(self) -> None:
        self.sandbox(1, "aws")
        self.sandbox(2, "qemu")
        self.sandbox(3, "aws")
        done = self.run_in_a_network_of_its_own()
        self.assertEqual(done.returncode, 0)
        self.assertIn("VMs of aws still run and cost money; end them there: i-1, i-3\n", done.stderr)
        self.assertNotIn("i-2", done.stderr)

    def test_a_store_that_cant_be_read_is_told_and_the_rest_goes_on(self) -> None:
        (self.state_dir / FILE).parent.mkdir()
        (self.state_dir / FILE).write_text("no database" * 1000)
        done = self.run_in_a_network_of_its_own()
        self.assertEqual(done.returncode, 1)
        self.assertIn("VMs at clouds may still run", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_a_broken_configuration_leaves_the_default_directory(self) -> None:
        self.config.write_text("no_such_key = 1\n")
        self.assertEqual(removal._state_dir(str(self.config)), Path("/var/lib/infranetes"))
        self.assertEqual(removal._state_dir(str(self.state_dir / "none")), Path("/var/lib/infranetes"))
