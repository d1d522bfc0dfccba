# SPDX-License-Identifier: Apache-2.0
"""What the provider requires of its host before it starts."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.guest import reporting
from infranetes.guest.image import NoGuestImage
from infranetes.providers.interface import Awaited
from infranetes.providers.qemu import start_checks
from infranetes.providers.qemu.vm.paths import ProviderPaths
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable


class HostTests(SynchronousTestCase):
    """What QEMU needs of the node before the first VM: directories, programs, a guest image, the lock."""

    def test_a_directory_that_can_not_be_made_is_named_with_its_setting(self) -> None:
        root = Path(self.mktemp())
        paths = ProviderPaths(root / "state", root / "run")
        for _ in range(2):
            start_checks.make_directories(paths, root / "templates")
        for made in (paths.state, paths.run, paths.vms, root / "templates"):
            self.assertEqual(made.stat().st_mode & 0o777, 0o700)
        (root / "file").write_text("")
        with self.assertRaisesRegex(FailedPrecondition, "file/x can't be made: .*state_dir"):
            start_checks.make_directories(paths, root / "file" / "x")

    def test_what_a_start_waits_for_that_has_no_guest_image(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        missing = NoGuestImage("there is no guest image: make one")

        def why() -> Unavailable:
            return start_checks.without_image(directory, missing)

        self.assertEqual(str(why()), str(missing))
        with self.assertRaises(Unavailable), reporting.reported(directory, lambda words: None) as tell:
            tell("installing Debian")
            self.assertIsInstance(why(), Awaited)
            self.assertIn("which is being built: installing Debian", str(why()))
            raise Unavailable("no mirror answers")
        self.assertNotIsInstance(why(), Awaited)
        self.assertIn(f"{missing}; the last build was not completed: no mirror answers", str(why()))

    def test_a_program_that_is_not_installed_yet_is_waited_for_and_its_package_named(self) -> None:
        self.patch(start_checks, "_PROGRAMS", {"no-such-program": "its-package"})
        self.patch(os, "geteuid", lambda: 0)
        with self.assertRaises(Unavailable) as caught:
            start_checks.check_rights()
        self.assertIn("apt-get install its-package", str(caught.exception))

    def test_one_daemon_at_a_time(self) -> None:
        clock, paths = Clock(), ProviderPaths(Path(self.mktemp()), Path(self.mktemp()))
        paths.state.mkdir()
        held = self.successResultOf(start(start_checks.take_lock(clock, paths)))
        refused, soon = (start(start_checks.take_lock(clock, paths)) for _ in range(2))
        clock.pump([0.25] * 12)
        self.assertNoResult(soon)
        refused.cancel()
        self.failureResultOf(refused, CancelledError)
        os.close(held)
        clock.advance(0.25)
        held = self.successResultOf(soon)
        refused = start(start_checks.take_lock(clock, paths))
        clock.pump([0.25] * 24)
        self.failureResultOf(refused, FailedPrecondition)
        os.close(held)
