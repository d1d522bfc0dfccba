# SPDX-License-Identifier: Apache-2.0
"""A cloud's disk is made, or the making fails; the end-to-end tests show what is on the disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import cloud_disk, image
from infranetes.guest.cloud_disk import build_cloud_disk
from infranetes.guest.image import GuestImage
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, ResourceExhausted
from infranetes_common.loop_devices import loop_devices_of
from tests.harness.needs import needs_mounts, needs_programs

ROOT = Path(__file__).resolve().parents[3]
# The stand-in for the maker first does what has to be undone: it makes a mount and a loop device.
BEGIN = 'set -e; mount -t tmpfs tmpfs "$1/tree"; losetup --find --show "$1/disk.raw"; '
# Then it waits, and writes to a file that it does.
WAIT = BEGIN + 'echo $$ >"$1/../waits"; sleep 1000'
# A shell that starts the tests in the background has them ignore SIGINT.
PROCESS = """\
import signal, sys
from infranetes.guest import cli, cloud_disk
signal.signal(signal.SIGINT, signal.default_int_handler)
cloud_disk._MAKER = ("sh", "-c", sys.argv[1], "sh")
sys.exit(cli.main(["cloud-disk", "aws", sys.argv[2], "--image-dir", sys.argv[3]]))
"""


@needs_mounts
@needs_programs("fdisk", "mkfs.vfat", "mkfs.ext4")
class CloudDiskTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.target = self.directory / "pod.raw"
        self.images = Path(self.mktemp()).absolute()
        (self.images / "one").mkdir(parents=True)
        (self.images / image.CURRENT).symlink_to("one")
        made = GuestImage(self.images / "one", "one", 0.0, "bookworm", "6.1.0", (), ("docker",))
        for file in (made.disk, made.kernel, made.initrd):
            file.write_bytes(bytes(1 << 20))
        image.write(made)
        self.told: list[str] = []
        self.addCleanup(self.end_loop_devices)

    def end_loop_devices(self) -> None:
        for work in self.left():
            for device in self.loop_devices(work):
                subprocess.run(["losetup", "--detach", device], check=True)

    def build(self, maker: str = "", *, gib: int = 2, script: Path | None = None) -> None:
        if maker:
            self.patch(cloud_disk, "_MAKER", ("sh", "-c", maker, "sh"))
        build_cloud_disk(
            "aws", "docker", self.target, gib, self.told.append, image_dir=self.images, script=script
        )

    def left(self) -> list[Path]:
        """Return all files but the disk and the maker's messages."""
        return [each for each in self.directory.iterdir() if each.name not in ("pod.raw", "waits")]

    def loop_devices(self, work: Path) -> list[str]:
        return loop_devices_of(str(work / "disk.raw"))

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 100
        while not done():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    @contextlib.contextmanager
    def process(self) -> Iterator[subprocess.Popen[str]]:
        """Start another process that makes the disk and stops in the middle."""
        command = [sys.executable, "-c", PROCESS, WAIT, str(self.target), str(self.images)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            try:
                self.until(lambda: (self.directory / "waits").exists())
                yield process
            finally:
                process.kill()

    def test_a_disk_is_there_when_it_is_whole(self) -> None:
        self.target.write_text("of before")
        size = 'test "$(stat --format %s "$1/disk.raw")" = 2147483648; '
        self.build(
            f'{size}test "$(cat {self.target})" = "of before"; echo "I: half"; echo whole >"$1/disk.raw"'
        )
        self.assertEqual(self.target.read_text(), "whole\n")
        self.assertEqual(self.told, ["half"])
        self.assertEqual(self.left(), [])

    def test_the_maker_has_the_files_of_the_disk_and_the_script(self) -> None:
        script = self.directory.parent / "script"
        script.write_text("")
        self.build('cp "$1/files/etc/infranetes/vmserver.toml" "$1/disk.raw"; echo "I: $7"', script=script)
        self.assertIn('source = "aws"', self.target.read_text())
        self.assertEqual(self.told, [str(script)])

    def test_what_fails_is_told_and_undone(self) -> None:
        self.target.write_text("of before")
        with self.assertRaises(InfranetesError) as caught:
            self.build(BEGIN + "echo no such thing; exit 3")
        self.assertIn("making the disk failed with exit code 3", str(caught.exception))
        self.assertIn("no such thing", str(caught.exception))
        self.assertEqual((self.target.read_text(), self.left()), ("of before", []))
        self.assertNotIn(str(self.directory), Path("/proc/self/mountinfo").read_text())
        self.assertNotIn(str(self.directory), subprocess.check_output(["losetup", "--list"], text=True))

    def test_the_real_maker_tells_which_step_failed(self) -> None:
        with self.assertRaises(InfranetesError) as caught:
            self.build()  # the guest image has no file system
        self.assertIn("mount failed", str(caught.exception))
        self.assertEqual((self.told, self.left()), (["copying the guest image"], []))

    def test_one_that_is_asked_to_end_undoes_what_it_did(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.process() as process:
                process.send_signal(number)
                _, errors = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 130, errors)
            self.assertIn("nothing is left", errors)
            self.assertEqual(self.left(), [])
            (self.directory / "waits").unlink()

    def test_what_a_killed_one_left_ends_with_it_or_with_the_next(self) -> None:
        with self.process():
            [work] = self.left()
            self.assertTrue(processes_with(str(work)))
        self.until(lambda: not processes_with(str(work)))
        self.assertEqual(len(self.loop_devices(work)), 1)
        self.build('echo whole >"$1/disk.raw"')
        self.assertEqual((self.left(), self.loop_devices(work)), ([], []))
        self.assertEqual(self.target.read_text(), "whole\n")

    def test_one_that_is_at_work_is_left_alone(self) -> None:
        with self.process() as process:
            [work] = self.left()
            self.build('echo whole >"$1/disk.raw"')
            self.assertEqual(self.left(), [work])
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        self.assertEqual(self.left(), [])

    def test_what_is_of_no_use_is_named_before_anything_is_made(self) -> None:
        for arguments, words in (
            (("moon", "docker", self.target, 8), "moon"),
            (("aws", "rkt", self.target, 8), "rkt"),
            (("aws", "docker", self.target, 1), "size 1"),
        ):
            with self.assertRaises(InvalidArgument) as caught:
                build_cloud_disk(*arguments, self.told.append, image_dir=self.images)
            self.assertIn(words, str(caught.exception))
        self.assertRaises(InvalidArgument, self.build, script=self.directory / "none")
        self.patch(cloud_disk, "TOOLS", {"no-such-tool": "a-package"})
        self.assertIn("a-package", str(self.assertRaises(FailedPrecondition, self.build)))
        self.assertEqual(self.left(), [])

    def test_a_full_disk_is_told_before_anything_is_made(self) -> None:
        self.patch(cloud_disk, "NEEDED_BYTES", 1 << 60)
        self.assertIn("make room", str(self.assertRaises(ResourceExhausted, self.build)))
        self.assertEqual(self.left(), [])


def processes_with(word: str) -> list[str]:
    """Return the ids of processes that have this word among their arguments."""
    found = []
    for file in (each / "cmdline" for each in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            if word.encode() in file.read_bytes() and file.parent.name != str(os.getpid()):
                found.append(file.parent.name)
    return found
