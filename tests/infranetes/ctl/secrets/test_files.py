# SPDX-License-Identifier: Apache-2.0
"""What is found in files with secrets, as the tools that make them write them."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.secrets.files import MAX_BYTES, paths_in, secrets_in, secrets_of_files

PEM = "-----BEGIN PRIVATE KEY-----\nMIIplanted0123456789\n-----END PRIVATE KEY-----\n"
ADMIN_CONF = f"""\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: cHVibGlj
    server: https://10.0.0.1:6443
  name: kubernetes
contexts:
- context:
    cluster: kubernetes
    user: kubernetes-admin
  name: kubernetes-admin@kubernetes
current-context: kubernetes-admin@kubernetes
kind: Config
preferences: {{}}
users:
- name: kubernetes-admin
  user:
    client-certificate-data: cHVibGlj
    client-key-data: {base64.b64encode(PEM.encode()).decode()}
- name: other
  user:
    token: planted-token
    tokenFile: token.txt
- name: plugin
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: login
      args: [get, --client-secret, planted-argument, --token=planted-flag, --client-id, public-id]
      env:
      - name: OIDC_PASSWORD
        value: planted-environment
      - name: OIDC_USER
        value: public-user
"""
CLOUDS = r"""
clouds:
  devstack:
    auth:
      auth_url: https://keystone.example:5000/v3
      username: public-user
      project_name: public-project
      password: "planted {with}, 'all' \"that\" a password may have: #"
    region_name: RegionOne
  other:
    auth_type: v3applicationcredential
    auth:
      application_credential_id: planted-id
      application_credential_secret: planted#secret with spaces
"""
SERVICE_ACCOUNT = {
    "type": "service_account",
    "project_id": "public-project",
    "private_key_id": "planted-id",
    "private_key": PEM,
    "client_email": "public@public-project.iam.gserviceaccount.com",
    "auth_uri": "https://accounts.google.com/o/oauth2/auth",
    "token_uri": "https://oauth2.googleapis.com/token",
}
AWS = """\
# planted by hand
[default]
aws_access_key_id = AKIAplanted
aws_secret_access_key = planted/key+with=signs
region = eu-west-1

[profile other]
aws_session_token=planted-session
s3 =
    max_concurrent_requests = 20
