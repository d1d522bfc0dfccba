# SPDX-License-Identifier: Apache-2.0
"""The CDs of a guest: `configuration` makes them of what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import attrs
import yaml

from infranetes.cloud_init import cloud_config
from infranetes.cloud_init.boot_script import volumes_script
from infranetes.cloud_init.document import GuestDocument, Resolvers
from infranetes.cloud_init.multipart import Part, joined
from infranetes.cloud_init.network import network_data, version_2
from infranetes.cloud_init.user_data import CLOUD_CONFIG, UserDocument, documents, meta_data, ssh_keys
from infranetes.providers.annotation_rows import PREFIX
from infranetes.providers.machine_annotations import CloudInit, NetworkConfig
from infranetes.providers.machine_images import Cd, GuestConfiguration
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Network

SYSPREP_LABEL = "unattendCD"  # Windows looks at no label; KubeVirt's users know this one
# Of two documents of the pod's: its annotation's values, and the source's list entries first.
_BEFORE = "list(prepend)+dict(no_replace,recurse_list)+str()"
_WIDTH = 1 << 16  # of a line, so that none is folded
_MOUNTS = b"@virtlet-mount-script@"


@attrs.frozen
class _CloudInit:
    """What cloud-init is told, in whichever form."""

    meta_data: Mapping[str, object]
    user_data: bytes = attrs.field(repr=False)
    network_config: NetworkConfig
    resolvers: Resolvers


@attrs.frozen
class NoCloud(_CloudInit):
    """The CD for cloud-init's data source NoCloud."""

    def cds(self, network: Network) -> tuple[Cd, ...]:
        """See GuestConfiguration."""
        config = version_2(network, self.network_config, self.resolvers)
        files = {
            # JSON, which is YAML too: CirrOS knows nothing else.
            "meta-data": json.dumps(self.meta_data).encode() + b"\n",
            "user-data": self.user_data or b"#cloud-config\n{}\n",  # has to be there
            "network-config": yaml.safe_dump(config, sort_keys=False).encode(),
        }
        return (Cd("cidata", files),)


@attrs.frozen
class ConfigDrive(_CloudInit):
    """The CD of OpenStack's form, for cloudbase-init, and for cloud-init's data source ConfigDrive."""

    def cds(self, network: Network) -> tuple[Cd, ...]:
        """See GuestConfiguration."""
        files = {
            "openstack/latest/meta_data.json": _json(self.meta_data),
            "openstack/latest/network_data.json": _json(
                network_data(network, self.network_config, self.resolvers)
            ),
        }
        if self.user_data:
            files["openstack/latest/user_data"] = self.user_data
        return (Cd("config-2", files),)


@attrs.frozen
class Sysprep:
    """A CD with answers for Windows' setup, beside that of another configuration."""

    files: Mapping[str, bytes] = attrs.field(repr=False)
    beside: GuestConfiguration | None = None

    def cds(self, network: Network) -> tuple[Cd, ...]:
        """See GuestConfiguration."""
        others = self.beside.cds(network) if self.beside is not None else ()
        return (*others, Cd(SYSPREP_LABEL, self.files))


def configuration(document: GuestDocument) -> GuestConfiguration | None:
    """Return what the CDs of a guest have. None: it has no CD.

    :raise InvalidArgument: something that the pod says is wrong; the message names it and what to do."""
    choices = document.choices
    made: GuestConfiguration | None = None
    if choices.cloud_init is CloudInit.NONE:
        if choices.user_data or choices.user_data_source is not None:
            raise InvalidArgument(
                f"annotations {PREFIX}cloud-init and {PREFIX}user-data contradict each other: `none` means "
                "that the guest is told nothing; leave one of them out"
            )
    else:
        kind, meta = _FORMS[choices.cloud_init]
        given = _json_values(meta_data(choices.meta_data))
        keys = ssh_keys(document)
        made = kind(
            {**meta(document, keys, given), **given},
            _user_data(document, documents(document)),
            choices.network_config,
            document.resolvers,
        )
    return Sysprep(_sysprep(document), made) if choices.sysprep else made


