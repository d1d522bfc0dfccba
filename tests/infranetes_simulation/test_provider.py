# SPDX-License-Identifier: Apache-2.0
"""The simulated provider over a real farm: the contract, its faults, and the loss of the farm."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers import registry
from infranetes.providers.interface import Instance, InstanceState, IPodProvider, ProviderContext
from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.errors import (
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import vmserver
from infranetes_simulation.provider.farm_client import FarmClient
from infranetes_simulation.provider.provider import SimulatedProvider
from infranetes_simulation.provider.settings import AFTER_ANNOTATION, BEHAVIOUR_ANNOTATION
from tests.contract.leased_addresses import LeasedAddressContract
from tests.contract.pod_provider import PodProviderContract
from tests.contract.pod_provider_case import ProviderCase, reactor
from tests.contract.sleeping_vms import ISleepingProvider, SleepingVmsContract
from tests.contract.started_kept_vms import StartedKeptVmsContract
from tests.contract.stopped_vms import StoppedVmsContract
from tests.support import warm
from txgrpc import GrpcError


class SimulatedCase(ProviderCase):
    provider_name = "simulated"
    boot_timeout = 20.0

    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()

    def setUp(self) -> Any:
        self.settings: dict[str, Any] = {
            "boot_seconds": 0.1,
            "jitter_seconds": 0.1,
            "farm_command": warm.detached("-m", "infranetes_simulation.farm"),
        }
        return super().setUp()

    def table(self) -> Mapping[str, Any]:
        return self.settings

    async def farm(self, op: str, **fields: Any) -> Mapping[str, Any]:
        """Send a request to the test's farm past the provider. It is not started for that."""
        directory = self.run_dir / "simulated"
        farm = FarmClient(reactor, ["/bin/false"], directory, directory, lambda vms: None, lambda *_: None)
        try:
            return await farm.request(op, **fields)
        finally:
            await farm.stop(end_farm=False)

    async def end_from_outside(self, instance: Instance) -> None:
        await self.farm("behave", id=instance.id, behaviour="dies-after", after=0)

    def break_launches(self) -> Any:
        self.settings["faults"] = [{"every": 1, "behaviour": "fails"}]
        return lambda: self.settings.pop("faults")

    async def leftovers(self) -> list[str]:
        """A farm without VMs ends when its provider stops."""
        await self.until(lambda: not self.farm_pids(), "a farm without VMs ends when its provider stops")
        return []

    def farm_pids(self) -> list[int]:
        """Return the processes of the test's farm, which has the directory of its socket to itself."""
        found = []
        for directory in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if directory.readlink() == self.run_dir / "simulated":
                    found.append(int(directory.parent.name))
        return found


class SimulatedContractTests(SimulatedCase, PodProviderContract, LeasedAddressContract, TestCase):
    """What every provider does."""


class SimulatedKeptVmsTests(SimulatedCase, StartedKeptVmsContract, TestCase):
    """VMs that start from kept ones."""

    async def keeper(self) -> IStartsKeptVms:
        return _starts_kept(await self.started())

    async def machine(self, keeper: IStartsKeptVms) -> str:
        return (await self.running(self.providers[-1], self.spec())).id

    async def launched(self, keeper: IStartsKeptVms, directory: Path) -> str:
        return (await self.running(self.providers[-1], attrs.evolve(self.spec(), kept=directory))).id

    async def next_daemon(self, keeper: IStartsKeptVms) -> IStartsKeptVms:
        return _starts_kept(await self.restarted(self.providers[-1]))

    async def end(self, keeper: IStartsKeptVms, machine: str) -> None:
        provider = self.providers[-1]
        ended: list[Instance] = []
        provider.watch(ended.append)
        await self.end_from_outside(await provider.get(machine))
        await self.until(lambda: ended, "the VM's end is told")

    async def assert_executes(self, keeper: IStartsKeptVms, machine: str) -> None:
        instance = await self.providers[-1].get(machine)
        self.assertEqual((await self.agent_info(instance)).sandbox_id, instance.sandbox_id)

    async def assert_unchanged(self, keeper: IStartsKeptVms, machine: str) -> None:
        await self.assert_executes(keeper, machine)


