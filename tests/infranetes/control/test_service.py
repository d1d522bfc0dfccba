# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers to infranetes-ctl."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from infranetes.control.service import size_words
from infranetes.ctl import render
from infranetes.machines.pool import Pool
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pooled import Purpose
from infranetes.providers.interface import Console, IHasConsoles, Instance, InstanceState, IPodProvider, Size
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.wire import control, cri, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod


class ControlTests(PodsTestCase):
    """The control service of a node with a pool of two."""

    def setUp(self) -> None:
        self.world = FakeNode(pool=PoolConfig(sizes=(PoolSize(count=2),), per_minute=100))
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.service = self.world.control

    def ask(self, method: str, **fields: Any) -> Any:
        request = getattr(control, f"{method}Request")(**fields)
        return self.do(getattr(self.service, method)(request, None))

    def stray(self, name: str, **changes: Any) -> Instance:
        """Return a VM of this node that has no record."""
        made = Instance(name, "f" * 32, "e" * 32, InstanceState.RUNNING, created_at=900.0)
        self.world.provider.instances[name] = attrs.evolve(made, **changes)
        return made

    def test_pods_are_listed_with_their_vm(self) -> None:
        resources = cri.LinuxContainerResources(
            cpu_quota=150_000, cpu_period=100_000, memory_limit_in_bytes=1 << 30
        )
        config = pod("big", linux=cri.LinuxPodSandboxConfig(resources=resources))
        big, plain = self.run_pod(config), self.run_pod(pod("plain"))
        (instance,) = [one for one in self.world.provider.instances.values() if one.sandbox_id == big]
        priced = attrs.evolve(instance, size="t3.small", cost_per_hour=0.0208, created_at=950.0)
        self.world.provider.instances[instance.id] = priced
        before = {one.id: one for one in self.ask("ListPods").pods}
        self.assertEqual(before[big].vm.size, "1.5 CPU, 1024 MiB")
        self.assertFalse(before[big].vm.HasField("cost_per_hour"))
        self.do(self.world.reconciler.once(self.world.node_provider))
        answer = self.ask("ListPods")
        self.assertEqual((answer.provider, answer.trouble), ("fake", ""))
        found = {one.id: one for one in answer.pods}
        self.assertEqual(set(found), {big, plain})
        one = found[big]
        self.assertEqual((one.namespace, one.name, one.state, one.agent), ("default", "big", "ready", "live"))
        self.assertEqual((one.vm.id, one.vm.state, one.vm.size), (instance.id, "running", "t3.small"))
        self.assertEqual((one.vm.cost_per_hour, one.vm.created_at), (0.0208, 950 * 10**9))
        self.do(self.world.sandboxes.stop(big))
        (stopped,) = [one for one in self.ask("ListPods").pods if one.id == big]
        self.assertEqual((stopped.state, stopped.HasField("vm")), ("stopped", False))

    def test_a_vm_whose_provider_has_no_word_for_its_size_says_it_itself(self) -> None:
        said = vmserver.InfoResponse(cpus=2, memory_bytes=700 << 20)
        for member in self.world.node.pools.own.members.values():
            member.machine.info = said
        self.assertEqual({one.vm.size for one in self.ask("GetPool").vms}, {"2 CPU, 700 MiB"})
        sandbox = self.run_pod()
        self.world.node.inventory.sandbox(sandbox).machine.info = said
        (one,) = self.ask("ListPods").pods
        self.assertEqual((one.size, one.vm.size), ("2 CPU, 700 MiB",) * 2)
        addresses = list(one.addresses)
        self.assertEqual(addresses, [self.record(sandbox).address])
        self.do(self.world.sandboxes.stop(sandbox))
        (one,) = self.ask("ListPods").pods
        self.assertEqual((one.size, list(one.addresses)), ("2 CPU, 700 MiB", addresses))

    def test_those_that_are_being_launched_are_listed_too(self) -> None:
        self.world.provider.launch_error = None
        config = pod(annotations={"infranetes.io/own": "x"})
        self.world.provider.booting = Deferred()
        self.start(config)
        (one,) = self.ask("ListPods").pods
        self.assertEqual(one.state, "launching")
        self.assertTrue(one.vm.id)

    def test_orphans_are_what_neither_a_pod_nor_the_pool_has(self) -> None:
        self.run_pod()
        self.assertEqual(list(self.ask("ListOrphans").vms), [])
        self.stray("vm-lost", detail="no idea")
        (vm,) = self.ask("ListOrphans").vms
        self.assertEqual((vm.id, vm.sandbox_id, vm.detail), ("vm-lost", "e" * 32, "no idea"))

    def test_a_dry_run_ends_nothing(self) -> None:
        self.stray("vm-lost")
        answer = self.ask("EndOrphans", dry_run=True)
        self.assertEqual([vm.id for vm in answer.ended], ["vm-lost"])
        self.assertIn("vm-lost", self.world.provider.instances)
        self.assertEqual([call for call in self.world.provider.calls if call[0] == "destroy"], [])

    def test_all_of_them_or_those_named_are_ended(self) -> None:
        for name in ("vm-a", "vm-b", "vm-c"):
            self.stray(name)
        answer = self.ask("EndOrphans", ids=["vm-b", "vm-b"])
        self.assertEqual([vm.id for vm in answer.ended], ["vm-b"])
        answer = self.ask("EndOrphans")
        self.assertEqual({vm.id for vm in answer.ended}, {"vm-a", "vm-c"})
        self.assertEqual(list(self.ask("EndOrphans").ended), [])

    def test_a_pods_vm_is_never_ended(self) -> None:
        sandbox = self.run_pod()
        mine = self.record(sandbox).instance_id
        pooled = self.world.node.pools.own.idle()[0].record.instance_id
        self.stray("vm-lost")
        for id in (mine, pooled, "no-such"):
            request = control.EndOrphansRequest(ids=["vm-lost", id])
            self.failureResultOf(start(self.service.EndOrphans(request, NO_CALL)), NotFound)
        self.assertEqual([call for call in self.world.provider.calls if call[0] == "destroy"], [])

    def test_what_can_not_be_ended_is_told(self) -> None:
        self.stray("vm-a")
        self.stray("vm-b")
        real = self.world.provider.destroy
        self.patch(
            self.world.provider,
            "destroy",
            lambda id: fail(Unavailable("the cloud is down")) if id == "vm-a" else real(id),
        )
        answer = self.ask("EndOrphans")
        self.assertEqual([vm.id for vm in answer.ended], ["vm-b"])
        self.assertEqual([(one.vm.id, one.error) for one in answer.failed], [("vm-a", "the cloud is down")])

    def test_the_pool_is_listed_drained_and_filled(self) -> None:
        answer = self.ask("GetPool")
        self.assertEqual((answer.drained, answer.wanted, len(answer.vms)), (False, 2, 2))
        self.assertEqual({one.state for one in answer.vms}, {"idle"})
        self.assertEqual(len(self.ask("DrainPool", dry_run=True).ended), 2)
        self.assertEqual(len(self.ask("GetPool").vms), 2)
        answer = self.ask("DrainPool")
        self.assertEqual((len(answer.ended), len(answer.left)), (2, 0))
        answer = self.ask("GetPool")
        self.assertEqual((answer.drained, answer.wanted, len(answer.vms)), (True, 0, 0))
        self.assertEqual(self.ask("FillPool").wanted, 2)
        self.assertEqual(len(self.ask("GetPool").vms), 2)

    def test_a_handlers_pool_is_listed_drained_and_filled_by_itself(self) -> None:
        node = self.world.node
        config = PoolConfig(sizes=(PoolSize(count=1),))
        node.pools.others = [Pool(node.providers.own, config, Purpose("fast"))]
        node.pools.others[0].provider_ready()
        self.assertEqual(sorted(one.handler for one in self.ask("GetPool").vms), ["", "", "fast"])
        (one,) = self.ask("GetPool", handler="fast").vms
        self.assertEqual((one.handler, one.vm.provider), ("fast", "fake"))
        self.assertEqual(len(self.ask("GetPool", handler="").vms), 2)
        self.assertEqual([each.id for each in self.ask("DrainPool", handler="fast").ended], [one.id])
        answer = self.ask("GetPool")
        self.assertEqual((answer.drained, answer.wanted, len(answer.vms)), (False, 2, 2))
        self.assertEqual(self.ask("FillPool", handler="fast").wanted, 1)
        self.assertEqual(self.ask("GetPool").wanted, 3)
        for method in ("GetPool", "DrainPool", "FillPool"):
            request = getattr(control, f"{method}Request")(handler="none")
            error = self.failureResultOf(start(getattr(self.service, method)(request, None)), NotFound)
            self.assertIn("'none' has no pool", str(error.value))

    def test_a_drain_tells_what_is_left(self) -> None:
        self.world.provider.destroy_error = Unavailable("not now")
        answer = self.ask("DrainPool")
        self.assertEqual((len(answer.ended), len(answer.left)), (0, 2))

    def test_a_provider_that_is_not_ready_is_asked_nothing(self) -> None:
        self.world.kill()
        self.world.begin()
        self.service = self.world.control
        self.assertTrue(self.ask("ListPods").trouble)
        for method in ("ListOrphans", "EndOrphans", "DrainPool"):
            request = getattr(control, f"{method}Request")()
            self.failureResultOf(start(getattr(self.service, method)(request, None)), Unavailable)

    def test_no_answer_has_secrets(self) -> None:
        said = "no way through https://me:planted@proxy.example"
        node, provider = self.world.node, self.world.provider
        sandbox = node.inventory.sandbox(self.run_pod())
        sandbox.record = attrs.evolve(sandbox.record, message=said)
        for id, instance in provider.instances.items():
            provider.instances[id] = attrs.evolve(instance, detail=said)
        self.do(self.world.reconciler.once(self.world.node_provider))
        for member in node.pools.own.members.values():
            member.record = attrs.evolve(member.record, message=said)
        node.pools.own.trouble = said
        self.stray("vm-lost", detail=said)
        east: Any = SimpleNamespace(name="east")
        node.providers.add(east).trouble = said
        self.patch(provider, "destroy", lambda id: fail(Unavailable(said)))
        for method, times in {"ListPods": 3, "ListOrphans": 2, "EndOrphans": 3, "GetPool": 5}.items():
            text = str(self.ask(method))
            self.assertNotIn("planted", text)
            self.assertEqual(text.count("https://(hidden)@proxy.example"), times, method)

    def test_orphans_of_a_provider_that_can_not_be_asked_are_not_none(self) -> None:
        east: Any = SimpleNamespace(name="east")  # nothing of it is asked
        node_provider = self.world.node.providers.add(east)
        node_provider.trouble = "no credentials"
        why = ["provider east is not ready: no credentials"]
        self.assertEqual(list(self.ask("EndOrphans").troubles), why)
        self.stray("vm-lost")
        self.assertEqual(list(self.ask("ListOrphans").troubles), why)
        self.assertEqual(list(self.ask("EndOrphans", dry_run=True).troubles), why)
        answer = self.ask("EndOrphans")
        self.assertEqual(([vm.id for vm in answer.ended], list(answer.troubles)), (["vm-lost"], why))

    def test_a_named_orphan_may_be_one_of_a_provider_that_can_not_be_asked(self) -> None:
        east: Any = SimpleNamespace(name="east")
        self.world.node.providers.add(east).trouble = "no credentials"
        self.stray("vm-lost")
        request = control.EndOrphansRequest(ids=["vm-east"])
        error = self.failureResultOf(start(self.service.EndOrphans(request, NO_CALL)), NotFound)
        self.assertIn("no credentials", str(error.value))
        answer = self.ask("EndOrphans", ids=["vm-lost"])
        self.assertEqual(([vm.id for vm in answer.ended], list(answer.troubles)), (["vm-lost"], []))

    def test_sizes_in_words(self) -> None:
        self.assertEqual(size_words(Size()), "")
        self.assertEqual(size_words(Size(cpu_millis=250)), "0.25 CPU")
        self.assertEqual(size_words(Size(2000, 3 << 30)), "2 CPU, 3072 MiB")


