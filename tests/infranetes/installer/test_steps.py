# SPDX-License-Identifier: Apache-2.0
"""An installation is whole or not there, whatever happens in between; a removal leaves what was before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer import layout, record
from infranetes.installer.kubelets import SOCKET
from infranetes.installer.record import Phase
from infranetes.installer.steps import TABLE, Installer, Options, Wanted
from infranetes.installer.trees import Trees
from infranetes.installer.written import Written
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from tests.infranetes.installer.system import FakeSystem, Killed, files, tree

CONFIGURATION = 'node = "@NODE@"\n[delegate]\nsocket = "@RUNTIME_SOCKET@"\n'
DROP_IN = "/etc/systemd/system/kubelet.service.d/zz-infranetes.conf"


class StepsCase(SynchronousTestCase):
    """A node with kubelet and containerd, and trees of two releases."""

    def setUp(self) -> None:
        self.patch(os, "sync", lambda: None)  # the whole machine waits for it
        self.top = Path(self.mktemp()).absolute()
        self.system = FakeSystem(self.top / "node")
        self.images = self.top / "images"
        for name in ("0.2.0-aaaa", "0.3.0-bbbb"):
            tree(self.images, name)
        self.before = self.system.snapshot()
        self.pods = 0
        self.used: set[str] = set()
        self.time = 0.0
        self.words: list[str] = []

    def installer(
        self, name: str = "0.2.0-aaaa", configuration: str = CONFIGURATION, **options: bool
    ) -> Installer:
        node_files = files(self.system)
        return Installer(
            node_files,
            self.system,
            Trees(node_files, self.images / name, self.top / "no-guest", lambda: self.used),
            Options(configuration, "node-1", "10.0.0.5", "", **options),
            self.system.answers,
            lambda: self.pods,
            self.words.append,
            now=lambda: self.time,
            sleep=self.pass_time,
        )

    def pass_time(self, seconds: float) -> None:
        self.time += seconds

    @property
    def record(self) -> record.Record:
        return record.read(self.system.root / "opt/infranetes")

    def assert_runs(self, name: str) -> None:
        """The daemon of this tree runs, kubelet uses it, and nothing of a step is left."""
        self.assertEqual(self.system.tree, name)
        self.assertTrue(self.system.kubelet_uses_daemon)
        self.assertEqual((self.record.phase, self.record.tree), (Phase.INSTALLED, name))
        home = self.system.root / "opt/infranetes"
        self.assertEqual((home / "current").readlink(), Path(name))
        left = {path.name for path in home.iterdir()} - {
            "current",
            "installed.json",
            self.record.previous,
            name,
        }
        self.assertEqual(left, set())

    def assert_as_before(self) -> None:
        self.assertEqual(self.system.snapshot(), self.before)


class TableTests(SynchronousTestCase):
    def test_there_is_an_action_for_each_phase_and_wish(self) -> None:
        self.assertEqual(set(TABLE), {(phase, wanted) for phase in Phase for wanted in Wanted})


class InstallTests(StepsCase):
    def test_kubelet_reaches_the_daemon_and_the_daemon_the_runtime(self) -> None:
        self.installer().present()
        self.assert_runs("0.2.0-aaaa")
        command = self.system.units["kubelet.service"].command
        self.assertTrue(command.startswith("/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS"), command)
        self.assertIn("$KUBELET_EXTRA_ARGS", command)
        self.assertTrue(command.endswith(f"--container-runtime-endpoint={SOCKET}"))
        configured = self.system.root / "etc/infranetes/infranetes.toml"
        self.assertEqual(
            configured.read_text(),
            'node = "node-1"\n[delegate]\nsocket = "/run/containerd/containerd.sock"\n',
        )
        self.assertEqual(configured.stat().st_mode & 0o777, 0o600)
        self.assertIn("/opt/infranetes/0.2.0-aaaa/usr/bin/twistd", self.system.units[layout.UNIT].command)

    def test_containerd_is_neither_restarted_nor_written_to(self) -> None:
        self.installer().present()
        self.assertFalse([words for words in self.system.said if "containerd" in " ".join(words)])
        changed = {
            name
            for name, state in self.system.snapshot().items()
            if name not in ("units",) and self.before.get(name) != state
        }
        self.assertFalse([name for name in changed if "containerd" in name])

    def test_kubelet_is_pointed_at_the_daemon_only_once_that_answers(self) -> None:
        self.installer().present()
        restarts = [words[2] for words in self.system.said if words[:2] == ("systemctl", "restart")]
        self.assertEqual(restarts, ["infranetes.service", "kubelet.service"])

    def test_twice_is_as_once_and_restarts_nothing(self) -> None:
        self.installer().present()
        state = self.system.snapshot()
        self.system.said.clear()
        self.installer().present()
        self.assertEqual(self.system.snapshot(), state)
        self.assertFalse([words for words in self.system.said if words[1] in ("restart", "daemon-reload")])

    def test_removed_the_node_is_as_before(self) -> None:
        self.installer(csi=True, cni=True).present()
        self.assertIn(f"etc/systemd/system/{layout.UNIT}.d/csi.conf", self.system.snapshot())
        self.installer().absent()
        self.assert_as_before()
        self.assertEqual(self.system.ended_networks, 1)
        self.installer().absent()
        self.assert_as_before()

    def test_a_node_that_has_the_package_is_left_to_it(self) -> None:
        unit = self.system.root / "usr/lib/systemd/system/infranetes.service"
        unit.write_text("[Service]\nExecStart=/usr/bin/twistd3 infranetes\n")
        self.system.reload()
        before = self.system.snapshot()
        error = self.assertRaises(FailedPrecondition, self.installer().present)
        self.assertIn("installed as a package", str(error))
        self.assertEqual(self.system.snapshot(), before)

    def test_a_file_of_somebody_elses_is_never_replaced(self) -> None:
        for path in (layout.CONFIGURATION, DROP_IN):
            target = self.system.root / path.lstrip("/")
            target.parent.mkdir(parents=True)
            target.write_text("mine\n")
            before = self.system.snapshot()
            error = self.assertRaises(FailedPrecondition, self.installer().present)
            self.assertIn(path, str(error))
            self.assertEqual(self.system.snapshot(), before)
            target.unlink()
            target.parent.rmdir()

    def test_a_node_without_the_runtimes_socket_is_refused(self) -> None:
        (self.system.root / "run/containerd/containerd.sock").unlink()
        self.assertIn("containerd.sock", str(self.assertRaises(FailedPrecondition, self.installer().present)))

    def test_a_daemon_that_does_not_start_leaves_nothing(self) -> None:
        self.system.broken = {"0.2.0-aaaa"}
        self.assertRaises(InfranetesError, self.installer().present)
        self.assert_as_before()

    def test_a_kubelet_that_does_not_start_uses_its_own_runtime_again(self) -> None:
        self.system.broken = {SOCKET}
        error = self.assertRaises(Unavailable, self.installer().present)
        self.assertIn("kubelet.service", str(error))
        self.assertTrue(self.system.units["kubelet.service"].active)
        self.assert_as_before()

    def test_kubelet_may_be_left_to_somebody_else(self) -> None:
        self.installer(manage_kubelet=False).present()
        self.assertFalse(self.system.kubelet_uses_daemon)
        self.assertNotIn(("systemctl", "restart", "kubelet.service"), self.system.said)

    def test_a_link_out_of_the_root_is_not_followed(self) -> None:
        outside = self.top / "outside"
        outside.mkdir()
        (self.system.root / "etc/infranetes").symlink_to(outside)
        self.assertRaises(FailedPrecondition, self.installer().present)
        self.assertEqual(list(outside.iterdir()), [])

    def test_a_configuration_that_names_what_there_is_not_is_refused_before_anything(self) -> None:
        error = self.assertRaises(InfranetesError, self.installer(configuration='a = "@NOTHING@"\n').present)
        self.assertIn("@NOTHING@", str(error))
        self.assert_as_before()

    def test_a_record_that_is_damaged_stops_everything(self) -> None:
        self.installer().present()
        (self.system.root / "opt/infranetes/installed.json").write_text('{"phase": "installed"')
        before = self.system.snapshot()
        for attempt in (self.installer().present, self.installer().absent):
            self.assertIn("installed.json", str(self.assertRaises(InfranetesError, attempt)))
        self.assertEqual(self.system.snapshot(), before)


class UpgradeTests(StepsCase):
    def setUp(self) -> None:
        super().setUp()
        self.installer().present()
        self.system.said.clear()

    def test_the_new_daemon_takes_over_and_kubelet_is_not_restarted(self) -> None:
        self.installer("0.3.0-bbbb").present()
        self.assert_runs("0.3.0-bbbb")
        self.assertEqual(self.record.previous, "0.2.0-aaaa")
        self.assertNotIn(("systemctl", "restart", "kubelet.service"), self.system.said)
        self.assertFalse([words for words in self.system.said if words[1] in ("stop", "kill")])

    def test_back_again_is_an_upgrade_like_any_other(self) -> None:
        self.installer("0.3.0-bbbb").present()
        self.installer("0.2.0-aaaa").present()
        self.assert_runs("0.2.0-aaaa")
        self.installer().absent()
        self.assert_as_before()

    def test_one_that_does_not_start_leaves_the_one_before_running(self) -> None:
        before = self.system.snapshot()
        self.system.broken = {"0.3.0-bbbb"}
        error = self.assertRaises(Unavailable, self.installer("0.3.0-bbbb").present)
        self.assertIn("runs 0.2.0-aaaa again", str(error))
        self.assertEqual(self.system.tree, "0.2.0-aaaa")
        self.assertEqual(self.record.phase, Phase.INSTALLED)
        self.installer().present()  # nothing is left of the attempt
        self.assertEqual(self.system.snapshot(), before)

    def test_a_disk_that_is_full_leaves_the_one_before_running(self) -> None:
        before = self.system.snapshot()

        def full(*arguments: object, **options: object) -> None:
            Path(str(arguments[1])).mkdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[1])

        self.patch(shutil, "copytree", full)
        error = self.assertRaises(Unavailable, self.installer("0.3.0-bbbb").present)
        self.assertRegex(str(error), "runs 0.2.0-aaaa again: .*No space left")
        self.assertEqual(self.system.snapshot(), before)

    def test_of_three_trees_the_oldest_goes_unless_a_vm_runs_by_it(self) -> None:
        tree(self.images, "0.4.0-cccc")
        self.used = {"/opt/infranetes/0.2.0-aaaa/usr/bin/qemu-system-x86_64"}
        self.installer("0.3.0-bbbb").present()
        self.installer("0.4.0-cccc").present()
        home = self.system.root / "opt/infranetes"
        self.assertTrue((home / "0.2.0-aaaa").is_dir())
        self.used = set()
        self.installer("0.4.0-cccc").present()
        self.assertFalse((home / "0.2.0-aaaa").exists())
        self.assertTrue((home / "0.3.0-bbbb").is_dir())

    def test_another_configuration_restarts_the_daemon_and_one_that_it_refuses_is_taken_back(self) -> None:
        self.installer(configuration=CONFIGURATION + 'log = "a"\n').present()
        self.assertIn(("systemctl", "restart", "infranetes.service"), self.system.said)
        good = self.system.snapshot()
        refused = self.installer(configuration=CONFIGURATION + 'log = "b"\n')
        text = self.system.root / "etc/infranetes/infranetes.toml"
        self.patch(
            self.system,
            "answers",
            lambda seconds: (
                (_ for _ in ()).throw(InfranetesError("no")) if '"b"' in text.read_text() else None
            ),
        )
        refused._answers = self.system.answers
        self.assertRaises(Unavailable, refused.present)
        self.assertEqual(self.system.snapshot(), good)

    def test_a_kubelet_that_is_started_otherwise_since_is_followed(self) -> None:
        """As after an update of kubelet's package: the flag is added to what its unit says now."""
        unit = self.system.root / "usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf"
        unit.write_text(unit.read_text().replace("$KUBELET_EXTRA_ARGS", "$KUBELET_EXTRA_ARGS --v=4"))
        self.system.reload()
        self.installer().present()
        self.assertIn("--v=4 --container-runtime-endpoint=", self.system.units["kubelet.service"].command)

    def test_what_an_administrator_deleted_is_there_again(self) -> None:
        (self.system.root / DROP_IN.lstrip("/")).unlink()
        (self.system.root / layout.UNIT_FILE.lstrip("/")).unlink()
        self.installer().present()
        self.assert_runs("0.2.0-aaaa")


