# SPDX-License-Identifier: Apache-2.0
"""Which containers and pods are of one shape."""

from __future__ import annotations

from typing import Any, cast

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.keeping.shape import Shape, difference, shape_of_container, shape_of_pod, template_of
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.node_providers import NodeProvider
from infranetes.providers.interface import Size
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import box, pod

KEPT: dict[str, Any] = {"command": ["serve"], "args": ["--port", "80"]}


class ContainerTests(SynchronousTestCase):
    def differs(self, *, image: str = "sha256:1", **fields: Any) -> str | None:
        mount = cri.Mount(container_path="/data", host_path="/pods/1/data")
        kept = shape_of_container(box(**KEPT, mounts=[mount]), "sha256:1")
        other = shape_of_container(box(**{**KEPT, "mounts": [mount], **fields}), image)
        self.assertEqual(difference(kept, other), difference(other, kept))
        return difference(kept, other)

    def test_what_is_a_pods_own_makes_no_difference(self) -> None:
        elsewhere = cri.Mount(container_path="/data", host_path="/pods/2/data", selinux_relabel=True)
        target = cri.LinuxContainerConfig()
        target.security_context.namespace_options.target_id = "a container of the other pod"
        resources = cri.LinuxContainerConfig(resources=cri.LinuxContainerResources(cpu_shares=7))
        own: list[dict[str, Any]] = [
            {"envs": [cri.KeyValue(key="A", value=b"b")]},
            {"mounts": [elsewhere]},
            {"labels": {"a": "b"}, "annotations": {"c": "d"}, "log_path": "main/1.log"},
            {"linux": resources},
        ]
        for fields in own:
            self.assertIsNone(self.differs(**fields), fields)

    def test_what_differs_is_named(self) -> None:
        confined = cri.LinuxContainerConfig()
        confined.security_context.readonly_rootfs = True
        place = cri.Mount(container_path="/other", host_path="/pods/1/data")
        read_only = cri.Mount(container_path="/data", host_path="/pods/1/data", readonly=True)
        others: list[tuple[str, Any]] = [
            ("command", ["serve", "--port"]),
            ("command", []),
            ("args", ["--port80"]),
            ("working_dir", "/srv"),
            ("tty", True),
            ("stdin", True),
            ("mounts", []),
            ("mounts", [place]),
            ("mounts", [read_only]),
            ("devices", [cri.Device(container_path="/dev/x", host_path="/dev/x", permissions="r")]),
        ]
        for field, value in others:
            self.assertEqual(self.differs(**{field: value}), field, value)
        self.assertEqual(self.differs(linux=confined), "security_context")
        self.assertEqual(self.differs(image="sha256:2"), "image")

    def test_words_are_not_run_together(self) -> None:
        one, other = (shape_of_container(box(command=each), "i") for each in (["ab", "c"], ["a", "bc"]))
        self.assertEqual(difference(one, other), "command")


def shaped(config: cri.PodSandboxConfig, size: Size) -> Shape:
    return shape_of_pod("oci", Handler("", cast(NodeProvider, None)), config, size)


class PodTests(SynchronousTestCase):
    def test_names_and_addresses_make_no_difference(self) -> None:
        size = Size(500, 256 << 20)
        one, other = (shaped(pod(name=each, uid=each, hostname=each), size) for each in ("a", "b"))
        self.assertIsNone(difference(one, other))

    def test_what_differs_is_named(self) -> None:
        size, linux = Size(500, 256 << 20), cri.LinuxPodSandboxConfig(sysctls={"net.core.somaxconn": "9"})
        kept = shaped(pod(), size)
        for of_cpu in (attrs.evolve(size, cpu_millis=501), attrs.evolve(size, memory_bytes=1 << 30)):
            self.assertEqual(difference(kept, shaped(pod(), of_cpu)), "size of the VM")
        self.assertEqual(difference(kept, shaped(pod(linux=linux), size)), "sysctls")
        others = {"disk": "size of the VM's disk", "containers": "container provider"}
        for name, value in (("disk", "40Gi"), ("containers", "docker")):
            annotated = pod(annotations={f"infranetes.io/{name}": value})
            self.assertEqual(difference(kept, shaped(annotated, size)), others[name])
        linux = cri.LinuxPodSandboxConfig()
        linux.security_context.privileged = True
        self.assertEqual(difference(kept, shaped(pod(linux=linux), size)), "security context")

    def test_the_version_of_a_workload_is_told_by_kubernetes_labels(self) -> None:
        self.assertEqual(template_of(pod(labels={"app": "web"})), "")
        self.assertEqual(template_of(pod(labels={"pod-template-hash": "5d"})), "5d")
        self.assertEqual(template_of(pod(labels={"controller-revision-hash": "web-1"})), "web-1")
