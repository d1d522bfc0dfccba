# SPDX-License-Identifier: Apache-2.0
"""Pods of images without our agent at a cloud, through the CRI of a daemon that is a process."""

from __future__ import annotations

from infranetes_common.wire import cri
from tests.infranetes.daemon.machine_pods import NAME, MachineCalls
from txgrpc import Code

SSH = {"infranetes.io/guest": "ssh"}
NOTHING = {"infranetes.io/guest": "none"}


class GuestPods(MachineCalls):
    """Each pod is a VM whose image knows nothing of Infranetes. A mixin for a `CloudDaemonCase`."""

    async def add_image(self) -> str:
        return str(await self.world.guest_image(NAME))

    async def logs(self, words: str) -> None:
        """Wait until the container's log has these words."""
        log = self.log_directory / "web" / "main.log"
        await self.until(
            lambda: log.exists() and words in log.read_text(errors="replace"), f"{words} is logged", 40.0
        )

    async def test_a_pods_life_by_ssh(self) -> None:
        await self.started()
        sandbox = await self.run_pod(annotations=SSH, hostname="web-1")
        container = await self.run_container(sandbox, self.machine())
        [vm] = self.world.seen()
        self.assertEqual((vm.image, vm.sandbox), (self.machine_image, sandbox))
        self.assertIn(b"hostname: web-1", self.world.guests.user_data[vm.id])
        self.assertNotIn(b"CERTIFICATE", self.world.guests.user_data[vm.id])
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = await self.runtime.PodSandboxStatus(asked, timeout=10.0)
        self.assertEqual(status.status.network.ip, vm.address)
        answer = await self.exec_in(container, "sh", "-c", "echo there; exit 3")
        self.assertEqual((answer.exit_code, answer.stdout), (3, b"there\n"))
        await self.logs("booted with")
        self.world.guests.say(vm.id, "words of the guest\n")
        await self.logs("words of the guest")
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual((await self.exec_in(container, "false")).exit_code, 1)
        self.assertEqual(self.world.seen(), [vm])
        stopping = cri.StopContainerRequest(container_id=container, timeout=10)
        await self.runtime.StopContainer(stopping, timeout=30.0)
        ended = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((ended.exit_code, ended.reason), (0, "Completed"))
        self.assertEqual(self.world.guests.pressed[0], vm.id)
        await self.logs("reboot: Power down")
        text = (self.log_directory / "web" / "main.log").read_text()
        for words in ("booted with", "words of the guest", "Power down"):
            self.assertEqual(text.count(words), 1, "no line is logged twice")
        await self.not_ready()
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()

    async def test_a_guest_that_nobody_can_log_in_to_has_its_console(self) -> None:
        await self.started()
        sandbox = await self.run_pod(annotations=NOTHING)
        container = await self.run_container(sandbox, self.machine())
        [vm] = self.world.seen()
        self.assertNotIn(b"ssh", self.world.guests.user_data[vm.id])
        await self.logs("booted with")
        said = await self.refused(Code.FAILED_PRECONDITION, self.exec_in(container, "true"))
        self.assertIn("console", said)
        self.world.end(vm.id)
        ended = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((ended.exit_code, ended.reason), (0, "Completed"))
        await self.not_ready()
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.nothing_is_left()

    async def test_a_guest_that_ignores_its_power_button_is_ended(self) -> None:
        await self.started()
        self.world.guests.obeys = False
        sandbox = await self.run_pod(annotations=NOTHING)
        container = await self.run_container(sandbox, self.machine())
        stopping = cri.StopContainerRequest(container_id=container, timeout=1)
        await self.runtime.StopContainer(stopping, timeout=30.0)
        ended = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual(ended.exit_code, 137)
        await self.nothing_is_left()
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)

    async def test_what_a_cloud_can_not_do_is_refused(self) -> None:
        await self.started()
        secret = "infranetes.io/user-data-source"
        for asked, words in (
            ({"infranetes.io/guest": "guest-agent"}, "ssh or none"),
            ({**SSH, "infranetes.io/firmware": "uefi"}, "infranetes.io/firmware"),
            ({**SSH, secret: "secret/keys/user-data"}, "no Secret"),
            ({**SSH, secret: "/etc/secret/user-data"}, "no Secret"),
            ({"infranetes.io/user-data": "#cloud-config\n{}"}, "infranetes.io/guest: ssh or none"),
            ({**SSH, "infranetes.io/cloud-init": "none"}, "node's key"),
        ):
            said = await self.refused(Code.INVALID_ARGUMENT, self.run_pod(annotations=asked))
            self.assertIn(words, said)
        # As it is in base64, it is over what any cloud takes.
        large = {**SSH, "infranetes.io/user-data": "#cloud-config\nruncmd: [" + "\u00e4" * 110_000 + "]"}
        sandbox = await self.run_pod(annotations=large)
        said = await self.refused(Code.INVALID_ARGUMENT, self.create(sandbox, self.machine()))
        self.assertIn("user-data", said)
        self.assertEqual(self.world.seen(), [], "the cloud was not asked")
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
