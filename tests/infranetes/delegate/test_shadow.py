# SPDX-License-Identifier: Apache-2.0
"""Shadow sandboxes are made at a delegate, found again by their label, and ended."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.delegate.channel import Delegate
from infranetes.delegate.hidden import SHADOW_BY, SHADOW_OF
from infranetes.delegate.shadow import ShadowSandboxes, shadow_config
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.support.delegate import FakeDelegate
from tests.txgrpc.support import socket_path
from txgrpc import Code, GrpcError

reactor = installed()
OURS, OTHER = "5" * 32, "6" * 32
HOME = "/var/lib/infranetes"


def config() -> cri.PodSandboxConfig:
    """Return a pod's config with many things that only its VM may have."""
    made = cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name="web", uid="u", namespace="default", attempt=2),
        hostname="web",
        labels={"app": "web"},
        annotations={"kubernetes.io/ingress-bandwidth": "10M"},
        log_directory="/var/log/pods/web",
        port_mappings=[cri.PortMapping(container_port=80, host_port=8080)],
    )
    made.linux.cgroup_parent = "/kubepods/podu"
    made.linux.sysctls["net.core.somaxconn"] = "1024"
    made.linux.overhead.memory_limit_in_bytes = 1 << 20
    context = made.linux.security_context
    context.privileged = True
    context.run_as_user.value = 1000
    context.namespace_options.pid = cri.NODE
    context.namespace_options.userns_options.mode = cri.POD
    context.seccomp.profile_type = cri.SecurityProfile.RuntimeDefault
    return made


def info(*namespaces: dict[str, str]) -> dict[str, str]:
    """Return the info of a verbose status."""
    return {"info": json.dumps({"pid": 7, "runtimeSpec": {"linux": {"namespaces": namespaces}}})}


async def failed(work: Awaitable[object]) -> InfranetesError:
    """Return the error with which it fails."""
    try:
        await work
    except InfranetesError as error:
        return error
    raise AssertionError("it has not failed")


class ConfigTests(TestCase):
    def test_it_is_the_pods_but_for_what_only_the_vm_may_have(self) -> None:
        pod = config()
        shadow = shadow_config(pod, OURS, HOME)
        self.assertEqual(dict(shadow.labels), {"app": "web", SHADOW_OF: OURS, SHADOW_BY: HOME})
        for same in ("metadata", "hostname", "annotations", "log_directory", "port_mappings"):
            self.assertEqual(getattr(shadow, same), getattr(pod, same))
        self.assertEqual(shadow.linux.cgroup_parent, pod.linux.cgroup_parent)
        self.assertEqual(shadow.linux.overhead, pod.linux.overhead)
        self.assertEqual(dict(shadow.linux.sysctls), {})
        context = shadow.linux.security_context
        self.assertFalse(context.privileged or context.HasField("run_as_user"))
        options = context.namespace_options
        self.assertEqual((options.network, options.pid, options.ipc), (cri.POD, cri.CONTAINER, cri.POD))
        self.assertFalse(options.HasField("userns_options"))
        self.assertTrue(context.HasField("seccomp"))
        self.assertEqual(pod, config())