class RemoveTests(StepsCase):
    def test_pods_that_are_vms_are_waited_for(self) -> None:
        self.installer().present()
        self.pods = 2
        state = self.system.snapshot()
        self.assertIn("2 pods", str(self.assertRaises(FailedPrecondition, self.installer().absent)))
        self.assertEqual(self.system.snapshot(), state)
        self.pods = 0
        self.installer().absent()
        self.assert_as_before()

    def test_or_ended_when_that_is_asked_for(self) -> None:
        self.installer().present()
        self.pods = 2
        self.installer(end_pods=True).absent()
        self.assert_as_before()

    def test_kubelet_has_its_runtime_before_the_daemon_is_stopped(self) -> None:
        self.installer().present()
        self.system.said.clear()
        self.installer().absent()
        verbs = [words[1:3] for words in self.system.said if words[1] in ("restart", "stop")]
        self.assertEqual(verbs, [("restart", "kubelet.service"), ("stop", "infranetes.service")])

    def test_volumes_stay(self) -> None:
        self.installer().present()
        volumes = self.system.root / "var/lib/infranetes/qemu/volumes"
        volumes.mkdir(parents=True)
        (volumes / "data.raw").write_text("data")
        (volumes.parent / "vms").mkdir()
        self.installer().absent()
        left = {path for path in self.system.snapshot() if path not in self.before}
        there = (
            "infranetes",
            "infranetes/qemu",
            "infranetes/qemu/volumes",
            "infranetes/qemu/volumes/data.raw",
        )
        self.assertEqual(left, {f"var/lib/{each}" for each in there})
        self.assertIn("/var/lib/infranetes/qemu/volumes stays", self.words[-1])

    def test_a_kubelet_that_is_uninstalled_meanwhile_does_not_keep_it(self) -> None:
        self.installer().present()
        for path in ("kubelet.service", "kubelet.service.d/10-kubeadm.conf"):
            (self.system.root / "usr/lib/systemd/system" / path).unlink()
        self.system.units.pop("kubelet.service")
        self.system.reload()
        self.installer().absent()
        self.assertFalse((self.system.root / "opt/infranetes").exists())


