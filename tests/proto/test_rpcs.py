# SPDX-License-Identifier: Apache-2.0
"""What is generated of services: that it is what the .proto files say, and that mypy holds others to it."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

from google.protobuf.descriptor_pb2 import MethodDescriptorProto
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import csi
from infranetes_common.wire.csi_rpcs import ControllerSnapshotRpcs, controller_service
from infranetes_common.wire.descriptors import file
from tests.harness.durations import slow
from txgrpc import Call

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [each.stem for each in (ROOT / "proto").glob("*.proto")]

DEMO = """
service DemoService {
  // Greets.
  // Politely.
  rpc Hello(HelloRequest) returns (HelloResponse);

  // Group: PodNetwork. All about networks.
  rpc Tell(stream Word) returns (HelloResponse);
  rpc Hear(HelloRequest) returns (stream Word);
  rpc Talk(stream Word) returns (stream Word);
}
"""


def generator() -> ModuleType:
    """Return proto/rpcs.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("rpcs", ROOT / "proto" / "rpcs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


rpcs = generator()


class ModuleTests(SynchronousTestCase):
    """The module of a service, by its parts."""

    def setUp(self) -> None:
        text = rpcs.module("demo", DEMO.replace("  // Greets", "  // Group: Greeting\n  // Greets"))
        self.parts = {each.name: each for each in ast.parse(text).body if hasattr(each, "name")}

    def code(self, name: str) -> str:
        return ast.unparse(self.parts[name])

    def test_a_stub_has_the_kind_and_the_types_of_each_rpc(self) -> None:
        stub = self.code("DemoStub")
        self.assertIn("service = wire.DemoService", stub)
        kinds = dict(re.findall(r"^    (\w+): (.+)$", stub, flags=re.M))
        self.assertEqual(
            kinds,
            {
                "Hello": "Unary[wire.HelloRequest, wire.HelloResponse]",
                "Tell": "Upload[wire.Word, wire.HelloResponse]",
                "Hear": "Download[wire.HelloRequest, wire.Word]",
                "Talk": "Bidirectional[wire.Word, wire.Word]",
            },
        )

    def test_a_group_is_a_protocol(self) -> None:
        greeting, network = self.code("DemoGreetingRpcs"), self.code("DemoPodNetworkRpcs")
        self.assertIn(
            "def Hello(self, request: wire.HelloRequest, call: Call, /) -> Response[wire.HelloResponse]:",
            greeting,
        )
        for rpc in (
            "Tell(self, requests: AsyncIterator[wire.Word], call: Call, /) -> Response[wire.HelloResponse]:",
            "Hear(self, request: wire.HelloRequest, call: Call, /) -> Responses[wire.Word]:",
            "Talk(self, requests: AsyncIterator[wire.Word], call: Call, /) -> Responses[wire.Word]:",
        ):
            self.assertIn(f"    @abstractmethod\n    def {rpc}", network)
            self.assertNotIn(rpc, greeting)

    def test_comments_are_docstrings(self) -> None:
        self.assertIn('"""Greets.\n        Politely."""', self.code("DemoGreetingRpcs"))
        self.assertIn('"""All about networks."""', self.code("DemoPodNetworkRpcs"))
        self.assertIn("See `DemoPodNetworkRpcs.Talk`.", self.code("DemoStub"))

    def test_a_service_is_made_of_an_object_for_each_group_or_none(self) -> None:
        made = self.code("demo_service")
        parameters = "greeting: DemoGreetingRpcs | None, pod_network: DemoPodNetworkRpcs | None"
        self.assertIn(f"def demo_service({parameters}) -> Service:", made)
        self.assertIn("return Service(wire.DemoService, greeting, pod_network)", made)

    def test_without_groups_one_object_answers_all(self) -> None:
        text = rpcs.module("demo", re.sub("// Group: .*", "", DEMO))
        self.assertIn("class DemoRpcs(Protocol):", text)
        self.assertIn("def demo_service(rpcs: DemoRpcs) -> Service:", text)

    def test_a_file_without_services_has_no_module(self) -> None:
        self.assertIsNone(rpcs.module("demo", "message Note {}\n"))

    def test_what_is_not_understood_is_refused(self) -> None:
        for line in ("rpc Hello(A) returns (B) {}", "rpc Hello(A)", "option deprecated = true;"):
            error = self.assertRaises(SystemExit, rpcs.services, f"service Demo {{\n  {line}\n}}\n")
            self.assertIn(f"service Demo: write an RPC or a comment on one line: {line}", str(error))

    def test_an_rpc_before_the_first_group_is_refused(self) -> None:
        error = self.assertRaises(SystemExit, rpcs.services, DEMO)
        self.assertIn("service DemoService: Hello is in no group", str(error))


class GeneratedTests(SynchronousTestCase):
    """The modules of this tree's files."""

    def test_they_say_what_the_descriptors_say(self) -> None:
        kinds = {
            (False, False): "Unary",
            (True, False): "Upload",
            (False, True): "Download",
            (True, True): "Bidirectional",
        }
        for name in SOURCES:
            for service in file(f"{name}.proto").services_by_name.values():
                module = import_module(f"infranetes_common.wire.{name}_rpcs")
                short = service.name.removesuffix("Service")
                wanted = {}
                for method in service.methods:
                    written = MethodDescriptorProto()
                    method.CopyToProto(written)
                    kind = kinds[written.client_streaming, written.server_streaming]
                    types = f"wire.{method.input_type.name}, wire.{method.output_type.name}"
                    wanted[method.name] = f"{kind}[{types}]"
                self.assertEqual(getattr(module, f"{short}Stub").__annotations__, wanted)

    def test_groups_share_out_a_services_rpcs(self) -> None:
        for name in SOURCES:
            text = (ROOT / "proto" / f"{name}.proto").read_text()
            for described in rpcs.services(text):
                served = [rpc.name for group in described.groups for rpc in group.rpcs]
                declared = file(f"{name}.proto").services_by_name[described.name].methods_by_name
                self.assertEqual(sorted(served), sorted(declared))


class Snapshots(ControllerSnapshotRpcs):
    async def CreateSnapshot(
        self, request: csi.CreateSnapshotRequest, call: Call
    ) -> csi.CreateSnapshotResponse:
        return csi.CreateSnapshotResponse()


class ServedTests(SynchronousTestCase):
    def test_an_object_without_one_of_its_rpcs_is_not_made(self) -> None:
        error = self.assertRaises(TypeError, Snapshots)
        for missing in ("DeleteSnapshot", "ListSnapshots", "GetSnapshot"):
            self.assertIn(missing, str(error))

    def test_rpcs_of_a_group_that_nothing_answers_are_not_offered(self) -> None:
        self.assertEqual(controller_service(None, None).answers, {})


SAMPLE = """
from infranetes_common.wire.csi_rpcs import *
from infranetes_common.wire.pluginregistration_rpcs import *
from infranetes_common.wire import pluginregistration as wire
from txgrpc import Call

class Complete(RegistrationRpcs):
    async def GetInfo(self, request: wire.InfoRequest, call: Call) -> wire.PluginInfo:
        return wire.PluginInfo()

    async def NotifyRegistrationStatus(
        self, request: wire.RegistrationStatus, call: Call
    ) -> wire.RegistrationStatusResponse:
        return wire.RegistrationStatusResponse()

class Lacking(RegistrationRpcs):
    async def GetInfo(self, request: wire.InfoRequest, call: Call) -> wire.PluginInfo:
        return wire.PluginInfo()

    async def NotifyRegistration(self, status: wire.RegistrationStatus, call: Call) -> None: ...

class OtherRequest(Complete):
    async def GetInfo(self, request: wire.PluginInfo, call: Call) -> wire.PluginInfo:  # [override]
        return request

class OtherResponse(Complete):
    async def GetInfo(self, request: wire.InfoRequest, call: Call) -> wire.InfoRequest:  # [override]
        return request

def serve(volumes: ControllerVolumeRpcs, snapshots: ControllerSnapshotRpcs, whatever: object) -> None:
    registration_service(Complete())
    registration_service(Lacking())  # [abstract]
    registration_service(whatever)  # [arg-type]
    controller_service(volumes, snapshots)
    controller_service(volumes, None)
    controller_service(volumes)  # [call-arg]
    controller_service(snapshots, volumes)  # [arg-type]

async def call(stub: RegistrationStub) -> str:
    await stub.GetInf(wire.InfoRequest(), timeout=1.0)  # [attr-defined]
    await stub.GetInfo(wire.PluginInfo(), timeout=1.0)  # [arg-type]
    await stub.GetInfo(wire.InfoRequest())  # [call-arg]
    (await stub.GetInfo(wire.InfoRequest(), timeout=1.0)).missing  # [attr-defined]
    return (await stub.GetInfo(wire.InfoRequest(), timeout=1.0)).name
"""


class TypeTests(SynchronousTestCase):
    @slow(8, "mypy reads Twisted and protobuf's types")
    def test_what_is_wrong_is_an_error(self) -> None:
        """Each error is where the sample says, and there is no other."""
        python = sys.executable if importlib.util.find_spec("mypy") else str(ROOT / ".venv/bin/python")
        if not Path(python).exists():
            raise SkipTest("mypy is not installed: make venv")
        directory = Path(tempfile.mkdtemp(dir=Path(self.mktemp()).resolve().parent))
        sample = directory / "sample.py"
        sample.write_text(SAMPLE)
        command = [python, "-m", "mypy", "--no-pretty", f"--cache-dir={directory}", str(sample)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = set(re.findall(r"sample\.py:(\d+): error: .* \[([\w-]+)\]$", done.stdout, flags=re.M))
        wanted = {
            (str(number), error[1])
            for number, line in enumerate(SAMPLE.splitlines(), 1)
            if (error := re.search(r"# \[([\w-]+)\]$", line))
        }
        self.assertEqual(found, wanted, done.stdout + done.stderr)
