# SPDX-License-Identifier: Apache-2.0
"""The contract of every PodProvider: one suite that each of them passes with its real VMs.

The test module of a provider has, for instance::

    class QemuTests(PodProviderContract, LeasedAddressContract, TestCase):
        provider_name = "qemu"
        boot_timeout = 60.0

        def table(self): ...
        def end_from_outside(self, instance): ...
        def break_launches(self): ...
        def leftovers(self): ...

Each test starts with an empty state directory and ends with nothing left of its VMs, which `tearDown` proves.
VMs are expensive: a test makes as few as its statement needs.
"""

from __future__ import annotations

import secrets
import stat
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.protocol import Factory, Protocol
from zope.interface.verify import verifyObject

from infranetes.identity.certificates import key_id
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.providers.interface import (
    Instance,
    InstanceState,
    IPodProvider,
)
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver
from tests.contract.interrupted_launches import InterruptedLaunchContract
from tests.contract.pod_provider_case import reactor
from txgrpc import GrpcError


class LaunchContract(InterruptedLaunchContract):
    """The promises of `IPodProvider` that hold for VMs without an agent, too."""

    async def test_it_provides_the_whole_interface(self) -> None:
        provider = self.make_provider()
        verifyObject(IPodProvider, provider)
        self.assertEqual(provider.name, self.provider_name)

    async def test_a_fresh_one_has_no_vm_and_can_be_stopped_twice(self) -> None:
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(await self.within(provider.list()), [])
        await self.within(provider.stop())
        await self.within(provider.stop())

    async def test_one_that_was_never_started_can_be_stopped(self) -> None:
        provider = self.make_provider()
        await self.within(provider.stop())
        await self.within(provider.stop())

    async def test_status_is_words_for_people(self) -> None:
        provider = self.make_provider()
        before = provider.status()
        await self.within(provider.start(lambda words: None), self.start_timeout)
        for status in (before, provider.status(), provider.status()):
            for key, value in status.items():
                self.assertIsInstance(key, str)
                self.assertIsInstance(value, str)
        self.assertTrue(provider.status())

    async def test_the_life_of_a_vm(self) -> None:
        """It is launched, runs an agent with the right identity, is known by id, destroyed, and unknown."""
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        asked = time.time()

        launched = await self.within(provider.launch(spec))
        self.assertIn(launched.state, (InstanceState.PENDING, InstanceState.RUNNING))
        self.assertEqual((launched.token, launched.sandbox_id), (spec.token, spec.sandbox_id))
        self.assertTrue(launched.id)
        self.assertEqual([found.id for found in await self.within(provider.list())], [launched.id])

        wait = self.boot_timeout
        instance = await self.within(provider.wait_running(launched.id, wait), wait + 5)
        self.assertIs(instance.state, InstanceState.RUNNING)
        self.assertEqual((instance.id, instance.token), (launched.id, spec.token))
        self.assertTrue(ip_address(instance.address))
        self.assertTrue(instance.agent_host)
        self.assertTrue(0 < instance.agent_port < 65536)
        self.assertTrue(asked - 120 < instance.created_at < time.time() + 120, instance.created_at)

        self.assertEqual(await self.within(provider.wait_running(launched.id, wait)), instance)
        self.assertEqual(await self.within(provider.get(launched.id)), instance)
        self.assertEqual(await self.within(provider.get(launched.id)), instance)
        self.assertEqual(await self.within(provider.list()), [instance])

        info = await self.agent_info(instance)
        self.assertEqual(info.sandbox_id, spec.sandbox_id)
        self.assertTrue(info.boot_id)
        if self.private_endpoint(instance) is None:
            stranger = self.agent(instance, sandbox_id=secrets.token_hex(16))
            await self.assertFailure(stranger.Info(vmserver.InfoRequest(), timeout=5.0), GrpcError)
        self.assert_key_is_private(spec.identity.key_pem)

        await self.within(provider.destroy(launched.id))
        await self.assert_unknown(provider, launched.id)
        await self.within(provider.destroy(launched.id))
        await self.assert_unknown(provider, launched.id)
        self.assertEqual(ended, [], "destroy is no surprise")
        await self.assert_silent(instance)

    async def assert_unknown(self, provider: IPodProvider, instance_id: str) -> None:
        await self.refused(NotFound, provider.get(instance_id))
        await self.refused(NotFound, provider.wait_running(instance_id, 1.0))
        self.assertNotIn(instance_id, [found.id for found in await self.within(provider.list())])

    def assert_key_is_private(self, key_pem: str) -> None:
        """Assert that no state file that others may read has the key, and no process's argument list."""
        secret = key_pem.splitlines()[1].encode()
        for directory in (self.state_dir, self.run_dir):
            directory.chmod(0o755)
            for path in directory.rglob("*"):
                if path.is_file() and not path.is_symlink() and _others_reach(path, directory):
                    with path.open("rb") as file:
                        for chunk in iter(lambda: file.read(1 << 20), b""):
                            self.assertNotIn(secret, chunk, f"{path} shows a private key to everyone")
        for arguments in (each / "cmdline" for each in Path("/proc").glob("[0-9]*")):
            try:
                said = arguments.read_bytes()
            except OSError:
                continue
            self.assertNotIn(secret, said, f"{arguments} has a private key")

    async def test_ids_that_nobody_has_are_unknown_and_harmless(self) -> None:
        provider = await self.started()
        for instance_id in (secrets.token_hex(16), "no-such-vm", "", "../../etc/passwd", "a\nb", "ü" * 300):
            await self.assert_unknown(provider, instance_id)
            await self.within(provider.destroy(instance_id))
            await self.within(provider.destroy(instance_id))

    async def test_one_token_is_one_vm(self) -> None:
        """Even if it is launched several times: simultaneously, later, and by the next daemon."""
        provider = await self.started()
        spec = self.spec()
        first, second = await gatherResults(
            [self.within(provider.launch(spec)), self.within(provider.launch(spec))]
        )
        self.assertEqual(first.id, second.id)
        instance = await self.running(provider, spec)
        self.assertEqual(instance.id, first.id)

        provider = await self.restarted(provider)
        third = await self.within(provider.launch(spec))
        self.assertEqual((third.id, third.address), (instance.id, instance.address))
        self.assertEqual([found.id for found in await self.within(provider.list())], [instance.id])

    async def test_a_vm_is_in_the_zone_that_is_asked_for_or_nowhere(self) -> None:
        """A provider without zones accepts any zone."""
        provider = await self.started()
        zone = (await self.within(provider.launch(self.spec()))).zone
        there, nowhere = self.spec(zone=zone or "nowhere-1x"), self.spec(zone="nowhere-1x")
        for _ in range(2):
            self.assertEqual((await self.within(provider.launch(there))).zone, zone)
            if zone:
                await self.refused(FailedPrecondition, provider.launch(nowhere))
        found = await self.within(provider.list())
        self.assertEqual([one.zone for one in found], [zone] * 2)

    async def test_without_a_kept_state_no_vm_starts_from_it(self) -> None:
        """Providers whose VMs never do refuse any state."""
        provider = await self.started()
        empty = self.state_dir / "no-state"
        empty.mkdir()
        for directory in (empty, self.state_dir / "missing"):
            spec = attrs.evolve(self.spec(), kept=directory)
            for _ in range(2):
                await self.refused(FailedPrecondition, provider.launch(spec))
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(list(empty.iterdir()), [])

    async def test_vms_of_different_tokens_are_made_side_by_side(self) -> None:
        provider = await self.started()
        specs = [self.spec() for _ in range(3)]
        instances = await gatherResults(
            [Deferred.fromCoroutine(self.running(provider, spec)) for spec in specs], consumeErrors=True
        )
        self.assertEqual([one.sandbox_id for one in instances], [spec.sandbox_id for spec in specs])
        self.assertEqual(len({one.id for one in instances}), 3)
        self.assertEqual(len({(one.agent_host, one.agent_port) for one in instances}), 3)
        self.assertEqual(len({one.address for one in instances}), 3)
        infos = [await self.agent_info(one) for one in instances]
        self.assertEqual([info.sandbox_id for info in infos], [spec.sandbox_id for spec in specs])
        self.assertEqual(len({info.boot_id for info in infos}), 3)
        await gatherResults(
            [self.within(provider.destroy(one.id)) for one in [*instances, *instances]], consumeErrors=True
        )
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_new_daemon_finds_the_vms_and_touches_none(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        before = await self.agent_info(instance)

        provider = await self.restarted(provider)
        ended: list[Instance] = []
        provider.watch(ended.append)
        self.assertEqual(await self.within(provider.list()), [instance])
        self.assertEqual(await self.within(provider.get(instance.id)), instance)
        self.assertEqual(await self.within(provider.wait_running(instance.id, self.boot_timeout)), instance)
        after = await self.agent_info(instance)
        self.assertEqual((after.boot_id, after.agent_id), (before.boot_id, before.agent_id))

        await self.end_from_outside(instance)
        await self.until(lambda: ended, "a VM that an earlier daemon made is seen to end")
        self.assertEqual([one.id for one in ended], [instance.id])

    async def test_a_vm_that_ended_while_no_daemon_ran_is_listed_as_ended(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.within(provider.stop())
        await self.end_from_outside(instance)
        provider = await self.started()
        [found] = await self.within(provider.list())
        self.assertEqual((found.id, found.state), (instance.id, InstanceState.ENDED))
        self.assertEqual(found.sandbox_id, instance.sandbox_id)
        await self.within(provider.destroy(instance.id))
        await self.assert_unknown(provider, instance.id)

    async def test_the_end_of_a_vm_is_told_once(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        instance = await self.running(provider, spec)
        self.assertEqual(ended, [])

        await self.end_from_outside(instance)
        await self.until(lambda: ended, "a VM that ended is told")
        self.assertEqual((ended[0].id, ended[0].state), (instance.id, InstanceState.ENDED))
        self.assertEqual((ended[0].token, ended[0].sandbox_id), (spec.token, spec.sandbox_id))
        self.assertIs((await self.within(provider.get(instance.id))).state, InstanceState.ENDED)
        [listed] = await self.within(provider.list())
        self.assertIs(listed.state, InstanceState.ENDED)
        await self.refused(Unavailable, provider.wait_running(instance.id, self.boot_timeout))
        self.assertIs(
            (await self.within(provider.launch(spec))).state,
            InstanceState.ENDED,
            "the token still names the VM that it made",
        )

        await self.within(provider.destroy(instance.id))
        await self.within(provider.destroy(instance.id))
        await self.assert_unknown(provider, instance.id)
        self.assertEqual(len(ended), 1)

    async def test_waiting_ends_with_its_deadline_and_leaves_the_vm(self) -> None:
        """If the VM is already up, the wait succeeds at once instead."""
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        try:
            await self.within(provider.wait_running(launched.id, 0.001), 10.0)
        except DeadlineExceeded as error:
            self.assertIn("0.001", str(error))
        waits = [provider.wait_running(launched.id, self.boot_timeout) for _ in range(2)]
        first, second = await self.within(gatherResults(waits), self.boot_timeout + 5)
        self.assertEqual(first, second)
        self.assertIs(first.state, InstanceState.RUNNING)

    async def test_a_wait_that_is_cancelled_harms_neither_the_vm_nor_other_waits(self) -> None:
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        other = provider.wait_running(launched.id, self.boot_timeout)
        dropped = provider.wait_running(launched.id, self.boot_timeout)
        dropped.cancel()
        dropped.addErrback(lambda failure: failure.trap(CancelledError))
        await self.within(dropped)
        instance = await self.within(other, self.boot_timeout + 5)
        self.assertIs(instance.state, InstanceState.RUNNING)

    async def test_destroying_a_vm_that_is_still_starting_ends_the_wait_for_it(self) -> None:
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        waiting = provider.wait_running(launched.id, self.boot_timeout)
        outcome: list[Any] = []
        waiting.addBoth(outcome.append)
        await self.within(provider.destroy(launched.id))
        await self.until(lambda: outcome, "the wait for a destroyed VM ends", 60.0)
        if not isinstance(outcome[0], Instance):
            outcome[0].trap(Unavailable, NotFound)
        await self.assert_unknown(provider, launched.id)

    async def test_a_launch_that_fails_leaves_nothing(self) -> None:
        await (await self.started()).stop()  # so that everything that `start` builds only once is built
        mend = self.break_launches()
        provider = await self.started()
        spec = self.spec()
        try:
            for attempt in (spec, spec, self.spec()):
                error = await self.refused(InfranetesError, provider.launch(attempt))
                self.assertNotIn(attempt.identity.key_pem.splitlines()[1], str(error))
                self.assertEqual(await self.within(provider.list()), [])
            await self.within(provider.stop())
            left = self.leftovers()
            self.assertEqual(left if isinstance(left, list) else await left, [])
        finally:
            mend()
        provider = await self.started()
        instance = await self.running(provider, spec)
        self.assertEqual(instance.token, spec.token)

    async def test_a_size_that_can_not_be_had_is_refused(self) -> None:
        provider = await self.started()
        spec = self.spec(size=self.too_big)
        for _ in range(2):
            await self.refused(InvalidArgument, provider.launch(spec))
        self.assertEqual(await self.within(provider.list()), [])

    async def test_vms_of_other_nodes_and_clusters_are_not_seen(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.within(provider.stop())
        for cluster, node in ((self.cluster, "other"), ("other", self.node)):
            stranger = await self.started(cluster=cluster, node=node)
            self.assertEqual(await self.within(stranger.list()), [])
            await self.refused(NotFound, stranger.get(instance.id))
            await self.within(stranger.destroy(instance.id))
            await self.within(stranger.stop())
        provider = await self.started()
        self.assertEqual(await self.within(provider.list()), [instance])
        self.assertEqual((await self.agent_info(instance)).sandbox_id, instance.sandbox_id)


class PodProviderContract(LaunchContract):
    """The promises of `IPodProvider`, one test each."""

    async def test_a_vm_of_the_pool_becomes_a_pods_over_its_channel(self) -> None:
        """It is launched without a host name. Its key, certificate and host name change, its tags do not."""
        provider = await self.started()
        spec = self.spec()
        spec = attrs.evolve(spec, identity=attrs.evolve(spec.identity, hostname=""))
        instance = await self.running(provider, spec)
        await self.agent_info(instance)
        stub = self.agent(instance)
        request = (await stub.NewKey(vmserver.NewKeyRequest(), timeout=30.0)).request
        signed = self.authority.sign(spec.sandbox_id, request, 3600)
        config = cri.PodSandboxConfig(hostname="claimed")
        for _ in range(2):
            await stub.Rekey(vmserver.RekeyRequest(certificate=signed.certificate_pem), timeout=30.0)
            await stub.ConfigureSandbox(vmserver.ConfigureSandboxRequest(config=config), timeout=30.0)
        shows = self.private_endpoint(instance) is None
        if shows:
            self.assertEqual(await self.shown_key(instance), signed.key_id)

        provider = await self.restarted(provider)
        for _ in range(2):
            again = await self.within(provider.launch(spec))
            self.assertEqual((again.id, again.address), (instance.id, instance.address))
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])
        if shows:
            self.assertEqual(await self.shown_key(instance), signed.key_id)

    async def shown_key(self, instance: Instance) -> str:
        """Return the id of the key that the agent presents on a new connection."""
        seen: Deferred[str] = Deferred()

        class Look(Protocol):
            def dataReceived(self, data: bytes) -> None:
                if not seen.called:
                    certificate = self.transport.getPeerCertificate().to_cryptography()  # type: ignore[union-attr]
                    seen.callback(key_id(certificate.public_key()))

        endpoint = wrapClientTLS(
            self.authority.client_options(instance.sandbox_id),
            marked_endpoint(reactor, instance.agent_host, instance.agent_port, 30.0),
        )
        connection: Any = await self.within(endpoint.connect(Factory.forProtocol(Look)))
        try:
            shown: str = await self.within(seen)
            return shown
        finally:
            connection.transport.abortConnection()


def _others_reach(path: Path, root: Path) -> bool:
    """Return whether the modes of `path` and of its parents up to `root` let other users read it."""
    try:
        if not path.stat().st_mode & (stat.S_IROTH | stat.S_IRGRP):
            return False
        parents = [parent for parent in path.parents if parent.is_relative_to(root)]
        return all(parent.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP) for parent in parents)
    except FileNotFoundError:
        return False
