# SPDX-License-Identifier: Apache-2.0
"""Mistakes at the command line of infranetes-ctl."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tempfile
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.ctl.cli import ask, read
from infranetes_common.concurrency import deferred, start
from infranetes_common.reactors import installed
from tests.errors.mistakes import CTL, Mistake, MistakeCase
from tests.infranetes.pods.fakes import FakeNode, pod


class CommandLineTests(MistakeCase):
    def refused(self, words: str, cause: str, way_out: str, code: int = 2) -> None:
        self.told(Mistake(cause, way_out), {CTL: self.typed(*words.split(), code=code)})

    def test_11_a_command_is_misspelt(self) -> None:
        self.refused("desribe web", "unknown command 'desribe'", "did you mean describe")

    def test_12_an_option_is_misspelt(self) -> None:
        self.refused("pods --namespcae x", "unrecognized arguments: --namespcae", "did you mean --namespace")

    def test_13_an_annotation_is_misspelt(self) -> None:
        self.refused("explain infranetes.io/isntance-type", "no annotation and no key",
                     "did you mean infranetes.io/instance-type", code=1)  # fmt: skip

    def test_14_a_selector_is_none(self) -> None:
        self.refused("pods -l app:web", "'app:web,?' is no selector|is no selector", "such as app=web")

    def test_15_a_command_without_its_dashes(self) -> None:
        self.refused("exec web ls -l", "unrecognized arguments: -l", "follow a `--`")

    def test_16_a_trace_without_a_pod(self) -> None:
        self.refused("services --trace 10.96.0.1:443", "--trace needs a POD", "from whose VM")


class SocketTests(TestCase):
    """The daemon's socket."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(prefix="errors-", dir="/tmp")
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name) / "s"

    @deferred
    async def told(self, cause: str, way_out: str, code: int) -> None:
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            self.assertEqual(await ask(installed(), self.path, read(["pods"])), code)
        self.assertRegex(told.getvalue(), cause)
        self.assertRegex(told.getvalue(), way_out)

    def bound(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        self.addCleanup(server.close)
        server.bind(str(self.path))
        return server

    def test_17_the_daemon_does_not_run(self) -> Deferred[None]:
        return self.told("no infranetes daemon answers on .*: it is not there", "systemctl status", 3)

    def test_18_the_daemon_has_died(self) -> Deferred[None]:
        self.bound().close()
        return self.told("nobody listens there", "systemctl status infranetes", 3)

    def test_19_the_user_is_not_root(self) -> Deferred[None]:
        self.bound().listen()
        self.path.chmod(0)
        if os.geteuid() == 0:
            self.path.parent.chmod(0o711)
            os.seteuid(65534)
            self.addCleanup(os.seteuid, 0)
        return self.told("may not be used by this user", "try it as root", 1)


class NameTests(MistakeCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        for name in ("frontend-7d4b9", "frontend-9c6f5", "database"):
            self.successResultOf(start(self.world.sandboxes.run(pod(name), "")))

    def test_20_a_pod_is_misspelt(self) -> None:
        said = {
            "describe": self.asked(self.world, "describe", "databsae"),
            "get pods": self.asked(self.world, "get", "pods", "databsae"),
        }
        self.told(Mistake("'databsae'", "did you mean (default/)?database"), said)

    def test_21_a_beginning_that_two_pods_have(self) -> None:
        said = {CTL: self.asked(self.world, "describe", "frontend")}
        self.told(Mistake("several pods are meant by 'frontend'", "default/frontend-7d4b9.*say which"), said)

    def test_22_a_pod_without_a_container_has_no_log(self) -> None:
        said = {CTL: self.asked(self.world, "logs", "database")}
        self.told(Mistake("pod database has no containers", "so there is no log"), said)

    def test_23_an_orphan_that_is_none(self) -> None:
        said = {CTL: self.asked(self.world, "end-orphans", "i-1234")}
        self.told(Mistake("no orphan is called i-1234: nothing was ended", "list them again"), said)
