# SPDX-License-Identifier: Apache-2.0
"""The test case for pods whose containers mount what their VM mounts by itself, with fakes."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.python.monkey import MonkeyPatcher

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod


def mounting(*paths: str, name: str = "main") -> cri.ContainerConfig:
    """Return the configuration of a container in which these paths of the node are mounted."""
    mounts = [cri.Mount(container_path=f"/m{number}", host_path=path) for number, path in enumerate(paths)]
    config: cri.ContainerConfig = box(name, mounts=mounts)
    return config


class MountingCase(PodsTestCase):
    """A running sandbox."""

    def setUp(self) -> None:
        super().setUp()
        self.begin()

    def begin(self, name: str = "web", uid: str = "u1") -> None:
        """Run the pod that later calls are about."""
        self.sandbox = self.run_pod(pod(name, uid=uid))
        self.agent = self.world.agents[self.sandbox]

    @property
    def created(self) -> list[cri.ContainerConfig]:
        """Return what the sandbox's agent was asked to create."""
        return self.agent.created

    def create(self, config: cri.ContainerConfig, sandbox: str = "") -> str:
        return str(self.do(self.world.containers.create(sandbox or self.sandbox, config)))

    def refused(self, error: type[Exception], config: cri.ContainerConfig, sandbox: str = "") -> str:
        creating = start(self.world.containers.create(sandbox or self.sandbox, config))
        return str(self.failureResultOf(creating, error).value)

    def stop(self, sandbox: str = "") -> None:
        self.do(self.world.sandboxes.stop(sandbox or self.sandbox))

    def hang(self, holder: object, name: str, *, after: bool) -> MonkeyPatcher:
        """Make a step never return: it hangs before its effect, or `after` it."""
        step = getattr(holder, name)

        async def hanging(*asked: object, **more: object) -> None:
            if after:
                await step(*asked, **more)
            await Deferred()

        hung: MonkeyPatcher = self.patch(holder, name, lambda *asked, **more: start(hanging(*asked, **more)))
        return hung

    def next_daemon(self) -> None:
        """Kill the daemon, and start the next one."""
        self.world.kill()
        self.world.begin()
        self.world.provider_ready()
