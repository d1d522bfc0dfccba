# SPDX-License-Identifier: Apache-2.0
"""EC2 as a `Cloud`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_network

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import PREFIX, Wishes
from infranetes.providers.cloud.aws import addresses, errors
from infranetes.providers.cloud.aws.credentials import Credentials
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.images import Images
from infranetes.providers.cloud.aws.launch_parameters import launch_parameters, root_disk_mappings
from infranetes.providers.cloud.aws.libcloud_types import Instance, InstanceExtra
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.calls.connections import close_session, connection_arguments
from infranetes.providers.cloud.interface import (
    ADDRESS,
    CLUSTER,
    NODE,
    SANDBOX,
    TOKEN,
    Action,
    CloudError,
    CloudVM,
    ErrorKind,
    LaunchRequest,
    Leftover,
    MachineImage,
    Offer,
    Rate,
)
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.confidential import Confidential
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition, InvalidArgument

_ID = re.compile(r"i-[0-9a-f]{8,17}")
_SUBNET = "subnet-"  # the prefix of subnets' ids
_MAX_USER_DATA = 16 * 1024  # bytes, before base64
_NO_IDENTITY = b"{}"  # the user-data of a stopped instance
# The reasons of ends that are the guest's, or that somebody has asked for.
_ASKED_FOR = ("Client.InstanceInitiatedShutdown", "Client.UserInitiatedShutdown")
_STATES = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.PENDING,  # what ran stays RUNNING in the ledger
    "stopped": InstanceState.ENDED,
    "shutting-down": InstanceState.ENDED,
    "terminated": InstanceState.ENDED,
}


# Source: "Request throttling for the Amazon EC2 API". EC2 keeps a bucket for each action of an account and
# region; LOOK has the rate of requests without a filter.
_RATES = {
    Action.LAUNCH: Rate(2.0, 5.0),
    Action.DESTROY: Rate(5.0, 100.0),
    Action.CHANGE: Rate(5.0, 50.0),
    Action.LOOK: Rate(10.0, 50.0),
}


class AwsCloud:
    """One region of one account."""

    name = "aws"
    rates: Mapping[Action, Rate] = _RATES
    looks_per_list = 0
    user_data_bytes = _MAX_USER_DATA

    def __init__(self, settings: Settings, context: ProviderContext, book: OfferBook[Driver]) -> None:
        self._settings = settings
        self._cluster, self._node = context.cluster, context.owner
        self._credentials = Credentials(
            settings.access_key, settings.secret_key, settings.profile, settings.region, settings.call_seconds
        )
        self._images = Images(settings.image_owners)
        self._architecture = "x86_64"  # the configured image's; all other images must have the same
        # By VM id: the association with an elastic address.
        self._given: dict[str, addresses.Association] = {}
        self._subnet_zones: Mapping[str, str] = {}  # the zone of each configured subnet
        self._book = book
        self.location = context.located(f"aws {settings.region}")

    def _thd_ranges(self, driver: Driver) -> Sequence[AddressRange]:
        """See `TellsRanges`. Of a default VPC, which is used without subnets, nothing is told."""
        found = driver.ranges_of(self._settings.subnets) if self._settings.subnets else ()
        return [AddressRange(vpc, ip_network(addresses)) for vpc, addresses in found]

    @property
    def offers(self) -> Sequence[Offer]:
        return self._book.offers

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    def check_wishes(self, wishes: Wishes) -> None:
        if wishes.region and wishes.region != self._settings.region:
            raise InvalidArgument(
                f"annotation {PREFIX}region: {wishes.region!r}: this node makes VMs in "
                f"{self._settings.region} only; let the pod run on a node of that region"
            )
        if wishes.security_groups and not self.zones(wishes)[0]:
            raise InvalidArgument(
                f"annotation {PREFIX}security-groups needs a subnet: give {PREFIX}subnet, "
                "or subnets in providers.aws"
            )
        if wishes.elastic_address not in ("", "new") and not wishes.elastic_address.startswith("eipalloc-"):
            raise InvalidArgument(
                f"annotation {PREFIX}elastic-address: {wishes.elastic_address!r}: "
                'expected "new" or eipalloc-…'
            )
        if wishes.confidential not in (None, Confidential.SEV_SNP):
            raise InvalidArgument(
                f"annotation {PREFIX}confidential: {wishes.confidential.value!r}: EC2 has sev-snp alone"
            )

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        """Subnets; without any, an availability zone of the default VPC, or "" for EC2's choice."""
        subnets = [wishes.subnet] if wishes.subnet else self._settings.subnets
        if not within or not subnets:
            return subnets or [within]
        found = [subnet for subnet in subnets if self._subnet_zones.get(subnet) == within]
        if not found and wishes.subnet:
            raise FailedPrecondition(
                f"the pod's volumes are in zone {within}, and annotation {PREFIX}subnet names "
                f"{wishes.subnet}, which is no subnet of that zone among those in providers.aws: leave it "
                "out, or name one that is"
            )
        if not found:
            known = ", ".join(sorted(set(self._subnet_zones.values())))
            raise FailedPrecondition(
                f"the pod's volumes are in zone {within}, and this node makes VMs in {known} only: add a "
                "subnet of that zone to subnets in providers.aws, or let the pod run on a node that has one"
            )
        return found

    def first_zone(self) -> str:
        """Return the zone of the first configured subnet; "": not known yet, or there is none."""
        return self._subnet_zones.get(next(iter(self._settings.subnets), ""), "")

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        keys = self._credentials._thd_now()
        driver: Driver = Driver(
            keys.access_key,
            keys.secret_key,
            region=self._settings.region,
            token=keys.token,
            signature_version="4",
            timeout=timeout,
            **connection_arguments(self._settings.endpoint),
        )
        driver.keys = keys
        return driver

    def _thd_is_current(self, driver: Driver) -> bool:
        return driver.keys == self._credentials._thd_now()

    def _thd_disconnect(self, driver: Driver) -> None:
        close_session(driver)

    def _thd_check(self, driver: Driver) -> str:
        wanted = self._settings.image
        image = self._images._thd_get(driver, wanted)
        if image is None:
            raise FailedPrecondition(f"{self.location} has no image {wanted}; see image in providers.aws")
        if self._settings.subnets:
            self._subnet_zones = driver.zones_of(self._settings.subnets)
            self._book.use_zones(self._subnet_zones.values())
        self._architecture = str(image.extra.get("architecture") or "x86_64")
        return self._architecture

    # ---- The catalogue

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        return self._images._thd_find(driver, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return self._images._thd_has(driver, id)

    # ---- VMs

    def _thd_launch(self, driver: Driver, request: LaunchRequest) -> CloudVM:
        settings, wishes = self._settings, request.wishes
        if len(request.identity) > _MAX_USER_DATA:
            raise CloudError(ErrorKind.INVALID, "the VM's identity is larger than user-data may be")
        self._check_offered(request)
        image = request.image or settings.image
        root_disk = self._images._thd_root_disk(driver, image)
        additions = launch_parameters(settings, request)
        subnet = request.zone if request.zone.startswith(_SUBNET) else ""
        if request.zone and not subnet:
            additions["Placement.AvailabilityZone"] = request.zone
        groups = (wishes.security_groups or settings.security_groups) if subnet else ()
        with driver.connection.adding(additions):
            instance = driver.run_instance(
                name=f"infranetes-{request.sandbox_id[:12]}",
                instance_type=request.size,
                image=image,
                user_data=request.identity,
                key_name=settings.key_name,
                subnet=subnet,
                security_groups=groups,
                tags=request.tags,
                client_token=_client_token(request),
                disks=root_disk_mappings(settings, root_disk),
                instance_profile=wishes.instance_profile or settings.instance_profile,
            )
        return _vm(instance)

    def _check_offered(self, request: LaunchRequest) -> None:
        """Check that a zone has a size, as far as is known, so that EC2 is not asked for what it lacks.

        :raise CloudError: the zone does not have it."""
        zone = self._subnet_zones.get(request.zone, request.zone)
        zones = next((offer.zones for offer in self.offers if offer.name == request.size), ())
        if zones and zone and not zone.startswith(_SUBNET) and zone not in zones:
            raise CloudError(ErrorKind.CAPACITY, f"zone {zone} does not offer {request.size}")

    def _thd_poll_launch(self, driver: Driver, vm: CloudVM) -> CloudVM:
        return vm  # EC2 refuses a launch at once or not at all

    def _thd_find(self, driver: Driver, token: str) -> list[CloudVM]:
        return self._thd_listed(driver, {f"tag:{TOKEN}": token})

    def _thd_list(self, driver: Driver) -> list[CloudVM]:
        return self._thd_listed(driver, {})

    def _thd_listed(self, driver: Driver, filters: dict[str, str]) -> list[CloudVM]:
        ours = {f"tag:{CLUSTER}": self._cluster, f"tag:{NODE}": self._node}
        return [_vm(instance) for instance in driver.instances(filters={**ours, **filters})]

    def _thd_survey(self, driver: Driver) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_get(self, driver: Driver, id: str) -> CloudVM | None:
        try:
            instances = driver.instances([id])
        except Exception as error:
            cloud_error = errors.classify(error)
            if cloud_error is not None and cloud_error.kind is ErrorKind.NOT_FOUND:
                return None
            raise
        return next((_vm(each) for each in instances if each.id == id and self._is_ours(each)), None)

    def _is_ours(self, instance: Instance) -> bool:
        tags = instance.extra["tags"]
        return tags.get(CLUSTER) == self._cluster and tags.get(NODE) == self._node

    def _thd_destroy(self, driver: Driver, vm: CloudVM) -> bool:
        if not driver.terminate_instance(vm.id):
            return False
        self._thd_release_resources(driver, vm)
        return True

    def _thd_release_resources(self, driver: Driver, vm: CloudVM) -> None:
        if vm.wanted_address == "new":
            addresses._thd_release_of(driver, vm.token, self._given.pop(vm.id, None))

    # ---- Addresses, disks, consoles

    def _thd_assign_address(self, driver: Driver, vm: CloudVM) -> None:
        tags = {CLUSTER: self._cluster, NODE: self._node, SANDBOX: vm.sandbox_id, TOKEN: vm.token}
        given = addresses._thd_associate(driver, vm, tags)
        if vm.wanted_address == "new" and given is not None:
            self._given[vm.id] = given

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        return addresses._thd_leftovers(driver, self._cluster, self._node)

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        addresses._thd_release(driver, leftover)

    def _thd_console_output(self, driver: Driver, id: str) -> str:
        return driver.console_output(id)

    # ---- VMs that wait stopped

    def check_stoppable(self, wishes: Wishes) -> None:
        """See `StoppingCloud`. What can't be stopped besides spot instances, EC2 says when it is asked."""

    def _thd_stop(self, driver: Driver, vm: CloudVM) -> None:
        try:
            driver.stop_instance(vm.id)
        except BaseHTTPError as error:
            if "UnsupportedOperation" not in str(error):
                raise
            raise CloudError(
                ErrorKind.INVALID,
                f"EC2 can't stop instance {vm.id}, as its root disk is no EBS volume, for example; let VMs "
                f"wait booted: {error}",
            ) from None

    def _thd_take_identity(self, driver: Driver, vm: CloudVM) -> bool:
        driver.set_user_data(vm.id, _NO_IDENTITY)
        return True

    def _thd_start(self, driver: Driver, vm: CloudVM, identity: bytes) -> CloudVM:
        if len(identity) > _MAX_USER_DATA:
            raise CloudError(ErrorKind.INVALID, "the VM's identity is larger than user-data may be")
        driver.set_user_data(vm.id, identity)
        driver.start_instance(vm.id)
        return vm

    # ---- Guests without our agent

    def _thd_power_off(self, driver: Driver, id: str) -> None:
        driver.stop_instance(id)

    def _thd_console_log(self, driver: Driver, id: str) -> bytes:
        return driver.console_log(id)


def _vm(instance: Instance) -> CloudVM:
    extra, tags = instance.extra, instance.extra["tags"]
    state = _STATES.get(extra.get("status", ""), InstanceState.PENDING)
    ended = state is InstanceState.ENDED
    return CloudVM(
        id=instance.id,
        token=tags.get(TOKEN, ""),
        sandbox_id=tags.get(SANDBOX, ""),
        state=state,
        private_address=next(iter(instance.private_ips), ""),
        public_address=next(iter(instance.public_ips), ""),
        created_at=instance.created_at.timestamp() if instance.created_at else 0.0,
        size=extra.get("instance_type") or "",
        wanted_address=tags.get(ADDRESS, ""),
        detail=_why_ended(extra) if ended else "",
        zone=extra.get("availability") or "",
        gone=extra.get("status") == "terminated",
        halted=extra.get("status") == "stopped",
        failed=ended and _has_failed(extra),
    )


def _has_failed(extra: InstanceExtra) -> bool:
    reason = extra.get("state_reason") or ""
    return bool(reason) and not reason.startswith(_ASKED_FOR)


def _why_ended(extra: InstanceExtra) -> str:
    reason = extra.get("state_reason") or extra.get("reason") or ""
    # Source: EC2's manual, "Troubleshoot EC2 instance launch issues".
    if reason.startswith("Client.InternalError"):
        return (
            f"{reason}; so EC2 ends it if the KMS key of a disk can't be used: see disk_key in providers.aws"
        )
    return reason


def _client_token(request: LaunchRequest) -> str:
    """EC2's idempotency key, of at most 64 characters: the same for any identity of a VM."""
    fields = "\0".join((request.size, request.zone, request.image)).encode()
    return f"{request.token}-{request.number}-{hashlib.sha256(fields).hexdigest()[:12]}"
