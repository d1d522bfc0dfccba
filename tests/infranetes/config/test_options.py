# SPDX-License-Identifier: Apache-2.0
"""The command line of `twistd infranetes`: each flag is a key, and wins over the file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config
from infranetes.identity.authority import Authority
from infranetes.providers.interface import Size
from infranetes.providers.machine_annotations import read
from infranetes.providers.machine_images import DiskBus
from infranetes.service import Options
from infranetes_common.errors import ConfigError, FailedPrecondition

POLICIES = '[kubernetes]\nnetwork_policies = true\nkubeconfig = "/etc/kubeconfig"\n'


class OptionsTests(SynchronousTestCase):
    def parsed(self, *flags: str, text: str = "") -> Config:
        path = Path(self.mktemp())
        path.write_text(text)
        options = Options()
        options.parseOptions(["--config", str(path), *flags])
        return options.reading.config

    def refused(self, *flags: str, text: str = "") -> str:
        with self.assertRaises(SystemExit) as caught:
            self.parsed(*flags, text=text)
        return str(caught.exception)

    def test_those_of_the_go_version(self) -> None:
        found = self.parsed(
            *("--listen", "/run/infra.sock", "--podprovider", "simulated", "--imgprovider", "docker"),
            *(
                "--ca",
                "/root/ca.pem",
                "--master-ip",
                "10.0.0.1",
                "--cluster-cidr",
                "10.244.0.0/16, 10.96.0.0/12",
            ),
            *("--kubeconfig", "/var/lib/kube-proxy/kubeconfig", "--base-ip", "10.88.3"),
        )
        self.assertEqual((found.socket_path, found.provider), ("/run/infra.sock", "simulated"))
        self.assertEqual((found.imgprovider, found.ca), ("docker", "/root/ca.pem"))
        kubernetes = found.kubernetes
        self.assertEqual(kubernetes.master_ip, "10.0.0.1")
        self.assertEqual(kubernetes.cluster_cidrs, ("10.244.0.0/16", "10.96.0.0/12"))
        self.assertEqual(kubernetes.kubeconfig, "/var/lib/kube-proxy/kubeconfig")
        self.assertEqual(found.providers["simulated"], {"pod_cidr": "10.88.3.0/24"})

    def test_images_may_be_the_providers_own(self) -> None:
        self.assertEqual(self.parsed("--podprovider", "aws", "--imgprovider", "aws").imgprovider, "aws")

    def test_a_pool_has_no_use_where_each_image_is_its_vm(self) -> None:
        pool = "[[pool.sizes]]\ncount = 1\n"
        self.assertIn("pool.sizes", self.refused("--podprovider", "aws", "--imgprovider", "aws", text=pool))
        self.assertEqual(self.parsed("--imgprovider", "systemd", text=pool).imgprovider, "systemd")

    def test_handlers_are_offered_beside_the_names_that_have_nothing_special(self) -> None:
        found = self.parsed(text='[handlers.classic]\ncontprovider = "docker"\n[handlers.infranetes]\n')
        self.assertEqual(found.offered_handlers, ("infranetes", "classic"))
        self.assertEqual(found.handlers["classic"].contprovider, "docker")
        for text, word in (
            ("[handlers.Classic]", "handlers.Classic"),
            ('[handlers."a b"]', "handlers.a b"),
            ('[handlers.classic]\ncontprovider = "podman"', "podman"),
            ("[handlers.classic]\nsize = 1", "size"),
            ('imgprovider = "systemd"\n[handlers.classic]\ncontprovider = "docker"', "imgprovider"),
        ):
            self.assertIn(word, self.refused(text=text + "\n"))

    def test_handlers_say_what_their_pods_have(self) -> None:
        found = self.parsed(
            text="""
            [handlers.cloud]
            provider = "aws"
            network = "vpc"
            cpu_millis = 500
            memory = "512MiB"
            [handlers.cloud.annotations]
            allow = ["infranetes.io/spot*"]
            set = {"infranetes.io/subnet" = "tenants"}
            [[handlers.cloud.pool.sizes]]
            count = 2
            [handlers.appliance]
            provider = "gcp"
            images = "machine"
            """
        )
        cloud = found.handlers["cloud"]
        self.assertEqual(cloud.size, Size(cpu_millis=500, memory_bytes=2**29))
        self.assertEqual(cloud.annotations.set, {"infranetes.io/subnet": "tenants"})
        self.assertEqual(cloud.pool.sizes[0].count, 2)
        self.assertEqual(found.offered_providers, ("qemu", "aws", "gcp"))
        kinds = {name: found.kind_of(name) for name in ("", "infranetes", "cloud", "appliance")}
        self.assertEqual(
            kinds, {"": "docker", "infranetes": "docker", "cloud": "docker", "appliance": "machine"}
        )

    def test_a_handler_may_be_a_class_of_machines(self) -> None:
        document = "#cloud-config\n" + "# a comment\n" * 2000
        text = f"""
            [handlers.windows]
            images = "machine"
            [handlers.windows.annotations.set]
            "infranetes.io/preset" = "windows"
            "infranetes.io/firmware" = "secure-boot"
            "infranetes.io/user-data" = '''{document}'''
            """
        windows = self.parsed(text=text).handlers["windows"].annotations.set
        self.assertEqual(read(windows).hardware.disk, DiskBus.SATA)
        self.assertEqual(read(windows).guest.user_data, document)

    def test_what_a_handler_can_not_mean_is_named(self) -> None:
        for text, word in (
            ('images = "floppy"', "floppy"),
            ('network = "mesh"', "mesh"),
            ("cpu_millis = -1", "cpu_millis"),
            (f'provider = "{"x" * 64}"', "handlers.x.provider"),
            ('images = "machine"\ncontprovider = "oci"', "handlers.x.contprovider"),
            ('images = "machine"\npool = {sizes = [{count = 1}]}', "handlers.x.pool.sizes"),
            ('annotations = {allow = ["a*b"]}', "handlers.x.annotations.allow"),
            ('annotations = {set = {"infranetes.io/spot" = "maybe"}}', "infranetes.io/spot"),
            ('annotations = {set = {"infranetes.io/spott" = "true"}}', "infranetes.io/spott"),
            ('annotations = {set = {"infranetes.io/containers" = "oci"}}', "this table's key contprovider"),
            ('annotations = {set = {"infranetes.io/network" = "vpc"}}', "this table's key network"),
            ('annotations = {set = {"infranetes.io/shared-paths" = "/x"}}', "the pod's own"),
            ('annotations = {set = {"infranetes.startproxy" = "true"}}', "the pod's own"),
            ('annotations = {set = {"infranetes.sethostname" = "maybe"}}', "infranetes.sethostname"),
            ('annotations = {set = {"infranetes.io/tpm" = "true"}}', 'images = "machine"'),
            ('images = "machine"\nannotations = {set = {"infranetes.io/tpm" = "2.0"}}', "infranetes.io/tpm"),
            ('images = "machine"\nannotations = {set = {VirtletCPUModel = ""}}', "VirtletCPUModel"),
        ):
            self.assertIn(word, self.refused(text=f"[handlers.x]\n{text}\n"), text)
        cni = '[handlers.x]\nnetwork = "cni"\n'
        own = '[delegate]\nsocket = "/run/c.sock"\n'
        self.assertIn("delegate.socket", self.refused(text=cni))
        self.assertIn(
            "only give networks to VMs of the provider qemu",
            self.refused(text=cni + 'provider = "aws"\n' + own),
        )
        self.assertIn("network_policies", self.refused(text=cni + own + POLICIES))
        self.assertIn("VMs of a pool", self.refused(text=cni + "pool = {sizes = [{count = 1}]}\n" + own))
        self.assertEqual(self.parsed(text=cni + own).handlers["x"].network, "cni")
        docker = 'imgprovider = "systemd"\n[handlers.x]\nimages = "docker"\n'
        self.assertIn("handlers.x.contprovider", self.refused(text=docker))
        self.assertEqual(self.parsed(text=docker + 'contprovider = "oci"\n').kind_of("x"), "docker")

    def test_the_nodes_own_runtime_is_given_by_its_socket(self) -> None:
        self.assertEqual(self.parsed().delegate.socket_path, "")
        text = '[delegate]\nsocket = "unix:///run/containerd/containerd.sock"\n'
        self.assertEqual(self.parsed(text=text).delegate.socket_path, "/run/containerd/containerd.sock")
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        link = f"{directory.name}/l"
        os.symlink("/run/infranetes", link)
        for text, word in (
            ('socket = "containerd.sock"', "delegate.socket"),
            ('socket = "unix://"', "delegate.socket"),
            (f'socket = "/{"x" * 107}"', "107 bytes"),
            ('socket = "/run/infranetes/../infranetes/infranetes.sock"', "this daemon's own"),
            (f'socket = "{link}/infranetes.sock"', "this daemon's own"),
        ):
            self.assertIn(word, self.refused(text=f"[delegate]\n{text}\n"))

    def test_its_own_socket_has_not_the_name_by_which_kubelet_knows_CRI_O(self) -> None:
        self.assertIn("socket: '/run/x/crio.sock' ends in", self.refused(text='socket = "/run/x/crio.sock"'))
        beside = '[delegate]\nsocket = "/run/crio/crio.sock"\n'
        self.assertEqual(self.parsed(text=beside).delegate.socket_path, "/run/crio/crio.sock")

    def test_they_win_over_the_file(self) -> None:
        text = """
            [kubernetes]
            master_ip = "10.0.0.9"
            [providers.qemu]
            pod_cidr = "10.1.0.0/16"
            bridge = "br7"
            """
        found = self.parsed("--master-ip", "10.0.0.1", "--base-ip", "10.88.3.", text=text)
        self.assertEqual(found.kubernetes.master_ip, "10.0.0.1")
        self.assertEqual(found.providers["qemu"], {"pod_cidr": "10.88.3.0/24", "bridge": "br7"})
        self.assertEqual(self.parsed(text=text).kubernetes.master_ip, "10.0.0.9")

    def test_what_can_not_be_is_named(self) -> None:
        for flags, words in (
            (("--imgprovider", "floppy"), ("imgprovider", "floppy", "docker")),
            (
                ("--imgprovider", "aws", "--podprovider", "qemu"),
                ("imgprovider", "aws", "the name of the provider"),
            ),
            (("--contprovider", "podman"), ("contprovider", "docker", "oci")),
            (("--contprovider", "oci", "--imgprovider", "systemd"), ("contprovider", "imgprovider")),
            (("--ca", "ca.pem"), ("ca", "absolute")),
            (("--master-ip", "master"), ("kubernetes.master_ip",)),
            (("--cluster-cidr", "10.0.0.0/99"), ("kubernetes.cluster_cidrs", "10.0.0.0/99")),
            (("--base-ip", "10.88"), ("base-ip", "10.88.3")),
            (("--base-ip", "10.88.3", "--podprovider", "elsewhere"), ("base-ip", "elsewhere")),
        ):
            said = self.refused(*flags)
            for word in words:
                self.assertIn(word, said)
        self.assertIn("kubernetes.master_ip", self.refused(text='[kubernetes]\nmaster_ip = "x"\n'))


class OwnCaTests(SynchronousTestCase):
    """`ca`: a CA of the user's own."""

    def setUp(self) -> None:
        self.state = Path(self.mktemp())
        other = Authority(Path(self.mktemp()))
        self.ca = other.ca_pem
        self.file = Path(self.mktemp())
        document = other._path.read_text()
        begin = document.index("-----BEGIN CERT")
        self.file.write_text(document[begin:] + document[:begin])  # the key last, as is common
        self.file.chmod(0o600)

    def test_it_signs_in_place_of_ours(self) -> None:
        authority = Authority(self.state, path=self.file)
        self.assertEqual(authority.ca_pem, self.ca)
        self.assertIn("BEGIN CERTIFICATE", authority.issue("a" * 32, 60).certificate_pem)
        self.assertFalse((self.state / "ca").exists())

    def test_one_that_is_not_there_is_not_made(self) -> None:
        missing = Path(self.mktemp())
        error = self.assertRaises(ConfigError, Authority, self.state, path=missing)
        self.assertIn("ca:", str(error))
        self.assertFalse(missing.exists())

    def test_one_without_its_key_or_that_others_may_read_is_refused(self) -> None:
        self.file.chmod(0o644)
        self.assertRaises(FailedPrecondition, Authority, self.state, path=self.file)
        self.file.chmod(0o600)
        self.file.write_text(self.ca)
        error = self.assertRaises(FailedPrecondition, Authority, self.state, path=self.file)
        self.assertIn("private key", str(error))


