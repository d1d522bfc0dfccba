# SPDX-License-Identifier: Apache-2.0
"""Runtime handlers: providers, kinds of pods, sizes, annotations and pools side by side on one node."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred
from zope.interface import alsoProvides, noLongerProvides

from infranetes.pods.node.handler_config import DOCKER, MACHINE, SYSTEMD
from infranetes.pods.node.handlers import AnnotationRule, Handler
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.providers.hypervisor import IBootsImages
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes.providers.tenants import Tenant, Tenants
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.mixed import MACHINE_IMAGE, MixedCase, MixedNode, TwoKindsOfImages

SUBNET = {"infranetes.io/subnet": "tenants"}


class ProviderTests(MixedCase):
    """The pods of a handler are VMs of its provider."""

    def vms(self) -> tuple[int, int]:
        return len(self.world.provider.instances), len(self.world.east.instances)

    def test_each_pod_has_a_vm_of_its_handlers_provider_and_the_record_says_so(self) -> None:
        own, other = self.run_pod(), self.east_pod()
        self.assertEqual(self.vms(), (1, 1))
        self.assertEqual((self.record(own).provider, self.record(other).provider), ("fake", "east"))
        for id in (own, other):
            self.do(self.world.sandboxes.remove(id))
        self.assertEqual(self.vms(), (0, 0))
        self.assertNothingLeft()

    def test_one_that_does_not_start_stops_no_pod_of_another(self) -> None:
        self.world.east_side.trouble = "no credentials"
        error = self.failureResultOf(self.start(handler="east"), Unavailable)
        self.assertEqual(str(error.value), "provider east is not ready: no credentials")
        self.run_pod()
        self.assertEqual((self.vms(), self.world.node.providers.trouble), ((1, 0), ""))
        self.world.node_provider.trouble = "no KVM"
        self.assertEqual(
            self.world.node.providers.trouble, "provider fake: no KVM; provider east: no credentials"
        )

    def test_another_configuration_changes_no_pod_that_runs(self) -> None:
        id = self.east_pod()
        self.world.east_provider = "fake"
        self.world.restart()
        self.world.east_ready()
        sandbox = self.world.node.inventory.sandboxes[id]
        self.assertEqual(self.world.node.handlers.of(sandbox.record).node_provider.name, "east")
        self.do(self.world.sandboxes.stop(id))
        self.assertEqual(self.world.east.calls[-1][0], "destroy")
        self.assertEqual(self.vms(), (0, 0))
        self.successResultOf(self.start(pod("next", "u3"), "east"))
        self.assertEqual(self.vms(), (1, 0))

    def test_a_launch_that_a_killed_daemon_began_goes_on_at_its_provider(self) -> None:
        self.world.east.booting = Deferred()
        self.assertNoResult(self.start(handler="east"))
        self.world.east.booting = None
        self.world.restart()
        ((sandbox),) = self.world.node.inventory
        self.assertEqual(sandbox.state, SandboxState.LAUNCHING, "its provider has not started")
        self.world.east_ready()
        self.assertEqual((sandbox.state, self.vms()), (SandboxState.READY, (0, 1)))


class SweepTests(MixedCase):
    """Reconciliation passes over the VMs of each provider."""

    def orphan(self, provider: FakeProvider, token: str = "lost") -> None:  # noqa: S107 - no password
        provider.instances[f"vm-{token}"] = Instance(f"vm-{token}", token, "s", InstanceState.RUNNING)

    def passes(self) -> None:
        for _ in range(2):
            self.world.wait(self.world.times.sweep + 1)

    def test_one_that_hangs_hides_no_orphan_of_another(self) -> None:
        self.world.restart()
        self.world.east.hanging = True
        self.world.east_ready()
        self.orphan(self.world.provider)
        self.passes()
        self.assertEqual(self.world.provider.instances, {})

    def test_a_vm_is_an_orphan_of_its_provider_though_another_has_its_token_on_record(self) -> None:
        token = self.record(self.run_pod()).token
        self.orphan(self.world.east, token)
        self.passes()
        self.assertEqual((len(self.world.provider.instances), self.world.east.instances), (1, {}))

    def test_its_end_is_no_end_of_anothers_pod(self) -> None:
        id = self.run_pod()
        self.orphan(self.world.east, self.record(id).token)
        self.world.east.end(f"vm-{self.record(id).token}", "power cut")
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_a_pod_is_lost_when_its_own_provider_has_its_vm_no_more(self) -> None:
        own, other = self.run_pod(), self.east_pod()
        self.world.east.instances.clear()
        self.passes()
        self.assertEqual(self.record(own).state, SandboxState.READY)
        self.assertEqual(self.record(other).state, SandboxState.LOST)

    def test_orphans_are_told_though_one_provider_can_not_be_asked(self) -> None:
        self.orphan(self.world.provider)
        self.world.east_side.trouble = "no credentials"
        ((node_provider, instance),), (trouble,) = self.do(self.world.reconciler.orphans())
        self.assertEqual((node_provider, instance.id), (self.world.node_provider, "vm-lost"))
        self.assertIn("no credentials", trouble)
        self.world.node_provider.trouble = "no KVM"
        self.failureResultOf(start(self.world.reconciler.orphans()), Unavailable)


class SizeAndAnnotationTests(MixedCase):
    """How the VM of a handler's pod is made."""

    def make_world(self) -> MixedNode:
        world = MixedNode()
        world.east_rule = AnnotationRule("east", SUBNET, ("infranetes.io/sp*", "infranetes.io/image"))
        world.kill()
        world.begin()
        return world

    def test_a_pod_that_asks_for_nothing_has_its_handlers_size(self) -> None:
        self.east_pod()
        self.assertEqual(self.world.east.specs[-1].request.size, Size(cpu_millis=500, memory_bytes=2**29))
        self.assertFalse(self.world.east.specs[-1].request.size.memory_limited)
        resources = cri.LinuxContainerResources(memory_limit_in_bytes=2**30)
        linux = cri.LinuxPodSandboxConfig(resources=resources)
        self.east_pod(pod("large", "u3", linux=linux))
        self.assertEqual(self.world.east.specs[-1].request.size, Size(cpu_millis=500, memory_bytes=2**30))

    def test_what_is_set_is_the_vms_and_the_sandbox_keeps_what_its_client_gave(self) -> None:
        config = pod("east", "u2", annotations={"infranetes.io/spot": "true", "example.org/team": "a"})
        id = self.east_pod(config)
        self.assertEqual(
            self.world.east.specs[-1].request.annotations,
            {"infranetes.io/spot": "true", "example.org/team": "a", **SUBNET},
        )
        self.assertEqual(self.world.east.specs[-1].request.granted, frozenset(SUBNET))
        self.assertEqual(self.world.node.inventory.sandboxes[id].config, config)

    def test_what_is_not_allowed_is_refused_before_there_is_anything(self) -> None:
        for annotation, words in (
            ({"infranetes.io/region": "eu"}, ("infranetes.io/region", "handlers.east.annotations.allow")),
            ({"infranetes.io/subnet": "mine"}, ("infranetes.io/subnet", "handlers.east.annotations.set")),
            ({"infranetes.aws.subnet": "mine"}, ("infranetes.aws.subnet", "annotations.allow")),
        ):
            error = self.failureResultOf(self.start(pod(annotations=annotation), "east"), InvalidArgument)
            for word in words:
                self.assertIn(word, str(error.value))
        self.assertNothingLeft()
        self.run_pod(pod(annotations={"infranetes.io/region": "eu"}))  # other handlers allow this
        self.east_pod(pod("same", "u3", annotations=SUBNET))


