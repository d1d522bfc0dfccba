# SPDX-License-Identifier: Apache-2.0
"""Bounds on what comes from the wire."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial import unittest

from infranetes.cri import validate
from infranetes.cri.status import pod_cidr
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import box, pod


class ValidateTests(unittest.SynchronousTestCase):
    """Which requests pass, and which are refused with the name of the bad field."""

    def refused(self, words: str, check: Any, *arguments: Any) -> None:
        error = self.assertRaises(InvalidArgument, check, *arguments)
        self.assertIn(words, str(error))

    def test_annotations_that_can_not_be_are_refused_whatever_the_provider(self) -> None:
        for name, value in (("infranetes.io/gpus", "many"), ("infranetes.io/gpu", "1")):
            self.refused(name, validate.sandbox_config, pod(annotations={name: value}))
        validate.sandbox_config(pod(annotations={"infranetes.io/gpus": "1", "example.org/gpus": "many"}))

    def test_what_kubelet_sends_passes(self) -> None:
        validate.sandbox_config(
            pod(
                hostname="web-0.sub",
                log_directory="/var/log/pods/default_web_u1",
                dns_config=cri.DNSConfig(servers=["10.96.0.10"], searches=["svc.cluster.local"]),
                port_mappings=[cri.PortMapping(container_port=80)],
                linux=cri.LinuxPodSandboxConfig(
                    security_context=cri.LinuxSandboxSecurityContext(
                        namespace_options=cri.NamespaceOption(
                            pid=cri.CONTAINER, userns_options=cri.UserNamespace(mode=cri.NODE)
                        )
                    )
                ),
            )
        )
        validate.container_config(box(log_path="web/0.log", envs=[cri.KeyValue(key="A", value="ü".encode())]))
        validate.container_config(box())

    def test_a_variable_may_have_any_bytes_but_zero(self) -> None:
        binary = bytes(range(1, 256))
        validate.container_config(box(envs=[cri.KeyValue(key="A", value=binary)]))
        with_zero = box(envs=[cri.KeyValue(key="A", value=b"\0" + binary)])
        self.refused("config.envs[0].value (A) has a zero byte", validate.container_config, with_zero)

    def test_variables_may_have_as_many_bytes_as_a_kernel_takes(self) -> None:
        def container(count: int) -> Any:
            values = [cri.KeyValue(key=f"SERVICE_{each}", value=b"x" * 1000) for each in range(count)]
            return box(envs=values)

        validate.container_config(container(2000))
        self.refused("bytes, over 4194304", validate.container_config, container(5000))

    @given(st.text())
    def test_no_log_path_leaves_its_directory(self, path: str) -> None:
        import posixpath

        try:
            validate.log_path(path)
        except InvalidArgument:
            return
        joined = posixpath.normpath(f"/logs/pod/{path}")
        self.assertTrue(joined == "/logs/pod" or joined.startswith("/logs/pod/"), joined)

    @given(st.text(alphabet="abc.-_ \n0", max_size=80))
    def test_a_host_name_that_passes_is_one(self, name: str) -> None:
        try:
            validate.sandbox_config(pod(hostname=name))
        except InvalidArgument:
            return
        self.assertLessEqual(len(name), 64)
        for label in filter(None, [name]):
            for part in label.split("."):
                self.assertRegex(part, r"\A[a-c0]([a-c0-]*[a-c0])?\Z")

    def test_mounts_that_can_not_be_had_in_a_vm_say_why(self) -> None:
        good: dict[str, Any] = {"container_path": "/x", "host_path": "/y"}
        validate.container_config(box(mounts=[cri.Mount(**good, readonly=True, recursive_read_only=True)]))
        empty = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/x"
        shared = {"host_path": empty, "propagation": cri.PROPAGATION_BIDIRECTIONAL}
        validate.container_config(box(mounts=[cri.Mount(**{**good, **shared})]))
        cases: list[tuple[dict[str, Any], str]] = [
            ({"host_path": "y"}, "host_path has to be an absolute path"),
            ({"container_path": ""}, "container_path has to be an absolute path"),
            ({"propagation": cri.PROPAGATION_BIDIRECTIONAL}, "propagation BIDIRECTIONAL"),
            ({"propagation": cri.PROPAGATION_HOST_TO_CONTAINER}, "propagation HOST_TO_CONTAINER"),
            ({"uidMappings": [cri.IDMapping(length=1)]}, "Mappings: 0 mappings"),
            ({"recursive_read_only": True}, "recursive_read_only needs readonly"),
            ({**shared, "recursive_read_only": True, "readonly": True}, "needs propagation PRIVATE"),
        ]
        for fields, words in cases:
            mount = cri.Mount(**{**good, **fields})
            self.refused(words, validate.container_config, box(mounts=[cri.Mount(**good), mount]))
            self.refused(
                "config.mounts[1] (", validate.container_config, box(mounts=[cri.Mount(**good), mount])
            )

    def test_images_as_volumes(self) -> None:
        good: dict[str, Any] = {"container_path": "/x", "image": cri.ImageSpec(image="other")}
        validate.container_config(box(mounts=[cri.Mount(**good, image_sub_path="a/b", readonly=True)]))
        cases: list[tuple[dict[str, Any], str]] = [
            ({"host_path": "/y"}, "not of both"),
            ({"image": cri.ImageSpec()}, "image.image is empty"),
            ({"image_sub_path": "/a"}, "image_sub_path"),
            ({"image_sub_path": "a/../b"}, "image_sub_path"),
            ({"propagation": cri.PROPAGATION_BIDIRECTIONAL}, "propagation"),
            ({"gidMappings": [cri.IDMapping(length=1)]}, "Mappings: 0 mappings"),
        ]
        for fields, words in cases:
            self.refused(words, validate.container_config, box(mounts=[cri.Mount(**{**good, **fields})]))
        stray = cri.Mount(container_path="/x", host_path="/y", image_sub_path="a")
        self.refused("image_sub_path is for mounts of images", validate.container_config, box(mounts=[stray]))

    def secured(self, **fields: Any) -> Any:
        context = cri.LinuxSandboxSecurityContext(namespace_options=cri.NamespaceOption(**fields))
        return pod(linux=cri.LinuxPodSandboxConfig(security_context=context))

    def test_the_nodes_namespaces_are_the_vms(self) -> None:
        for field in ("network", "pid", "ipc"):
            node: Any = {field: cri.NODE}
            validate.sandbox_config(self.secured(**node))
        self.refused("network: CONTAINER", validate.sandbox_config, self.secured(network=cri.CONTAINER))

    def test_user_namespaces_are_refused_as_the_cri_says_it(self) -> None:
        mapping = cri.IDMapping(host_id=1, container_id=0, length=65536)
        validate.sandbox_config(
            self.secured(userns_options=cri.UserNamespace(mode=cri.POD, uids=[mapping], gids=[mapping]))
        )
        for users, words in (
            (cri.UserNamespace(mode=cri.POD), "userns_options.uids: 0 mappings"),
            (cri.UserNamespace(mode=cri.POD, uids=[mapping, mapping]), "userns_options.uids: 2 mappings"),
            (cri.UserNamespace(mode=cri.NODE, uids=[mapping]), "NODE allows no mappings"),
            (cri.UserNamespace(mode=cri.CONTAINER), "mode: CONTAINER"),
            (cri.UserNamespace(mode=cri.TARGET), "mode: TARGET"),
        ):
            config = self.secured(userns_options=users)
            self.refused(words, validate.sandbox_config, config)
            context = cri.LinuxContainerSecurityContext(
                namespace_options=config.linux.security_context.namespace_options
            )
            linux = cri.LinuxContainerConfig(security_context=context)
            self.refused(words, validate.container_config, box(linux=linux))
        validate.sandbox_config(self.secured(userns_options=cri.UserNamespace(mode=cri.NODE)))

    def test_devices_are_the_vms_and_host_ports_are_checked(self) -> None:
        validate.container_config(box(devices=[cri.Device(host_path="/dev/fuse")]))
        for device in (cri.Device(container_path="/dev/x"), cri.Device(host_path="/dev/../etc")):
            self.refused("config.devices[0].host_path", validate.container_config, box(devices=[device]))
        port = cri.PortMapping(host_port=8080, container_port=80)
        validate.sandbox_config(pod(port_mappings=[port]))
        port.host_ip = "x"
        self.refused("config.port_mappings[0].host_ip", validate.sandbox_config, pod(port_mappings=[port]))

    def test_seconds_are_as_many_as_kubernetes_likes(self) -> None:
        month = 30 * 86400
        for asked, taken in ((0, 0), (month, month), (2**63 - 1, validate.FOREVER)):
            self.assertEqual(validate.seconds(asked, "timeout"), taken)
        self.refused("timeout is -1", validate.seconds, -1, "timeout")

    def test_commands_have_a_word_and_an_end(self) -> None:
        self.assertEqual(validate.command(["ls", ""]), ["ls", ""])
        self.refused("cmd is empty", validate.command, [])
        self.refused("cmd is empty", validate.command, [""])
        self.refused("cmd is over", validate.command, ["x" * 2_000_000])

    def test_the_pod_cidr_is_the_first_of_ipv4(self) -> None:
        self.assertEqual(pod_cidr("10.244.1.0/24"), "10.244.1.0/24")
        self.assertEqual(pod_cidr("fd00::/64, 10.244.1.0/24"), "10.244.1.0/24")
        for wrong in ("10.244.1.1/24", "300.0.0.0/8", "10.0.0.0/8,", "fd00::/64", "x" * 10_000):
            self.refused("runtime_config.network_config.pod_cidr", pod_cidr, wrong)

    def test_labels_match_when_all_do(self) -> None:
        self.assertTrue(validate.labels_match({"a": "1", "b": "2"}, {"a": "1"}))
        self.assertFalse(validate.labels_match({"a": "1"}, {"a": "1", "b": "2"}))
        self.assertFalse(validate.labels_match({"a": "1"}, {"a": "2"}))
