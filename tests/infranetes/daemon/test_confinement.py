# SPDX-License-Identifier: Apache-2.0
"""What infranetes.service forbids the daemon, and that the daemon can do what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tests.harness.needs import needs_mounts, needs_programs, needs_registry, needs_systemd
from tests.harness.tools import need
from tests.infranetes.daemon import confined
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.unit import GUEST_UNIT, UNIT, UnitProgram
from tests.support.oci import busybox
from tests.support.registry import Registry

PAGE = ROOT / "docs" / "threat-model.md"
# The units, each with a drop-in or without, as systemd sees them.
EXPOSED = {
    "`infranetes.service`": (UNIT, "infranetes.service", None),
    "with `systemd-cni.conf`": (UNIT, "infranetes.service", ROOT / "docs" / "systemd-cni.conf"),
    "with `systemd-csi.conf`": (UNIT, "infranetes.service", ROOT / "docs" / "systemd-csi.conf"),
    "`infranetes-guest.service`": (GUEST_UNIT, "infranetes-guest.service", None),
    "`vmserver.service`": (ROOT / "debian" / "vmserver.service", "vmserver.service", None),
}

# Reads a volume as soon as there is a file in it.
_READS = """
import sys, time
from pathlib import Path
print("ready", flush=True)
until = time.monotonic() + 100
while not list(Path(sys.argv[1]).iterdir()) and time.monotonic() < until:
    time.sleep(0.05)
print([each.name for each in Path(sys.argv[1]).iterdir()])
"""

# Pulls an image with skopeo, and has disks made of its layers.
_PULLS = """
import sys
from pathlib import Path
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from infranetes.images import ImagesConfig, ImageStore

async def main(directory, reference):
    config = ImagesConfig(insecure_registries=(reference.partition("/")[0],))
    store = ImageStore(reactor, directory / "images", config)
    await store.start()
    try:
        image = await store.pull(reference)
        print(len(await store.disks(image.id)), "layers")
    except Exception as error:
        print(error)
    finally:
        await store.stop()
        reactor.stop()

work = main(Path(sys.argv[1]), sys.argv[2])
reactor.callWhenRunning(lambda: Deferred.fromCoroutine(work))
reactor.run()
"""


def capabilities() -> set[str]:
    """Return the capabilities that the unit leaves."""
    (line,) = re.findall(r"^CapabilityBoundingSet=(.+)$", UNIT.read_text(), flags=re.M)
    return set(line.split())


@needs_programs("systemd-analyze")
class UnitFileTests(SynchronousTestCase):
    def exposure(self, unit: Path, name: str, drop_in: Path | None) -> float:
        """Return what systemd says of a unit with a drop-in."""
        directory = Path(self.mktemp())
        (directory / f"{name}.d").mkdir(parents=True)
        shutil.copy(unit, directory / name)
        if drop_in is not None:
            shutil.copy(drop_in, directory / f"{name}.d")
        command = [need("systemd-analyze"), "security", "--offline=true", "--no-pager"]
        said = subprocess.run(
            [*command, str(directory / name)], check=True, capture_output=True, text=True
        ).stdout
        (level,) = re.findall(rf"Overall exposure level for {re.escape(name)}: ([\d.]+)", said)
        return float(level)

    def test_systemd_itself_finds_no_more_exposed_than_the_page_says(self) -> None:
        told = dict(re.findall(r"^\| ([^|]+?) \| (\d+\.\d) \|", PAGE.read_text(), flags=re.M))
        self.assertEqual(set(told), set(EXPOSED))
        for words, unit in EXPOSED.items():
            self.assertLessEqual(self.exposure(*unit), float(told[words]), words)

    def test_the_daemon_alone_is_exposed_by_at_most_3(self) -> None:
        self.assertLessEqual(self.exposure(*EXPOSED["`infranetes.service`"]), 3.0)

    def test_each_capability_is_explained_by_the_code_that_needs_it_and_no_other_is(self) -> None:
        text = PAGE.read_text().split("\n## What the daemon is root for\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (`CAP_[^|]+)\|[^|]+\|([^|]+)\|$", text, flags=re.M)
        explained = [name for names, _ in rows for name in re.findall(r"`(CAP_\w+)`", names)]
        self.assertEqual(sorted(explained), sorted({*capabilities(), "CAP_SYS_ADMIN"}))
        for names, code in rows:
            modules = re.findall(r"`([\w/]+\.py)`", code)
            self.assertTrue(modules, names)
            for module in modules:
                self.assertTrue((ROOT / module).exists(), module)


@needs_systemd
class SandboxTests(TestCase):
    """The sandbox that systemd makes from the unit."""

    timeout = 600

    def setUp(self) -> None:
        source = Path(confined.__file__).read_text()
        self.program = UnitProgram(source)
        self.addCleanup(self.program.remove)
        directory = self.program.directory
        number = directory / "victim"
        other = str(confined.OTHER)
        self.program.run("install", "-o", other, "-m", "600", "/dev/null", str(directory / "others"))
        self.program.run("install", "-d", "-g", other, "-m", "755", str(directory / "shared"))
        drop = f"setpriv --reuid={other} --keep-groups -- sleep 1000"
        script = f"echo $$ >{number}; exec {drop} >/dev/null 2>&1"
        self.program.run("setsid", "--fork", "sh", "-c", script)
        self.program.run(
            "sh", "-c", f"until grep -q {other} /proc/$(cat {number})/status; do sleep 0.1; done"
        )
        self.victim = number.read_text().strip()
        self.addCleanup(self.program.run, "kill", self.victim)

    def tried(self, *names: str) -> str:
        self.program.start(" ".join([str(self.program.directory), self.victim, *names]))
        return self.program.finished()

    def tried_without(self, capability: str) -> str:
        """Return the result of what needs this capability when the unit takes it away, too."""
        drop_in = self.program.directory / "without.conf"
        drop_in.write_text(f"[Service]\nCapabilityBoundingSet=~{capability}\n")
        self.program.add(drop_in)
        return self.tried(capability.lower())

    async def test_the_daemon_can_do_what_it_has_to_and_nothing_else(self) -> None:
        self.assertEqual(await deferToThread(self.tried), "done\n")

    async def test_it_needs_each_of_its_capabilities(self) -> None:
        for name in sorted(capabilities()):
            said = await deferToThread(self.tried_without, name)
            self.assertRegex(said, rf"\A{name.lower()}: .+\ndone\n\Z")


@needs_systemd
class MountTests(TestCase):
    timeout = 300

    async def test_what_kubelet_mounts_while_it_runs_is_seen(self) -> None:
        """Such as a Secret's tmpfs."""
        program = UnitProgram(_READS)
        self.addCleanup(program.remove)
        volume = program.directory / "volume"
        volume.mkdir()

        def mounted() -> str:
            program.start(str(volume))
            program.says("ready")
            program.run("mount", "-t", "tmpfs", "tmpfs", str(volume))
            program.run("touch", str(volume / "token"))
            try:
                return program.finished()
            finally:
                program.run("umount", str(volume))

        self.assertEqual(await deferToThread(mounted), "ready\n['token']\n")


@needs_registry
class ImageTests(TestCase):
    timeout = 300

    @needs_mounts
    async def test_images_are_pulled_and_their_layers_made_disks(self) -> None:
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        program = UnitProgram(_PULLS)
        self.addCleanup(program.remove)

        def pulled() -> str:
            reference = registry.push("web", "1", busybox())
            program.start(f"{program.directory} {reference}")
            return program.finished()

        self.assertEqual(await deferToThread(pulled), f"{len(busybox().diff_ids)} layers\n")