class ShadowTests(TestCase):
    async def setUp(self) -> None:
        self.theirs = FakeDelegate(socket_path(self), old=True)
        await self.theirs.start()
        self.addCleanup(self.theirs.down)
        self.delegate = Delegate(reactor, self.theirs.path)
        self.addCleanup(self.delegate.stop)
        self.shadows = ShadowSandboxes(self.delegate, HOME)
        self.theirs.add_sandbox("theirs")

    def labelled(self, owner: str = OURS, state: Any = cri.SANDBOX_READY, created_at: int = 0) -> str:
        """Add a sandbox with the label of shadows. Return its id."""
        id = self.theirs.add_sandbox()
        self.theirs.sandboxes[id].labels[SHADOW_OF] = owner
        self.theirs.sandboxes[id].state = state
        self.theirs.sandboxes[id].created_at = created_at
        return id

    async def test_it_is_made_once(self) -> None:
        id = await self.shadows.run(config(), OURS)
        self.assertEqual(await self.shadows.run(config(), OURS), id)
        self.assertEqual(self.theirs.names().count("RunPodSandbox"), 1)
        [shadow] = await self.shadows.list()
        self.assertEqual((shadow.id, shadow.owner, shadow.ours, shadow.ready), (id, OURS, True, True))
        self.assertEqual(await self.shadows.list(OTHER), [])
        request = next(body for name, body in self.theirs.requests if name == "RunPodSandbox")
        self.assertEqual(cri.RunPodSandboxRequest.FromString(request).runtime_handler, "")

    async def test_one_whose_answer_was_lost_is_found_and_what_is_half_made_is_ended(self) -> None:
        self.labelled(state=cri.SANDBOX_NOTREADY, created_at=3)
        self.labelled(created_at=1)
        newest = self.labelled(created_at=2)
        other = self.labelled(OTHER)
        self.assertEqual(await self.shadows.run(config(), OURS), newest)
        self.assertCountEqual([each.id for each in await self.shadows.list()], [newest, other])
        self.assertNotIn("RunPodSandbox", self.theirs.names())

    async def test_another_daemons_are_seen_and_told_apart(self) -> None:
        await self.shadows.run(config(), OURS)
        await ShadowSandboxes(self.delegate, "/var/lib/other").run(config(), OTHER)
        self.labelled("7" * 32)  # of a release that did not record the owner
        found = [(each.owner, each.ours) for each in await self.shadows.list()]
        self.assertCountEqual(found, [(OURS, True), (OTHER, False), ("7" * 32, False)])

    async def test_what_a_call_that_failed_has_left_is_ended(self) -> None:
        def run(request: bytes) -> bytes:
            self.labelled(state=cri.SANDBOX_NOTREADY)
            raise GrpcError(Code.UNKNOWN, "failed to setup network for sandbox: no podCIDR")

        self.theirs.answers["RunPodSandbox"] = run
        error = await failed(self.shadows.run(config(), OURS))
        self.assertIsInstance(error, Unavailable)
        self.assertIn("no podCIDR", str(error))
        self.assertEqual(await self.shadows.list(), [])

    async def test_its_namespace_is_the_one_of_its_status(self) -> None:
        id = self.labelled()
        status = cri.PodSandboxStatus(id=id, state=cri.SANDBOX_READY)
        here = {"type": "network", "path": "/var/run/netns/cni-1"}

        def answer(**said: Any) -> None:
            response = cri.PodSandboxStatusResponse(status=status, **said).SerializeToString()
            self.theirs.answers["PodSandboxStatus"] = lambda request: response

        answer(info=info({"type": "pid"}, here))
        self.assertEqual(await self.shadows.namespace(id), "/var/run/netns/cni-1")
        request = cri.PodSandboxStatusRequest.FromString(self.theirs.requests[-1][1])
        self.assertTrue(request.verbose)
        for said in (
            {},
            {"info": {"info": "evil"}},
            {"info": {"info": "[]"}},
            {"info": info({"type": "network"})},
            {"info": info({"type": "network", "path": "/proc/7/ns/net"})},
            {"info": info({"type": "network", "path": "run/netns/x"})},
            {"info": info({"type": "network", "path": "/run/netns/x\nlink"})},
            {"info": info(here, here)},
        ):
            answer(**said)
            error = await failed(self.shadows.namespace(id))
            self.assertIsInstance(error, FailedPrecondition)
            self.assertIn("does not report the network namespace", str(error))
        status.state = cri.SANDBOX_NOTREADY
        answer(info=info(here))
        self.assertIsInstance(await failed(self.shadows.namespace(id)), NotFound)

    async def test_one_that_is_gone_has_no_namespace(self) -> None:
        self.assertIsInstance(await failed(self.shadows.namespace("7" * 64)), NotFound)

    async def test_it_is_stopped_and_removed_also_twice(self) -> None:
        id = self.labelled()
        await self.shadows.end(id)
        await self.shadows.end(id)
        self.assertEqual(self.theirs.names(), ["StopPodSandbox", "RemovePodSandbox"] * 2)
        self.theirs.errors["StopPodSandbox"] = GrpcError(Code.NOT_FOUND, "not found")
        await self.shadows.end(id)

    async def test_an_end_that_fails_is_told_in_the_delegates_words(self) -> None:
        self.theirs.errors["StopPodSandbox"] = GrpcError(Code.UNKNOWN, "cni plugin not initialized")
        error = await failed(self.shadows.end(self.labelled()))
        self.assertIsInstance(error, Unavailable)
        self.assertIn("cni plugin not initialized", str(error))
        self.assertEqual(len(await self.shadows.list()), 1)

    async def test_a_delegate_that_is_down_has_none(self) -> None:
        await self.theirs.down()
        for work in (self.shadows.run(config(), OURS), self.shadows.list(), self.shadows.end("x")):
            self.assertIsInstance(await failed(work), Unavailable)