class MachineAnnotationTests(MixedCase):
    """Annotations for the VMs of images: Virtlet's words count as ours."""

    def handler(self, **more: Any) -> Handler:
        return attrs.evolve(self.world.node.handlers.by_name["east"], kind=MACHINE, **more)

    def test_they_are_refused_for_pods_of_containers(self) -> None:
        wish = pod(annotations={"infranetes.io/preset": "windows"})
        error = self.failureResultOf(self.start(wish, "east"), InvalidArgument)
        self.assertIn("infranetes.io/preset", str(error.value))
        self.assertNothingLeft()

    def setUp(self) -> None:
        super().setUp()
        alsoProvides(self.world.east, IBootsImages)

    def test_they_are_refused_where_the_node_does_not_boot_the_image(self) -> None:
        noLongerProvides(self.world.east, IBootsImages)
        for handler, given in (
            (self.handler(), {"VirtletCPUModel": "host-model"}),
            (self.handler(annotations=AnnotationRule("east", {"infranetes.io/cpu-model": "Haswell"})), {}),
        ):
            error = self.assertRaises(InvalidArgument, handler.check_annotations, given)
            self.assertIn("infranetes.io/cpu-model can't be served: east", str(error))
        self.handler().check_annotations({"infranetes.io/spot": "true", "VirtletVCPUCount": "2"})

    def test_virtlets_words_become_ours_for_the_vm(self) -> None:
        given = {"VirtletVCPUCount": "2", "example.org/team": "a"}
        self.handler().check_annotations(given)
        self.assertEqual(
            self.handler().vm_annotations(given), {"infranetes.io/cpu": "2", "example.org/team": "a"}
        )
        plain = attrs.evolve(self.handler(), kind=DOCKER)
        self.assertEqual(plain.vm_annotations(given), given)

    def test_what_a_handler_allows_and_sets_holds_for_what_they_become(self) -> None:
        rule = AnnotationRule("east", {"infranetes.io/disk-bus": "ide"}, ("infranetes.io/cpu",))
        handler = self.handler(annotations=rule)
        handler.check_annotations({"VirtletVCPUCount": "2", "VirtletDiskDriver": "ide"})
        self.assertEqual(handler.vm_annotations({})["infranetes.io/disk-bus"], "ide")
        for name, value in (("VirtletDiskDriver", "scsi"), ("VirtletCPUModel", "host-model")):
            error = self.assertRaises(InvalidArgument, handler.check_annotations, {name: value})
            self.assertIn("handlers.east.annotations", str(error))

    def test_a_value_that_is_malformed_in_our_words_is_refused(self) -> None:
        wrong = {"VirtletDiskDriver": "floppy"}
        error = self.assertRaises(InvalidArgument, self.handler().check_annotations, wrong)
        self.assertIn("virtio, scsi, sata, ide or nvme", str(error))


