# SPDX-License-Identifier: Apache-2.0
"""The networks that containerd 2 and CRI-O give our pods, as far as can be tested without a VM."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.delegate.channel import Delegate
from infranetes.delegate.shadow import ShadowSandboxes
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.delegates.crio import Crio
from tests.delegates.programs import use_built_containerd
from tests.e2e.test_namespaces import CniContainerd
from tests.interop.critest_images import PAUSE
from tests.interop.critest_runtimes import removed
from tests.support import oci
from tests.support.registry import Registry

reactor = installed()
OURS = "5" * 32  # a sandbox's id


class CniCrio(CniContainerd, Crio):
    """A CRI-O whose pods' links are made like containerd's."""


class ShadowCase(TestCase):
    """A test case with a runtime that has a bridge of its own."""

    timeout = 300

    def runtime_in(self, root: Path, plugin: dict[str, object]) -> CniContainerd:
        """Return the delegate, not started."""
        raise NotImplementedError

    async def lives(self) -> None:
        """Run the test, with any delegate."""
        bridge = f"cni{secrets.token_hex(4)}"
        self.addCleanup(deferToThread, said, "ip", "link", "delete", bridge)
        place = Path(tempfile.mkdtemp(prefix="inf-", dir="/var/tmp"))  # not on an overlay file system
        self.addCleanup(deferToThread, removed, place)
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        await deferToThread(registry.push, *PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        runtime = self.runtime_in(place / "c", {"type": "bridge", "bridge": bridge, "isGateway": True})
        self.addCleanup(deferToThread, runtime.end)
        await deferToThread(runtime.start, registry)
        delegate = Delegate(reactor, str(runtime.socket))
        self.addCleanup(delegate.stop)
        shadows = ShadowSandboxes(delegate, str(place))
        config = cri.PodSandboxConfig(
            metadata=cri.PodSandboxMetadata(name="web", uid=secrets.token_hex(8), namespace="default")
        )

        shadow = await shadows.run(config, OURS)
        namespace = await shadows.namespace(shadow)
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=shadow).SerializeToString()
        answer = await delegate.call("/runtime.v1.RuntimeService/PodSandboxStatus", request)
        address = cri.PodSandboxStatusResponse.FromString(answer).status.network.ip
        self.assertEqual(await self.address_in(namespace), address)
        [listed] = await shadows.list(OURS)
        self.assertEqual((listed.id, listed.ours, listed.ready), (shadow, True, True))

        await deferToThread(runtime.kill)
        self.assertEqual(await self.address_in(namespace), address)
        await deferToThread(runtime.start, registry)
        self.assertEqual(await shadows.run(config, OURS), shadow)
        self.assertEqual(await shadows.namespace(shadow), namespace)
        for _ in range(2):
            await shadows.end(shadow)
        await self.assertFailure(start(shadows.namespace(shadow)), NotFound)
        self.assertEqual(await shadows.list(), [])
        self.assertFalse(Path(namespace).exists())

    async def address_in(self, namespace: str) -> str:
        """Return the IPv4 address of the link eth0 in a namespace, which must be a veth."""
        words = ("nsenter", f"--net={namespace}", "ip", "-d", "-j", "-4", "address", "show", "eth0")
        [link] = json.loads(await deferToThread(said, *words))
        self.assertEqual(link["linkinfo"]["info_kind"], "veth")
        return str(link["addr_info"][0]["local"])


class ContainerdTests(ShadowCase):
    """containerd 2."""

    def runtime_in(self, root: Path, plugin: dict[str, object]) -> CniContainerd:
        use_built_containerd(self)
        return CniContainerd(root, plugin)

    async def test_a_shadow_has_the_pods_network_until_it_is_ended(self) -> None:
        await self.lives()


class CrioTests(ShadowCase):
    """CRI-O."""

    def runtime_in(self, root: Path, plugin: dict[str, object]) -> CniContainerd:
        return CniCrio(root, plugin)

    async def test_a_shadow_has_the_pods_network_until_it_is_ended(self) -> None:
        await self.lives()


def said(*command: str) -> str:
    """Return a command's output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