class DropInTests(SynchronousTestCase):
    """FILE.d/*.toml beside the daemon's configuration."""

    def setUp(self) -> None:
        self.main = Path(self.mktemp()).absolute()
        self.drop_in = Path(f"{self.main}.d") / "10.toml"
        self.drop_in.parent.mkdir()

    def refused(self, main: str, drop_in: str, *flags: str) -> list[str]:
        self.main.write_text(main)
        self.drop_in.write_text(drop_in)
        with self.assertRaises(SystemExit) as caught:
            Options().parseOptions(["--config", str(self.main), *flags])
        return str(caught.exception).removeprefix("infranetes: ").splitlines()

    def test_what_values_have_to_be_together_is_blamed_on_the_file_that_has_the_key(self) -> None:
        self.assertEqual(
            [words.partition(": ")[0] for words in self.refused('state_dir = "a"\n', 'run_dir = "b"\n')],
            [str(self.main), str(self.drop_in)],
        )

    def test_all_that_is_wrong_is_told_at_once(self) -> None:
        found = self.refused("", 'ca = "a"\n[handlers.a]\nimages = "machine"\npool.sizes = [{count = 1}]\n')
        self.assertEqual(len(found), 2, found)
        self.assertTrue(found[0].startswith(f"{self.drop_in}: ca: "), found)
        self.assertTrue(found[1].startswith(f"{self.drop_in}: handlers.a.pool.sizes: "), found)

    def test_a_flag_is_blamed_itself(self) -> None:
        (words,) = self.refused("", 'socket = "/a"\n', "--listen", "b")
        self.assertTrue(words.startswith("command line: socket: "), words)
