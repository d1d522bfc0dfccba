# SPDX-License-Identifier: Apache-2.0
"""Agents that can't be reached, or die in the middle of a call."""

from __future__ import annotations

from pathlib import Path

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code

NEVER = 1000.0  # longer than a test may take: what waits for it fails
SOON = 1.0
LISTING = 4.0  # how long lists wait for agents that were lost just now


@needs_registry
class AgentTests(DaemonCase):
    """One dead VM never fails or slows anything else."""

    async def setUp(self) -> None:
        super().setUp()
        self.config["times"] = {"unknown_after": 1.0}
        self.constants = {
            "infranetes.machines.agent.client.CONNECT_SECONDS": SOON,
            "infranetes.machines.agent.client.KEEPALIVE_SECONDS": SOON,
            "infranetes.machines.agent.limits.CHANNEL.handshake_timeout": SOON,
            "infranetes.machines.agent.limits.CHANNEL.keepalive_timeout": SOON,
        }
        await self.start()

    def file(self, name: str) -> Path:
        """Return a file that a command in a VM makes: simulated VMs share the node's files."""
        return self.root / name

    async def behave(self, sandbox: str, behaviour: str, after: float = 0) -> None:
        vm = next(vm for vm in await self.vms() if vm["sandbox_id"] == sandbox)
        await self.farm("behave", id=vm["id"], behaviour=behaviour, after=after)

    async def states(self) -> dict[str, int]:
        """List the containers. A list that waits for lost agents fails."""
        listed = await self.runtime.ListContainers(cri.ListContainersRequest(), timeout=0.75 * LISTING)
        return {each.id: each.state for each in listed.containers}

    @slow(5, "a lost agent is given up after a while")
    async def test_a_lost_one_is_unknown_and_the_others_are_not_waited_for(self) -> None:
        self.config["times"] |= {"listing": LISTING}
        await self.restart()
        pods = [await self.run_pod(f"p{number}") for number in range(4)]
        containers = [await self.run_container(pod, self.box(script="sleep 1000")) for pod in pods]
        ended = await self.run_container(pods[0], self.box("ended", script="true"))
        await self.in_state(ended, cri.CONTAINER_EXITED)
        for behaviour in ("no-agent", "unreachable"):
            await self.behave(pods[0], behaviour)
            status = await self.in_state(containers[0], cri.CONTAINER_UNKNOWN)
            self.assertTrue(status.message)
            self.assertEqual(
                await self.states(),
                {
                    containers[0]: cri.CONTAINER_UNKNOWN,
                    ended: cri.CONTAINER_EXITED,
                    **dict.fromkeys(containers[1:], cri.CONTAINER_RUNNING),
                },
            )
            command = cri.ExecSyncRequest(container_id=containers[0], cmd=["true"], timeout=1)
            call = self.runtime.ExecSync(command, timeout=30.0)
            await self.refused_in(call, (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED))
            await self.runtime.ExecSync(
                cri.ExecSyncRequest(container_id=containers[1], cmd=["true"], timeout=10), timeout=20.0
            )
            await self.behave(pods[0], "normal")
            await self.in_state(containers[0], cri.CONTAINER_RUNNING, 40.0)

    async def refused_in(self, call: object, codes: tuple[Code, ...]) -> None:
        from txgrpc import GrpcError

        try:
            await call  # type: ignore[misc]
        except GrpcError as error:
            self.assertIn(error.code, codes, error.message)
        else:
            self.fail("not refused")

    async def test_an_agent_that_dies_in_the_middle_of_a_command(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        script = f"touch {self.file('begun')}; sleep {NEVER:.0f}"
        command = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", script], timeout=int(NEVER))
        call = self.runtime.ExecSync(command, timeout=NEVER)
        await self.until(self.file("begun").exists, "the command runs")
        await self.behave(sandbox, "no-agent")
        await self.refused(Code.UNAVAILABLE, call)
        await self.behave(sandbox, "normal")
        await self.in_state(container, cri.CONTAINER_RUNNING, 40.0)
        await self.remove_pod(sandbox)

    async def test_a_vm_that_dies_in_the_middle_of_a_stop(self) -> None:
        sandbox = await self.run_pod()
        script = f"trap 'touch {self.file('told')}' TERM; while :; do sleep 0.1; done"
        container = await self.run_container(sandbox, self.box(script=script))
        stop = cri.StopContainerRequest(container_id=container, timeout=int(NEVER))
        call = self.runtime.StopContainer(stop, timeout=NEVER)
        await self.until(self.file("told").exists, "the stop has begun")
        await self.behave(sandbox, "dies-after")
        await call
        status = await self.container_status(container)
        self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 137))

    async def test_a_pod_that_can_not_be_reached_can_be_ended(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        await self.behave(sandbox, "unreachable")
        await self.in_state(container, cri.CONTAINER_UNKNOWN)
        await self.stop_pod(sandbox)
        self.assertEqual(await self.vms(), [])
        await self.in_state(container, cri.CONTAINER_EXITED)
        await self.remove_pod(sandbox)

    @slow(7, "the daemon waits for an agent that may still come")
    async def test_an_agent_that_never_comes_leaves_nothing(self) -> None:
        self.config["times"] = {"launch": 2.0}
        await self.restart()
        for behaviour in ("no-agent", "unreachable", "never"):
            annotations = {"simulated.infranetes.io/behaviour": behaviour}
            config = self.pod(behaviour, annotations=annotations)
            await self.refused(Code.DEADLINE_EXCEEDED, self.run_pod(behaviour, config))
            self.assertEqual(await self.vms(), [])
        self.assertEqual(await self.sandboxes(), [])
        await self.run_pod()

    async def test_a_daemon_that_starts_again_is_hindered_by_no_dead_agent(self) -> None:
        pods = [await self.run_pod(f"p{number}") for number in range(3)]
        containers = [await self.run_container(pod, self.box(script="sleep 1000")) for pod in pods]
        await self.behave(pods[0], "unreachable")
        await self.restart()
        states = await self.states()
        self.assertEqual(set(states), set(containers))
        for container in containers[1:]:
            await self.in_state(container, cri.CONTAINER_RUNNING, 5.0)
        await self.in_state(containers[0], cri.CONTAINER_UNKNOWN, 40.0)