def user_data(document: GuestDocument) -> bytes:
    """Return the user-data of a guest whose cloud has ways of its own to tell it; b"": there is none.

    Its name and the keys of its pod's annotations are in it too, as its meta-data is the cloud's.

    :raise InvalidArgument: something that the pod says is wrong; the message names it and what to do."""
    if document.choices.cloud_init is CloudInit.NONE:
        configuration(document)  # says what contradicts that
        return b""
    config: dict[str, object] = {}
    if document.hostname:
        config["hostname"] = document.hostname
    if keys := ssh_keys(document):
        config["ssh_authorized_keys"] = list(keys)
    content = f"#cloud-config\n{yaml.safe_dump(config, width=_WIDTH)}".encode()
    parts = [Part(content, CLOUD_CONFIG, "infranetes-names.txt", _BEFORE)] if config else []
    return _user_data(document, documents(document), *parts)


def _user_data(document: GuestDocument, own: Sequence[UserDocument], *more_parts: Part) -> bytes:
    if document.choices.user_data_alone and own:
        (alone, *more) = own
        if more:
            raise InvalidArgument(
                f"annotation {PREFIX}user-data-alone: there are two documents, {alone.what} and "
                f"{more[0].what}; leave one of them out"
            )
        mounts = "#!/bin/sh\n" + volumes_script(document.volumes)
        return alone.content.replace(_MOUNTS, mounts.encode())
    parts = [
        Part(
            each.content,
            each.kind,
            # Of another ending cloudbase-init would think that it knows what runs it.
            f"user-data-{number}.txt",
            _BEFORE if number > 1 and each.kind == CLOUD_CONFIG else "",
        )
        for number, each in enumerate(own, 1)
    ]
    parts += [*more_parts, *cloud_config.parts(document)]
    if len(parts) == 1:
        return parts[0].content
    return joined(parts) if parts else b""


def _nocloud_meta(
    document: GuestDocument, keys: Sequence[str], given: Mapping[str, object]
) -> dict[str, object]:
    meta: dict[str, object] = {"instance-id": document.instance}
    if document.hostname:
        meta["local-hostname"] = document.hostname
    if keys:
        meta["public-keys"] = list(keys)
    return meta


def _configdrive_meta(
    document: GuestDocument, keys: Sequence[str], given: Mapping[str, object]
) -> dict[str, object]:
    hostname = given.get("local-hostname", document.hostname)
    meta: dict[str, object] = {"uuid": given.get("instance-id", document.instance)}
    if hostname:
        meta |= {"hostname": hostname, "name": hostname}
    if keys:
        meta["public_keys"] = {f"key-{number}": key for number, key in enumerate(keys)}
    return meta


def _json_values(given: Mapping[str, object]) -> Mapping[str, object]:
    try:
        json.dumps(given)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"annotation {PREFIX}meta-data: values are texts, numbers, true or false, lists and mappings; "
            "put dates and the like in quotes"
        ) from None
    return given


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _sysprep(document: GuestDocument) -> dict[str, bytes]:
    under = document.choices.sysprep + "/"
    files = {
        path.removeprefix(under): file.content
        for path, file in document.files.items()
        if path.startswith(under)
    }
    if not files:
        raise InvalidArgument(
            f"annotation {PREFIX}sysprep: {document.choices.sysprep}: no ConfigMap or Secret is mounted "
            "there; expected the mountPath of one with the key Autounattend.xml or Unattend.xml"
        )
    return files


_Meta = Callable[[GuestDocument, Sequence[str], Mapping[str, object]], dict[str, object]]
_FORMS: Mapping[CloudInit, tuple[type[NoCloud] | type[ConfigDrive], _Meta]] = {
    CloudInit.NOCLOUD: (NoCloud, _nocloud_meta),
    CloudInit.CONFIG_DRIVE: (ConfigDrive, _configdrive_meta),
}
