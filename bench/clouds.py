# SPDX-License-Identifier: Apache-2.0
"""The simulated clouds of the benches, whose VMs take 45 s to boot, and providers with default settings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from bench.figures import Missing
from infranetes.identity.authority import Authority
from infranetes.providers import registry
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.interface import InstanceSpec, ProviderContext
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor
from tests.support.clouds import wheels
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.azure import SimulatedAzure
from tests.support.clouds.azure_buckets import AzureBuckets
from tests.support.clouds.ec2_buckets import Ec2Buckets
from tests.support.clouds.faults import NO_AGENT
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.gce_quotas import GceQuotas
from tests.support.clouds.openstack import SimulatedOpenStack
from tests.support.clouds.vcsim import PROGRAM
from tests.support.clouds.vsphere import SimulatedVcenter

Simulated: TypeAlias = SimulatedAws | SimulatedAzure | SimulatedGce | SimulatedOpenStack | SimulatedVcenter

CLOUDS = ("aws", "azure", "gcp", "openstack", "vsphere")
BOOT_SECONDS = 45.0  # from the launch until the VM runs and has its address
_CLONE_SECONDS = 15.0  # the part of BOOT_SECONDS for which vCenter clones
CLUSTER, NODE = "bench", "node-1"
_DEFAULTS = {field.name for field in attrs.fields(CloudSettings)} - {"sizes"}


def need_descriptions() -> None:
    """Look for the descriptions of the clouds' APIs.

    :raise Missing: one of them is not there."""
    for release in wheels.pinned():
        try:
            wheels.wheel(release)
        except AssertionError as error:
            raise Missing(str(error)) from error


def simulated(reactor: IReactor, name: str, directory: Path) -> Simulated:
    """Start one of CLOUDS and return it.

    :raise Missing: a program or a file that it needs is not there."""
    need_descriptions()
    world = _made(reactor, name, directory)
    world.behaviour = NO_AGENT
    world.start()
    return world


def _made(reactor: IReactor, name: str, directory: Path) -> Simulated:
    place = directory / "machines"
    if name == "aws":
        aws = SimulatedAws(reactor, place, CLUSTER)
        aws.boot_seconds = aws.endings.seconds = BOOT_SECONDS
        aws.buckets = Ec2Buckets(reactor.seconds)
        return aws
    if name == "azure":
        azure = SimulatedAzure(reactor, place)
        azure.operation_seconds = BOOT_SECONDS
        azure.buckets = AzureBuckets(reactor.seconds)
        return azure
    if name == "gcp":
        gcp = SimulatedGce(reactor, place)
        gcp.operation_seconds = BOOT_SECONDS
        gcp.quotas = GceQuotas(reactor.seconds)
        return gcp
    if name == "openstack":
        openstack = SimulatedOpenStack(reactor, place)
        openstack.launch_seconds = BOOT_SECONDS
        return openstack
    if not PROGRAM.exists():
        raise Missing(f"{PROGRAM} is missing: make tools")
    vsphere = SimulatedVcenter(reactor, place)
    vsphere.clone_seconds, vsphere.boot_seconds = _CLONE_SECONDS, BOOT_SECONDS - _CLONE_SECONDS
    return vsphere


def provider(reactor: IReactor, name: str, world: Simulated, directory: Path) -> CloudProvider[Any]:
    """Return a provider, not yet started, for a simulated cloud."""
    table = {key: value for key, value in world.table().items() if key not in _DEFAULTS}
    made = registry.create(reactor, name, table, ProviderContext(directory, directory, CLUSTER, NODE))
    assert isinstance(made, CloudProvider)
    return made


def specs(directory: Path, count: int) -> Sequence[InstanceSpec]:
    """Return the specs of the VMs of `count` pods."""
    authority = Authority(directory)
    return [_spec(authority) for _ in range(count)]


def _spec(authority: Authority) -> InstanceSpec:
    sandbox = secrets.token_hex(16)
    certificate, key = authority.issue_vm(sandbox, 3600)
    identity = Identity(
        sandbox_id=sandbox,
        certificate_pem=certificate,
        key_pem=key,
        ca_pem=authority.ca_pem,
        hostname="pod",
        machine_id=secrets.token_hex(16),
        entropy=secrets.token_hex(32),
        now_nanos=time.time_ns(),
    )
    return InstanceSpec(secrets.token_hex(16), sandbox, CLUSTER, NODE, identity)
