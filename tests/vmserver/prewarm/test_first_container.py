# SPDX-License-Identifier: Apache-2.0
"""The first container runs on a real Docker engine, or with conmon and crun, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes_common import reactors
from infranetes_common.wire import cri
from tests.harness.needs import needs_crun, needs_docker
from tests.support.dockerd import Dockerd
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.docker.provider import DockerConfig, DockerProvider
from vmserver.containers.oci.seccomp_filters import ANNOTATION
from vmserver.prewarm.first_container import run_first_container


@needs_docker
class FirstContainerTests(TestCase):
    async def setUp(self) -> None:
        self.engine = Dockerd()
        self.addCleanup(self.engine.stop)
        self.engine.start()
        etc = Path(self.mktemp())
        etc.mkdir()
        for name in ("hosts", "resolv.conf"):
            (etc / name).write_text("")
        self.provider = DockerProvider(
            reactors.installed(), DockerConfig(socket=self.engine.socket), etc.absolute(), etc.absolute()
        )
        await self.provider.start()

    async def tearDown(self) -> None:
        await self.provider.stop()

    async def test_a_container_has_run_and_nothing_of_it_is_left(self) -> None:
        seen: list[object] = []
        self.provider.watch(lambda state: seen.append(state.state), lambda id: seen.append(id))
        await run_first_container(reactors.installed(), self.provider)
        self.assertEqual(seen[-1], "prewarm")  # removed
        self.assertIn(1, seen)  # CONTAINER_RUNNING
        self.assertEqual(await self.provider.containers(), [])
        self.assertEqual(await self.provider.images(), [])

    async def test_an_engine_that_is_gone_is_told_to_the_log_alone(self) -> None:
        self.engine.stop_engine()
        await run_first_container(reactors.installed(), self.provider)


@needs_crun
class FirstOciContainerTests(OciCase, TestCase):
    """Without a layer, as none has been sent before a template is frozen."""

    async def test_a_container_has_run_and_nothing_of_it_is_left(self) -> None:
        await run_first_container(reactors.installed(), self.provider)
        self.assertEqual(
            self.states_told("prewarm"),
            [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED, None],
        )
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_containers_after_it_have_the_default_profiles_of_seccomp_compiled(self) -> None:
        given = []
        for dropped in ((), ["ALL"]):
            await run_first_container(reactors.installed(), self.provider, dropped)
            context = cri.LinuxContainerSecurityContext(
                namespace_options=cri.NamespaceOption(pid=cri.CONTAINER),
                seccomp=cri.SecurityProfile(profile_type=cri.SecurityProfile.RuntimeDefault),
                capabilities=cri.Capability(drop_capabilities=dropped),
            )
            id = await self.create("true", linux=cri.LinuxContainerConfig(security_context=context))
            text = (self.config.directory / "containers" / id / "bundle/config.json").read_text()
            given.append(json.loads(text)["annotations"][ANNOTATION])
        self.assertNotEqual(*given)
        await self.run_container("true")  # in the pod's shared processes
        [init] = (self.config.directory / "init").iterdir()
        self.assertEqual(json.loads((init / "config.json").read_text())["annotations"][ANNOTATION], given[1])