@implementer(IHasConsoles)
class _WithConsoles:
    """A provider that has consoles and nothing else."""

    name = "other"

    def __init__(self, *consoles: Console, error: Exception | None = None) -> None:
        self._consoles = consoles
        self._error = error

    def consoles(self, sandbox: str) -> Deferred[Sequence[Console]]:
        if self._error is not None:
            return fail(self._error)
        return succeed([one for one in self._consoles if one.sandbox_id.startswith(sandbox)])


def with_consoles(*consoles: Console, error: Exception | None = None) -> IPodProvider:
    """Return what is a provider as far as its consoles are asked for."""
    return cast(IPodProvider, _WithConsoles(*consoles, error=error))


class ConsoleTests(PodsTestCase):
    """What a VM wrote to its console."""

    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.service = self.world.control

    def ask(self, method: str, **fields: Any) -> Any:
        request = getattr(control, f"{method}Request")(**fields)
        return start(getattr(self.service, method)(request, None))

    def shows(self, *consoles: Console) -> None:
        self.world.node_provider.provider = with_consoles(*consoles)

    def test_the_newest_one_of_a_sandbox_is_shown(self) -> None:
        live = Console("qemu-2", "abc1", 0.0, "", "booting\nx" + "y" * 300_000, "")
        self.shows(
            live, Console("qemu-1", "abc1", 50.5, "its process was killed by SIGKILL", "panic", "words")
        )
        answer = self.successResultOf(self.ask("GetConsole", sandbox="abc"))
        self.assertEqual((answer.sandbox_id, answer.vm_id, answer.ended_at), ("abc1", "qemu-2", 0))
        self.assertEqual(len(answer.text), 256 * 1024)

    def test_one_that_is_gone(self) -> None:
        self.shows(Console("qemu-1", "abc1", 50.5, "its process was killed by SIGKILL", "panic", "words"))
        answer = self.successResultOf(self.ask("GetConsole", sandbox="abc1"))
        self.assertEqual(answer.ended_at, 50_500_000_000)
        words = render.as_text("console", answer, Namespace())
        for each in ("abc1", "qemu-1", "1970-01-01 00:00:50 UTC", "SIGKILL", "panic", "words"):
            self.assertIn(each, words)
        self.assertEqual(render.as_json("console", answer, Namespace())["ended_at"], 50.5)

    def test_what_can_not_be_shown(self) -> None:
        consoles = [Console(f"qemu-{id}", id, 1.0, "", "", "") for id in ("abc1", "abc2")]
        self.shows(*consoles)
        for sandbox, kind in (("", InvalidArgument), ("abc", InvalidArgument), ("d", NotFound)):
            self.failureResultOf(self.ask("GetConsole", sandbox=sandbox), kind)

    def test_one_on_the_node_is_shown_whatever_troubles_a_provider_has(self) -> None:
        self.shows(Console("qemu-1", "abc1", 50.5, "", "panic", "words"))
        self.world.node_provider.trouble = "there is no guest image"
        self.assertEqual(self.successResultOf(self.ask("GetConsole", sandbox="abc1")).text, "panic")
        error = self.failureResultOf(self.ask("GetConsole", sandbox="d"), Unavailable)
        self.assertIn("there is no guest image", str(error.value))

    def test_one_provider_that_fails_leaves_the_others_consoles(self) -> None:
        self.shows(Console("qemu-1", "abc1", 50.5, "", "panic", "words"))
        east = with_consoles(error=Unavailable("east does not answer"))
        self.world.node.providers.add(east).trouble = ""
        self.assertEqual(self.successResultOf(self.ask("GetConsole", sandbox="abc1")).text, "panic")
        error = self.failureResultOf(self.ask("GetConsole", sandbox="d"), Unavailable)
        self.assertIn("east does not answer", str(error.value))

    def test_a_provider_without_consoles(self) -> None:
        self.failureResultOf(self.ask("GetConsole", sandbox="abc"), FailedPrecondition)
