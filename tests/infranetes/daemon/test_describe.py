# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl describe` against a daemon as a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infranetes.ctl.cli import FAILED
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.ctl import CtlCase
from txgrpc import Code


@needs_registry
class DescribeTests(CtlCase):
    more = ""

    def written(self) -> str:
        return super().written() + self.more

    async def described(self, pod: str) -> Any:  # Any: JSON
        return await self.json("describe", pod)

    def whats(self, described: Mapping[str, Any], container: str = "") -> list[str]:
        return [step["what"] for step in described["steps"] if step["container"] == container]

    async def test_a_pods_life_from_its_launch_to_its_removal(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        container = await self.run_container(sandbox, self.box(script="exit 3"))
        await self.in_state(container, cri.CONTAINER_EXITED)
        told = await self.described("default/web")
        self.assertEqual((told["pod"]["id"], told["pod"]["state"]), (sandbox, "ready"))
        self.assertEqual(
            self.whats(told)[:5],
            [
                "the pod is asked for",
                "the provider is waited for, until it has started",
                "the provider is asked for a VM",
                "the VM starts",
                "the agent in the VM starts, and answers",
            ],
        )
        self.assertIn("the pod is ready", self.whats(told))
        self.assertIn("an image is brought into the VM", self.whats(told))
        self.assertEqual(
            self.whats(told, "main"),
            ["the container is created", "the container is started", "the container has ended"],
        )
        times = [step["began_at"] for step in told["steps"]]
        self.assertEqual(times, sorted(times))
        self.assertFalse(any(step["under_way"] or step["error"] for step in told["steps"]))
        (main,) = told["containers"]
        self.assertEqual((main["name"], main["state"], main["exit_code"]), ("main", "exited", 3))
        words = await self.ctl("describe", "web")
        for word in ("default/web", "exit code 3", "TIME", "the VM starts"):
            self.assertIn(word, words)

        await self.stop_pod(sandbox)
        self.assertEqual(
            self.whats(await self.described(sandbox[:8]))[-3:],
            ["the pod is stopped", "its containers are ended", "the VM is destroyed"],
        )
        await self.remove_pod(sandbox)
        told = await self.described(sandbox)
        self.assertEqual((told["pod"]["state"], told["containers"]), ("removed", []))
        self.assertEqual(self.whats(told)[-1], "the pod is removed")
        self.assertIn("nothing is known of a pod 'other'", await self.ctl("describe", "other", code=FAILED))

    async def test_a_launch_that_failed_says_why(self) -> None:
        await self.start()
        config = self.pod("web", annotations={"simulated.infranetes.io/behaviour": "fails"})
        await self.refused(Code.UNAVAILABLE, self.run_pod("web", config))
        told = await self.described("default/web")
        self.assertEqual(told["pod"]["state"], "failed")
        self.assertEqual((await self.json("pods"))["pods"], [told["pod"]])
        self.assertIn(told["pod"]["message"][:60], await self.ctl("pods"))
        failed = [step for step in told["steps"] if step["error"]]
        self.assertEqual(failed[0]["what"], "the provider is asked for a VM")
        self.assertIn("the launch has failed", self.whats(told))

    async def test_a_pod_with_a_vm_of_the_pool_has_its_steps_too(self) -> None:
        self.more = "\n[[pool.sizes]]\ncount = 1\n"
        await self.start()
        while not any(vm["state"] == "idle" for vm in (await self.json("pool"))["vms"]):
            await self.sleep(0.05)
        await self.run_pod("web")
        whats = self.whats(await self.described("web"))
        order = ["the VM starts", "the VM waits in the pool", "the pod is asked for"]
        order += ["the pod has a VM of the pool", "the pod is ready"]
        self.assertEqual([each for each in whats if each in order], order)

    async def test_a_daemon_that_is_started_again_has_forgotten_steps_and_not_the_pod(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web")
        container = await self.run_container(sandbox, self.box(script="sleep 600"))
        await self.restart()
        told = await self.described("web")
        self.assertEqual(self.whats(told)[0], "the daemon was started again")
        self.assertEqual([each["id"] for each in told["containers"]], [container])
        self.assertTrue(told["containers"][0]["started_at"])
