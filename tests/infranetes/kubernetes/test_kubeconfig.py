# SPDX-License-Identifier: Apache-2.0
"""How kubeconfigs are read, whichever program has written them."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.kubeconfig import MAX_BYTES, Access, thd_read
from infranetes_common.errors import FailedPrecondition

Fields = dict[str, object]


class KubeconfigCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "kubeconfig"

    def write(
        self, cluster: Fields | None = None, user: Fields | None = None, context: str = "here", **top: object
    ) -> None:
        content = {
            "current-context": context,
            "contexts": [
                {"name": "elsewhere", "context": {"cluster": "other", "user": "nobody"}},
                {"name": "here", "context": {"cluster": "it", "user": "me"}},
            ],
            "clusters": [{"name": "it", "cluster": {"server": "https://k8s:6443/", **(cluster or {})}}],
            "users": [{"name": "me", "user": user or {}}],
        }
        self.path.write_text(yaml.safe_dump({**content, **top}))

    def read(self, host: str = "") -> Access:
        return thd_read(self.path, host)

    def refused(self) -> str:
        return str(self.assertRaises(FailedPrecondition, self.read))


class KubeconfigTests(KubeconfigCase):
    def test_files_are_beside_it(self) -> None:
        for name in ("ca.crt", "me.crt", "me.key"):
            (self.directory / name).write_text(name)
        self.write(
            {"certificate-authority": "ca.crt"}, {"client-certificate": "me.crt", "client-key": "me.key"}
        )
        found = self.read()
        self.assertEqual(found.server, "https://k8s:6443")
        self.assertEqual((found.authority, found.certificate, found.key), (b"ca.crt", b"me.crt", b"me.key"))

    def test_what_is_in_it_comes_before_files(self) -> None:
        data = base64.b64encode(b"inside").decode()
        self.write({"certificate-authority-data": data, "certificate-authority": "none"})
        self.assertEqual(self.read().authority, b"inside")

    def test_a_token_comes_before_a_file_of_it(self) -> None:
        (self.directory / "token").write_text("filed\n")
        self.write(user={"tokenFile": "token"})
        self.assertEqual(self.read().token, "filed")
        self.write(user={"token": "written", "tokenFile": "token"})
        self.assertEqual(self.read().token, "written")

    def test_another_address_keeps_the_port(self) -> None:
        self.write()
        self.assertEqual(self.read("10.0.0.1").server, "https://10.0.0.1:6443")
        self.assertEqual(self.read("fd00::1").server, "https://[fd00::1]:6443")

    def test_a_plug_in_with_a_path_is_beside_it(self) -> None:
        exec_ = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "bin/login",
            "args": ["--now", 3],
            "env": [{"name": "A", "value": "b"}, {"name": "left out"}],
            "provideClusterInfo": True,
        }
        extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
        self.write({"extensions": [{"name": "other"}, extension]}, {"exec": exec_})
        plugin = self.read().plugin
        assert plugin is not None
        self.assertEqual(plugin.command, (str(self.directory.absolute() / "bin/login"), "--now", "3"))
        self.assertEqual(plugin.environment, {"A": "b"})
        self.assertTrue(plugin.told_cluster)
        self.assertEqual(plugin.cluster_config, {"audience": "x"})

    def test_secrets_are_not_shown(self) -> None:
        (self.directory / "me.key").write_text("secret-key")
        exec_ = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "login",
            "env": [{"name": "PASSWORD", "value": "secret-word"}],
        }
        self.write(user={"token": "secret-token", "client-key": "me.key", "exec": exec_})
        shown = repr(self.read())
        self.assertIn("login", shown)
        self.assertNotIn("secret", shown)


class RefusedTests(KubeconfigCase):
    def test_what_is_missing_is_named(self) -> None:
        self.assertIn(f"{self.path} can't be read", self.refused())
        self.write(context="nowhere")
        self.assertIn("no contexts named 'nowhere'", self.refused())
        self.write(clusters=[])
        self.assertIn("no clusters named 'it'", self.refused())
        self.write(user={"client-certificate": "gone.crt"})
        self.assertIn("gone.crt can't be read", self.refused())

    def test_what_is_none(self) -> None:
        for content, why in (
            ("{", "YAML"),
            ("[" * 5000, "YAML"),
            ("- a\n", "a mapping"),
            ("current-context: 3", "current-context can't be of type int"),
            ("x" * (MAX_BYTES + 1), "more than"),
        ):
            self.path.write_text(content)
            self.assertIn(why, self.refused())

    def test_servers_that_are_no_url(self) -> None:
        for server in ("", "k8s:6443", "ftp://k8s", "https://"):
            self.write({"server": server})
            self.assertIn("server has to be a URL", self.refused())

    def test_data_that_is_no_base64(self) -> None:
        self.write({"certificate-authority-data": "%"})
        self.assertIn("certificate-authority-data is no base64", self.refused())

    def test_servers_that_anybody_could_be(self) -> None:
        self.write({"insecure-skip-tls-verify": True})
        self.assertIn("insecure-skip-tls-verify", self.refused())

    def test_ways_that_are_not_taken(self) -> None:
        self.write({"proxy-url": "socks5://proxy"})
        self.assertIn("proxy-url is not supported", self.refused())

    def test_plug_ins_of_another_api(self) -> None:
        self.write(user={"exec": {"apiVersion": "v9", "command": "login"}})
        self.assertIn("client.authentication.k8s.io/v1", self.refused())
