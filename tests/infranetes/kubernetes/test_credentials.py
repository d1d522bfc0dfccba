# SPDX-License-Identifier: Apache-2.0
"""Credentials from plug-ins, which are real programs here."""

from __future__ import annotations

import base64
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.kubernetes import credentials
from infranetes.kubernetes.credentials import Credentials
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed

reactor = installed()
VERSION = "client.authentication.k8s.io/v1"
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
#: It records its input, and prints the content of a file.
PLUGIN = """\
#!/bin/sh
printf '%s\\n' "$KUBERNETES_EXEC_INFO" >> "$NOTES"
[ -n "$HOME" ] || exit 3
[ -z "$PYTHONPATH" ] || exit 4
cat "$ANSWER"
"""


class PluginCase(TestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.patch(os, "environ", {**os.environ, "PYTHONPATH": "/usr/local/lib/of-the-daemon"})
        self.notes = self.directory / "notes"
        self.answer = self.directory / "answer"
        program = self.directory / "login"
        program.write_text(PLUGIN)
        program.chmod(0o700)
        self.credentials = Credentials(reactor, self.kubeconfig(), "10.0.0.1", now=lambda: NOON)

    def kubeconfig(self, **more: object) -> Path:
        variables = {"NOTES": self.notes, "ANSWER": self.answer}
        exec_ = {
            "apiVersion": VERSION,
            "command": "./login",
            "env": [{"name": name, "value": str(value)} for name, value in variables.items()],
            **more,
        }
        authority = base64.b64encode(b"CA").decode()
        cluster = {"server": "https://k8s:6443", "certificate-authority-data": authority}
        content = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me"}}],
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "me", "user": {"exec": exec_}}],
        }
        path = self.directory / "kubeconfig"
        path.write_text(json.dumps(content))  # which is YAML too
        return path

    def print(self, **status: str) -> None:
        self.answer.write_text(
            json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})
        )

    def asked(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    async def token(self) -> str:
        return (await self.credentials.current()).token


class PluginTests(PluginCase):
    @deferred
    async def test_it_is_asked_once_for_all_who_ask_meanwhile(self) -> None:
        self.print(token="one")
        found = await gatherResults([start(self.token()) for _ in range(5)])
        self.assertEqual(found, ["one"] * 5)
        (asked,) = self.asked()
        self.assertEqual(asked["apiVersion"], VERSION)
        self.assertEqual(asked["spec"], {"interactive": False})

    @deferred
    async def test_it_is_asked_again_shortly_before_what_it_gave_expires(self) -> None:
        self.print(token="one", expirationTimestamp="2030-01-01T12:00:05Z")
        self.assertEqual([await self.token(), await self.token()], ["one", "one"])
        self.assertEqual(len(self.asked()), 2)
        self.patch(credentials, "FRESH_SECONDS", 0.0)  # the unchanged kubeconfig is read each time
        self.print(token="two", expirationTimestamp="2030-01-01T13:00:00+00:00")
        self.assertEqual([await self.token(), await self.token()], ["two", "two"])
        self.assertEqual(len(self.asked()), 3)

    @deferred
    async def test_it_is_asked_again_once_the_server_refuses(self) -> None:
        self.print(token="one")
        self.assertEqual(await self.token(), "one")
        self.print(token="two")
        self.credentials.unreachable()  # does not mean that a token is bad
        self.assertEqual(await self.token(), "one")
        self.credentials.refused()
        self.assertEqual(await self.token(), "two")

    @deferred
    async def test_a_certificate_of_its_may_be_why_no_connection_comes_about(self) -> None:
        self.print(clientCertificateData="certificate", clientKeyData="key")
        found = await self.credentials.current()
        self.assertEqual((found.certificate, found.key, found.token), (b"certificate", b"key", ""))
        self.print(clientCertificateData="other", clientKeyData="key")
        self.credentials.unreachable()
        self.assertEqual((await self.credentials.current()).certificate, b"other")

    @deferred
    async def test_it_is_told_of_the_cluster_if_the_kubeconfig_wants_it(self) -> None:
        self.kubeconfig(provideClusterInfo=True)
        self.print(token="one")
        await self.token()
        (asked,) = self.asked()
        known = {"server": "https://10.0.0.1:6443", "certificate-authority-data": "Q0E="}
        self.assertEqual(asked["spec"], {"interactive": False, "cluster": known})

    @deferred
    async def test_another_kubeconfig_asks_anew(self) -> None:
        self.patch(credentials, "FRESH_SECONDS", 0.0)
        self.print(token="one")
        await self.token()
        self.kubeconfig(args=["--other"])
        self.print(token="two")
        self.assertEqual(await self.token(), "two")

    @deferred
    async def test_what_is_no_credential_is_refused(self) -> None:
        for answer in (
            "",
            "{}",
            "[]",
            json.dumps({"apiVersion": "v9", "status": {"token": "a"}}),
            json.dumps({"apiVersion": VERSION, "status": {}}),
            json.dumps({"apiVersion": VERSION, "status": {"clientCertificateData": "a"}}),
            json.dumps({"apiVersion": VERSION, "status": {"token": 3}}),
            json.dumps({"apiVersion": VERSION, "status": {"token": "a", "expirationTimestamp": "soon"}}),
        ):
            self.answer.write_text(answer)
            error = await self.assertFailure(start(self.token()), FailedPrecondition)
            self.assertIn("printed no ExecCredential", str(error))

    @deferred
    async def test_one_that_fails_is_asked_again_at_the_next_request(self) -> None:
        error = await self.assertFailure(start(self.token()), FailedPrecondition)
        self.assertIn("returned no credentials", str(error))
        self.print(token="one")
        self.assertEqual(await self.token(), "one")