class KilledTests(StepsCase):
    """The installer ends before and after each program that it runs, and at each file that it writes."""

    def effects(self, act: Callable[[], None], at: int) -> bool:
        """Do it, killed at its effect number `at`; return whether it got there."""
        count = 0

        def count_one() -> None:
            nonlocal count
            count += 1
            if count == at:
                raise Killed

        self.system.fails = lambda words: count_one() if words[1] not in ("show", "cat") else None
        patches = []
        for name in ("write", "delete", "remove_directories", "save_before", "forget_before"):
            real = getattr(Written, name)

            def wrapped(*arguments: object, real: Callable[..., object] = real) -> object:
                count_one()
                return real(*arguments)

            patches.append(self.patch(Written, name, wrapped))
        for name in ("bring", "link_current", "remove_all", "remove_state", "prune"):
            real = getattr(Trees, name)

            def wrapped_tree(*arguments: object, real: Callable[..., object] = real) -> object:
                count_one()
                return real(*arguments)

            patches.append(self.patch(Trees, name, wrapped_tree))
        real_write = record.write

        def noted(*arguments: object) -> None:
            real_write(*arguments)  # type: ignore[arg-type]
            count_one()

        patches.append(self.patch(record, "write", noted))
        try:
            act()
        except Killed:
            return True
        finally:
            self.system.fails = lambda words: None
            for patch in patches:
                patch.restore()
        return False

    def each(self, prepare: Callable[[], None], act: Callable[[], None], judge: Callable[[], None]) -> int:
        at = 0
        while True:
            at += 1
            self.setUp()
            prepare()
            if not self.effects(act, at):
                return at - 1
            judge()

    def test_an_installation_is_gone_on_with(self) -> None:
        def judge() -> None:
            self.installer().present()
            self.assert_runs("0.2.0-aaaa")
            self.installer().absent()
            self.assert_as_before()

        self.assertGreater(self.each(lambda: None, lambda: self.installer().present(), judge), 10)

    def test_or_taken_back(self) -> None:
        def judge() -> None:
            self.installer().absent()
            self.assert_as_before()

        self.assertGreater(self.each(lambda: None, lambda: self.installer().present(), judge), 10)

    def test_or_gone_on_with_by_another_release(self) -> None:
        def judge() -> None:
            self.installer("0.3.0-bbbb").present()
            self.assertEqual(self.system.tree, "0.3.0-bbbb")
            self.installer().absent()
            self.assert_as_before()

        self.assertGreater(self.each(lambda: None, lambda: self.installer().present(), judge), 10)

    def test_an_upgrade_is_gone_on_with_or_taken_back(self) -> None:
        for then in ("0.3.0-bbbb", "0.2.0-aaaa"):

            def judge(then: str = then) -> None:
                self.installer(then).present()
                self.assert_runs(then)
                self.installer().absent()
                self.assert_as_before()

            upgrade = lambda: self.installer("0.3.0-bbbb").present()  # noqa: E731
            self.assertGreater(self.each(lambda: self.installer().present(), upgrade, judge), 7)

    def test_a_removal_is_gone_on_with(self) -> None:
        def judge() -> None:
            self.installer().absent()
            self.assert_as_before()

        removal = lambda: self.installer().absent()  # noqa: E731
        self.assertGreater(self.each(lambda: self.installer().present(), removal, judge), 8)

    def test_or_followed_by_an_installation(self) -> None:
        def judge() -> None:
            self.installer().present()
            self.assert_runs("0.2.0-aaaa")

        removal = lambda: self.installer().absent()  # noqa: E731
        self.assertGreater(self.each(lambda: self.installer().present(), removal, judge), 8)


