# SPDX-License-Identifier: Apache-2.0
"""The pod, or else its node, chooses the container provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
from zope.interface import implementer

from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handler
from infranetes.pods.vm.container_providers import check_user_namespace, has_user_namespaces
from infranetes.providers.interface import IHasGuestImage
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod
from tests.infranetes.pods.layers import LayerAgent
from tests.support.user_namespaces import namespaces, of_pod

DOCKER = {"infranetes.io/containers": "docker"}


@implementer(IHasGuestImage)
class GuestImageProvider:
    """A provider that knows what its VMs offer, the default first."""

    name = "fake"

    def __init__(self, offered: Sequence[str]) -> None:
        self._offered = offered

    def container_providers(self) -> Sequence[str]:
        return self._offered


class ContainerProviderTests(PodsTestCase):
    def chosen(self, sandbox: str) -> list[str]:
        """Return the choices that were sent to the agent."""
        return self.world.agents[sandbox].chosen

    def change_agents(self, **attributes: Any) -> None:
        """Set these attributes on the agents of new VMs."""
        make = self.world.make_agent

        def changed(sandbox_id: str) -> Any:
            agent = make(sandbox_id)
            for name, value in attributes.items():
                setattr(agent, name, value)
            return agent

        self.patch(self.world, "make_agent", changed)

    def test_a_pod_that_says_nothing_has_what_its_node_says_or_else_its_image(self) -> None:
        self.assertEqual(self.chosen(self.run_pod(pod("a"))), [""])
        self.world.node.handlers.contprovider = "oci"
        self.assertEqual(self.chosen(self.run_pod(pod("b"))), ["oci"])

    def test_a_pods_own_choice_comes_before_its_nodes(self) -> None:
        self.world.node.handlers.contprovider = "oci"
        self.assertEqual(self.chosen(self.run_pod(pod("a", annotations=DOCKER))), ["docker"])
        self.assertEqual(
            self.chosen(self.run_pod(pod("b", annotations={"infranetes.io/containers": " docker "}))),
            ["docker"],
        )

    def test_a_handlers_choice_comes_between(self) -> None:
        node = self.world.node
        node.handlers.contprovider = "oci"
        node.handlers.by_name["classic"] = Handler("classic", node.providers.own, contprovider="docker")
        node.handlers.by_name["plain"] = Handler("plain", node.providers.own)
        for name, handler, wanted, chosen in (
            ("a", "classic", {}, "docker"),
            ("b", "plain", {}, "oci"),
            ("c", "", {}, "oci"),
            ("d", "classic", {"infranetes.io/containers": "oci"}, "oci"),
        ):
            sandbox = self.successResultOf(self.start(pod(name, annotations=wanted), handler))
            self.assertEqual(self.chosen(sandbox), [chosen], name)
        for handler, offered in (("classic", False), ("plain", True), ("", True)):
            self.assertIs(
                has_user_namespaces(node.handlers.contprovider, node.handlers.named(handler)),
                offered,
                handler,
            )

    def test_where_nobody_chooses_the_guest_image_says_whether_there_are_user_namespaces(self) -> None:
        node, handler = self.world.node, self.world.node.handlers.named("")
        for offered, has in ((["oci", "docker"], True), (["docker", "oci"], False), ([], False)):
            provider = GuestImageProvider(offered)
            self.patch(node.providers.own, "provider", provider)
            self.assertIs(has_user_namespaces(node.handlers.contprovider, handler), has, offered)
        node.handlers.contprovider = "oci"
        self.assertTrue(has_user_namespaces(node.handlers.contprovider, handler))

    def test_a_pod_has_a_user_namespace_where_there_can_be_one_and_says_what_to_do_elsewhere(self) -> None:
        node, handler = self.world.node, self.world.node.handlers.named("")
        wanted = pod(linux=of_pod(namespaces()))
        node.handlers.contprovider = "oci"
        check_user_namespace(node.handlers.contprovider, wanted, handler)
        node.handlers.contprovider = "docker"
        error = self.assertRaises(
            InvalidArgument, check_user_namespace, node.handlers.contprovider, wanted, handler
        )
        self.assertIn("leave hostUsers out", str(error))
        check_user_namespace(node.handlers.contprovider, pod(), handler)

    def test_what_the_vm_does_not_offer_is_told_and_the_vm_destroyed(self) -> None:
        self.change_agents(configure_error=FailedPrecondition("docker can't run containers in this VM"))
        failure = self.failureResultOf(self.start(pod(annotations=DOCKER)), FailedPrecondition)
        self.assertIn("docker can't run containers in this VM", str(failure.value))
        self.assertNothingLeft()

    def test_where_images_are_machines_there_is_nothing_to_choose(self) -> None:
        node = self.world.node
        node.handlers.by_name[""] = attrs.evolve(node.handlers.by_name[""], kind=MACHINE)
        failure = self.failureResultOf(self.start(pod(annotations=DOCKER)), InvalidArgument)
        self.assertIn("infranetes.io/containers", str(failure.value))
        self.assertNothingLeft()

    def test_whether_a_vm_takes_layers_is_asked_again_after_a_choice(self) -> None:
        self.patch(self.world, "make_agent", lambda id: LayerAgent(id, self.world.provider))
        for name, chosen, times in (("a", {}, 1), ("b", DOCKER, 2)):
            id = self.run_pod(pod(name, annotations=chosen))
            machine = self.world.node.inventory.sandboxes[id].machine
            self.assertTrue(self.do(machine.takes_layers()))
            self.assertEqual(cast(LayerAgent, self.world.agents[id]).asked, [("info", ())] * times)
