# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of the provider of any driver of libcloud's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from infranetes.providers.cloud.any import dialects
from infranetes.providers.cloud.any.credentials import _thd_read
from infranetes.providers.cloud.any.dialects import DIALECTS, Dialect
from infranetes.providers.cloud.settings import ENDPOINT, CloudSettings, matching, not_empty
from infranetes_common import config_outside as outside

if TYPE_CHECKING:
    from libcloud.compute.base import NodeDriver

Table = Mapping[str, object]

_OWN = ("name", "size", "image", "location")  # arguments of create_node that the daemon gives


def _is_driver(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    found = dialects.concrete(value)
    if not dialects.overrides(found, "create_node"):
        raise ValueError(f"libcloud's driver {value} can't make VMs")
    if not dialects.overrides(found, "list_sizes"):
        raise ValueError(f"libcloud's driver {value} tells no sizes, of which one could be chosen")


def _are_of_driver(instance: Settings, attribute: attrs.Attribute[Table], value: Table) -> None:
    if (found := instance.concrete) and (words := dialects.unknown(found.__init__, value)):
        raise ValueError(words)


def _are_of_create(instance: Settings, attribute: attrs.Attribute[Table], value: Table) -> None:
    if (found := instance.concrete) is None:
        return
    if taken := [name for name in value if name in _OWN]:
        raise ValueError(f"{taken[0]} is given by the daemon: leave it out")
    if words := dialects.unknown(found.create_node, value):
        raise ValueError(words)
    its = instance.dialect
    given = (*_OWN, *its.create, its.password, its.user_data.partition(".")[0])
    if lacking := dialects.missing(found.create_node, given):
        raise ValueError(f"{found.__name__} needs {', '.join(lacking)} besides")


def _takes_user_data(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    if (found := instance.concrete) is None:
        return
    argument = instance.dialect.user_data.partition(".")[0]
    if not argument:
        raise ValueError(
            f"which argument of {found.__name__}.create_node takes user-data, by which a VM is told who it "
            "is? A driver that has none can't make VMs for pods"
        )
    if words := dialects.unknown(found.create_node, [argument]):
        raise ValueError(words)


def _has_image(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    if (found := instance.concrete) and not value and dialects.needs(found.create_node, "image"):
        raise ValueError("it has to be given: an image's id or name")


def _are_locations(
    instance: Settings, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]
) -> None:
    if found := instance.concrete:
        has_some = dialects.overrides(found, "list_locations")
        if value and not (has_some and dialects.takes(found.create_node, "location")):
            raise ValueError(f"{found.__name__} has no locations: leave it out")
        if not value and dialects.needs(found.create_node, "location"):
            raise ValueError("one has to be given, by its id or name")


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.libcloud`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = ("credentials_file", "arguments", "locations", "image", "create")

    # A name of libcloud's, or MODULE:CLASS.
    driver: str = attrs.field(validator=[not_empty, _is_driver])
    # A TOML file with the driver's arguments that are secret.
    credentials_file: str = attrs.field(validator=not_empty)
    # The driver's other arguments.
    arguments: Mapping[str, object] = attrs.field(factory=dict, validator=_are_of_driver)
    # The API's address; empty: the driver's own.
    endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST or https://HOST:PORT"))
    # Ids or names of locations, tried in this order.
    locations: tuple[str, ...] = attrs.field(default=(), validator=_are_locations)
    # The id or name of the image of a guest with our agent; empty: `create` says it.
    image: str = attrs.field(default="", validator=_has_image)
    user_data: str = attrs.field(default="", validator=_takes_user_data)  # empty: as in `dialects`
    # Further arguments of create_node.
    create: Mapping[str, object] = attrs.field(factory=dict, validator=_are_of_create)
    # Which of a VM's addresses is the pod's; empty: as in `dialects`.
    pod_address: Literal["", "private", "public"] = ""
    settle_seconds: float = attrs.field(default=30.0, validator=attrs.validators.ge(0.0))
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))

    @property
    def concrete(self) -> type[NodeDriver] | None:
        """The class of the driver's objects; None: there is no such driver, which another message says."""
        try:
            return dialects.concrete(self.driver)
        except ValueError:
            return None

    @property
    def dialect(self) -> Dialect:
        """How the driver takes and tells what `NodeDriver` leaves open."""
        known = DIALECTS.get(self.driver, Dialect())
        return attrs.evolve(
            known,
            user_data=self.user_data or known.user_data,
            create={**known.create, **self.create},
            address=self.pod_address or known.address,
        )

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look at the file of credentials, and say that the cloud was not asked."""
        key = "credentials_file"
        for said in outside.tried(lambda: _thd_read(self.credentials_file), key):
            yield attrs.evolve(said, key=key)
        yield from super().look_outside(is_set)