class FailingTests(StepsCase):
    """Each program that is run fails once, where it may."""

    def test_an_installation_that_fails_anywhere_leaves_the_node_as_it_was(self) -> None:
        changing = ("daemon-reload", "enable", "restart")
        for at in range(1, 20):
            self.setUp()
            seen = 0

            def fail(words: tuple[str, ...], at: int = at) -> None:
                nonlocal seen
                if words[1] in changing:
                    seen += 1
                    if seen == at:
                        raise InfranetesError(f"{words} failed")

            self.system.fails = fail
            try:
                self.installer().present()
            except InfranetesError:
                self.assert_as_before()
            else:
                self.assertGreater(at, 5)
                return
        self.fail("it never succeeds")

    def test_so_does_a_disk_that_is_full(self) -> None:
        for place, name in ((Trees, "bring"), (Trees, "bring_guest_image"), (Written, "write")):
            with self.subTest(name=name):
                self.setUp()
                real = getattr(place, name)

                def full(*arguments: object, real: Callable[..., object] = real) -> None:
                    real(*arguments)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/opt/infranetes")

                patch = self.patch(place, name, full)
                self.assertRaises(OSError, self.installer().present)
                self.assert_as_before()
                patch.restore()


class RecordTests(StepsCase):
    def test_it_is_roots_and_readable(self) -> None:
        self.installer().present()
        path = self.system.root / "opt/infranetes/installed.json"
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(json.loads(path.read_text())["files"][DROP_IN], "kubelet")