class KindTests(MixedCase):
    """Pods of containers and pods that are machines, side by side."""

    def make_world(self) -> MixedNode:
        world = MixedNode()
        world.east_kind = MACHINE
        world.kill()
        world.begin()
        return world

    def setUp(self) -> None:
        super().setUp()
        self.world.node.handlers.image_source = TwoKindsOfImages.source

    def create(self, sandbox: str, name: str) -> Deferred[Any]:
        return start(self.world.containers.create(sandbox, box(image=name)))

    def test_both_run_and_end(self) -> None:
        own, machine = self.run_pod(), self.east_pod()
        self.assertEqual((self.record(own).kind, self.record(machine).kind), (DOCKER, MACHINE))
        self.assertEqual(self.record(machine).state, SandboxState.VACANT)
        self.successResultOf(self.create(own, "busybox"))
        made = self.successResultOf(self.create(machine, "appliance"))
        container = self.world.node.inventory.containers[made]
        self.assertEqual(
            (self.world.east.specs[-1].request.image, container.record.image_id), ("ami-7", MACHINE_IMAGE)
        )
        self.assertEqual(self.record(machine).state, SandboxState.READY)
        for id in (own, machine):
            self.do(self.world.sandboxes.remove(id))
        self.assertEqual(self.world.east.instances, {})
        self.assertNothingLeft()

    def test_a_machine_is_as_large_as_its_pod_asks(self) -> None:
        config = pod("east", "u2", annotations={"infranetes.io/memory": "3Gi"})
        machine = self.east_pod(config)
        self.successResultOf(self.create(machine, "appliance"))
        self.assertEqual(self.world.east.specs[-1].request.size, Size(500, 3 << 30))

    def test_an_image_of_the_other_kind_is_refused(self) -> None:
        own, machine = self.run_pod(), self.east_pod()
        for sandbox, name, words in (
            (own, "appliance", "containers"),
            (machine, "busybox", "machine images"),
        ):
            error = self.failureResultOf(self.create(sandbox, name), InvalidArgument)
            self.assertIn(f"are made of {words}", str(error.value))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_nothing_chooses_what_runs_containers_in_a_machine(self) -> None:
        wish = pod("east", "u2", annotations={"infranetes.io/containers": "oci"})
        self.failureResultOf(self.start(wish, "east"), InvalidArgument)
        self.run_pod(pod(annotations={"infranetes.io/containers": "oci"}))

    def test_executables_have_a_vm_that_is_told_to_run_them(self) -> None:
        node_provider = self.world.node.providers.by_name["east"]
        self.world.node.handlers.by_name["tools"] = Handler("tools", node_provider, SYSTEMD, SYSTEMD)
        self.world.node.handlers.contprovider = "oci"
        id = self.successResultOf(self.start(handler="tools"))
        self.assertEqual(self.world.agents[id].chosen, ["systemd"])
        self.assertEqual(self.record(id).kind, SYSTEMD)

    def test_a_record_keeps_its_kind_under_another_configuration(self) -> None:
        id = self.east_pod()
        self.world.east_kind = DOCKER
        self.world.restart()
        self.world.east_ready()
        handler = self.world.node.handlers.of(self.world.node.inventory.sandboxes[id].record)
        self.assertEqual((handler.kind, handler.node_provider.name), (MACHINE, "east"))