class SimulatedStoppedVmsTests(SimulatedCase, StoppedVmsContract, TestCase):
    """VMs that are stopped and started."""

    def refuse_starts(self) -> None:
        self.settings["starts_fail"] = True

    async def end_stopped(self, instance: Instance) -> None:
        await self.farm("end", id=instance.id)

    async def at_rest(self, instance: Instance) -> bytes:
        directory = self.state_dir / "simulated"
        return b"".join(each.read_bytes() for each in directory.rglob("*") if each.is_file())

    async def test_the_loss_of_the_farm_ends_those_that_run_and_none_that_is_stopped(self) -> None:
        provider = await self.started()
        spec = self.spec()
        stopped, running = await self.stopped(provider, spec), await self.running(provider, self.spec())
        ended: list[str] = []
        provider.watch(lambda instance: ended.append(instance.id))
        for pid in self.farm_pids():
            os.kill(pid, signal.SIGKILL)
        states = {each.id: each.state for each in await self.within(provider.list())}
        self.assertEqual(states, {stopped.id: InstanceState.STOPPED, running.id: InstanceState.ENDED})
        self.assertEqual(ended, [running.id])
        await self.assert_executes(await self.running(provider, self.again(spec)))


class SimulatedSleepTests(SimulatedCase, SleepingVmsContract, TestCase):
    """VMs that sleep."""

    async def sleeper(self) -> ISleepingProvider:
        return _sleeps(await self.started())

    async def machine(self, sleeper: ISleepingProvider) -> Instance:
        return await self.running(sleeper, self.spec())

    async def next_daemon(self, sleeper: ISleepingProvider) -> ISleepingProvider:
        return _sleeps(await self.restarted(sleeper))

    async def end(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        ended: list[Instance] = []
        sleeper.watch(ended.append)
        await self.end_from_outside(machine)
        await self.until(lambda: ended, "the VM's end is told")

    async def damage(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        (self.state_dir / "simulated" / "asleep" / machine.id).write_text("{")

    async def assert_executes(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        self.assertEqual((await self.agent_info(machine)).sandbox_id, machine.sandbox_id)

    async def assert_still(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        stub = self.agent(machine)
        await self.assertFailure(stub.Info(vmserver.InfoRequest(), timeout=5.0), GrpcError)
        file = self.state_dir / "simulated" / "asleep" / machine.id
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)


def _sleeps(provider: IPodProvider) -> ISleepingProvider:
    assert isinstance(provider, SimulatedProvider)
    return cast(ISleepingProvider, provider)


def _starts_kept(provider: IPodProvider) -> IStartsKeptVms:
    assert isinstance(provider, SimulatedProvider)
    return cast(IStartsKeptVms, provider)


class SimulatedTests(SimulatedCase, TestCase):
    """What only this provider does."""

    async def test_one_that_never_boots_is_waited_for_in_vain(self) -> None:
        provider = await self.started()
        launched = await provider.launch(self.spec(annotations={BEHAVIOUR_ANNOTATION: "never"}))
        for _ in range(2):
            await self.refused(DeadlineExceeded, provider.wait_running(launched.id, 0.5))
        self.assertIs((await provider.get(launched.id)).state, InstanceState.PENDING)

    async def test_one_without_agent_runs_and_refuses_connections(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec(annotations={BEHAVIOUR_ANNOTATION: "no-agent"}))
        stub = self.agent(instance)
        await self.assertFailure(stub.Info(vmserver.InfoRequest(), timeout=5.0), GrpcError)

    async def test_one_that_ends_after_a_while_is_told(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        asked = {BEHAVIOUR_ANNOTATION: "dies-after", AFTER_ANNOTATION: "0.3"}
        instance = await self.running(provider, self.spec(annotations=asked))
        await self.until(lambda: ended, "the VM's end is told")
        self.assertEqual(ended[0].id, instance.id)

    async def test_a_behaviour_that_does_not_exist_is_refused(self) -> None:
        provider = await self.started()
        for asked in (
            {BEHAVIOUR_ANNOTATION: "odd"},
            {BEHAVIOUR_ANNOTATION: "dies-after", AFTER_ANNOTATION: "soon"},
            {BEHAVIOUR_ANNOTATION: "dies-after", AFTER_ANNOTATION: "-1"},
            {"simulated.infranetes.io/behavior": "fails"},
        ):
            await self.refused(InvalidArgument, provider.launch(self.spec(annotations=asked)))
        self.assertEqual(await provider.list(), [])

    async def test_a_launch_that_is_to_fail_says_what_asked_for_it(self) -> None:
        provider = await self.started()
        spec = self.spec(annotations={BEHAVIOUR_ANNOTATION: "fails"})
        refused = await self.assertFailure(provider.launch(spec), Unavailable)
        self.assertIn(BEHAVIOUR_ANNOTATION, str(refused))

    async def test_every_nth_launch_fails_and_leaves_nothing(self) -> None:
        self.settings["faults"] = [{"every": 3, "behaviour": "fails"}]
        provider = await self.started()
        for _ in range(2):
            await provider.launch(self.spec())
            await provider.launch(self.spec())
            refused = await self.assertFailure(provider.launch(self.spec()), Unavailable)
            self.assertIn("configuration", str(refused))
        self.assertEqual(len(await provider.list()), 4)

    async def test_capacity_is_given_back(self) -> None:
        self.settings["capacity"] = 2
        provider = await self.started()
        first, _ = await gatherResults([provider.launch(self.spec()) for _ in range(2)])
        await self.refused(ResourceExhausted, provider.launch(self.spec()))
        await provider.destroy(first.id)
        await provider.launch(self.spec())

    async def test_when_the_farm_is_killed_its_vms_have_ended_and_a_new_farm_serves(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instances = [await self.running(provider, self.spec()) for _ in range(2)]
        for pid in self.farm_pids():
            os.kill(pid, signal.SIGKILL)
        await self.until(lambda: len(ended) == 2, "the end of each VM is told")
        self.assertEqual({one.id for one in ended}, {one.id for one in instances})
        listed = await self.within(provider.list())
        self.assertEqual({one.state for one in listed}, {InstanceState.ENDED})
        await self.running(provider, self.spec())
        await self.refused(Unavailable, provider.wait_running(instances[0].id, 5.0))

    async def test_a_farm_that_does_not_start_is_named_with_its_words(self) -> None:
        self.patch(FarmClient, "start_seconds", 1.0)
        self.settings["farm_command"] = ["/bin/sh", "-c", "echo no farm today >&2; exit 1"]
        provider = self.make_provider()
        for _ in range(2):
            error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
            self.assertIn("no farm today", str(error))
            self.assertIn("farm_command", str(error))
        self.settings.pop("farm_command")

    async def test_after_stop_calls_say_so(self) -> None:
        provider = await self.started()
        await provider.stop()
        await self.refused(Unavailable, provider.list())
        await self.refused(Unavailable, provider.launch(self.spec()))

    async def test_an_id_of_another_shape_never_reaches_the_farm(self) -> None:
        provider = await self.started()
        await self.refused(NotFound, provider.get("sim-" + "É" * 32))


class SettingsTests(SynchronousTestCase):
    """Wrong settings are refused with the key's name."""

    def test_each_wrong_value_is_named(self) -> None:
        context = ProviderContext(Path("/nonexistent/state"), Path("/nonexistent/run"), "c", "n")
        for table, key in (
            ({"boot_second": 1}, "boot_second"),
            ({"boot_seconds": "fast"}, "boot_seconds"),
            ({"boot_seconds": -1}, "boot_seconds"),
            ({"capacity": -1}, "capacity"),
            ({"faults": [{"every": 0, "behaviour": "never"}]}, "every"),
            ({"faults": [{"every": 1, "behaviour": "odd"}]}, "behaviour"),
            ({"pod_cidr": "10.0.0.0/31"}, "pod_cidr"),
        ):
            error = self.assertRaises(ConfigError, registry.create, reactor, "simulated", table, context)
            self.assertIn("simulated", str(error))
            self.assertIn(key, str(error))

    def test_a_socket_path_that_is_too_long_is_refused(self) -> None:
        context = ProviderContext(Path("/nonexistent/state"), Path("/nonexistent/" + "r" * 100), "c", "n")
        error = self.assertRaises(ConfigError, registry.create, reactor, "simulated", {}, context)
        self.assertIn("run_dir", str(error))
