# SPDX-License-Identifier: Apache-2.0
"""A support bundle of a node that has secrets everywhere. Daemons' own words: `tests.infranetes.daemon`."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from infranetes.ctl import bundle_daemon, host, host_programs
from infranetes.ctl.bundle import support_bundle
from infranetes.ctl.bundle_daemon import MAX_CONSOLE
from infranetes.ctl.session import DONE, Session
from infranetes_common.commands import Command, Output
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import HIDDEN
from infranetes_common.wire import control, cri
from infranetes_common.wire.control_rpcs import ControlStub
from txgrpc import Code, GrpcError

POD = "0123456789abcdef"
LINE = "TUlJcGxhbnRlZDAxMjM0NTY3ODk"


def pem(mark: str) -> str:
    return f"-----BEGIN PRIVATE KEY-----\n{LINE}{mark}\nAB{mark}==\n-----END PRIVATE KEY-----\n"


#: Secrets by the place that makes them known.
KNOWN = {
    "config": "planted 'config' \"value\"\nover lines",
    "plug-in": "planted=plug;in/0001",
    "kubeconfig": "planted-kubeconfig",
    "clouds": 'planted {clouds}, "that" is: all #',
    "secure": "planted wörd: secure",
    "aws": "planted/aws+key==",
    "registry": "planted:registry",
    "header": "planted-header",
    "password": "planted password of a file",
    "broken": "planted-broken-drop-in",
}
#: What is only recognised, by texts that have it.
SHAPED = {
    "url": "https://me:planted-url@proxy.example",
    "url token": "https://planted0token@github.com/x.git",
    "basic": "Authorization: Basic OnBsYW50ZWQ=",
    "bearer": "bearer planted.bearer",
    "sas": "https://a.blob.core.windows.net/c?sv=2022&sig=planted%2Fsas&se=2026",
    "signature": "https://s3.example/b?X-Amz-Signature=plantedsignature",
    "query": "https://api.example/?token=planted-query",
    "connection": "AccountName=a;AccountKey=plantedaccount==;x=y",
    "environment": "AWS_SECRET_ACCESS_KEY=planted-environment",
    "argument": "login --password planted-argument --verbose",
    "json": '{"clientSecret": "planted \\"json\\""}',
    "key": pem("0ther"),
}
PARTS = (
    b"planted",
    b"over lines",
    b"r own",
    b"clouds}",
    b"rd: sec",
    b"aws+key",
    b"OnBs",
    b"0ther",
    LINE.encode(),
)


def everything() -> str:
    """All secrets, in a text as the guest or the daemon may write them."""
    shapes = [
        f"{text}\n{json.dumps(text)}\n{base64.b64encode(text.encode()).decode()}" for text in KNOWN.values()
    ]
    one_line = [
        json.dumps({"message": text.replace("\n", "\\n")}) for text in (*KNOWN.values(), *SHAPED.values())
    ]
    return "\n".join([*shapes, *SHAPED.values(), *one_line, pem("gcp"), json.dumps(pem("gcp"))])


class _Daemon:
    """Answers with secrets in every text."""

    async def ListPods(self, request: object, timeout: float) -> control.ListPodsResponse:
        text = everything()
        vm = control.Vm(id="i-1", detail=text)
        return control.ListPodsResponse(
            provider="other", trouble=text, pods=[control.Pod(id=POD, name="web", message=text, vm=vm)]
        )

    async def GetPool(self, request: object, timeout: float) -> control.GetPoolResponse:
        return control.GetPoolResponse(
            trouble=everything(), vms=[control.Pooled(id="b", message=everything())]
        )

    async def ListOrphans(self, request: object, timeout: float) -> control.ListOrphansResponse:
        return control.ListOrphansResponse(
            troubles=[everything()], vms=[control.Vm(id="v", detail=everything())]
        )

    async def DescribePod(self, request: object, timeout: float) -> control.DescribePodResponse:
        text = everything()
        return control.DescribePodResponse(
            pod=control.Pod(id=POD, name="web", message=text),
            containers=[
                control.PodContainer(id="c", name="main", image=SHAPED["url"], reason=text, message=text)
            ],
            steps=[control.Step(what="boot", began_at=1, detail=text, error=text)],
        )

    async def GetConsole(self, request: object, timeout: float) -> control.GetConsoleResponse:
        cut = KNOWN["kubeconfig"] + "\n" + "x" * (MAX_CONSOLE - 12)
        return control.GetConsoleResponse(text=everything() + "\nlogin:", output=cut)

    async def GetMetrics(self, request: object, timeout: float) -> control.GetMetricsResponse:
        return control.GetMetricsResponse(text=everything())

    async def Status(self, request: object, timeout: float) -> cri.StatusResponse:
        condition = cri.RuntimeCondition(type="RuntimeReady", message=everything())
        info = {"config": json.dumps({"providers.other.url": everything()}), "words": everything()}
        return cri.StatusResponse(status=cri.RuntimeStatus(conditions=[condition]), info=info)


class _Channel:
    def __init__(self, *_: object) -> None:
        pass

    def stub(self, _: object) -> _Daemon:
        return _Daemon()

    async def close(self) -> None:
        pass


async def _run(reactor: object, command: Command) -> Output:
    lines = everything().splitlines(keepends=True)
    if "--reverse" in command.words:  # each line is an entry of the journal
        lines = [f"{line.rstrip()}\n" for line in reversed(lines)]
    return Output(0, "".join(lines).encode(), b"")


async def _version(*_: object) -> Output:
    return Output(0, b"1.0", b"")


async def _check(*_: object) -> bytes:
    return b"table ip infranetes_bridge0\n"


class SecretsTests(TestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.patch(os, "environ", {**os.environ, "HOME": str(self.root)})
        self.patch(bundle_daemon, "RuntimeStub", lambda channel: _Daemon())
        self.patch(host, "run", _version)
        self.patch(host_programs, "run", _run)
        self.patch(host_programs, "check", _check)
        self.main = self.root / "infranetes.toml"

    def put(self, name: str, text: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def files(self) -> Mapping[str, str]:
        """Write the files with secrets. Returns their paths."""
        auth = base64.b64encode(f"me:{KNOWN['registry']}".encode()).decode()
        clouds = "clouds:\n  one:\n    auth:\n      username: me\n      password: {}\n"
        self.put(".aws/credentials", f"[default]\naws_secret_access_key = {KNOWN['aws']}\n")
        self.put("secure.yaml", clouds.format(json.dumps(KNOWN["secure"])))
        kubeconfig = f"users:\n- name: me\n  user:\n    token: {KNOWN['kubeconfig']}\n"
        return {
            "kubeconfig": self.put("kubeconfig", kubeconfig),
            "clouds": self.put("clouds.yaml", clouds.format(json.dumps(KNOWN["clouds"]))),
            "gcp": self.put(
                "gcp.json", json.dumps({"type": "service_account", "private_key": pem("gcp")}, indent=2)
            ),
            "auth": self.put("auth.json", json.dumps({"auths": {"r.example": {"auth": auth}}}, indent=2)),
            "headers": self.put("headers", f"x-team: {KNOWN['header']}\nx-other: x\n"),
            "password": self.put("password", KNOWN["password"] + "\na note\n"),
        }

    def configure(self) -> None:
        at = self.files()
        self.main.write_text(f"""\
            provider = "other"
            cluster = {json.dumps(SHAPED["url"])} # {KNOWN["config"]!r}
            images.auth_file = "{at["auth"]}"
            kubernetes.kubeconfig = "{at["kubeconfig"]}"
            tracing.headers_file = "{at["headers"]}"
            handlers.a.annotations.set = {{"example.org/user-data" = {json.dumps(SHAPED["environment"])}}}
            [providers.aws]
            secret_key = {json.dumps(KNOWN["config"])}
            [providers.openstack]
            clouds_file = "{at["clouds"]}"
            [providers.gcp]
            key_file = "{at["gcp"]}"
            [providers.other]
            connection_string = {json.dumps(KNOWN["plug-in"])}
            pin = 1234567
            words = ["planted", {{password_file = "{at["password"]}"}}]
            """)
        self.put("infranetes.toml.d/a.toml", f"[providers.x]\npassword = '{KNOWN['broken']}'\nnonsense\n")

    async def parts(self) -> dict[str, bytes]:
        """Make a bundle. Returns its files by their names."""
        path = self.root / "bundle.tar.gz"
        options = argparse.Namespace(config=self.main, file=path, json=False)
        printed: list[str] = []
        self.patch(Session, "print", lambda _, text: printed.append(text))
        session = Session(cast(IReactor, reactor), cast(ControlStub, _Daemon()), options)
        self.assertEqual(await support_bundle(session), DONE)
        self.assertNotIn("planted", "".join(printed))
        found = {}
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                found[member.name.removeprefix("bundle/")] = content.read()
        return found

    async def test_secrets_are_nowhere_in_it(self) -> None:
        self.configure()
        parts = await self.parts()
        expected = {"journal.txt", "status.json", "pods.json", "pool.json", "orphans.json", "manifest.json"}
        expected |= {"journal-guest-image.txt", "units.txt", "nftables.txt", "metrics.txt"}
        expected |= {f"pods/{POD}/{name}" for name in ("describe.json", "describe.txt", "console.txt")}
        self.assertLessEqual({*expected, "configuration/00-infranetes.toml.json"}, parts.keys())
        for name, content in parts.items():
            for part in PARTS:
                self.assertNotIn(part, content, f"{name}: {part!r}")
            for known in KNOWN.values():
                self.assertNotIn(base64.b64encode(known.encode()).rstrip(b"=")[:-1], content, name)
            self.assertNotIn(b"PRIVATE KEY", content, name)
            self.assertNotIn(b"1234567", content.replace(POD.encode(), b""), name)
            self.assertIn(b"(hidden)", content) if name in expected - {"manifest.json"} else None

    async def test_the_rest_is_in_it(self) -> None:
        self.configure()
        parts = await self.parts()
        shown = json.loads(parts["configuration/00-infranetes.toml.json"])["table"]
        self.assertEqual(shown["cluster"], "https://(hidden)@proxy.example")
        self.assertEqual(
            shown["providers"]["other"], dict.fromkeys(("connection_string", "pin", "words"), "(hidden)")
        )
        self.assertIn("configuration/01-a.toml.json", json.loads(parts["manifest.json"])["missing"])
        pods = json.loads(parts["pods.json"])
        self.assertEqual(pods["pods"][0]["name"], "web")
        self.assertIn("https://(hidden)@github.com/x.git", pods["pods"][0]["message"])
        status = json.loads(parts["status.json"])
        self.assertIn("providers.other.url", status["info"]["config"])
        console = parts[f"pods/{POD}/console.txt"].decode()
        self.assertIn("login:", console)
        self.assertTrue(re.search("sv=2022&sig=.hidden.&se=2026", console))

    async def test_a_file_that_is_not_looked_through_is_named(self) -> None:
        large = self.put("large", "x" * (2 << 20))
        self.main.write_text(f'kubernetes.kubeconfig = "{large}"\n')
        missing = json.loads((await self.parts())["manifest.json"])["missing"]
        self.assertIn(f"a search for the secrets of {large}", missing)

    async def test_a_file_that_is_not_utf_8_has_secrets_all_the_same(self) -> None:
        async def pool(*_: object, **__: object) -> control.GetPoolResponse:
            return control.GetPoolResponse(trouble="it was planted-latin, and planted1plug-in")

        self.patch(_Daemon, "GetPool", pool)
        toml = 'cluster = "kn\xf6del"\naws.secret_key = "planted-latin"\nproviders.x.a = "planted1plug-in"\n'
        for rest, shown in (("", HIDDEN), ("nonsense\n", "planted1plug-in")):
            self.main.write_bytes((toml + rest).encode("latin-1"))
            parts = await self.parts()
            self.assertEqual(json.loads(parts["pool.json"])["trouble"], f"it was {HIDDEN}, and {shown}")
            self.assertIn(
                "configuration/00-infranetes.toml.json", json.loads(parts["manifest.json"])["missing"]
            )
            self.assertNotIn("configuration/00-infranetes.toml.json", parts)
            (self.root / "bundle.tar.gz").unlink()

    async def test_an_error_is_told_without_secrets(self) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise GrpcError(Code.INTERNAL, SHAPED["url"])

        self.patch(_Daemon, "GetPool", refuse)
        missing = json.loads((await self.parts())["manifest.json"])["missing"]
        self.assertEqual(missing["pool.json"], "https://(hidden)@proxy.example")
