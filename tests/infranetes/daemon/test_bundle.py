# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl support-bundle` against a daemon as a process: what it contains, and what it must not."""

from __future__ import annotations

import base64
import json
import re
import stat
import tarfile
from typing import Any

from infranetes.cri.status import CLUSTER_CONDITION
from infranetes.ctl.cli import DONE, FAILED
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.ctl import CtlCase
from txgrpc import GrpcError

SECRETS = {
    name: f"planted-{name}-8d1f6c"
    for name in (
        *("registry", "pull", "provider", "commented", "token", "environment", "plug-in"),
        *("env", "volume", "log", "argument", "annotation", "image"),
    )
}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: it
contexts:
- context:
    cluster: it
    user: it
  name: it
clusters:
- cluster:
    server: http://127.0.0.1:9
  name: it
users:
- name: it
  user:
    token: {token}
"""


class BundleTests(CtlCase):
    unneeded = frozenset({CLUSTER_CONDITION})  # no API server listens there

    def setUp(self) -> None:
        super().setUp()
        auths = {"r.example": {"auth": base64.b64encode(f"me:{SECRETS['registry']}".encode()).decode()}}
        (self.root / "auth.json").write_text(json.dumps({"auths": auths}))
        (self.root / "kubeconfig").write_text(KUBECONFIG.format(token=SECRETS["token"]))
        (self.root / "kubeconfig").chmod(0o600)
        self.config["images"] = {"auth_file": str(self.root / "auth.json")}
        self.config["kubernetes"] = {"kubeconfig": str(self.root / "kubeconfig")}
        self.config["providers"]["aws"] = {
            "access_key": SECRETS["provider"],
            "secret_key": SECRETS["provider"],
        }
        self.config["metrics"] = {"listen": "127.0.0.1:0"}
        self.config["providers"]["plug-in"] = {"connection": SECRETS["plug-in"], "pin": 4711}
        self.environment["HTTPS_PROXY"] = f"http://me:{SECRETS['environment']}@127.0.0.1:9"
        self.bundle = self.root / "bundle.tar.gz"

    def written(self) -> str:
        return super().written() + f'\n# secret_key = "{SECRETS["commented"]}"\n'

    def parts(self) -> dict[str, bytes]:
        """Return the files in the bundle."""
        found = {}
        with tarfile.open(self.bundle) as archive:
            for member in archive:
                self.assertTrue(member.isfile())
                self.assertFalse(member.name.startswith("/") or ".." in member.name.split("/"))
                content = archive.extractfile(member)
                assert content is not None
                found[member.name.removeprefix("bundle/")] = content.read()
        return found

    async def plant(self, sandbox: str) -> None:
        """Run a container that has secrets, and request an image whose name contains some."""
        volume = self.root / "volume"
        volume.mkdir()
        (volume / "password").write_text(SECRETS["volume"])
        config = self.box(
            script=f"echo {SECRETS['log']}; exit 4",
            args=["--password", SECRETS["argument"]],
            annotations={"example.org/password": SECRETS["annotation"]},
            envs=[cri.KeyValue(key="PASSWORD", value=SECRETS["env"].encode())],
            mounts=[cri.Mount(container_path="/secret", host_path=str(volume), readonly=True)],
        )
        container = await self.run_container(sandbox, config)
        await self.in_state(container, cri.CONTAINER_EXITED)
        for image in ("127.0.0.1:9/none", f"https://me:{SECRETS['image']}@127.0.0.1:9/none"):
            request = cri.PullImageRequest(
                image=cri.ImageSpec(image=image),
                auth=cri.AuthConfig(username="me", password=SECRETS["pull"]),
            )
            with self.assertRaises(GrpcError):
                await self.image_service.PullImage(request, timeout=60.0)
            with self.assertRaises(GrpcError):
                await self.create(sandbox, self.box("other", image=cri.ImageSpec(image=image)))

    def check_secrets(self, parts: dict[str, bytes]) -> None:
        everything = b"\n".join([*parts.values(), *(name.encode() for name in parts)])
        for name, secret in SECRETS.items():
            for shape in (secret.encode(), base64.b64encode(secret.encode()).rstrip(b"=")):
                self.assertNotIn(shape, everything, name)
        self.assertNotIn(b"PRIVATE KEY", everything)
        for key in self.keys():
            self.assertNotIn(key, everything)

    def keys(self) -> set[bytes]:
        """Return a line of each of the daemon's private keys."""
        begin = re.compile(rb"PRIVATE KEY-----(?:\n|\\n)([A-Za-z0-9+/=]{16,})")
        files = [path for path in (self.root / "state").rglob("*") if path.is_file()]
        found = {
            key for path in files if path.stat().st_size < 10**6 for key in begin.findall(path.read_bytes())
        }
        self.assertTrue(found, "the daemon has no private key")
        return found

    @needs_registry
    async def test_it_has_what_a_maintainer_needs_and_no_secret(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web", annotations={"example.org/token": SECRETS["annotation"]})
        await self.plant(sandbox)
        gone = await self.run_pod("gone")
        await self.remove_pod(gone)
        words = await self.ctl("support-bundle", str(self.bundle))
        self.assertIn(str(self.bundle), words)
        self.assertEqual(stat.S_IMODE(self.bundle.stat().st_mode), 0o600)
        parts = self.parts()
        self.check_secrets(parts)

        def document(name: str) -> Any:  # Any: JSON
            return json.loads(parts[name])

        self.assertIn("infranetes", document("manifest.json")["versions"])
        self.assertEqual({pod["id"] for pod in document("pods.json")["pods"]}, {sandbox, gone})
        steps = [step["what"] for step in document(f"pods/{sandbox}/describe.json")["steps"]]
        self.assertIn("the pod is ready", steps)
        self.assertIn("the pod is removed", parts[f"pods/{gone}/describe.txt"].decode())
        shown = document("configuration/00-infranetes.toml.json")["table"]
        self.assertEqual(shown["provider"], "simulated")
        self.assertEqual(shown["providers"]["aws"]["secret_key"], "(hidden)")
        self.assertEqual(shown["providers"]["plug-in"], {"connection": "(hidden)", "pin": "(hidden)"})
        self.assertIn("status", document("status.json"))
        store = document("store.json")
        self.assertEqual(store["schema"], store["known"])
        self.assertIn("MemTotal", document("host.json")["memory"])
        self.assertLessEqual({"pool.json", "orphans.json", "programs.json"}, parts.keys())
        self.assertIn(b"\ninfranetes_sandboxes{", parts["metrics.txt"])

    async def test_without_a_daemon_there_is_what_can_be_had(self) -> None:
        (self.root / "infranetes.toml").write_text(self.written())
        told = json.loads(await self.ctl("support-bundle", str(self.bundle), "--json", code=DONE))
        self.assertEqual(told["file"], str(self.bundle))
        self.assertIn("pods.json", told["missing"])
        self.assertLessEqual({"configuration/00-infranetes.toml.json", "host.json"}, self.parts().keys())

    async def test_a_configuration_with_errors_is_in_it_with_them(self) -> None:
        self.config["pull"] = {"secret_key": SECRETS["provider"]}
        path = self.root / "infranetes.toml"
        path.write_text(self.written())
        words = await self.command("support-bundle", str(self.bundle), "--config", str(path))
        self.assertIn("without configuration: ", words)
        parts = self.parts()
        self.assertIn(b"pull", parts["configuration/00-infranetes.toml.json"])
        everything = b"".join(parts.values())
        self.assertNotIn(SECRETS["provider"].encode(), everything)

    @needs_registry
    async def test_a_daemon_without_metrics_says_so(self) -> None:
        del self.config["metrics"]
        await self.start()
        told = json.loads(await self.ctl("support-bundle", str(self.bundle), "--json"))
        self.assertIn("metrics.listen", told["missing"]["metrics.txt"])

    async def test_it_replaces_nothing(self) -> None:
        (self.root / "infranetes.toml").write_text(self.written())
        target = self.root / "target"
        self.bundle.symlink_to(target)
        words = await self.ctl("support-bundle", str(self.bundle), code=FAILED)
        self.assertIn("is there already", words)
        self.assertFalse(target.exists())
        nowhere = str(self.root / "none" / "bundle.tar.gz")
        self.assertIn("can't be made", await self.ctl("support-bundle", nowhere, code=FAILED))
