# SPDX-License-Identifier: Apache-2.0
"""Which names shells are offered."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl import completing
from infranetes.ctl.completing import containers, main, pods, socket_of
from infranetes_common.wire import control

PODS = [
    control.Pod(id="aa11" * 8, namespace="default", name="web"),
    control.Pod(id="bb22" * 8, namespace="kube-system", name="web"),
    control.Pod(id="cc33" * 8, namespace="kube-system", name="dns"),
]
CONTAINERS = [
    control.ListedContainer(
        pod=control.PodOfEntry(namespace="default", name=pod), container=control.PodContainer(name=name)
    )
    for pod, name in (("web", "main"), ("web", "side"), ("api", "server"))
]


class PodTests(SynchronousTestCase):
    def test_names_that_one_pod_has_then_with_namespaces_then_ids(self) -> None:
        self.assertEqual(pods(PODS, "d", ()), ["dns"])
        self.assertEqual({*pods(PODS, "w", ())}, set())
        self.assertEqual(pods(PODS, "de", ()), ["default/web"])
        self.assertEqual({*pods(PODS, "kube", ())}, {"kube-system/web", "kube-system/dns"})
        self.assertEqual(pods(PODS, "bb", ()), ["bb22" * 8])
        self.assertEqual(pods(PODS, "b", ()), [])

    def test_of_a_namespace_that_was_given(self) -> None:
        for words in (["-n", "kube-system"], ["--namespace=kube-system"], ["describe", "-n", "kube-system"]):
            self.assertEqual({*pods(PODS, "", words)}, {"web", "dns"}, words)

    def test_containers_of_a_pod_that_was_given(self) -> None:
        self.assertEqual(containers(CONTAINERS, ["logs", "web"]), ["main", "side"])
        self.assertEqual(containers(CONTAINERS, ["logs", "-n", "default", "api"]), ["server"])
        self.assertEqual(len(containers(CONTAINERS, ["ps"])), 3)
        self.assertEqual(containers(CONTAINERS, ["logs"], anywhere=False), [])


class CommandTests(SynchronousTestCase):
    def said(self, *words: str) -> list[str]:
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            self.assertEqual(main(words), 0)
        self.assertEqual(told.getvalue(), "")
        return out.getvalue().splitlines()

    def offers(self, *names: str) -> Callable[..., list[str]]:
        return lambda *_: [*names]

    def test_annotations_need_no_daemon(self) -> None:
        self.assertIn("infranetes.io/disk", self.said("annotations", "infranetes.io/d"))

    def test_what_a_shell_would_evaluate_is_not_offered(self) -> None:
        self.patch(completing, "_asked", self.offers("web", "web$(reboot)", "web `id`", "other"))
        self.assertEqual(self.said("pods", "we", "describe"), ["web"])

    def test_without_words_nothing_is_offered(self) -> None:
        self.patch(completing, "_asked", self.offers())
        self.assertEqual(self.said(), [])


class SocketTests(SynchronousTestCase):
    def test_it_is_that_of_the_words_or_of_the_configuration(self) -> None:
        file = Path(self.mktemp()).absolute()
        self.assertEqual(str(socket_of(["pods", "--socket", "/s"])), "/s")
        self.assertEqual(str(socket_of(["--config", str(file)])), "/run/infranetes/control.sock")
        file.write_text('run_dir = "/run/a"\n')
        self.assertEqual(str(socket_of([f"--config={file}"])), "/run/a/control.sock")
        drop_in = file.with_name(f"{file.name}.d") / "x.toml"
        drop_in.parent.mkdir()
        drop_in.write_text('run_dir = "/run/b"\n')
        self.assertEqual(str(socket_of(["--config", str(file)])), "/run/b/control.sock")
        drop_in.write_text("not TOML")
        self.assertEqual(str(socket_of(["--config", str(file)])), "/run/a/control.sock")
