# SPDX-License-Identifier: Apache-2.0
"""A pod's names, DNS and sysctls are checked as a whole, then applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from tests.support.user_namespaces import namespaces, of_pod
from vmserver import pod_settings
from vmserver.pod_settings import PodSettings, ipc_sysctls


class _Applier:
    def __init__(self) -> None:
        self.names: list[str] = []

    def set_hostname(self, name: str) -> None:
        self.names.append(name)


class PodSettingsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.etc, self.proc = Path(self.mktemp()), Path(self.mktemp())
        self.etc.mkdir()
        for file in (
            "net/ipv4/ip_forward",
            "net/ipv4/conf/eth0.5/rp_filter",
            "kernel/shmmax",
            "kernel/core_pattern",
        ):
            (self.proc / file).parent.mkdir(parents=True, exist_ok=True)
            (self.proc / file).write_text("0\n")
        applier: Any = _Applier()
        self.applier: Any = applier
        self.settings = PodSettings(applier, self.etc, proc_sys=self.proc)

    def refused(self, **fields: Any) -> str:
        with self.assertRaises(InvalidArgument) as caught:
            self.settings.apply(cri.PodSandboxConfig(**fields))
        self.assertEqual((self.applier.names, list(self.etc.iterdir())), ([], []), "nothing is half done")
        return str(caught.exception)

    def test_names_and_dns(self) -> None:
        dns = cri.DNSConfig(servers=["10.96.0.10", "fd00::a"], searches=["a.svc", "svc"], options=["ndots:5"])
        for _ in range(2):
            self.settings.apply(cri.PodSandboxConfig(hostname="web-0.web", dns_config=dns))
        self.assertEqual(self.applier.names[-1], "web-0.web")
        self.assertEqual(
            (self.etc / "resolv.conf").read_text(),
            "nameserver 10.96.0.10\nnameserver fd00::a\nsearch a.svc svc\noptions ndots:5\n",
        )
        hosts = (self.etc / "hosts").read_text()
        self.assertIn("127.0.0.1\tlocalhost\n", hosts)
        self.assertRegex(hosts, r"\n[0-9.]+\tweb-0\.web web-0\n$")

    def test_without_dns_the_machines_own_stays(self) -> None:
        (self.etc / "resolv.conf").write_text("nameserver 1.2.3.4\n")
        self.settings.apply(cri.PodSandboxConfig())
        self.assertEqual((self.etc / "resolv.conf").read_text(), "nameserver 1.2.3.4\n")

    def test_without_dns_of_its_own_the_machine_has_the_nodes(self) -> None:
        node = cri.DNSConfig(servers=["192.0.2.1"], searches=["lan"])
        for own in ("", "# nothing\nsearch x\n"):
            (self.etc / "resolv.conf").write_text(own)
            for _ in range(2):
                self.settings.apply(cri.PodSandboxConfig(), node)
            self.assertEqual((self.etc / "resolv.conf").read_text(), "nameserver 192.0.2.1\nsearch lan\n")
        (self.etc / "resolv.conf").write_text("nameserver 1.2.3.4\n")
        self.settings.apply(cri.PodSandboxConfig(), node)
        self.assertEqual((self.etc / "resolv.conf").read_text(), "nameserver 1.2.3.4\n")
        pods = cri.DNSConfig(servers=["10.96.0.10"])
        self.settings.apply(cri.PodSandboxConfig(dns_config=pods), node)
        self.assertEqual((self.etc / "resolv.conf").read_text(), "nameserver 10.96.0.10\n")

    def test_sysctls_of_a_pod_with_dots_or_slashes(self) -> None:
        sysctls = {
            "net.ipv4.ip_forward": "1",
            "net/ipv4/conf/eth0.5/rp_filter": "2",
            "kernel.shmmax": "12345",
        }
        self.settings.apply(cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls=sysctls)))
        self.assertEqual((self.proc / "net/ipv4/ip_forward").read_text(), "1\n")
        self.assertEqual((self.proc / "net/ipv4/conf/eth0.5/rp_filter").read_text(), "2\n")
        self.assertEqual((self.proc / "kernel/shmmax").read_text(), "12345\n")

    def test_each_user_of_containers_may_have_low_ports_and_ping(self) -> None:
        start, group = (
            self.proc / "net/ipv4" / name for name in ("ip_unprivileged_port_start", "ping_group_range")
        )
        for config in (cri.PodSandboxConfig(), cri.PodSandboxConfig(linux=of_pod(namespaces()))):
            for file in (start, group):
                file.write_text("1024\n")
            self.settings.apply(config)
            self.assertEqual((start.read_text(), group.read_text()), ("0\n", "0 2147483647\n"))
            config.linux.sysctls["net/ipv4/ip_unprivileged_port_start"] = "80"
            self.settings.apply(config)
            self.assertEqual(start.read_text(), "80\n")

    def test_users_of_a_machine_that_is_the_pod_may_have_what_its_image_says(self) -> None:
        start = self.proc / "net/ipv4/ip_unprivileged_port_start"
        start.write_text("1024\n")
        self.settings.apply(cri.PodSandboxConfig(), containers=False)
        self.assertEqual(start.read_text(), "1024\n")

    def test_other_sysctls_are_refused_by_name(self) -> None:
        for name in ("kernel.core_pattern", "vm.swappiness", "net", "net/../kernel/core_pattern", "net..x",
                     "/etc/passwd", "net.ipv4/../../../etc", ""):  # fmt: skip
            words = self.refused(linux=cri.LinuxPodSandboxConfig(sysctls={name: "1"}))
            self.assertIn("sysctls", words)

    def test_values_may_have_tabs_and_the_end_of_their_line(self) -> None:
        sysctls = {"net.ipv4.ip_forward": "1\n", "kernel.shmmax": "1\t2"}
        config = cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls=sysctls))
        self.settings.apply(config)
        self.assertEqual((self.proc / "net/ipv4/ip_forward").read_text(), "1\n")
        self.assertEqual((self.proc / "kernel/shmmax").read_text(), "1 2\n")
        self.assertEqual(ipc_sysctls(config), {"kernel.shmmax": "1 2"})

    def test_values_are_one_line(self) -> None:
        self.refused(linux=cri.LinuxPodSandboxConfig(sysctls={"kernel.shmmax": "1\n2"}))
        self.refused(linux=cri.LinuxPodSandboxConfig(sysctls={"kernel.shmmax": "1" * 5000}))

    def test_a_sysctl_that_the_kernel_lacks_is_named(self) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            self.settings.apply(
                cri.PodSandboxConfig(linux=cri.LinuxPodSandboxConfig(sysctls={"net.no.such": "1"}))
            )
        self.assertIn("net/no/such", str(caught.exception))

    def test_lines_can_not_be_smuggled_into_files(self) -> None:
        for dns in (
            cri.DNSConfig(servers=["1.2.3.4\nnameserver 6.6.6.6"]),
            cri.DNSConfig(servers=["fe80::1%x\nnameserver 6.6.6.6"]), cri.DNSConfig(servers=["x"]),
            cri.DNSConfig(searches=["a b"]), cri.DNSConfig(searches=["a\nb"]),
            cri.DNSConfig(options=["x\ny"]), cri.DNSConfig(servers=["1.2.3.4"] * 100),
            cri.DNSConfig(searches=["x" * 300]),
        ):  # fmt: skip
            self.refused(dns_config=dns)
        for name in ("a b", "a\nb", "-a", "x" * 65, "../etc"):
            self.refused(hostname=name)

    def test_only_checked_where_the_machine_is_not_the_pods(self) -> None:
        checking = PodSettings(self.applier, self.etc, check_only=True, proc_sys=self.proc)
        checking.apply(cri.PodSandboxConfig(hostname="x"))
        self.assertEqual((self.applier.names, list(self.etc.iterdir())), ([], []))
        self.assertRaises(InvalidArgument, checking.apply, cri.PodSandboxConfig(hostname="a b"))

    def test_an_address_of_its_own(self) -> None:
        self.assertRegex(pod_settings._own_address(), r"^[0-9.]+$")
