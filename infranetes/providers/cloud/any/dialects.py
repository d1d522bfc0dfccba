# SPDX-License-Identifier: Apache-2.0
"""What `NodeDriver` leaves to each of libcloud's drivers, for those that people use most.

A test compares this table with the drivers themselves. Other drivers are described by the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

import attrs

from infranetes.providers import libraries

if TYPE_CHECKING:  # the settings' keys are told without libcloud, too
    from libcloud.compute.base import NodeDriver

MONTH = 730.0  # hours


@attrs.frozen
class Dialect:
    """How one driver takes and tells what all have.

    :ivar user_data: the argument of `create_node` that takes user-data, or ARGUMENT.KEY; "": none does.
    :ivar create: what `create_node` gets besides. :ivar listing: what `list_nodes` and `list_sizes` get.
    :ivar password: an argument of `create_node` that has to be a password, which nobody will use.
    :ivar address: which of a node's addresses is the pod's, private or public.
    :ivar price_hours: for how many hours the price of a size is.
    :ivar concrete: the class that the driver's own class makes an object of; "": itself.
    """

    user_data: str = ""
    create: Mapping[str, object] = attrs.field(factory=dict)
    listing: Mapping[str, object] = attrs.field(factory=dict)
    password: str = ""
    address: str = "private"
    price_hours: float = 1.0
    concrete: str = ""


DIALECTS: Mapping[str, Dialect] = {
    "brightbox": Dialect("ex_userdata"),
    "cloudscale": Dialect("ex_create_attr.user_data", address="public"),
    "cloudstack": Dialect("ex_userdata", create={"ex_start_vm": True}),
    "digitalocean": Dialect("ex_user_data", concrete="DigitalOcean_v2_NodeDriver"),
    "linode": Dialect(
        "ex_userdata",
        create={"ex_private_ip": True},
        password="root_pass",  # noqa: S106  its name
        concrete="LinodeNodeDriverV4",
    ),
    "vultr": Dialect(
        "ex_userdata",
        listing={"ex_list_bare_metals": False},
        address="public",
        price_hours=MONTH,
        concrete="VultrNodeDriverV2",
    ),
    # These take no user-data, so that their nodes can't be told who they are.
    "kamatera": Dialect(create={"ex_wait": False}),
    "libvirt": Dialect(),
    "ovh": Dialect(address="public"),
    "scaleway": Dialect(),
    "upcloud": Dialect(),
}


def find(name: str) -> type[NodeDriver]:
    """Return a driver's class, by libcloud's name for it or as MODULE:CLASS.

    :raise ValueError: there is none, or libcloud is not installed."""
    try:
        from libcloud.compute.base import NodeDriver
        from libcloud.compute.providers import DRIVERS
    except ModuleNotFoundError as error:
        raise ValueError(libraries.missing("libcloud", error) or str(error)) from None
    module, colon, attribute = name.partition(":")
    if not colon:
        drivers = {str(each): where for each, where in DRIVERS.items()}  # older libclouds have enums
        if name not in drivers:
            close = get_close_matches(name.lower(), drivers, n=1)
            known = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(drivers))}"
            raise ValueError(f"libcloud has no driver {name!r}; {known}")
        module, attribute = drivers[name]
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module} with the driver {attribute} can't be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, NodeDriver)):
        raise ValueError(f"{name!r} is not a driver of libcloud for VMs, a NodeDriver")
    return found


def concrete(name: str) -> type[NodeDriver]:
    """Return the class of a driver's objects, whose methods have the arguments that count."""
    found = find(name)
    its = DIALECTS.get(name, Dialect()).concrete
    concrete: type[NodeDriver] | None = getattr(import_module(found.__module__), its, None) if its else found
    if concrete is None:
        raise ValueError(f"{name} needs a newer libcloud: this one has no {its}")
    return concrete


def overrides(driver: type[NodeDriver], method: str) -> bool:
    """Return whether a driver has a method of its own in the place of NodeDriver's, which raises."""
    from libcloud.compute.base import NodeDriver

    return getattr(driver, method) is not getattr(NodeDriver, method)


def unknown(function: Callable[..., object], names: Iterable[str]) -> str:
    """Return what is wrong with arguments of these names, for people; "": nothing is."""
    known = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return ""
    wrong = [name for name in names if name not in known]
    others = ", ".join(name for name in known if name != "self")
    return f"there is no argument {wrong[0]}; there are {others}" if wrong else ""


def missing(function: Callable[..., object], names: Collection[str]) -> list[str]:
    """Return the arguments that a function needs besides these."""
    return [
        name for name in inspect.signature(function).parameters if needs(function, name) and name not in names
    ]


def takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has an argument of this name."""
    return name in inspect.signature(function).parameters


def needs(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has an argument of this name, and no default for it."""
    found = inspect.signature(function).parameters.get(name)
    if found is None or name == "self" or found.kind in (found.VAR_KEYWORD, found.VAR_POSITIONAL):
        return False
    return found.default is found.empty
