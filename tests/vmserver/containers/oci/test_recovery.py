# SPDX-License-Identifier: Apache-2.0
"""An agent of oci containers is killed, or its conmon, crun or disk fails."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_crun
from tests.support import warm
from tests.vmserver.containers.oci.killed_agent import ID, container_config
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.oci import lock, record
from vmserver.containers.oci import provider as providers
from vmserver.containers.oci.runtime import CALL_SECONDS, Status
from vmserver.machine.mounts import unmount

MAX_STEPS = 80


@needs_crun
class KilledAgentTests(OciCase, TestCase):
    timeout = 600.0

    def killed(self, step: int) -> bool:
        """Run an agent that is killed at this step. Return whether there was such a step."""
        program = ("-m", "tests.vmserver.containers.oci.killed_agent")
        arguments = (str(self.base), self.config.crun, self.image_id, str(step))
        output = self.base / "output"
        with output.open("wb") as file:
            agent = warm.Process((*program, *arguments), file.fileno(), warm.ROOT, os.environ)
        code = agent.wait()
        self.assertIn(code, (0, -signal.SIGKILL), output.read_text())
        return code != 0

    @slow(15, "an agent is killed at each of its steps, and another goes on")
    async def test_killed_at_any_step_it_is_followed_by_one_that_goes_on(self) -> None:
        """However far it got, the container runs once, and in the end nothing is left of it."""
        out = self.base / "out"
        out.mkdir()
        for step in range(1, MAX_STEPS):
            (out / "ran").unlink(missing_ok=True)
            await self.provider.stop()
            if not await deferToThread(self.killed, step):
                return
            self.provider = await self.started()
            before = await self.state(ID)
            if before is None and (out / "ran").exists():
                continue  # it was removed
            state = await self.provider.create(
                ID, self.image_id, container_config(str(out)), cri.PodSandboxConfig()
            )
            if state.state == cri.CONTAINER_CREATED:
                state = await self.provider.start_container(ID)
            state = await self.ended(ID)
            self.assertEqual((state.exit_code, state.reason), (5, "Error"), step)
            self.assertEqual((out / "ran").read_text(), "ran\n", step)
            if before is not None:
                self.assertEqual(state.created_at, before.created_at, step)
            await self.provider.remove(ID)
            self.assertEqual(os.listdir(self.config.directory / "containers"), [], step)
            self.assertEqual(os.listdir(self.config.directory / "init"), [], step)
        self.fail(f"the agent has {MAX_STEPS} steps")


@needs_crun
class FailureTests(OciCase, TestCase):
    def container(self, id: str) -> Any:
        return self.provider._index.existing(id)

    def conmon_pid(self, id: str) -> int:
        return int((self.container(id).bundle / "conmon.pid").read_text())

    async def test_one_whose_conmon_is_killed_is_told_to_have_ended(self) -> None:
        id = await self.run_container("sleep", "600")
        pid = (await self.state(id)).pid
        os.kill(self.conmon_pid(id), signal.SIGKILL)
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))
        self.assertIn("conmon", state.message)
        await self.until(lambda: not Path(f"/proc/{pid}").exists(), "its process is gone")
        self.assertEqual(self.states_told(id)[-1], cri.CONTAINER_EXITED)

    async def test_one_whose_conmon_is_killed_with_the_agent_is_found_to_have_ended(self) -> None:
        id = await self.run_container("sleep", "600")
        pid = (await self.state(id)).pid
        await self.provider.stop()
        os.kill(self.conmon_pid(id), signal.SIGKILL)
        self.provider = await self.started()
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))
        await self.until(lambda: not Path(f"/proc/{pid}").exists(), "its process is gone")

    async def test_after_a_boot_what_ran_has_ended_and_what_did_not_can_be_started(self) -> None:
        ran, made = await self.run_container("sleep", "600"), await self.create("sh", "-c", "echo up")
        await self.provider.stop()
        os.kill(self.conmon_pid(ran), signal.SIGKILL)
        status = self.provider._crun.status(ran)
        status.kill()
        await self.until(lambda: not status.alive, "it has ended")
        await self.provider._crun.delete(ran)
        for id in (ran, made):
            unmount(self.container(id).root)
        self.provider = await self.started()
        state = await self.ended(ran)
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))
        self.assertIn("restarted", state.message)
        await self.provider.start_container(made)
        await self.ended(made)
        self.assertEqual([each.line for each in await self.lines(made)], [b"up"])

    async def test_a_full_disk_is_told_and_what_runs_can_be_stopped_and_removed(self) -> None:
        running, made = await self.run_container("sleep", "600"), await self.create("sleep", "600")

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real = record.save
        self.patch(record, "save", full)
        await self.refused(ResourceExhausted, self.provider.start_container(made))
        config = cri.ContainerConfig(command=["true"])
        making = self.provider.create("b" * 32, self.image_id, config, cri.PodSandboxConfig())
        await self.refused(ResourceExhausted, making)
        self.assertEqual((await self.provider.stop_container(running, 0)).exit_code, 137)
        await self.provider.remove(running)
        self.patch(record, "save", real)
        self.assertEqual((await self.provider.start_container(made)).state, cri.CONTAINER_RUNNING)
        self.assertEqual([state.id for state in await self.provider.containers()], [made])

    async def test_an_end_that_could_not_be_written_down_is_found_by_the_next_agent(self) -> None:
        id = await self.run_container("sh", "-c", "sleep 0.3; exit 9")

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real = record.save
        self.patch(record, "save", full)
        self.assertEqual((await self.ended(id)).exit_code, 9)
        self.patch(record, "save", real)
        await self.restarted()
        self.assertEqual((await self.ended(id)).exit_code, 9)

    async def test_a_crun_that_hangs_is_given_up_and_the_start_can_be_tried_again(self) -> None:
        id = await self.create("sh", "-c", "echo up")
        program = self.base / "hanging"
        program.write_text("#!/bin/sh\nexec sleep 600\n")
        program.chmod(0o755)
        self.patch(self.provider._crun, "_program", str(program))
        self.patch(self.provider._conmon, "_seconds", 1.0)
        self.patch(self.provider._crun, "seconds", 1.0)
        words = await self.refused(Unavailable, self.provider.start_container(id))
        self.assertIn("try again", words)
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_CREATED)
        self.patch(self.provider._crun, "_program", self.config.crun)
        self.patch(self.provider._crun, "seconds", CALL_SECONDS)
        await self.provider.start_container(id)
        await self.ended(id)
        self.assertEqual([each.line for each in await self.lines(id)], [b"up"])

    async def test_one_whose_removal_has_failed_is_not_started_and_can_be_removed(self) -> None:
        id = await self.create("true")

        async def fails(directory: Path) -> None:
            raise Unavailable("it is busy")

        files = self.provider._files
        patched = self.patch(files, "delete", fails)
        await self.refused(Unavailable, self.provider.remove(id))
        await self.refused(NotFound, self.provider.start_container(id))
        patched.restore()
        await self.provider.remove(id)
        self.assertIsNone(await self.state(id))

    def slowly_made(self) -> Deferred[None]:
        """Let containers be made only once this fires."""
        making: Deferred[None] = Deferred()
        make = self.provider._bundles.make

        async def slowly(*asked: Any) -> None:
            await make(*asked)
            await making

        self.patch(self.provider._bundles, "make", slowly)
        return making

    async def test_an_image_stays_while_a_container_is_made_of_it(self) -> None:
        making = self.slowly_made()
        creating = start(self.create("true"))
        words = await self.refused(FailedPrecondition, self.provider.remove_image(self.image_id))
        self.assertIn(self.image_id, words)
        making.callback(None)
        await self.provider.start_container(await creating)

    async def test_of_an_image_that_is_being_removed_no_container_is_made(self) -> None:
        releasing: Deferred[None] = Deferred()

        async def slowly(image_id: str) -> None:
            await releasing

        self.patch(self.provider._files, "release", slowly)
        removing = self.provider.remove_image(self.image_id)
        words = await self.refused(FailedPrecondition, self.create("true"))
        self.assertIn("is being removed", words)
        releasing.callback(None)
        await removing
        self.assertEqual(await self.provider.images(), [])

    async def test_what_changes_it_waits_for_what_is_in_work(self) -> None:
        id = await self.create("true")
        container, changed = self.container(id), list[str]()

        async def change(*_: object) -> None:
            changed.append(id)

        self.patch(providers, "change_limits", change)
        await container.lock.acquire()
        updating = self.provider.update(id, cri.LinuxContainerResources(cpu_shares=5))
        removing = self.provider.remove(id)
        self.assertEqual((changed, container.record.phase), ([], record.Phase.CREATED))
        container.lock.release()
        await updating
        await removing
        self.assertEqual((changed, await self.state(id)), ([id], None))

    async def test_one_that_does_not_end_though_it_is_killed_is_told(self) -> None:
        self.patch(providers, "END_SECONDS", 0.1)
        id = await self.run_container("sleep", "600")
        patched = self.patch(Status, "kill", lambda status: None)
        words = await self.refused(Unavailable, self.provider.stop_container(id, 0))
        self.assertIn("does not end", words)
        patched.restore()
        self.patch(providers, "END_SECONDS", 60.0)
        self.assertEqual((await self.provider.stop_container(id, 0)).exit_code, 137)

    async def test_a_directory_that_can_not_be_made_is_named(self) -> None:
        (self.base / "file").touch()
        config = attrs.evolve(self.config, directory=self.base / "file" / "oci")
        other = providers.OciProvider(installed(), config, self.etc, self.base / "other")
        self.assertIn(str(config.directory), await self.refused(FailedPrecondition, other.start()))
        await other.stop()

    async def test_the_pods_first_process_waits_for_a_container_that_is_being_created(self) -> None:
        first = await self.run_container("sleep", "600")
        making = self.slowly_made()
        creating = start(self.create("true"))
        await self.provider.remove(first)
        self.assertEqual(len(os.listdir(self.config.directory / "init")), 1)
        making.callback(None)
        await self.provider.remove(await creating)
        self.assertEqual(os.listdir(self.config.directory / "init"), [])

    async def test_an_image_that_can_not_be_unmounted_stays(self) -> None:
        async def fails(image_id: str) -> None:
            raise Unavailable("it is busy")

        patched = self.patch(self.provider._files, "release", fails)
        await self.refused(Unavailable, self.provider.remove_image(self.image_id))
        patched.restore()
        await self.run_container("true")
        self.assertEqual(await self.provider.images(), [self.image_id])

    async def test_a_directory_that_can_not_be_locked_is_named(self) -> None:
        directory = self.base / "none"
        words = await self.refused(FailedPrecondition, start(lock.locked(installed(), directory)))
        self.assertIn(str(directory / lock.FILE), words)

    async def test_a_containers_files_are_for_root_alone(self) -> None:
        id = await self.create("true")
        self.assertEqual(self.container(id).directory.stat().st_mode & 0o777, 0o700)

    async def test_a_record_that_is_damaged_is_named(self) -> None:
        id = await self.create("true")
        file = self.container(id).directory / record.FILE
        text = file.read_text()
        await self.provider.stop()
        other = self.make_provider()
        for damage in ("", "{}", text[: len(text) // 2]):
            file.write_text(damage)
            self.assertIn(str(file), await self.refused(FailedPrecondition, other.start()))
        await other.stop()
        file.write_text(text)
        self.provider = await self.started()
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_CREATED)

    async def test_two_agents_never_have_one_directory(self) -> None:
        self.patch(lock, "LOCK_SECONDS", 0.1)
        id = await self.run_container("sleep", "600")
        other = self.make_provider()
        for _ in range(2):
            words = await self.refused(FailedPrecondition, other.start())
            self.assertIn(f"{self.config.directory} is used by another agent", words)
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_RUNNING)
        await self.provider.stop()
        await other.start()
        self.assertEqual([state.id for state in await other.containers()], [id])
        await other.stop()
        self.provider = await self.started()

    async def test_an_agent_waits_for_one_that_is_about_to_leave(self) -> None:
        self.patch(lock, "LOCK_SECONDS", 60.0)
        other = self.make_provider()
        starting = other.start()
        await sleep(installed(), 0.1)
        self.assertFalse(starting.called)
        await self.provider.stop()
        await starting
        await other.stop()
        self.provider = await self.started()