class RecordedTests(MixedCase):
    """A handler as its pods were made, whatever the configuration has become."""

    def test_what_is_recorded_counts(self) -> None:
        node = self.world.node
        handler = node.handlers.by_name["east"]
        handler = attrs.evolve(handler, contprovider="oci")
        record = self.record(self.run_pod())
        for node_provider, kind, has in (
            (handler.node_provider, handler.kind, (handler.kind, "oci")),
            (node.providers.own, handler.kind, (handler.kind, "oci")),
            (handler.node_provider, SYSTEMD, (SYSTEMD, SYSTEMD)),
            (handler.node_provider, MACHINE, (MACHINE, "")),
        ):
            found = handler.recorded(attrs.evolve(record, kind=kind), node_provider)
            self.assertEqual((found.kind, found.contprovider), has, (node_provider.name, kind))
            self.assertIs(found.node_provider, node_provider)


class PoolTests(MixedCase):
    """A handler's pool has VMs of the handler's provider, for the handler's pods alone."""

    def make_world(self) -> MixedNode:
        world = MixedNode()
        world.pooled, world.east_rule = 1, AnnotationRule("east", SUBNET)
        world.kill()
        world.begin()
        return world

    def tokens(self) -> list[str]:
        return [each.token for each in self.world.store.contents().pool]

    def test_its_vms_are_made_as_those_of_its_pods(self) -> None:
        (spec,) = self.world.east.specs
        self.assertEqual((spec.request.annotations, self.world.provider.specs), (SUBNET, []))
        self.assertEqual(spec.request.granted, frozenset(SUBNET), "the configuration says it, no pod")
        (record,) = self.world.store.contents().pool
        self.assertEqual((record.provider, record.handler), ("east", "east"))

    def test_only_its_pods_have_them(self) -> None:
        (token,) = self.tokens()
        resources = cri.LinuxContainerResources(cpu_shares=256)
        small = cri.LinuxPodSandboxConfig(resources=resources)
        self.assertNotEqual(self.record(self.run_pod(pod("own", "u3", linux=small))).token, token)
        node_provider = self.world.node.providers.by_name["east"]
        self.world.node.handlers.by_name["plain"] = Handler("plain", node_provider)
        other = self.successResultOf(self.start(pod("plain", "u4", linux=small), "plain"))
        self.assertNotEqual(self.record(other).token, token)
        self.world.node.handlers.by_name["east"] = attrs.evolve(
            self.world.node.handlers.by_name["east"], size=Size()
        )
        self.assertEqual(self.record(self.east_pod()).token, token)

    def test_the_sweep_knows_them_and_the_next_daemon_has_them(self) -> None:
        for _ in range(2):
            self.do(self.world.reconciler.once(self.world.east_side))
        self.assertEqual(len(self.world.east.instances), 1)
        tokens = self.tokens()
        self.world.restart()
        self.world.east_ready()
        self.assertEqual(self.tokens(), tokens)
        self.assertEqual(len(self.world.node.pools.others[0].idle()), 1)

    def test_each_is_drained_by_itself(self) -> None:
        self.do(self.world.node.pools.own.drain())
        self.assertEqual(len(self.tokens()), 1)
        self.do(self.world.node.pools.others[0].drain())
        self.assertEqual(self.tokens(), [])
        settings = self.world.store.contents().settings
        self.assertEqual((settings["pool_drained"], settings["pool_drained:east"]), ("1", "1"))

    def test_a_vm_is_not_claimed_for_a_pod_of_another_provider(self) -> None:
        (record,) = self.world.store.contents().pool
        wrong = SandboxRecord(
            record.id, record.token, SandboxState.LAUNCHING, "n", b"", "", 1, "fake", "docker",
            instance_id=record.instance_id,
        )  # fmt: skip
        self.failureResultOf(self.world.store.claim(wrong), FailedPrecondition)
        self.assertEqual(self.tokens(), [record.token])


