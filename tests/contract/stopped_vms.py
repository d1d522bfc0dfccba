# SPDX-License-Identifier: Apache-2.0
"""The contract of every provider that stops and starts VMs: one suite, which also makes each call twice.

The test module of a provider has, for instance::

    class StoppedVmsTests(StoppedVmsContract, AwsCase, TestCase):
        def refuse_starts(self): ...
        async def end_stopped(self, instance): ...
        async def at_rest(self, instance): ...
"""

from __future__ import annotations

import secrets
from typing import cast

import attrs
from twisted.internet.defer import gatherResults
from zope.interface.verify import verifyObject

from infranetes.identity.authority import Authority
from infranetes.providers.interface import (
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    Size,
    VmRequest,
)
from infranetes.providers.stopping import IStopsVms
from infranetes_common.errors import DeadlineExceeded, NotFound, Unavailable
from infranetes_common.wire import vmserver
from tests.contract.pod_provider_case import ProviderCase
from txgrpc import GrpcError

SECONDS = 30.0


class StoppedVmsContract(ProviderCase):
    """The promises of `IStopsVms`."""

    # Hooks.

    def refuse_starts(self) -> None:
        """Have no stopped VM be started from now on; new ones are launched."""
        raise NotImplementedError

    async def end_stopped(self, instance: Instance) -> None:
        """End a stopped VM behind the provider's back."""
        raise NotImplementedError

    async def at_rest(self, instance: Instance) -> bytes:
        """Return what the IaaS, and the VM's disk, have of its identity."""
        raise NotImplementedError

    # Helpers.

    def again(self, spec: InstanceSpec) -> InstanceSpec:
        """Return the specification of the pod that claims a stopped VM: the same token, a new identity.

        Another CA has issued it, so that nobody could mistake it for the first one."""
        self.authority = Authority(self.mktemp())
        of_pod = attrs.evolve(
            self.spec(token=spec.token).identity, sandbox_id=spec.sandbox_id, hostname="its-pod"
        )
        return self.like(attrs.evolve(spec, identity=of_pod))

    def like(self, spec: InstanceSpec) -> InstanceSpec:
        """Return a specification with a further certificate by the same CA."""
        certificate, key = self.authority.issue_vm(spec.sandbox_id, 3600)
        return attrs.evolve(
            spec, identity=attrs.evolve(spec.identity, certificate_pem=certificate, key_pem=key)
        )

    async def stop_it(self, provider: IPodProvider, instance: Instance) -> Instance:
        stopped = await self.within(cast(IStopsVms, provider).stop_vm(instance.id, SECONDS), SECONDS + 5)
        self.assertIs(stopped.state, InstanceState.STOPPED)
        self.assertEqual((stopped.id, stopped.token), (instance.id, instance.token))
        return stopped

    async def stopped(self, provider: IPodProvider, spec: InstanceSpec) -> Instance:
        """Launch a VM, wait for its agent, and stop it."""
        instance = await self.running(provider, spec)
        await self.agent_info(instance)
        return await self.stop_it(provider, instance)

    async def assert_executes(self, instance: Instance) -> None:
        info = await self.agent_info(instance)
        self.assertEqual(info.sandbox_id, instance.sandbox_id)

    async def only(self, provider: IPodProvider) -> Instance:
        """Return the only VM that is listed."""
        (instance,) = await self.within(provider.list())
        return instance

    # The promises.

    async def test_it_stops_vms_and_says_which_it_can(self) -> None:
        provider = self.make_provider()
        verifyObject(IStopsVms, provider)
        for _ in range(2):
            cast(IStopsVms, provider).check_stoppable(VmRequest(Size()))

    async def test_one_is_stopped_and_started_with_another_identity(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        instance = await self.running(provider, spec)
        await self.agent_info(instance)
        for _ in range(2):
            stopped = await self.stop_it(provider, instance)
        for each in (await self.within(provider.get(instance.id)), await self.only(provider)):
            self.assertEqual((each.id, each.state), (instance.id, InstanceState.STOPPED))
        if stopped.cost_per_hour is not None and instance.cost_per_hour is not None:
            self.assertLess(stopped.cost_per_hour, instance.cost_per_hour)
        left = await self.at_rest(stopped)
        for secret in (spec.identity.key_pem, spec.identity.certificate_pem):
            self.assertNotIn(secret.splitlines()[1].encode(), left)

        again = self.again(spec)
        started = await self.running(provider, again)
        self.assertEqual((started.id, started.token), (instance.id, spec.token))
        await self.assert_executes(started)
        self.assertEqual(
            await self.within(provider.launch(again)), await self.within(provider.get(started.id))
        )
        self.assertEqual((await self.only(provider)).state, InstanceState.RUNNING)
        self.assertEqual(ended, [])
        await self.within(provider.destroy(started.id))
        self.assertEqual(await self.within(provider.list()), [])

    async def test_nobody_answers_where_one_was_stopped(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.agent_info(instance)
        await self.stop_it(provider, instance)
        await self.assertFailure(self.agent(instance).Info(vmserver.InfoRequest(), timeout=3.0), GrpcError)

    async def test_the_next_daemon_starts_what_the_one_before_has_stopped(self) -> None:
        provider = await self.started()
        spec = self.spec()
        stopped = await self.stopped(provider, spec)
        provider = await self.restarted(provider)
        ended: list[Instance] = []
        provider.watch(ended.append)
        self.assertIs((await self.only(provider)).state, InstanceState.STOPPED)
        again = self.again(spec)
        launched = await self.within(provider.launch(again))
        self.assertIn(launched.state, (InstanceState.PENDING, InstanceState.RUNNING))
        provider = await self.restarted(provider)  # which was killed before the VM ran
        started = await self.running(provider, self.like(again))
        self.assertEqual(started.id, stopped.id)
        await self.assert_executes(started)
        self.assertEqual((await self.only(provider)).id, stopped.id)
        self.assertEqual(ended, [])

    async def test_a_stop_that_was_interrupted_goes_on(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        for seconds in (0.0, 0.05):
            stopping = cast(IStopsVms, provider).stop_vm(instance.id, SECONDS)
            stopping.addErrback(lambda _: None)
            await self.sleep(seconds)
            provider = await self.restarted(provider)
            self.assertEqual((await self.only(provider)).id, instance.id)
        await self.stop_it(provider, instance)
        started = await self.running(provider, self.again(spec))
        await self.assert_executes(started)

    async def test_one_that_can_not_be_started_becomes_another(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.stopped(provider, spec)
        self.refuse_starts()
        provider = await self.restarted(provider)
        started = await self.running(provider, self.again(spec))
        self.assertEqual((started.token, started.sandbox_id), (spec.token, spec.sandbox_id))
        await self.assert_executes(started)
        self.assertEqual((await self.only(provider)).id, started.id)

    async def test_one_that_was_ended_meanwhile_becomes_another(self) -> None:
        provider = await self.started()
        spec = self.spec()
        stopped = await self.stopped(provider, spec)
        await self.end_stopped(stopped)
        started = await self.running(provider, self.again(spec))
        self.assertEqual((started.token, started.sandbox_id), (spec.token, spec.sandbox_id))
        await self.assert_executes(started)
        self.assertEqual((await self.only(provider)).id, started.id)

    async def test_a_stopped_one_is_destroyed(self) -> None:
        provider = await self.started()
        stopped = await self.stopped(provider, self.spec())
        provider = await self.restarted(provider)
        for _ in range(2):
            await self.within(provider.destroy(stopped.id))
        self.assertEqual(await self.within(provider.list()), [])
        await self.refused(NotFound, cast(IStopsVms, provider).stop_vm(stopped.id, SECONDS))

    async def test_calls_at_the_same_time_have_one_vm(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        stopping = [cast(IStopsVms, provider).stop_vm(instance.id, SECONDS) for _ in range(2)]
        stopping[0].addErrback(lambda _: None)
        stopping[0].cancel()
        self.assertIs((await self.within(stopping[1], SECONDS)).state, InstanceState.STOPPED)
        again = self.again(spec)
        found = await self.within(gatherResults([provider.launch(again) for _ in range(3)]))
        self.assertEqual({each.id for each in found}, {instance.id})
        await self.assert_executes(await self.running(provider, again))
        self.assertEqual((await self.only(provider)).id, instance.id)

    async def test_what_is_not_there_or_has_ended_is_not_stopped(self) -> None:
        provider = await self.started()
        stopper = cast(IStopsVms, provider)
        for name in ("", "../../etc", "ü" * 300, secrets.token_hex(8)):
            for _ in range(2):
                await self.refused(NotFound, stopper.stop_vm(name, SECONDS))
        instance = await self.running(provider, self.spec())
        ended: list[Instance] = []
        provider.watch(ended.append)
        await self.end_from_outside(instance)
        await self.until(lambda: ended, "the VM's end is told")
        for _ in range(2):
            failure = await self.assertFailure(
                self.within(stopper.stop_vm(instance.id, SECONDS)), Unavailable, NotFound
            )
            self.assertGreater(len(str(failure)), 10)

    async def test_one_that_takes_too_long_can_be_stopped_later(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.refused(DeadlineExceeded, cast(IStopsVms, provider).stop_vm(instance.id, 0.001))
        await self.stop_it(provider, instance)
