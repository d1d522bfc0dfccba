# SPDX-License-Identifier: Apache-2.0
"""How each kind of node's kubelet is found and pointed at the daemon."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer import kubelets, layout
from infranetes.installer.kubelets import KINDS, Kubelet
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from tests.harness.needs import needs_programs

UNIT = "kubelet.service"
OURS = kubelets.drop_in(UNIT)
ROOT = Path(__file__).resolve().parents[3]


class Said:
    """A systemctl that says these texts, by unit and verb."""

    def __init__(self, states: dict[str, str], cat: str = "") -> None:
        self._states = states
        self._cat = cat

    def run(self, *words: str, seconds: float = 0.0) -> str:
        if words[1] == "cat":
            return self._cat
        state = self._states.get(words[-1], "inactive")
        load = "loaded" if words[-1] in self._states else "not-found"
        return f"LoadState={load}\nActiveState={state}\n"


class FindTests(SynchronousTestCase):
    def test_it_is_the_one_that_runs(self) -> None:
        for kind in KINDS:
            for unit in kind.units:
                found = kubelets.find(Said({UNIT: "inactive", unit: "active"}))
                self.assertEqual((found.kind, found.unit), (kind, unit))

    def test_one_that_is_being_started_runs_and_one_that_ends_does_not(self) -> None:
        self.assertEqual(kubelets.find(Said({UNIT: "activating"})).unit, UNIT)
        for state in ("deactivating", "failed", "inactive"):
            self.assertRaises(FailedPrecondition, kubelets.find, Said({UNIT: state}))

    def test_where_none_runs_all_that_were_looked_for_are_named(self) -> None:
        error = str(self.assertRaises(FailedPrecondition, kubelets.find, Said({UNIT: "failed"})))
        for kind in KINDS:
            for unit in kind.units:
                self.assertIn(unit, error)


class CommandTests(SynchronousTestCase):
    def started(self, said: str) -> str:
        return kubelets.started_by(said, OURS, UNIT)

    def test_it_is_that_of_the_last_file_but_ours(self) -> None:
        said = (
            "# "
            "/lib/systemd/system/kubelet.service\n[Unit]\nDescription=a\n[Service]\nExecStart=/usr/bin/kubelet\n\n"
            "# /etc/systemd/system/kubelet.service.d/10-kubeadm.conf\n# of kubeadm\n[Service]\n"
            "ExecStart=\nExecStart=/usr/bin/kubelet $A \\\n   $B\n\n"
            f"# {OURS}\n[Service]\nExecStart=\nExecStart=/usr/bin/kubelet $A $B --old\n"
        )
        self.assertEqual(self.started(said), "/usr/bin/kubelet $A $B")

    def test_what_systemd_does_by_a_prefix_is_left_as_it_is(self) -> None:
        for command in ("-/usr/bin/kubelet $A", "!!/opt/bin/kubelet", "-@/usr/bin/kubelet kubelet"):
            said = f"# /lib/systemd/system/kubelet.service\n[Service]\nExecStart={command}\n"
            self.assertEqual(self.started(said), command)

    def test_other_sections_start_nothing(self) -> None:
        said = "# /lib/x.service\n[Unit]\nExecStart=/bin/false\n[Service]\nExecStart=/usr/bin/kubelet\n"
        self.assertEqual(self.started(said), "/usr/bin/kubelet")

    def test_several_or_none_and_what_is_no_kubelet_are_refused(self) -> None:
        top = "# /lib/systemd/system/kubelet.service\n[Service]\n"
        for commands, words in (
            ("ExecStart=/usr/bin/kubelet\nExecStart=/usr/bin/kubelet\n", "2 commands"),
            ("ExecStart=/usr/bin/kubelet\nExecStart=\n", "0 commands"),
            ("ExecStart=/bin/sh -c 'exec kubelet'\n", "/bin/sh"),
        ):
            self.assertIn(words, str(self.assertRaises(FailedPrecondition, self.started, top + commands)))

    @needs_programs("systemd-analyze")
    def test_systemd_takes_the_drop_in(self) -> None:
        directory = Path(self.mktemp()).absolute()
        (directory / f"{UNIT}.d").mkdir(parents=True)
        text = "[Service]\nExecStart=/bin/true $KUBELET_ARGS\n"
        (directory / UNIT).write_text(text.replace("/bin/true", "/usr/bin/kubelet"))
        said = f"# {directory / UNIT}\n{(directory / UNIT).read_text()}"
        kubelet = Kubelet(KINDS[-1], UNIT)
        (drop,) = kubelet.files(Said({}, said)).values()
        (directory / f"{UNIT}.d/zz-infranetes.conf").write_text(drop)
        (directory / "infranetes.service").write_text("[Service]\nExecStart=/bin/true\n")
        program = shutil.which("systemd-analyze")
        assert program is not None
        done = subprocess.run(
            [program, "verify", "--man=no", str(directory / UNIT)],
            check=False,
            capture_output=True,
            text=True,
            env={"SYSTEMD_UNIT_PATH": f"{directory}:", "PATH": "/usr/bin:/bin"},
        )
        complaints = [line for line in done.stderr.splitlines() if "infranetes" in line]
        self.assertEqual(complaints, [])


class DistributionTests(SynchronousTestCase):
    def test_k3s_and_rke2_get_a_file_that_adds_to_their_lists(self) -> None:
        for kind in KINDS[:2]:
            (path, text), *others = Kubelet(kind, kind.units[0]).files(Said({})).items()
            self.assertEqual(others, [])
            self.assertRegex(path, r"^/etc/rancher/(k3s|rke2)/config\.yaml\.d/zz-infranetes\.yaml$")
            self.assertEqual(
                yaml.safe_load(text), {"kubelet-arg+": [f"container-runtime-endpoint={kubelets.SOCKET}"]}
            )


class LayoutTests(SynchronousTestCase):
    def test_the_unit_is_the_packages_but_for_where_the_program_is(self) -> None:
        template = (ROOT / "debian/infranetes.service").read_text()
        made = layout.unit(template, "0.2.0-abc")
        home = "/opt/infranetes/0.2.0-abc/usr/bin"
        self.assertIn(
            f"\nExecStart={home}/python3 -I {home}/twistd --nodaemon --pidfile= infranetes --config", made
        )
        self.assertNotIn("infranetes-guest.service", made)
        self.assertNotIn("/usr/bin/twistd3", made)
        kept = [
            line for line in template.splitlines() if not line.startswith(("ExecStart=", "Wants=", "Doc"))
        ]
        self.assertEqual([line for line in kept if line and line not in made.splitlines()], [])

    def test_a_value_can_not_end_its_quotes(self) -> None:
        kubelet = Kubelet(KINDS[-1], UNIT)
        for name in ('a"\nsocket = "b', "a\\", "a\nb"):
            self.assertRaises(InvalidArgument, layout.configuration, 'node = "@NODE@"', kubelet, name, "")

    def test_an_address_is_written_as_listeners_want_it(self) -> None:
        kubelet = Kubelet(KINDS[-1], UNIT)
        for address, text in (("10.0.0.5", "10.0.0.5:9475"), ("fd00::5", "[fd00::5]:9475")):
            self.assertEqual(layout.configuration("@NODE_IP@:9475", kubelet, "n", address), text)

    def test_names_of_trees_lead_nowhere_else(self) -> None:
        for name in ("..", ".", "", "a/b", "current", ".hidden", "a" * 200):
            self.assertFalse(layout.is_tree(name), name)
        self.assertTrue(layout.is_tree("0.2.0-3f2a9c01d4e5"))
