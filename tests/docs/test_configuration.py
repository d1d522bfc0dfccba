# SPDX-License-Identifier: Apache-2.0
"""docs/configuration*.md and the packages' default files say what the configuration classes say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config as NodeConfig
from infranetes.config import load as load_node
from infranetes.ctl.config_files import pages
from infranetes.images.machine.config import MachineImageConfig
from infranetes.pods.node.handler_config import HandlerConfig
from infranetes.providers.cloud.any.settings import Settings as LibcloudSettings
from infranetes.providers.cloud.aws.settings import Settings as AwsSettings
from infranetes.providers.cloud.azure.settings import Settings as AzureSettings
from infranetes.providers.cloud.gcp.settings import Settings as GcpSettings
from infranetes.providers.cloud.openstack.settings import Settings as OpenStackSettings
from infranetes.providers.cloud.vsphere.settings import Settings as VsphereSettings
from infranetes.providers.qemu.settings import QemuSettings
from infranetes_common.config import structure
from infranetes_simulation.provider.settings import Settings as SimulatedSettings
from tests.docs.reference import defaults, documented
from vmserver.config import Config as AgentConfig
from vmserver.config import load as load_agent
from vmserver.containers.docker.provider import DockerConfig
from vmserver.containers.machine.provider import MachineConfig
from vmserver.containers.systemd.config import SystemdConfig

TREE = Path(__file__).resolve().parents[2]
VSPHERE: dict[str, object] = {  # what has to be given
    "host": "vcenter.example.org",
    "username": "infranetes",
    "password_file": "/etc/infranetes/vsphere-password",
    "datacenter": "DC",
    "folder": "pods",
    "image": "templates/infranetes-pod",
    "resource_pools": ["cluster/Resources"],
    "networks": ["pods"],
}
AZURE: dict[str, object] = {  # likewise
    "subscription": "00000000-0000-0000-0000-000000000000",
    "resource_group": "pods",
    "location": "westeurope",
    "image": "gallery/pod",
    "subnet": "network/pods",
}
LIBCLOUD: dict[str, object] = {  # likewise, by this driver
    "driver": "digitalocean",
    "credentials_file": "/etc/infranetes/digitalocean.toml",
    "locations": ["fra1"],
    "image": "178451234",
}
# The machine's or the owner's own names: they have no default that could be written down.
OF_THE_MACHINE = {
    ("infranetes.toml", "node"),
    ("providers.qemu", "max_memory"),
    ("providers.qemu", "max_cpus"),
    ("providers.qemu", "starts_at_once"),
    ("providers.simulated", "farm_command"),
    ("providers.aws", "region"),  # of the account
    ("providers.aws", "image"),
    *(("providers.vsphere", key) for key in VSPHERE),
    *(("providers.azure", key) for key in AZURE),
    ("providers.gcp", "project"),
    ("providers.gcp", "zones"),
    ("providers.gcp", "image"),
    *(("providers.libcloud", key) for key in LIBCLOUD),
    ("providers.openstack", "cloud"),
    ("providers.openstack", "image"),
    ("providers.openstack", "network"),
}


def uncommented(text: str) -> str:
    """A default file with the keys that it shows put in force; `# words` stay comments."""
    return re.sub(r"^#(?=[\[a-z])", "", text, flags=re.M)


class ReferenceTests(SynchronousTestCase):
    def check(self, heading: str, config: Any) -> None:
        expected = {
            key: "" if (heading, key) in OF_THE_MACHINE else default
            for key, default in defaults(config).items()
        }
        self.assertEqual(documented(pages(), heading), expected, heading)

    def test_the_packages_have_each_page_of_the_keys(self) -> None:
        there = {page.name for page in (TREE / "docs").glob("configuration*.md")}
        packaged = (TREE / "infranetes/config/reference").iterdir()
        self.assertEqual({each.resolve().name for each in packaged}, there)

    def test_every_key_of_the_daemon_and_its_default(self) -> None:
        self.check("infranetes.toml", NodeConfig())

    def test_every_key_of_a_handler_and_its_default(self) -> None:
        self.check("handlers.NAME", HandlerConfig())

    def test_every_key_of_a_machine_image_and_its_default(self) -> None:
        self.check("machine_images.NAME:VERSION", MachineImageConfig())

    def test_every_key_of_the_agent_and_its_default(self) -> None:
        self.check("vmserver.toml", AgentConfig())

    def test_every_key_of_the_qemu_provider_and_its_default(self) -> None:
        self.check("providers.qemu", QemuSettings())

    def test_every_key_of_the_simulated_provider_and_its_default(self) -> None:
        self.check("providers.simulated", SimulatedSettings())

    def test_every_key_of_the_docker_provider_and_its_default(self) -> None:
        self.check("providers.docker", DockerConfig())

    def test_every_key_of_the_machine_provider_and_its_default(self) -> None:
        self.check("providers.machine", MachineConfig())

    def test_every_key_of_the_systemd_provider_and_its_default(self) -> None:
        self.check("providers.systemd", SystemdConfig())

    def test_every_key_of_the_aws_provider_and_its_default(self) -> None:
        self.check("providers.aws", AwsSettings(region="eu-west-1", image="ami-12345678"))

    def test_every_key_of_the_vsphere_provider_and_its_default(self) -> None:
        self.check("providers.vsphere", structure(VSPHERE, VsphereSettings, source="test"))

    def test_every_key_of_the_azure_provider_and_its_default(self) -> None:
        self.check("providers.azure", structure(AZURE, AzureSettings, source="test"))

    def test_every_key_of_the_gcp_provider_and_its_default(self) -> None:
        zones = ("europe-west1-b",)
        self.check("providers.gcp", GcpSettings(project="test-project", zones=zones, image="guest"))

    def test_every_key_of_the_libcloud_provider_and_its_default(self) -> None:
        self.check("providers.libcloud", structure(LIBCLOUD, LibcloudSettings, source="test"))

    def test_every_key_of_the_openstack_provider_and_its_default(self) -> None:
        settings = OpenStackSettings(cloud="pods", image="infranetes", network="pods")
        self.check("providers.openstack", settings)


class DefaultFileTests(SynchronousTestCase):
    def load(self, name: str, uncomment: bool) -> Any:
        text = (TREE / "debian" / "etc" / name).read_text()
        path = Path(self.mktemp())
        path.write_text(uncommented(text) if uncomment else text)
        return load_node(str(path), {}) if name == "infranetes.toml" else load_agent(path)

    def test_as_installed_they_change_nothing(self) -> None:
        self.assertEqual(self.load("infranetes.toml", uncomment=False), NodeConfig())
        self.assertEqual(self.load("vmserver.toml", uncomment=False), AgentConfig())

    def test_the_keys_that_they_show_are_the_defaults(self) -> None:
        self.assertEqual(self.load("infranetes.toml", uncomment=True), NodeConfig())
        self.assertEqual(self.load("vmserver.toml", uncomment=True), AgentConfig())


class TenantTests(SynchronousTestCase):
    def test_the_page_of_tenants_has_every_key_of_each_cloud(self) -> None:
        page = (TREE / "docs" / "tenants.md").read_text()
        classes = (
            ("provider-openstack", OpenStackSettings),
            ("provider-aws", AwsSettings),
            ("provider-gcp", GcpSettings),
            ("provider-azure", AzureSettings),
            ("provider-vsphere", VsphereSettings),
            ("provider-libcloud", LibcloudSettings),
        )
        for link, settings in classes:
            [row] = [
                line for line in page.splitlines() if line.startswith("|") and f"]({link}.md) | " in line
            ]
            self.assertEqual(tuple(re.findall(r"`([^`]+)`", row.split("|")[2])), settings.TENANT_KEYS, link)
            for key in settings.TENANT_KEYS:
                self.assertIn(key, attrs.fields_dict(settings), link)
