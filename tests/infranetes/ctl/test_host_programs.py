# SPDX-License-Identifier: Apache-2.0
"""What a support bundle has of systemd and nftables."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl import host, host_programs
from infranetes.guest import image as images
from infranetes.guest.image import GuestImage
from infranetes_common import commands
from infranetes_common.commands import Command, Output
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor, installed

TABLES = (
    "table ip filter\ntable ip infranetes_infranetes0\ntable bridge infranetes_infranetes0\ntable ip nat\n"
)


class ProgramTests(SynchronousTestCase):
    """Over programs that say what a test wants."""

    def setUp(self) -> None:
        self.asked: list[str] = []
        self.said: dict[str, Output] = {}
        for module in (host_programs, commands):
            self.patch(module, "run", self.run_fake)

    async def run_fake(self, reactor: IReactor, command: Command) -> Output:
        self.asked.append(" ".join(command.words))
        return self.said.get(self.asked[-1], Output(0, f"<{self.asked[-1]}>\n".encode(), b""))

    def test_our_tables_are_listed_and_no_others(self) -> None:
        self.said["nft list tables"] = Output(0, TABLES.encode(), b"")
        text = self.successResultOf(start(host_programs.tables(installed())))
        self.assertEqual(
            text,
            "# 2 tables\n<nft list table ip infranetes_infranetes0>\n"
            "<nft list table bridge infranetes_infranetes0>\n",
        )

    def test_units_that_do_not_run_are_told_of(self) -> None:
        real = self.run_fake

        async def stopped(reactor: IReactor, command: Command) -> Output:
            return Output(3, (await real(reactor, command)).stdout, b"")

        self.patch(host_programs, "run", stopped)
        text = self.successResultOf(start(host_programs.units(installed())))
        self.assertIn("infranetes infranetes-guest>", text)

    def test_a_node_without_systemd_is_told_of(self) -> None:
        async def nothing(reactor: IReactor, command: Command) -> Output:
            return Output(1, b"", b"System has not been booted with systemd")

        self.patch(host_programs, "run", nothing)
        failure = self.failureResultOf(start(host_programs.units(installed())), FailedPrecondition)
        self.assertIn("has not been booted with systemd", str(failure.value))

    def test_each_unit_has_its_journal(self) -> None:
        for unit in (host_programs.UNIT, host_programs.GUEST_UNIT):
            text = self.successResultOf(start(host_programs.journal(installed(), unit)))
            self.assertIn(f"--unit={unit} ", text)

    def test_of_a_long_journal_the_end_is_kept(self) -> None:
        async def lines(reactor: IReactor, command: Command) -> Output:
            self.assertIn("--reverse", command.words)
            return Output(0, b"four\nthree\n  a\n  b\ntwo\none\n", b"")

        self.patch(host_programs, "run", lines)
        self.patch(host_programs, "MAX_JOURNAL", 24)
        text = self.successResultOf(start(host_programs.journal(installed(), "x")))
        self.assertEqual(text, "two\nthree\n  a\n  b\nfour\n")


class GuestImageTests(SynchronousTestCase):
    def test_it_is_what_the_manifest_says(self) -> None:
        directory = Path(self.mktemp())
        image = GuestImage(directory / "one", "key", 5.0, "bookworm", "6.1.0", ("vmserver_1",))
        image.directory.mkdir(parents=True)
        for part in (image.disk, image.kernel, image.initrd):
            part.touch()
        images.write(image)
        (directory / images.CURRENT).symlink_to("one")
        shown = host.guest_image({"qemu": {"image_dir": str(directory)}})
        self.assertEqual((shown["kernel_version"], shown["packages"]), ("6.1.0", ("vmserver_1",)))

    def test_a_node_without_one_says_so(self) -> None:
        with self.assertRaisesRegex(FailedPrecondition, "there is no guest image in "):
            host.guest_image({"qemu": {"image_dir": self.mktemp()}})
