# SPDX-License-Identifier: Apache-2.0
"""Pods whose containers Docker runs: in an image that has nothing else, or by a pod's or node's choice."""

from __future__ import annotations

import contextlib
from typing import Any

from infranetes_common.wire import cri
from tests.e2e import test_pods
from tests.e2e.pod_case import DOCKER_ALONE, IMAGES, PodCase, templates_of
from tests.e2e.volume_case import VolumeKindsCase
from tests.harness.durations import slow
from tests.infranetes.daemon.case import images, reactor
from txgrpc import Code, GrpcError


class DockerPodTests(test_pods.PodTests):
    """What pods may ask for, in a guest image that has only Docker."""

    images = DOCKER_ALONE
    contprovider = "docker"

    @slow(100, "a template with an image in Docker is booted")
    async def test_an_image_that_the_template_has_is_not_loaded_again(self) -> None:
        self.config["images"] = {"preload": [(await images()).reference]}
        self.config["providers"]["qemu"]["template_dir"] = templates_of("preloaded")
        await self.start()
        container = await self.run_container(await self.run_pod(), self.box(script="exit 7"))
        self.assertEqual((await self.in_state(container, cri.CONTAINER_EXITED)).exit_code, 7)
        self.assertNotIn("loaded into sandbox", self.log)


@slow(70, "two emulated VMs have nine containers")
class DockerVolumeTests(VolumeKindsCase):
    """Volumes in a guest image that has only Docker."""

    images = DOCKER_ALONE
    contprovider = "docker"

    async def test_a_pod_has_all_kinds_of_volumes_and_the_next_one_what_it_wrote(self) -> None:
        await self.check_all_kinds()


@slow(100, "Docker starts in two emulated VMs, with nine containers")
class ChosenDockerVolumeTests(DockerVolumeTests):
    """Volumes where a pod chooses Docker, which has to see what the agent mounts in its own namespace."""

    images = IMAGES


DOCKER = {"infranetes.io/containers": "docker"}
OCI = {"infranetes.io/containers": "oci"}
BY_DOCKER, BY_CRUN = {"dockerd", "containerd", "containerd-shim"}, {"conmon"}
# Lists the programs that run in the VM, whose PID namespace a privileged container may share.
PROGRAMS = "cat /proc/[0-9]*/comm 2>/dev/null | sort | uniq -c; grep MemAvailable /proc/meminfo"


@slow(50, "Docker starts in each VM that chooses it")
class ChoiceTests(PodCase):
    """Pods on a node that leaves the choice to them."""

    contprovider = ""

    def looker(self, name: str = "main", script: str = "while :; do sleep 0.2; date +%s; done") -> Any:
        """Return the configuration of a container that sees all processes of the VM."""
        namespaces = cri.NamespaceOption(pid=cri.NODE)
        context = cri.LinuxContainerSecurityContext(privileged=True, namespace_options=namespaces)
        return self.box(name, script, linux=cri.LinuxContainerConfig(security_context=context))

    async def programs(self, container: str) -> set[str]:
        """Return which of the programs that run containers are running in the VM."""
        said = (await self.execute(container, "sh", "-c", PROGRAMS)).stdout.decode()
        self.assertIn("MemAvailable", said)
        return set(said.split()) & {*BY_DOCKER, *BY_CRUN}

    async def until_programs(self, container: str, programs: set[str]) -> None:
        """Wait until the agent answers, and exactly these programs run."""
        until = reactor.seconds() + 120.0
        while True:
            with contextlib.suppress(GrpcError):
                if await self.programs(container) == programs:
                    return
            self.assertLess(reactor.seconds(), until, self.log[-3000:])
            await self.sleep(0.5)

    async def test_pods_of_both_run_side_by_side_and_a_handlers_are_executables_of_the_vms_systemd(
        self,
    ) -> None:
        self.config["handlers"] = {"executables": {"images": "systemd"}}
        await self.start()
        begun = reactor.seconds()
        plain = await self.run_pod("plain")
        between = reactor.seconds()
        chosen = await self.run_pod("chosen", annotations=DOCKER)
        ended = reactor.seconds()
        by_crun = await self.run_container(plain, self.looker())
        by_docker = await self.run_container(chosen, self.looker())
        self.assertEqual(await self.programs(by_crun), BY_CRUN)
        self.assertEqual(await self.programs(by_docker), BY_DOCKER)
        for pod, container, name in ((plain, by_crun, "plain"), (chosen, by_docker, "chosen")):
            self.assertEqual((await self.execute(container, "sh", "-c", "exit 4")).exit_code, 4)
            other = self.box("other", "echo hello; exit 3")
            status = await self.in_state(await self.run_container(pod, other), cri.CONTAINER_EXITED)
            self.assertEqual(status.exit_code, 3)
            log = self.log_directory / name / "other.log"
            await self.until(lambda log=log: b"hello" in log.read_bytes(), "its log")  # type: ignore[misc]
        figures = (
            f"{between - begun:.2f} s for a pod, {ended - between:.2f} s for one whose Docker is started"
        )
        await self.refused(Code.INVALID_ARGUMENT, self.run_pod("x", annotations={next(iter(DOCKER)): "lxc"}))
        self.assertEqual(len(await self.sandboxes()), 2, figures)
        await self.check_executables(plain)

    async def check_executables(self, plain: str) -> None:
        """Check that an image of executables is fetched by the VM itself, here from where nothing listens."""
        name = "systemd.infranetes.io/127.0.0.1__1/tools/server@sha256:" + 64 * "0"
        await self.image_service.PullImage(
            cri.PullImageRequest(image=cri.ImageSpec(image=name)), timeout=30.0
        )
        (self.log_directory / "web").mkdir(exist_ok=True)
        request = cri.RunPodSandboxRequest(config=self.pod(), runtime_handler="executables")
        answer = await self.runtime.RunPodSandbox(request, timeout=60.0 * self.patience)
        box = self.box("executable", image=cri.ImageSpec(image=name))
        error = await self.refused(Code.UNAVAILABLE, self.create(answer.pod_sandbox_id, box))
        self.assertIn("127.0.0.1:1", str(error))
        await self.refused(Code.INVALID_ARGUMENT, self.create(plain, box))

    async def test_a_killed_agent_and_a_killed_daemon_go_on_with_the_chosen_one(self) -> None:
        """Here the node chooses for its pods, and not as their image does."""
        self.config["contprovider"] = "docker"
        await self.start()
        sandbox = await self.run_pod()
        main = await self.run_container(sandbox, self.looker())
        before = await self.container_status(main)
        with contextlib.suppress(GrpcError):  # the answer is lost with the agent
            await self.execute(main, "sh", "-c", "kill -KILL $(pgrep -f vmserver.toml)")
        await self.until_programs(main, BY_DOCKER)
        await self.restart()
        await self.until_programs(main, BY_DOCKER)
        status = await self.in_state(main, cri.CONTAINER_RUNNING)
        self.assertEqual(status.started_at, before.started_at)
        again = await self.run_container(sandbox, self.box("again", "exit 7"))
        self.assertEqual((await self.in_state(again, cri.CONTAINER_EXITED)).exit_code, 7)
        crun = await self.run_pod("crun", annotations=OCI)
        looker = await self.run_container(crun, self.looker())
        self.assertEqual(await self.programs(looker), BY_CRUN)
