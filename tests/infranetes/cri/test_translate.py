# SPDX-License-Identifier: Apache-2.0
"""Records are translated to the CRI's messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infranetes.cri import translate
from infranetes.cri.runtime import RuntimeService
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_images import IMAGE
from tests.infranetes.pods.fakes import box, pod


class TranslateTests(PodsTestCase):
    """Lists and statuses."""

    def setUp(self) -> None:
        super().setUp()
        node, containers = self.world.node, self.world.containers
        checkpoints = Checkpoints(node.reactor, Path("none"), node.providers, containers)
        runtime = RuntimeService(
            node.reactor,
            self.world.status_calls,
            node.listing,
            node.providers,
            node.resizer,
            node.sandboxes,
            containers,
            checkpoints,
        )
        self.answers: Any = {method.name: answer for method, answer in runtime.service.answers.items()}

    def call(self, name: str, request: Any) -> Any:
        return self.successResultOf(start(self.answers[name](request, None)))

    def container(self, sandbox: str, config: Any) -> str:
        return str(self.do(self.world.containers.create(sandbox, config)))

    def status(self, container: str) -> Any:
        return self.call("ContainerStatus", cri.ContainerStatusRequest(container_id=container)).status

    def test_a_list_is_what_its_items_are_one_by_one(self) -> None:
        for number in range(5):
            sandbox = self.run_pod(pod(f"p{number}", labels={"n": str(number)}, annotations={"a": "x" * 300}))
            for name in ("one", "two"):
                self.container(sandbox, box(name, labels={"l": name * 100}))
        inventory = self.world.node.inventory
        sandboxes = cri.ListPodSandboxResponse.FromString(b"".join(translate.sandbox_items(inventory)))
        self.assertEqual(list(sandboxes.items), [translate.sandbox_item(one) for one in inventory])
        things = list(inventory.containers.values())
        for _ in range(2):  # first built anew, then from the cache
            containers = cri.ListContainersResponse.FromString(b"".join(translate.container_items(things)))
            self.assertEqual(list(containers.containers), [translate.container_item(one) for one in things])
        self.assertEqual(translate.container_items([]), [])

    def test_what_was_kept_is_dropped_when_things_change(self) -> None:
        sandbox = self.run_pod()
        container = self.container(sandbox, box())
        states = []
        for step in (self.world.containers.start(container), self.world.containers.stop(container, 0)):
            self.call("ListContainers", cri.ListContainersRequest())
            self.do(step)
            answer = self.call("ListContainers", cri.ListContainersRequest())
            states.append(cri.ListContainersResponse.FromString(answer).containers[0].state)
        self.assertEqual(states, [cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED])
        self.world.agents[sandbox].go_away()

    def test_unknown_and_back(self) -> None:
        sandbox = self.run_pod()
        container = self.container(sandbox, box())
        self.do(self.world.containers.start(container))
        listed = cri.ListContainersRequest()
        self.call("ListContainers", listed)
        agent = self.world.agents[sandbox]
        agent.go_away()
        self.world.wait(6)
        answer = cri.ListContainersResponse.FromString(self.call("ListContainers", listed))
        self.assertEqual(answer.containers[0].state, cri.CONTAINER_UNKNOWN)
        self.assertEqual(self.status(container).reason, "AgentUnreachable")
        agent.away = False
        self.world.wait(20)
        answer = cri.ListContainersResponse.FromString(self.call("ListContainers", listed))
        self.assertEqual(answer.containers[0].state, cri.CONTAINER_RUNNING)
        self.assertEqual(self.status(container).reason, "")

    def test_a_containers_whole_status(self) -> None:
        sandbox = self.run_pod(pod(log_directory="/logs/p/"))
        resources = cri.LinuxContainerResources(cpu_shares=5)
        image = cri.ImageSpec(image=IMAGE, user_specified_image="docker.io/busybox:1")
        config = box(
            log_path="main/0.log",
            labels={"l": "1"},
            annotations={"a": "2"},
            linux=cri.LinuxContainerConfig(resources=resources),
            stop_signal=cri.SIGUSR1,
        )
        config.image.CopyFrom(image)
        container = self.container(sandbox, config)
        status = self.status(container)
        self.assertEqual(status.image.image, "docker.io/busybox:1")
        self.assertEqual((status.image_id, status.image_ref), (IMAGE, IMAGE))
        self.assertEqual(status.log_path, "/logs/p/main/0.log")
        self.assertEqual(status.resources.linux, resources)
        self.assertEqual((dict(status.labels), dict(status.annotations)), ({"l": "1"}, {"a": "2"}))
        self.assertEqual(status.stop_signal, cri.SIGUSR1)
        self.assertEqual((status.state, status.created_at), (cri.CONTAINER_CREATED, 5))
        self.do(self.world.containers.start(container))
        agent = self.world.agents[sandbox]
        user = cri.ContainerUser(linux=cri.LinuxContainerUser(uid=7, gid=8))
        agent.containers[container].user.CopyFrom(user)
        agent.containers[container].resources.cpu_shares = 9
        agent.become(container, cri.CONTAINER_EXITED, finished_at=11, exit_code=2, reason="OOMKilled")
        status = self.status(container)
        self.assertEqual(
            (status.state, status.started_at, status.finished_at, status.exit_code, status.reason),
            (cri.CONTAINER_EXITED, 6, 11, 2, "OOMKilled"),
        )
        self.assertEqual(status.user, user)
        self.assertEqual(status.resources.linux.cpu_shares, 9)

    def test_a_sandboxs_ip_is_its_own_only_while_it_has_its_vm(self) -> None:
        sandbox = self.run_pod()
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        self.assertEqual(self.call("PodSandboxStatus", request).status.network.ip, "10.0.0.1")
        self.do(self.world.sandboxes.stop(sandbox))
        status = self.call("PodSandboxStatus", request).status
        self.assertEqual((status.state, status.network.ip), (cri.SANDBOX_NOTREADY, ""))

    def test_status_says_what_it_waits_for(self) -> None:
        self.world.node_provider.trouble = "building the template, 40 %"
        status = self.call("Status", cri.StatusRequest()).status
        for condition in status.conditions:
            self.assertEqual(
                (condition.status, condition.reason, condition.message),
                (False, "ProviderNotReady", "building the template, 40 %"),
            )
