# SPDX-License-Identifier: Apache-2.0
"""What the command line chooses reaches the daemon, and its QEMU."""

from __future__ import annotations

import contextlib
import io
import tomllib
from pathlib import Path

import attrs
import cattrs
from twisted.trial.unittest import SynchronousTestCase

from bench.__main__ import BENCHES, parsed
from bench.daemon import ROOT, Daemon
from bench.setup import Setup
from infranetes.providers.qemu.host.uids import parse
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import QemuSettings
from tests.cluster.__main__ import options as cluster_options
from tests.interop.critest import options as critest_options


class CommandLineTests(SynchronousTestCase):
    def test_without_names_all_benches_run(self) -> None:
        self.assertEqual(parsed([]).names, [*BENCHES])

    def test_a_choice_is_named_with_its_bench(self) -> None:
        self.assertEqual(parsed(["waits", "lives:aws"]).names, ["waits", "lives:aws"])

    def test_unknown_benches_and_accelerators_are_refused(self) -> None:
        for wrong in (["fast"], ["waits:aws"], ["--accelerator", "hvf"]):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                parsed(wrong)

    def test_every_bench_is_a_module_that_runs(self) -> None:
        for module, _ in BENCHES.values():
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            self.assertIn("\nasync def run(reactor: IReactor, report: Report", source, module)


class AcceleratorTests(SynchronousTestCase):
    def settings(self, setup: Setup) -> QemuSettings:
        """What a bench's daemon reads of its configuration."""
        daemon = Daemon(object(), "qemu", setup.qemu())  # type: ignore[arg-type]  # it is not started
        self.addCleanup(daemon.remove)
        document = tomllib.loads((daemon.root / "infranetes.toml").read_text())
        return cattrs.structure(document["providers"]["qemu"], QemuSettings)

    def test_a_forced_accelerator_reaches_the_daemon(self) -> None:
        for accelerator in ("auto", "kvm", "tcg"):
            given = parsed(["--accelerator", accelerator])
            settings = self.settings(Setup(given.accelerator, given.image_dir))
            self.assertEqual(settings.accelerator, accelerator)

    def test_kvm_runs_guests_on_the_nodes_own_processor(self) -> None:
        line = CommandLine("qemu", "7.2", "kvm", memory_mib=1024, max_memory_mib=1024, max_cpus=1)
        for arguments in (line.template_arguments(), line.clone_arguments()):
            self.assertEqual(arguments[arguments.index("-accel") + 1], "kvm")
            self.assertEqual(arguments[arguments.index("-cpu") + 1], "host")
        emulated = attrs.evolve(line, accelerator="tcg")
        self.assertNotEqual(line.template_inputs("image"), emulated.template_inputs("image"))

    def test_the_others_that_start_the_daemon_take_it_too(self) -> None:
        self.assertEqual(critest_options(["--accelerator", "kvm"]).accelerator, "kvm")
        self.assertEqual(cluster_options(["--accelerator", "kvm"]).accelerator, "kvm")


class SetupTests(SynchronousTestCase):
    def test_a_given_guest_image_is_every_benchs(self) -> None:
        setup = Setup(image_dir=Path("/guest"))
        self.assertEqual({setup.qemu()["image_dir"], setup.qemu(docker=True)["image_dir"]}, {"/guest"})

    def test_no_vm_has_a_user_of_another_daemons_vms(self) -> None:
        ours = parse(str(Setup().qemu()["uids"]))
        default = parse(QemuSettings().uids)
        self.assertTrue(ours.last < default.first or ours.first > default.last)
