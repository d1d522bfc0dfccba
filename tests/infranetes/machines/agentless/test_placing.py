# SPDX-License-Identifier: Apache-2.0
"""A directory of a guest is made to have exactly certain files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless import placing
from infranetes.machines.agentless.access import GuestFile
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered, ResourceExhausted
from infranetes_common.wire import vmserver
from tests.harness.needs import find_program, needs_programs

NAMES = ["with space", "-rf", "*", "$(id)", "back\\slash", "quote'\"", "ünïcode", " both ends ", "..data"]


def files(**content: str) -> dict[str, GuestFile]:
    return {name.replace("__", "/"): GuestFile(text.encode()) for name, text in content.items()}


class PlacingCase(SynchronousTestCase):
    """The script, run here."""

    shell: tuple[str, ...] = ("/bin/sh",)

    def setUp(self) -> None:
        self.top = Path(self.mktemp()).absolute()
        self.directory = self.top / "a" / "secrets"
        self.environment = {"PATH": os.environ["PATH"]}

    def put(self, wanted: Mapping[str, GuestFile]) -> None:
        _, *words = placing.command(str(self.directory))
        done = subprocess.run(
            [*self.shell, *words],
            input=placing.archive(wanted, 1e9),
            env=self.environment,
            capture_output=True,
            timeout=60,
        )
        placing.check(
            vmserver.ExecSyncResponse(exit_code=done.returncode, stderr=done.stderr), str(self.directory)
        )

    def found(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.directory)): path.read_text()
            for path in self.directory.rglob("*")
            if not path.is_dir()
        }


class ScriptTests(PlacingCase):
    """The files that are there afterwards."""

    def test_the_directory_is_made_and_has_the_files_and_their_modes(self) -> None:
        self.put(
            {
                "token": GuestFile(b"s3cret\0\xff", 0o400),
                "deep/er/key": GuestFile(b"", 0o640),
                "plain": GuestFile(b"x" * 100_000),
            }
        )
        self.assertEqual((self.directory / "token").read_bytes(), b"s3cret\0\xff")
        self.assertEqual((self.directory / "plain").read_bytes(), b"x" * 100_000)
        modes = {path.name: path.stat().st_mode & 0o7777 for path in self.directory.rglob("*")}
        self.assertEqual(modes, {"token": 0o400, "plain": 0o644, "deep": 0o755, "er": 0o755, "key": 0o640})

    def test_what_is_no_longer_wanted_is_gone_and_what_is_stays(self) -> None:
        self.put(files(a="1", b="2", c__d="3", c__e="4"))
        self.put(files(b="2", c__e="5"))
        self.assertEqual(self.found(), {"b": "2", "c/e": "5"})
        self.put(files(b="2"))
        self.assertEqual(sorted(os.listdir(self.directory)), ["b"])
        self.put({})
        self.assertEqual(os.listdir(self.directory), [])

    def test_twice_is_as_once(self) -> None:
        for _ in range(2):
            self.put(files(a="1", b__c="2"))
            self.assertEqual(self.found(), {"a": "1", "b/c": "2"})

    def test_each_is_replaced_whole(self) -> None:
        """Whoever has the old file open goes on reading it, and no file is written to while it is there."""
        self.put(files(a="old"))
        with open(self.directory / "a") as old:
            self.put(files(a="new"))
            self.assertEqual(old.read(), "old")
        self.assertEqual(self.found(), {"a": "new"})

    def test_a_file_takes_a_directorys_place_and_the_other_way_round(self) -> None:
        self.put(files(a="file", b__x="below", b__y__z="deeper"))
        self.put(files(a__x="below", b="file"))
        self.assertEqual(self.found(), {"a/x": "below", "b": "file"})

    def test_links_are_replaced_and_what_they_lead_to_stays(self) -> None:
        outside = self.top / "outside"
        outside.mkdir(parents=True)
        (outside / "kept").write_text("kept")
        self.directory.mkdir(parents=True)
        for name in ("a", "b", "c"):
            (self.directory / name).symlink_to(outside)
        self.put(files(a="file", b__kept="other"))
        self.assertEqual(self.found(), {"a": "file", "b/kept": "other"})
        self.assertEqual((outside / "kept").read_text(), "kept")
        self.assertEqual(os.listdir(outside), ["kept"])

    def test_names_of_any_kind(self) -> None:
        wanted = {name: GuestFile(name.encode()) for name in NAMES}
        self.put(wanted)
        self.assertEqual(self.found(), {name: name for name in NAMES})
        self.put(files(x="1"))
        self.assertEqual(self.found(), {"x": "1"})

    def test_names_that_somebody_in_the_guest_has_made_lead_nowhere_else(self) -> None:
        self.directory.mkdir(parents=True)
        other = self.top / "other"
        other.write_text("kept")
        trap = self.directory / f"x\n{other}".lstrip("/")
        trap.parent.mkdir(parents=True)
        trap.write_text("")
        self.put(files(a="1"))
        self.assertEqual((self.found(), other.read_text()), ({"a": "1"}, "kept"))

    def test_what_a_killed_script_has_left_is_no_file_of_the_directory(self) -> None:
        left = self.directory / ".infranetes-new"
        left.mkdir(parents=True)
        (left / "half").write_text("hal")
        self.put(files(a="1"))
        self.assertEqual(os.listdir(self.directory), ["a"])

    def test_a_directory_that_cannot_be_made_is_told(self) -> None:
        self.top.mkdir(parents=True)
        (self.top / "a").write_text("no directory")
        error = self.assertRaises(FailedPrecondition, self.put, files(a="1"))
        self.assertIn(str(self.directory), str(error))
        self.assertEqual((self.top / "a").read_text(), "no directory")

    def test_a_path_with_quota_in_it_is_no_full_disk(self) -> None:
        self.top.mkdir(parents=True)
        (self.top / "quota").write_text("no directory")
        self.directory = self.top / "quota" / "secrets"
        self.assertRaises(FailedPrecondition, self.put, files(a="1"))


@needs_programs("busybox")
class BusyboxScriptTests(ScriptTests):
    """The same in a guest that has Busybox alone."""

    def setUp(self) -> None:
        super().setUp()
        busybox = find_program("busybox")
        assert busybox is not None
        programs = self.top.parent / f"{self.top.name}-programs"
        programs.mkdir(parents=True)
        self.addCleanup(shutil.rmtree, programs)
        for name in ("sh", "tar", "find", "mkdir", "rm", "mv", "["):
            (programs / name).symlink_to(busybox)
        self.shell = (str(programs / "sh"),)
        self.environment = {"PATH": str(programs)}


class LackingTests(PlacingCase):
    """A guest without one of the programs."""

    def test_what_the_guest_lacks_is_told(self) -> None:
        programs = self.top.parent / f"{self.top.name}-programs"
        programs.mkdir(parents=True)
        for name in ("find", "mkdir", "rm", "mv"):
            (programs / name).symlink_to(str(find_program(name)))
        self.environment = {"PATH": str(programs)}
        error = self.assertRaises(NotOffered, self.put, files(a="1"))
        self.assertIn("tar", str(error))
        self.assertEqual(self.found(), {})


class RefusalTests(SynchronousTestCase):
    """What is refused before anything is sent."""

    def test_paths_that_lead_out_of_the_directory(self) -> None:
        away = ("", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "a/", "./a", ".", ".infranetes-new/x")
        for path in (*away, "a\0b", "a\nb", "x" * 256, "\udcff", "d/" * 2500 + "x"):
            with self.subTest(path=path[:20]):
                self.assertRaises(InvalidArgument, placing.archive, {path: GuestFile(b"")}, 1e9)

    def test_directories_that_are_none(self) -> None:
        for path in ("", "relative", "/", "//", "/a/../b", "/a\0", "/a\nb"):
            with self.subTest(path=path):
                self.assertRaises(InvalidArgument, placing.command, path)

    def test_a_file_that_is_to_be_a_directory_too(self) -> None:
        for wanted in (files(a="1", a__b="2"), files(a="1", a__b__c="2")):
            error = self.assertRaises(InvalidArgument, placing.archive, wanted, 1e9)
            self.assertIn("'a'", str(error))

    def test_bits_other_than_permissions_are_not_passed_on(self) -> None:
        self.assertEqual(
            placing.archive({"a": GuestFile(b"", 0o104755)}, 1e9),
            placing.archive({"a": GuestFile(b"", 0o755)}, 1e9),
        )


class FailureTests(SynchronousTestCase):
    """What is made of the script's failures."""

    def test_a_full_disk_is_resource_exhausted(self) -> None:
        result = vmserver.ExecSyncResponse(
            exit_code=2, stderr=b"tar: a: Cannot write: No space left on device"
        )
        self.assertRaises(ResourceExhausted, placing.check, result, "/run/secrets")

    def test_the_end_of_a_long_message_is_told(self) -> None:
        result = vmserver.ExecSyncResponse(exit_code=2, stderr=b"x" * 100_000 + b" the end\xff")
        error = self.assertRaises(FailedPrecondition, placing.check, result, "/run/secrets")
        self.assertIn("the end", str(error))
        self.assertLess(len(str(error)), 1200)
