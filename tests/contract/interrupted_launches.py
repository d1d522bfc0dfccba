# SPDX-License-Identifier: Apache-2.0
"""The part of the pod providers' contract about launches that are interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError

from infranetes.providers.interface import (
    InstanceSpec,
)
from infranetes_common.errors import (
    InfranetesError,
)
from tests.contract.pod_provider_case import ProviderCase
from tests.harness.durations import slow
from tests.support import warm

_ROOT = Path(__file__).parents[2]
_DIE_IN_LAUNCH = "tests.contract.die_in_launch"


class InterruptedLaunchContract(ProviderCase):
    """Launches that are cancelled, or whose daemon is killed."""

    async def test_a_launch_that_is_cancelled_can_be_made_again_or_destroyed(self) -> None:
        """As after a daemon that is killed in a launch, whatever exists of the VM is listed."""
        provider = await self.started()
        for seconds in self.interrupt_after:
            spec = self.spec()
            launching = provider.launch(spec)
            await self.sleep(seconds)
            launching.cancel()
            launching.addErrback(lambda failure: failure.trap(CancelledError, InfranetesError))
            await self.within(launching)
            instance = await self.running(provider, spec)
            self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])
            self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
            await self.within(provider.destroy(instance.id))

            spec = self.spec()
            launching = provider.launch(spec)
            await self.sleep(seconds)
            launching.cancel()
            launching.addErrback(lambda failure: failure.trap(CancelledError, InfranetesError))
            await self.within(launching)
            for one in await self.within(provider.list()):
                self.assertEqual(one.token, spec.token)
                await self.within(provider.destroy(one.id))
            self.assertEqual(await self.within(provider.list()), [])

    @slow(8, "six daemons are killed in launches, and three go on")
    async def test_a_daemon_killed_in_a_launch_leaves_what_the_next_one_adopts_or_ends(self) -> None:
        for seconds in self.interrupt_after:
            adopted, dropped = self.spec(), self.spec()
            await self.die_in_launch(adopted, seconds)
            await self.die_in_launch(dropped, seconds)
            provider = await self.started()
            listed = await self.within(provider.list())
            self.assertLessEqual({one.token for one in listed}, {adopted.token, dropped.token})
            self.assertLessEqual(len(listed), 2)
            instance = await self.running(provider, adopted)
            self.assertEqual((await self.agent_info(instance)).sandbox_id, adopted.sandbox_id)
            for one in listed:
                if one.token == adopted.token:
                    self.assertEqual(one.id, instance.id)
                await self.within(provider.destroy(one.id))
            await self.within(provider.destroy(instance.id))
            self.assertEqual(await self.within(provider.list()), [])
            await self.within(provider.stop())

    async def die_in_launch(self, spec: InstanceSpec, seconds: float) -> None:
        """Ask for the VM in a process of its own, which kills itself by SIGKILL `seconds` later."""
        job = self.run_dir / f"{spec.token}.json"
        job.touch(mode=0o600)
        context = attrs.asdict(self.context())
        document = {
            "provider": self.provider_name,
            "table": dict(self.table()),
            "context": {key: str(value) for key, value in context.items()},
            "pod_cidr": self.pod_cidr,
            "spec": attrs.asdict(spec),
            "seconds": seconds,
        }
        job.write_text(json.dumps(document, default=str))
        output = self.run_dir / f"{spec.token}.log"
        with output.open("wb") as file:
            arguments = ("-m", _DIE_IN_LAUNCH, str(job))
            daemon = warm.Process(arguments, file.fileno(), _ROOT, os.environ)
        try:
            seconds_to_die = self.start_timeout + 60
            await self.until(lambda: daemon.poll() is not None, "the daemon kills itself", seconds_to_die)
        finally:
            job.unlink()
            daemon.kill()
        self.assertEqual(daemon.returncode, -signal.SIGKILL, output.read_text(errors="replace"))