class Acme(FakeProvider):
    """A tenant of the node's own provider."""

    name = "fake/acme"


class TenantNode(FakeNode):
    """A node whose provider has a tenant, which lists the namespace `acme`, and a pool of its own."""

    def __init__(self, **times: Any) -> None:
        self.acme = Acme(self)
        super().__init__(**times)

    def made(self) -> None:
        self.tenant = self.node.providers.add(self.acme)  # type: ignore[arg-type]
        self.tenant.trouble = ""
        self.tenant.ready.succeed(None)
        self.node.handlers.tenants = {"fake": Tenants("fake", (Tenant("acme", ("acme",)),))}
        self.node.handlers.by_name["acme"] = Handler("acme", self.tenant, tenant="acme")


class TenantTests(PodsTestCase):
    """A pod's VM is its tenant's."""

    world: TenantNode

    def make_world(self) -> TenantNode:
        return TenantNode()

    def of(self, namespace: str, handler: str = "") -> str:
        config = pod(f"of-{namespace}", f"uid-{namespace}-{handler}")
        config.metadata.namespace = namespace
        id: str = self.successResultOf(self.start(config, handler))
        provider: str = self.record(id).provider
        return provider

    def test_by_its_namespace_or_its_handler_and_the_record_says_so(self) -> None:
        found = self.of("default"), self.of("acme"), self.of("acme", "acme")
        self.assertEqual(found, ("fake", "fake/acme", "fake/acme"))
        self.assertEqual((len(self.world.provider.instances), len(self.world.acme.instances)), (1, 2))

    def test_a_pod_that_may_not_be_of_it_is_refused_before_anything_is_made(self) -> None:
        self.failureResultOf(self.start(pod("stray", "u9"), "acme"), InvalidArgument)
        self.assertEqual(self.world.acme.instances, {})
        self.assertNothingLeft()

    def test_the_nodes_pool_has_no_vm_for_it(self) -> None:
        handlers = self.world.node.handlers
        self.assertIs(handlers.pool_for(handlers.chosen("", "default", {})), self.world.node.pools.own)
        self.assertIsNone(handlers.pool_for(handlers.chosen("", "acme", {})))

    def test_a_tenant_whose_provider_does_not_start_stops_no_other_pod(self) -> None:
        self.world.tenant.trouble = "no credentials"
        config = pod("web", "u1")
        config.metadata.namespace = "acme"
        error = self.failureResultOf(self.start(config), Unavailable)
        self.assertEqual(str(error.value), "provider fake/acme is not ready: no credentials")
        self.assertEqual(self.of("default"), "fake")