"""
REGISTRIES = """\
unqualified-search-registries = ["docker.io"]
[[registry]]
location = "registry.example"
token = "planted, token"
"""


def docker(user: str, password: str) -> str:
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    return json.dumps(
        {"auths": {"r.example": {"auth": auth}, "s.example": {"identitytoken": "planted-identity"}}}
    )


class FormatTests(SynchronousTestCase):
    def check(self, text: str, *expected: str) -> None:
        found = set(secrets_in(text))
        self.assertLessEqual(set(expected), found)
        for public in ("public", "https://", "eu-west-1", "RegionOne", "kubernetes", "registry.example"):
            self.assertEqual([each for each in found if public in each and each != text.strip()], [])

    def test_a_kubeconfig_as_kubeadm_writes_it(self) -> None:
        self.check(
            ADMIN_CONF,
            base64.b64encode(PEM.encode()).decode(),
            *("planted-token", "planted-argument", "planted-flag", "planted-environment"),
        )
        self.assertEqual(paths_in(ADMIN_CONF), ["token.txt"])

    def test_a_kubeconfig_in_one_line_and_as_json(self) -> None:
        flow = "users: [{name: a, user: {token: planted-token, client-key: /etc/a.key, tokenFile: b}}]"
        self.check(flow, "planted-token")
        self.assertEqual(paths_in(flow), ["/etc/a.key", "b"])
        document = {"users": [{"user": {"token": "planted, token"}}]}
        for indent in (None, 2):
            self.check(json.dumps(document, indent=indent), "planted, token")

    def test_clouds_yaml(self) -> None:
        password = "planted {with}, 'all' \"that\" a password may have: #"
        self.check(CLOUDS, password, "planted#secret with spaces")

    def test_a_service_accounts_key_of_gcp(self) -> None:
        for indent in (None, 2):
            self.check(json.dumps(SERVICE_ACCOUNT, indent=indent), PEM)

    def test_credentials_of_aws(self) -> None:
        self.check(AWS, "planted/key+with=signs", "planted-session")

    def test_credentials_of_azure(self) -> None:
        principal = {
            "appId": "public",
            "displayName": "public",
            "password": "planted~a.b",
            "tenant": "public",
        }
        self.check(json.dumps(principal, indent=2), "planted~a.b")
        self.check(json.dumps({"clientId": "public", "clientSecret": "planted~c"}, indent=2), "planted~c")
        self.check("[default]\nclient_id=public\nsecret=planted~d\ntenant=public\n", "planted~d")

    def test_credentials_for_registries(self) -> None:
        for text in (
            docker("public", "planted: pass"),
            json.dumps(json.loads(docker("public", "planted: pass")), indent=1),
        ):
            self.check(text, "planted: pass", "planted-identity")
        self.check(REGISTRIES, "planted, token")

    def test_values_of_one_key_are_all_found(self) -> None:
        self.check('{"token": "planted-1", "token": "planted-2"}', "planted-1", "planted-2")
        self.check("token: planted-1\ntoken: planted-2\n", "planted-1", "planted-2")
        self.check("[a]\ntoken=planted-1\n[a]\ntoken=planted-2\n", "planted-1", "planted-2")

    def test_values_are_found_as_they_are_written(self) -> None:
        self.check("password: 012345678\n", "012345678")
        self.check(
            '{"password": 1234567890123456789012, "pin": 1.50000000}', "1234567890123456789012", "1.50000000"
        )
        self.check(
            "password: !vault planted-tagged\nx: &a {token: planted-shared}\ny: *a\n",
            "planted-tagged",
            "planted-shared",
        )

    def test_lines_of_no_format(self) -> None:
        self.check("A=b\nDB_PASSWORD=planted with spaces\n", "planted with spaces")
        self.check("# words\nexport TOKEN='planted quoted'; X=1\n", "planted quoted")
        self.check("machine public login public password planted-netrc", "planted-netrc")
        self.check("token: planted-in\n  what: is\n no: [YAML\n", "planted-in")
        self.check("\nplanted password\n", "planted password")

    def test_a_file_of_headers_has_only_secrets(self) -> None:
        text = "Authorization: Bearer planted-header\nx-team: planted-team\n"
        self.assertLessEqual({"Bearer planted-header", "planted-team"}, set(secrets_in(text, "headers_file")))

    def test_keys_with_or_without_a_certificate(self) -> None:
        certificate = "-----BEGIN CERTIFICATE-----\nMIIpublic\n-----END CERTIFICATE-----\n"
        self.assertEqual(list(secrets_in(certificate + PEM)), [PEM.strip()])
        self.assertEqual(list(secrets_in(certificate)), [])

    def test_a_file_within_a_file(self) -> None:
        self.check("user-data: |\n  users:\n  - token: planted-within\n", "planted-within")

    def test_hostile_files_take_no_longer(self) -> None:
        laughs = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}]\n" for n in range(60))
        self.check(laughs + "token: planted-end\n", "planted-end")
        self.check("token: planted-first\na: &a [*a]\nb: " + "[" * 5000, "planted-first")
        self.check("[" * 100_000)


class FileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.patch(os, "environ", {**os.environ, "HOME": str(self.root)})
        self.unread: dict[str, str] = {}

    def put(self, name: str, text: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def found(self, table: object) -> set[str]:
        return set(secrets_of_files(table, self.unread))

    def test_files_are_found_at_any_depth_and_from_file_to_file(self) -> None:
        self.put("token.txt", "planted in a file\n")
        kubeconfig = self.put("admin.conf", ADMIN_CONF)
        found = self.found({"handlers": {"a": {"list": [{"x": kubeconfig}, "/none", 5]}}})
        self.assertLessEqual({"planted-token", "planted in a file"}, found)

    def test_secure_yaml_is_read_with_clouds_yaml(self) -> None:
        self.put("secure.yaml", "clouds:\n  devstack:\n    auth:\n      password: planted secure\n")
        self.assertIn("planted secure", self.found({"clouds_file": self.put("clouds.yaml", CLOUDS)}))

    def test_files_at_well_known_places_are_read(self) -> None:
        self.put(".aws/credentials", AWS)
        self.put(".docker/config.json", docker("a", "planted-docker"))
        self.assertLessEqual({"planted-session", "planted-docker"}, self.found({}))

    def test_all_values_of_a_headers_file_are_secret(self) -> None:
        found = self.found({"tracing": {"headers_file": self.put("headers", "x-team: planted-team\n")}})
        self.assertIn("planted-team", found)

    def test_a_password_is_the_first_line_of_its_file(self) -> None:
        path = self.put("vcenter", "planted password\nof the vCenter\n")
        self.assertEqual(
            self.found({"providers": {"vsphere": {"password_file": path}}}), {"planted password"}
        )
        self.assertEqual(self.found({"resolv": path}), set())

    def test_files_that_name_each_other_are_read_once(self) -> None:
        path = self.root / "a.yaml"
        path.write_text(f"token: planted-a\nnext: {self.root / 'b.yaml'}\n")
        other = self.put("b.yaml", f"token: planted-b\nnext: {path}\n")
        self.assertLessEqual({"planted-a", "planted-b"}, self.found({"x": other}))

    def test_what_can_not_be_looked_through_is_told(self) -> None:
        large = self.put("large", "x" * (MAX_BYTES + 1))
        self.put("program", "\0token=planted")
        self.assertEqual(
            self.found({"x": [large, str(self.root / "program"), str(self.root), "/none"]}), set()
        )
        self.assertEqual(list(self.unread), [large])
