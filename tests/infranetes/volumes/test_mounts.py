"""Which volume a mount is, and what is kept of one."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.mounts import Source, below, carried, find
from infranetes.volumes.places import MountTable, Place
from infranetes.volumes.records import Record, Records
from infranetes_common import cri
from infranetes_common.entries import FILE, SYMLINK, Entry
from infranetes_common.errors import InvalidArgument


class MountCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()


class FindTests(MountCase):
    def setUp(self) -> None:
        super().setUp()
        self.table = MountTable()
        self.addCleanup(self.table.close)

    def test_links_in_the_path_are_followed_and_what_is_missing_is_made(self) -> None:
        (self.top / "file").write_text("")
        (self.top / "link").symlink_to("file")
        found = find(cri.Mount(host_path=str(self.top / "link")), self.table)
        self.assertEqual((found.path, found.file), (str(self.top / "file"), True))
        made = find(cri.Mount(host_path=str(self.top / "a" / "b")), self.table)
        self.assertFalse(made.file)
        self.assertEqual((self.top / "a" / "b").stat().st_mode & 0o777, 0o755)

    def test_sockets_devices_and_pipes_are_refused(self) -> None:
        os.mkfifo(self.top / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            here = os.getcwd()
            os.chdir(self.top)
            self.addCleanup(os.chdir, here)
            listening.bind("socket")
            for path in ("/dev/null", str(self.top / "pipe"), str(self.top / "socket")):
                error = self.assertRaises(InvalidArgument, find, cri.Mount(host_path=path), self.table)
                self.assertIn(path, str(error))

    def test_what_is_on_a_tmpfs_stays_in_memory(self) -> None:
        secret = self.top / "secret"
        secret.mkdir()
        self.assertFalse(find(cri.Mount(host_path=str(secret)), self.table).in_memory)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(secret)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(secret)])
        self.assertTrue(find(cri.Mount(host_path=str(secret)), self.table).in_memory)

    def test_what_is_mounted_below_a_read_only_mount_is_writable_unless_it_is_recursive(self) -> None:
        for name in ("disk", "locked", "one", "pipe"):
            (self.top / name).mkdir() if name in ("disk", "locked") else (self.top / name).write_text("")
        (self.top / "pipe").unlink()
        os.mkfifo(self.top / "pipe")
        here = {
            b"": Place("8:1", b"/"),
            b"disk": Place("8:2", b"/"),
            b"disk/in": Place("8:3", b"/"),
            b"gone": Place("8:4", b"/"),
            b"locked": Place("8:5", b"/", writable=False),
            b"one": Place("8:6", b"/one"),
            b"pipe": Place("8:7", b"/pipe"),
        }
        source = Source(str(self.top), False, False)
        mount = cri.Mount(container_path="/mnt", host_path="/link/to/it", readonly=True)
        self.assertEqual(
            below(mount, source, here),
            [
                cri.Mount(container_path=f"/mnt/{name}", host_path=str(self.top / name))
                for name in ("disk", "one")
            ],
        )
        mount.recursive_read_only = True
        self.assertEqual(below(mount, source, here), [])
        self.assertEqual(below(cri.Mount(container_path="/mnt"), source, here), [])

    def test_the_agent_is_told_volumes_in_place_of_paths(self) -> None:
        source = Source("/srv/x", False, False)
        mount = cri.Mount(container_path="/x", host_path="/srv/link", readonly=True, recursive_read_only=True)
        image = cri.Mount(container_path="/image", image=cri.ImageSpec(image="x"))
        config = cri.ContainerConfig(mounts=[image, mount])
        kept, sent = carried(config, {1: source}).mounts
        self.assertEqual(kept, image)
        self.assertEqual(sent.host_path, f"infranetes-volume:{source.id}")
        self.assertEqual((sent.readonly, sent.recursive_read_only), (True, False))
        self.assertEqual(config.mounts[1].host_path, "/srv/link")


class RecordTests(MountCase):
    def test_what_is_saved_is_loaded_until_it_is_forgotten(self) -> None:
        records = Records(self.top / "volumes")
        base = {
            b"\xff": Entry(b"\xff", FILE, 0o600, 1, 2, 3, 2**62),
            b"l": Entry(b"l", SYMLINK, 0o777, 0, 0, target=b"\xfe"),
        }
        places = {b"": Place("8:1", b"/srv/one"), b"a/\xff": Place("0:40", b"/\xfe")}
        one = Record(Source("/srv/one", True, False), True, ("c1", "c2"), places, base)
        two = Record(Source("/srv/two", False, True), False, (), None, None)
        for record in (one, two, one):
            records.save("s1", record)
        records.save("s2", two)
        found = records.load()
        self.assertEqual({each.source.path: each for each in found["s1"]}, {"/srv/one": one, "/srv/two": two})
        records.delete("s1", two.source.id)
        records.keep_only(["s1"])
        self.assertEqual(records.load(), {"s1": [one]})
        records.forget("s1")
        self.assertEqual(records.load(), {})

    def test_an_unreadable_one_does_not_hold_up_the_others(self) -> None:
        records = Records(self.top)
        good = Record(Source("/srv/one", True, False), False, (), None, None)
        records.save("s1", good)
        for name, text in (("a", "{"), ("b", "[]"), ("c", '{"path": 1}')):
            (self.top / "s1" / f"{name}.json").write_text(text)
        self.assertEqual(records.load(), {"s1": [good]})
