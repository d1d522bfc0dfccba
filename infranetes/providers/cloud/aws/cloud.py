"""EC2 as an `ICloud`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from libcloud.compute.base import Node, NodeImage, NodeSize
from libcloud.compute.drivers.ec2 import EC2NetworkSubnet
from libcloud.compute.types import NodeState
from zope.interface import implementer

from infranetes.providers.cloud.annotations import PREFIX, Wishes
from infranetes.providers.cloud.aws import addresses, errors
from infranetes.providers.cloud.aws.credentials import Credentials, Keys
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.images import Images, RootDisk
from infranetes.providers.cloud.aws.settings import Settings
from infranetes.providers.cloud.interface import (
    ADDRESS,
    CLUSTER,
    NODE,
    SANDBOX,
    TOKEN,
    CloudError,
    Found,
    ICloud,
    Leftover,
    MachineImage,
    Offer,
    Order,
    Trouble,
)
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition, InvalidArgument

_ID = re.compile(r"i-[0-9a-f]{8,17}")
_MAX_USER_DATA = 16 * 1024  # bytes, before base64
_STATES = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.ENDED,
    "stopped": InstanceState.ENDED,
    "shutting-down": InstanceState.ENDED,
    "terminated": InstanceState.ENDED,
}


@lru_cache
def offers(region: str) -> tuple[Offer, ...]:
    """The region's instance types with their prices, from libcloud's tables. Takes a moment, once."""
    return tuple(_offer(size) for size in Driver("-", "-", region=region).list_sizes())


def _offer(size: Any) -> Offer:
    extra = size.extra
    arm = "Graviton" in extra.get("physicalProcessor", "")
    return Offer(
        name=size.id,
        cpu_millis=int(extra.get("vcpu") or extra.get("cpu") or 0) * 1000,
        memory_bytes=int(size.ram) << 20,
        price=float(size.price) if size.price else None,
        gpus=int(extra.get("gpu") or 0),
        architecture="arm64" if arm else "x86_64",
    )


@implementer(ICloud)
class AwsCloud:
    """One region of one account."""

    name = "aws"

    def __init__(self, settings: Settings, context: ProviderContext, offers: Sequence[Offer]) -> None:
        self._settings = settings
        self._cluster, self._node = context.cluster, context.node
        self._credentials = Credentials(settings.access_key, settings.secret_key, settings.profile)
        self._images = Images(settings.image_owners)
        self._architecture = "x86_64"  # of the configuration's image, and so of all
        self.offers = offers
        self.place = f"aws {settings.region}"

    def is_id(self, text: str) -> bool:
        return _ID.fullmatch(text) is not None

    def check_wishes(self, wishes: Wishes) -> None:
        if wishes.region and wishes.region != self._settings.region:
            raise InvalidArgument(
                f"annotation {PREFIX}region: {wishes.region!r}: this node makes VMs in "
                f"{self._settings.region} only; let the pod run on a node of that region"
            )
        if wishes.security_groups and not self.places(wishes)[0]:
            raise InvalidArgument(
                f"annotation {PREFIX}security-groups needs a subnet: give {PREFIX}subnet, "
                "or subnets in providers.aws"
            )
        if wishes.elastic_address not in ("", "new") and not wishes.elastic_address.startswith("eipalloc-"):
            raise InvalidArgument(
                f"annotation {PREFIX}elastic-address: {wishes.elastic_address!r}: "
                'expected "new" or eipalloc-…'
            )

    def places(self, wishes: Wishes) -> Sequence[str]:
        return [wishes.subnet] if wishes.subnet else self._settings.subnets or [""]

    def judge(self, error: Exception) -> CloudError | None:
        return errors.judge(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        keys = self._credentials._thd_now()
        where: dict[str, Any] = {}
        if self._settings.endpoint:
            parts = urlsplit(self._settings.endpoint)
            secure = parts.scheme == "https"
            where = {"host": parts.hostname, "port": parts.port or (443 if secure else 80), "secure": secure}
        driver: Driver = Driver(
            keys.access_key,
            keys.secret_key,
            region=self._settings.region,
            token=keys.token,
            signature_version="4",
            timeout=timeout,
            **where,
        )
        driver.infranetes_keys = keys
        return driver

    def _thd_is_current(self, driver: Driver) -> bool:
        keys: Keys = driver.infranetes_keys
        return keys == self._credentials._thd_now()

    def _thd_check(self, driver: Driver) -> str:
        wanted = self._settings.image
        image = self._images._thd_get(driver, wanted)
        if image is None:
            raise FailedPrecondition(f"{self.place} has no image {wanted}; see image in providers.aws")
        if self._settings.subnets:
            driver.ex_list_subnets(subnet_ids=list(self._settings.subnets))
        self._architecture = str(image.extra.get("architecture") or "x86_64")
        return self._architecture

    # ---- The catalogue

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        return self._images._thd_find(driver, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return self._images._thd_has(driver, id)

    # ---- VMs

    def _thd_launch(self, driver: Driver, order: Order) -> Found:
        settings, wishes = self._settings, order.wishes
        if len(order.identity) > _MAX_USER_DATA:
            raise CloudError(Trouble.INVALID, "the VM's identity is larger than user-data may be")
        public = settings.public_address if wishes.public_address is None else wishes.public_address
        additions = {
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions.HttpTokens": "required",  # a request that was tricked out of a pod gets nothing
            "MetadataOptions.HttpPutResponseHopLimit": "1",
            **addresses.tag_parameters("volume", order.tags, number=2),
        }
        if wishes.spot:
            additions["InstanceMarketOptions.MarketType"] = "spot"
            if wishes.spot_max_price is not None:
                additions["InstanceMarketOptions.SpotOptions.MaxPrice"] = str(wishes.spot_max_price)
        image = order.image or settings.image
        root_disk = self._images._thd_root_disk(driver, image)
        groups = list(wishes.security_groups or settings.security_groups) if order.place else []
        with driver.connection.adding(additions):
            node = driver.create_node(
                name=f"infranetes-{order.sandbox_id[:12]}",
                size=NodeSize(order.size, order.size, 0, 0, 0, 0.0, driver),
                image=NodeImage(image, "", driver),
                ex_userdata=order.identity.decode(),
                ex_keyname=settings.key_name or None,
                ex_subnet=EC2NetworkSubnet(order.place, "", "") if order.place else None,
                ex_security_group_ids=groups or None,
                ex_metadata=dict(order.tags),
                ex_clienttoken=_client_token(order),
                ex_blockdevicemappings=self._disks(root_disk),
                ex_iamprofile=wishes.instance_profile or settings.instance_profile or None,
                ex_assign_public_ip=public,
            )
        return self._found(node)

    def _thd_settle(self, driver: Driver, found: Found) -> Found:
        return found  # EC2 refuses at once or not at all

    def _disks(self, root: RootDisk) -> list[dict[str, Any]] | None:
        """The root disk, which must not outlive the VM, whatever its image says."""
        if not root.name:
            return None
        disk = {"DeleteOnTermination": "true", "VolumeSize": str(max(root.gib, self._settings.disk_gib, 1))}
        return [{"DeviceName": root.name, "Ebs": disk}]

    def _thd_find(self, driver: Driver, token: str) -> list[Found]:
        return self._thd_listed(driver, {f"tag:{TOKEN}": token})

    def _thd_list(self, driver: Driver) -> list[Found]:
        return self._thd_listed(driver, {})

    def _thd_listed(self, driver: Driver, filters: dict[str, str]) -> list[Found]:
        ours = {f"tag:{CLUSTER}": self._cluster, f"tag:{NODE}": self._node}
        return [self._found(node) for node in driver.list_nodes(ex_filters={**ours, **filters})]

    def _thd_get(self, driver: Driver, id: str) -> Found | None:
        try:
            nodes = driver.list_nodes(ex_node_ids=[id])
        except Exception as error:
            found = errors.judge(error)
            if found is not None and found.trouble is Trouble.MISSING:
                return None
            raise
        return next((self._found(node) for node in nodes if node.id == id and self._is_ours(node)), None)

    def _is_ours(self, node: Any) -> bool:
        tags = node.extra["tags"]
        return bool(tags.get(CLUSTER) == self._cluster and tags.get(NODE) == self._node)

    def _found(self, node: Any) -> Found:
        extra, tags = node.extra, node.extra["tags"]
        state = _STATES.get(extra.get("status"), InstanceState.PENDING)
        ended = state is InstanceState.ENDED
        return Found(
            id=node.id,
            token=tags.get(TOKEN, ""),
            sandbox_id=tags.get(SANDBOX, ""),
            state=state,
            private_address=next(iter(node.private_ips), ""),
            public_address=next(iter(node.public_ips), ""),
            created_at=node.created_at.timestamp() if node.created_at else 0.0,
            size=extra.get("instance_type") or "",
            wanted_address=tags.get(ADDRESS, ""),
            detail=(extra.get("state_reason") or extra.get("reason") or "") if ended else "",
        )

    def _thd_destroy(self, driver: Driver, found: Found) -> bool:
        driver.destroy_node(_node(driver, found.id))
        nodes = driver.list_nodes(ex_node_ids=[found.id])
        if any(node.extra.get("status") != "terminated" for node in nodes):
            return False
        self._thd_release_all(driver, found)
        return True

    def _thd_release_all(self, driver: Driver, found: Found) -> None:
        if found.wanted_address == "new":
            addresses._thd_release_of(driver, found.token)

    # ---- Addresses, disks, consoles

    def _thd_address(self, driver: Driver, found: Found) -> None:
        tags = {CLUSTER: self._cluster, NODE: self._node, SANDBOX: found.sandbox_id, TOKEN: found.token}
        addresses._thd_associate(driver, found, tags)

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        return addresses._thd_leftovers(driver, self._cluster, self._node)

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        addresses._thd_release(driver, leftover)

    def _thd_console(self, driver: Driver, id: str) -> str:
        output = driver.ex_get_console_output(_node(driver, id)).get("output") or ""
        return str(output).strip()


def _node(driver: Driver, id: str) -> Node:
    return Node(id, id, NodeState.UNKNOWN, [], [], driver)


def _client_token(order: Order) -> str:
    """EC2's idempotency key: the same for what is the same but for the identity. At most 64 characters."""
    words = "\0".join((order.size, order.place, order.image)).encode()
    return f"{order.token}-{order.number}-{hashlib.sha256(words).hexdigest()[:12]}"
