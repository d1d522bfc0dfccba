# SPDX-License-Identifier: Apache-2.0
"""Reading the configuration: a TOML file and its drop-ins, which flags override."""

from __future__ import annotations

from collections.abc import Container, Mapping
from ipaddress import IPv4Network
from typing import Any

import attrs

from infranetes.config.rules import faults
from infranetes.config.schema import ADDRESSING, Config
from infranetes_common import config, config_files
from infranetes_common.config_files import Document, Sources
from infranetes_common.errors import ConfigError

BASE_IP = "base_ip"  # a flag for the provider's key pod_cidr
COMMAND_LINE = "command line"  # the place of flags' errors


@attrs.frozen
class Reading:
    """The configuration as it was read, and where each of its keys is from.

    :ivar flags: the dotted keys that the command line gave."""

    config: Config
    sources: Sources
    flags: frozenset[str] = frozenset()


def load(path: str | None, flags: Mapping[str, Any]) -> Config:  # Any: values of any key
    """Return the configuration, which `read` reads."""
    return read(path, flags).config


def read(path: str | None, flags: Mapping[str, Any]) -> Reading:  # Any: values of any key
    """Read the file at `path` and its drop-ins (None: all defaults), `flags` (dotted keys) over them.

    :raise ConfigError: names the file or flag, and the key, of everything that is wrong."""
    document = config_files.read(path) if path else Document({}, Sources(COMMAND_LINE))
    found = config.of_document(document, Config)
    for key, value in flags.items():
        if key == BASE_IP:
            continue  # handled below, once the provider is known
        table, _, name = key.rpartition(".")
        try:
            if table:
                inner = attrs.evolve(getattr(found, table), **{name: value})
                found = attrs.evolve(found, **{table: inner})
            else:
                found = attrs.evolve(found, **{name: value})
        except ValueError as error:
            raise ConfigError(f"{COMMAND_LINE}: {key}: {error.args[0]}") from None
    keys = set(flags)
    if BASE_IP in flags:
        found = with_base_ip(found, str(flags[BASE_IP]))
        keys = keys - {BASE_IP} | {f"providers.{found.provider}.pod_cidr"}
    sources = document.sources
    if wrong := [f"{_origin(fault, sources, keys)}: {fault}" for fault in faults(found)]:
        raise sources.placed(ConfigError("\n".join(wrong)))
    return Reading(found, sources, frozenset(keys))


def _origin(fault: str, sources: Sources, flags: Container[str]) -> str:
    return COMMAND_LINE if fault.partition(": ")[0] in flags else sources.main


def with_base_ip(configuration: Config, base: str) -> Config:
    """Return `configuration` with its provider's subnet for pods, given by its first three numbers.

    :raise ConfigError: they are malformed, or the provider gives no addresses."""
    if configuration.provider not in ADDRESSING:
        raise ConfigError(
            f"{COMMAND_LINE}: base-ip: provider {configuration.provider!r} takes pods' addresses from "
            f"elsewhere; it is for {' and '.join(ADDRESSING)}"
        )
    try:
        subnet = IPv4Network(f"{base.removesuffix('.')}.0/24")
    except ValueError:
        raise ConfigError(
            f"{COMMAND_LINE}: base-ip: {base!r} is not the first three numbers of an address, such as 10.88.3"
        ) from None
    table = {**configuration.providers.get(configuration.provider, {}), "pod_cidr": str(subnet)}
    return attrs.evolve(configuration, providers={**configuration.providers, configuration.provider: table})
