# SPDX-License-Identifier: Apache-2.0
"""Pods whose image is the VM itself, through the CRI of a daemon that is a process: what holds on any cloud.

`MachinePods` tests what depends on the cloud. The rest does not depend on it and is tested with one cloud.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from infranetes_common.wire import cri
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.faults import NO_AGENT, NORMAL
from txgrpc import Code

NAME = "web:1.0"
# Moments in a machine's creation: around which write to the store, how many VMs there are, what has happened.
MOMENTS = (
    ("after", 4, 0, "the cloud is to be asked"),
    ("before", 5, 1, "the cloud has answered"),
    ("after", 6, 1, "the machine runs"),
    ("after", 7, 1, "its agent answers"),
    ("before", 8, 1, "the agent has the container"),
)

if TYPE_CHECKING:
    _Base = CloudDaemonCase
else:
    _Base = object


class MachineCalls(_Base):
    """A daemon whose pods are of a cloud's images, and calls for them. A mixin for a `CloudDaemonCase`."""

    def setUp(self) -> None:
        super().setUp()
        self.config["imgprovider"] = self.provider

    async def pull(self, name: str) -> str:
        request = cri.PullImageRequest(image=cri.ImageSpec(image=name))
        return str((await self.image_service.PullImage(request, timeout=30.0)).image_ref)

    async def image_named(self, name: str) -> Any:
        """Return ImageStatus's answer, or None if the image is not here."""
        request = cri.ImageStatusRequest(image=cri.ImageSpec(image=name), verbose=True)
        answer = await self.image_service.ImageStatus(request, timeout=10.0)
        return answer if answer.HasField("image") else None

    async def add_image(self) -> str:
        """Add an image called NAME to the cloud, and return its id."""
        return str(await self.world.machine_image(NAME))

    async def started(self) -> None:
        """Start a daemon, and pull the image."""
        self.machine_image = await self.add_image()
        await self.start()
        self.pulled = await self.pull(NAME)

    def machine(self, name: str = "main", **fields: Any) -> Any:
        """Return the config of a container that is a machine."""
        return self.box(name, image=cri.ImageSpec(image=self.pulled), **fields)

    async def exec_in(self, container: str, *command: str) -> Any:
        request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=20)
        return await self.runtime.ExecSync(request, timeout=30.0)

    async def not_ready(self) -> None:
        """Wait until the sandbox is NotReady."""
        while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
            await self.sleep(0.1)


class MachinePods(MachineCalls):
    """A catalogue with one image, which is pulled. A mixin for a `CloudDaemonCase`.

    :cvar size: one of the cloud's sizes, not its cheapest.
    :cvar looked_for: words of the error that tell where `web:9` was looked for.
    """

    size: ClassVar[str]
    looked_for: ClassVar[tuple[str, ...]]

    async def test_images_are_the_clouds_and_what_it_lacks_is_told(self) -> None:
        await self.started()
        self.assertEqual(await self.pull("docker.io/library/web:1.0"), self.pulled)
        request = cri.ListImagesRequest()
        [image] = (await self.image_service.ListImages(request, timeout=10.0)).images
        self.assertEqual((image.id, list(image.repo_tags)), (self.pulled, [NAME]))
        self.assertEqual(list(image.repo_digests), [f"web@{self.pulled}"])
        theirs = f"{self.provider}.infranetes.io/web:1.0"
        for name in (NAME, "docker.io/library/web:1.0", theirs, self.pulled):
            status = await self.image_named(name)
            self.assertEqual(status.image.id, self.pulled)
        self.assertEqual(json.loads(status.info["info"])["imageSpec"]["machine"], self.machine_image)
        removing = cri.RemoveImageRequest(image=cri.ImageSpec(image=NAME))
        await self.image_service.RemoveImage(removing, timeout=10.0)
        self.assertIsNone(await self.image_named(NAME))
        self.assertEqual(await self.pull(NAME), self.pulled, "the cloud has it still")
        said = await self.refused(Code.NOT_FOUND, self.pull("web:9"))
        for words in self.looked_for:
            self.assertIn(words, said)
        said = await self.refused(Code.INVALID_ARGUMENT, self.pull("quay.io/web:1.0"))
        self.assertIn(f"{self.provider}.infranetes.io/NAME:VERSION", said)

    async def test_a_pods_life(self) -> None:
        await self.started()
        sandbox = await self.run_pod(annotations={"infranetes.io/instance-type": self.size})
        self.assertEqual([one.state for one in await self.sandboxes()], [cri.SANDBOX_READY])
        self.assertEqual(self.world.holdings(), [])
        container = await self.create(sandbox, self.machine())
        [vm] = self.world.seen()
        self.assertEqual((vm.image, vm.size, vm.sandbox), (self.machine_image, self.size, sandbox))
        await self.runtime.StartContainer(cri.StartContainerRequest(container_id=container), timeout=30.0)
        await self.in_state(container, cri.CONTAINER_RUNNING)
        answer = await self.exec_in(container, "sh", "-c", "echo there; exit 3")
        self.assertEqual((answer.exit_code, answer.stdout), (3, b"there\n"))
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        self.assertEqual(status.status.network.ip, vm.address)
        second = await self.refused(Code.FAILED_PRECONDITION, self.create(sandbox, self.machine("second")))
        self.assertIn(container, second)
        self.world.vm_images.write("words of the machine")
        log = self.log_directory / "web" / "main.log"
        await self.until(
            lambda: log.exists() and "words of the machine" in log.read_text(errors="replace"), "it is logged"
        )
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertIsNotNone(await self.image_named(NAME))
        self.assertEqual((await self.exec_in(container, "false")).exit_code, 1)
        self.assertEqual(self.world.seen(), [vm])
        await self.stop_pod(sandbox)
        await self.nothing_is_left()
        await self.remove_pod(sandbox)

    async def test_stopping_the_container_switches_the_machine_off(self) -> None:
        await self.started()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.machine())
        request = cri.StopContainerRequest(container_id=container, timeout=10)
        await self.runtime.StopContainer(request, timeout=30.0)
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (0, "Completed"))
        await self.until(lambda: not self.world.seen(), "it is off, and nobody has asked the cloud for that")
        await self.not_ready()
        self.assertEqual((await self.container_status(container)).exit_code, 0)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()

    async def test_an_image_that_was_removed_is_found_anew(self) -> None:
        await self.started()
        sandbox = await self.run_pod()
        self.world.deregister(self.machine_image)
        said = await self.refused(Code.INVALID_ARGUMENT, self.create(sandbox, self.machine()))
        self.assertIn(self.machine_image, said)
        self.assertEqual(self.world.holdings(), [])
        while await self.image_named(NAME) is not None:
            await self.sleep(0.05)
        self.machine_image = await self.world.machine_image(NAME)
        self.pulled = await self.pull(NAME)
        await self.create(sandbox, self.machine())
        self.assertEqual([vm.image for vm in self.world.seen()], [self.machine_image])
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)


