# SPDX-License-Identifier: Apache-2.0
"""What the pages show and what errors advise exists: keys of the configuration."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import Config as NodeConfig
from infranetes.images.machine.config import MachineImageConfig
from infranetes.machines.pool_config import PoolSize
from infranetes.pods.node.handler_config import HandlerConfig
from infranetes.providers.cloud.any.settings import Settings as LibcloudSettings
from infranetes.providers.cloud.aws.settings import Settings as AwsSettings
from infranetes.providers.cloud.azure.settings import Settings as AzureSettings
from infranetes.providers.cloud.gcp.settings import Settings as GcpSettings
from infranetes.providers.cloud.openstack.settings import Settings as OpenStackSettings
from infranetes.providers.cloud.vsphere.settings import Settings as VsphereSettings
from infranetes.providers.qemu.settings import QemuSettings
from infranetes_simulation.containers.provider import FakeConfig
from infranetes_simulation.provider.settings import Settings as SimulatedSettings
from tests.docs.reference import defaults
from vmserver.config import Config as AgentConfig
from vmserver.containers.docker.provider import DockerConfig
from vmserver.containers.machine.provider import MachineConfig
from vmserver.containers.systemd.config import SystemdConfig

TREE = Path(__file__).resolve().parents[2]
PROVIDERS: dict[str, Any] = {
    "aws": AwsSettings,
    "azure": AzureSettings,
    "docker": DockerConfig,
    "fake": FakeConfig,
    "gcp": GcpSettings,
    "libcloud": LibcloudSettings,
    "machine": MachineConfig,
    "openstack": OpenStackSettings,
    "qemu": QemuSettings,
    "simulated": SimulatedSettings,
    "systemd": SystemdConfig,
    "vsphere": VsphereSettings,
}


def known() -> set[str]:
    """Every dotted key of either configuration file."""
    keys = {*defaults(NodeConfig()), *defaults(AgentConfig())}
    keys |= {f"providers.{name}.{key}" for name, cls in PROVIDERS.items() for key in attrs.fields_dict(cls)}
    return keys | {f"pool.sizes.{key}" for key in attrs.fields_dict(PoolSize)}


def blocks(text: str) -> Iterator[str]:
    """The examples of a page: what is indented by four."""
    for found in re.finditer(r"(?:^ {4}.*\n(?:\n(?= {4}))*)+", text, flags=re.M):
        yield re.sub(r"^ {4}", "", found[0], flags=re.M)


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                yield from keys_of(each, f"{prefix}{key}.")
        else:
            yield prefix + key


def said(file: Path) -> Iterator[str]:
    """The strings in a module; one with fields also whole, with a line's end for each field."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)


def all_said() -> Iterator[tuple[Path, str]]:
    """Every string of the packages, with its file."""
    for package in ("infranetes", "infranetes_common", "infranetes_simulation", "txgrpc", "vmserver"):
        for file in sorted((TREE / package).rglob("*.py")):
            for text in said(file):
                yield file.relative_to(TREE), text


class ExampleTests(SynchronousTestCase):
    def test_every_key_in_an_example_exists(self) -> None:
        of_handler = {f"handlers.NAME.{key}" for key in defaults(HandlerConfig())}
        of_handler |= {f"handlers.NAME.pool.sizes.{key}" for key in attrs.fields_dict(PoolSize)}
        of_image = {f"machine_images.NAME.{key}" for key in defaults(MachineImageConfig())}
        keys, seen = known() | of_handler | of_image, 0
        for page in sorted((TREE / "docs").glob("*.md")):
            provider = page.stem.removeprefix("provider-").partition("-")[0]
            for block in blocks(page.read_text()):
                if not re.search(r"^(\[|[a-z_]+ = )", block, flags=re.M):
                    continue
                try:
                    table = tomllib.loads(block)
                except tomllib.TOMLDecodeError as error:
                    if re.search(r"^\[+[a-z_.]+\]+$", block, flags=re.M):
                        self.fail(f"{page.name}: {error} in:\n{block}")
                    continue  # a shell's, say
                for key in keys_of(table):
                    seen += 1
                    key = re.sub(r"^handlers\.[^.]+\.", "handlers.NAME.", key)
                    key = re.sub(r"^machine_images\..+\.", "machine_images.NAME.", key)
                    key = re.sub(r"\.tenants\.[^.]+\.(?!namespaces$)", ".", key)
                    key = re.sub(r"\.tenants\.[^.]+\.namespaces$", ".tenants", key)
                    key = re.sub(r"\.annotations\.set\..+", ".annotations.set", key)
                    self.assertTrue({key, f"providers.{provider}.{key}"} & keys, f"{page.name}: {key}")
        self.assertGreater(seen, 30)

    def test_every_key_that_an_error_names_exists(self) -> None:
        keys, seen = known(), 0
        for file, text in all_said():
            for key in re.findall(r"(?<![\w.])providers\.[a-z]+\.[a-z_]+", text):
                seen += 1
                self.assertIn(key, keys, str(file))
        self.assertGreater(seen, 5)

    def test_every_message_that_a_page_explains_is_one_that_is_said(self) -> None:
        """In the first column of the tables of what a person sees. A name in capitals and … stand for any."""
        everything = "\n".join(text for _, text in all_said())
        seen = 0
        for page in ("troubleshooting.md", "crictl.md"):
            text = (TREE / "docs" / page).read_text()
            for row in re.findall(r"^\| ([^|]+) \|", text, flags=re.M):
                for message in re.findall(r"`([^`]+ [^`]+)`", row):
                    words = re.sub(r"^(infranetes|infranetes-ctl): ", "", message)
                    for part in re.split(
                        r"…|\.\.\.|\b[A-Z:]{2,}\b|x86_64|infranetes-qemu|^64 sessions", words
                    ):
                        seen += 1
                        self.assertTrue(part.strip(" :") in everything, f"{page}: {message}: {part!r}")
        self.assertGreater(seen, 20)
