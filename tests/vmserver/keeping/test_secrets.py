# SPDX-License-Identifier: Apache-2.0
"""Volumes in memory are emptied before a machine is kept, unless a process uses them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.harness.needs import needs_root
from vmserver.keeping import secrets
from vmserver.machine.mounts import unmount
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

ME = {"c1": [os.getpid()]}
SECRET = b"tell nobody " * 10_000


@needs_root
class SecretCase(SynchronousTestCase):
    """A store with a tmpfs, on which two volumes share their memory."""

    def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="infranetes-secrets-"))
        self.addCleanup(shutil.rmtree, self.base)
        self.memory = self.base / "memory"
        self.store = VolumeStore(self.base / "disk", self.memory, mount=True)
        self.addCleanup(unmount, self.memory)
        self.store.make("secret", file=False, in_memory=True)
        self.store.make("token", file=True, in_memory=True)
        self.store.make("disk", file=False, in_memory=False)
        self.store.make("scratch", file=False, in_memory=True, size_limit=1 << 20)
        self.secret, self.token = self.store.path("secret"), self.store.path("token")
        self.scratch = self.store.path("scratch") / "own"
        self.addCleanup(unmount, self.scratch.parent)
        self.scratch.write_text("the pod's own")
        self.fill()

    def fill(self) -> None:
        """Write a secret as kubelet does: a directory that a link names."""
        top = self.secret
        (top / "..2026").mkdir(exist_ok=True)
        (top / "..2026" / "key").write_bytes(SECRET)
        (top / "..data").symlink_to("..2026")
        (top / "key").symlink_to("..data/key")
        self.token.write_bytes(SECRET)

    def path(self, name: str) -> Path:
        return self.secret / name

    def check(self, *ids: str) -> None:
        secrets.thd_check(self.store, ids or ("secret", "token"), ME)

    def refused(self) -> str:
        with self.assertRaises(FailedPrecondition) as raised:
            self.check()
        return str(raised.exception)


class EmptyTests(SecretCase):
    """What is emptied."""

    def test_the_files_are_gone_and_the_volumes_are_there(self) -> None:
        before = os.stat(self.token).st_ino, os.stat(self.secret).st_ino
        self.check()
        for _ in range(2):
            secrets.thd_empty(self.store, ["secret", "token"])
            self.assertEqual(os.listdir(self.secret), [])
            self.assertEqual(self.token.read_bytes(), b"")
        self.assertEqual((os.stat(self.token).st_ino, os.stat(self.secret).st_ino), before)
        self.assertEqual(self.scratch.read_text(), "the pod's own")

    def test_nothing_of_their_content_is_in_the_memory_that_they_had(self) -> None:
        with open(self.path("key"), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as seen:
            first = memoryview(seen)[: mmap.PAGESIZE]
            overwritten: list[bytes] = []
            self.patch(os, "ftruncate", lambda *_: overwritten.append(bytes(first)))
            secrets.thd_empty(self.store, ["secret"])
            first.release()
        self.assertEqual(overwritten, [bytes(mmap.PAGESIZE)])

    def test_a_link_leads_nowhere(self) -> None:
        outside = self.base / "outside"
        outside.write_text("not ours")
        self.path("link").symlink_to(outside)
        self.path("directory").symlink_to(self.base)
        secrets.thd_empty(self.store, ["secret"])
        self.assertEqual(outside.read_text(), "not ours")
        self.assertEqual(os.listdir(self.secret), [])

    def test_what_is_no_volume_in_memory_stays(self) -> None:
        (self.base / "disk/disk/directory/file").write_text("log")
        secrets.thd_empty(self.store, ["disk", "scratch", "unknown"])
        self.assertEqual((self.base / "disk/disk/directory/file").read_text(), "log")
        self.assertEqual(self.scratch.read_text(), "the pod's own")


class CheckTests(SecretCase):
    """What is refused."""

    def test_a_file_that_is_open(self) -> None:
        with open(self.path("key"), "rb"):
            self.assertIn("container c1 has the file", self.refused())
        self.check()
        with open(self.token, "rb"):
            self.assertIn("token/file", self.refused())

    def test_a_file_that_is_mapped(self) -> None:
        with open(self.path("key"), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # Python keeps a descriptor of its own for a map. Only the map is looked at here.
        listed = os.listdir
        self.patch(os, "listdir", lambda top: [] if str(top).endswith("fdinfo") else listed(top))
        self.assertIn("open or mapped", self.refused())
        mapped.close()

    def test_a_file_that_was_replaced_and_is_still_open(self) -> None:
        with open(self.path("key"), "rb"):
            shutil.rmtree(self.path("..2026"))
            self.assertIn("(deleted)", self.refused())

    def test_a_directory_that_is_open_is_none_of_them(self) -> None:
        for path in (self.secret, self.path("..2026")):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self.check()
            finally:
                os.close(descriptor)

    def test_a_file_of_the_pods_own_memory_may_be_open(self) -> None:
        with open(self.scratch, "rb"):
            self.check()

    def test_a_volume_that_nobody_would_bring_again(self) -> None:
        with self.assertRaisesRegex(FailedPrecondition, "volume token is in the VM's memory"):
            self.check("secret")

    def test_a_volume_that_cant_be_emptied(self) -> None:
        for id in ("disk", "scratch"):
            with self.assertRaisesRegex(InvalidArgument, f"volume {id}"):
                self.check("secret", "token", id)
        self.check("secret", "token", "unknown")

    def test_a_process_that_has_ended_uses_nothing(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        secrets.thd_check(self.store, ["secret", "token"], {"c1": [ended.pid]})

    def test_where_there_is_no_volume_all_is_well(self) -> None:
        empty = VolumeStore(self.base / "none", self.base / "no memory", mount=True)
        secrets.thd_check(empty, [], ME)
        secrets.thd_empty(empty, ["any"])


class RenameTests(SecretCase):
    """In a clone a volume is another pod's."""

    def test_a_volume_and_what_is_mounted_of_it_stay_the_same(self) -> None:
        parts = VolumeParts(self.store, self.base / "parts", mount=True)
        part = Path(parts.place("old", 0, "infranetes-volume:disk/below"))
        for _ in range(2):
            self.store.rename("disk", "new")
            parts.rename("old", "given")
        self.assertRaises(NotFound, self.store.path, "disk")
        (self.store.path("new") / "below" / "file").write_text("seen")
        moved = self.base / "parts/given/0"
        self.assertFalse(part.exists())
        self.assertEqual((moved / "file").read_text(), "seen")
        parts.release("given")
        self.assertFalse(moved.exists())

    def test_one_that_is_unknown_or_whose_id_is_taken(self) -> None:
        self.assertRaises(NotFound, self.store.rename, "unknown", "new")
        self.assertRaises(FailedPrecondition, self.store.rename, "secret", "token")
        self.assertRaises(InvalidArgument, self.store.rename, "../disk", "new")
        self.store.rename("secret", "renamed")
        self.assertEqual((self.store.path("renamed") / "key").read_bytes(), SECRET)