class AllOfMachinePods(MachinePods):
    """The tests of `MachinePods`, and those that do not depend on the cloud.

    :cvar annotation: the name of an annotation for the VM's image, and an image.
    """

    annotation: ClassVar[tuple[str, str]]

    async def test_removing_the_container_ends_the_vm(self) -> None:
        await self.started()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.machine())
        removing = cri.RemoveContainerRequest(container_id=container)
        for _ in range(2):
            await self.runtime.RemoveContainer(removing, timeout=60.0)
        self.assertEqual(self.world.holdings(), [])
        self.assertEqual(await self.containers(), [])
        await self.remove_pod(sandbox)

    async def test_a_machine_whose_agent_never_comes_up_is_ended(self) -> None:
        self.config["times"]["launch"] = 3.0
        await self.started()
        sandbox = await self.run_pod()
        self.world.behaviour = NO_AGENT
        said = await self.refused(Code.DEADLINE_EXCEEDED, self.create(sandbox, self.machine()))
        self.assertIn("agent", said)
        await self.nothing_is_left()
        self.assertEqual([one.state for one in await self.sandboxes()], [cri.SANDBOX_READY])
        self.assertEqual(await self.containers(), [])
        self.assertIsNotNone(await self.image_named(NAME))
        self.world.behaviour = NORMAL
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)

    async def test_an_annotation_can_not_name_another_image(self) -> None:
        self.config["providers"][self.provider]["allowed_images"] = ["*"]
        await self.started()
        sandbox = await self.run_pod(annotations=dict([self.annotation]))
        call = self.create(sandbox, self.machine())
        self.assertIn("infranetes.io/image", await self.refused(Code.INVALID_ARGUMENT, call))
        await self.nothing_is_left()

    async def test_a_daemon_that_is_killed_while_a_machine_boots_leaves_a_container_or_nothing(self) -> None:
        """Around each write from that of the VM to that of the container; kubelet then retries the call."""
        self.machine_image = await self.world.machine_image(NAME)
        for when, write, machines, step in MOMENTS:
            await self.start(crash=(when, write))
            self.pulled = await self.pull(NAME)
            name = f"pod-{when}-{write}"
            sandbox = await self.run_pod(name)
            await self.refused(Code.UNAVAILABLE, self.create(sandbox, self.machine()))
            await self.ended()
            self.assertEqual(len(self.world.seen()), machines, step)
            await self.start()
            self.assertEqual([one.id for one in await self.sandboxes()], [sandbox], step)
            container = await self.create(sandbox, self.machine())
            self.assertEqual(len(self.world.seen()), 1, step)
            self.assertEqual([one.id for one in await self.containers()], [container], step)
            await self.stop_pod(sandbox)
            await self.remove_pod(sandbox)
            await self.nothing_is_left()
            await self.kill()
