# SPDX-License-Identifier: Apache-2.0
"""The annotations of Virtlet's users, understood for pods whose image is the VM.

They are translated once, into ours, so that nobody else knows of them. docs/virtlet.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import attrs

from infranetes.providers.annotation_rows import PREFIX
from infranetes_common.errors import InvalidArgument
from infranetes_common.quantities import units

_FAMILY = re.compile(r"Virtlet[A-Z][A-Za-z0-9]*")


@attrs.frozen
class Alias:
    """One of Virtlet's annotations."""

    name: str
    ours: str  # without the prefix; "": it is refused, or has no effect
    translate: Callable[[str], str]  # "": nothing is asked for by this value
    refusal: str = ""  # what to do instead


def _as_it_is(text: str) -> str:
    return text


def _stripped(text: str) -> str:
    return text.strip()


def _lower(text: str) -> str:
    return text.strip().lower()


def _if_true(value: str) -> Callable[[str], str]:
    """Return what translates true; Virtlet took every other value for false."""
    return lambda text: value if text == "true" else ""


def _cpu_model(text: str) -> str:
    return {"": "", "host-model": "host"}[text.strip()]


def _size(text: str) -> str:
    return f"{-(-units(text.strip()) >> 20) or 1}Mi"


def _count(text: str) -> str:
    # Virtlet took 0 and less for one processor, which is what a VM has at the least.
    return text.strip() if int(text) > 0 else ""


def _cloud_config(text: str) -> str:
    """Virtlet's is a mapping without the line by which cloud-init knows it."""
    return text if text.lstrip().startswith("#cloud-config") else "#cloud-config\n" + text


_SOURCE_KEY, _SOURCE = "VirtletCloudInitUserDataSourceKey", "VirtletCloudInitUserDataSource"
_SCRIPT = "VirtletCloudInitUserDataScript"
_USER_DATA = "VirtletCloudInitUserData"
_OVERWRITE = "VirtletCloudInitUserDataOverwrite"
_KEYS, _KEY_SOURCE = "VirtletSSHKeys", "VirtletSSHKeySource"
TABLE = (
    Alias(_USER_DATA, "user-data", _cloud_config),
    Alias(_SCRIPT, "user-data", _as_it_is),
    Alias(_SOURCE, "user-data-source", _stripped),
    Alias(_SOURCE_KEY, "user-data-source", _stripped),
    Alias("VirtletCloudInitUserDataSourceEncoding", "user-data-encoding", _stripped),
    Alias(_OVERWRITE, "", _if_true("true")),
    Alias("VirtletCloudInitMetaData", "meta-data", _as_it_is),
    Alias("VirtletCloudInitImageType", "cloud-init", _lower),
    Alias(_KEYS, "ssh-keys", _as_it_is),
    Alias(_KEY_SOURCE, "ssh-keys-source", _stripped),
    Alias("VirtletForceDHCPNetworkConfig", "network-config", _if_true("dhcp")),
    Alias("VirtletRootVolumeSize", "disk", _size),
    Alias("VirtletDiskDriver", "disk-bus", _stripped),
    Alias("VirtletVCPUCount", "cpu", _count),
    Alias("VirtletCPUModel", "cpu-model", _cpu_model),
    Alias("VirtletSystemUUID", "machine-uuid", _stripped),
    Alias("VirtletChown9pfsMounts", "", _if_true("")),
    Alias(
        "VirtletLibvirtCPUSetting",
        "",
        _as_it_is,
        f"there is no libvirt here; name a CPU model by {PREFIX}cpu-model",
    ),
    Alias(
        "VirtletFilesFromDataSource",
        "",
        _as_it_is,
        "nothing is written into an image before it boots; mount the ConfigMap or Secret in the pod, with "
        "`items` and `subPath` where its keys have other paths, and cloud-init writes the files",
    ),
)


def is_virtlets(name: str) -> bool:
    """Return whether this is the name of one of Virtlet's annotations, or looks like one."""
    return _FAMILY.fullmatch(name) is not None


def translated(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return a pod's annotations with Virtlet's in our own words.

    :raise InvalidArgument: one that is not known, is malformed, can't be served, or says something else than
        ours beside it. The message names it."""
    given = {name: text for name, text in annotations.items() if is_virtlets(name)}
    if not given:
        return annotations
    known = {row.name: row for row in TABLE}
    found: dict[str, str] = {}
    for name, text in given.items():
        row = known.get(name)
        if row is None:
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise InvalidArgument(f"annotation {name[:80]} is not known; it looks like Virtlet's{meant}")
        if row.refusal:
            raise InvalidArgument(f"annotation {name} can't be served: {row.refusal}")
        if value := _value(row, text):
            found[name] = value
    ours = {PREFIX + known[name].ours: value for name, value in _combined(found).items() if known[name].ours}
    if _SCRIPT in found or _SOURCE_KEY in found:
        ours[PREFIX + "user-data-alone"] = "true"
    for ours_name, value in ours.items():
        if annotations.get(ours_name, value) != value:
            names = " and ".join(name for name in found if PREFIX + known[name].ours == ours_name)
            raise InvalidArgument(f"annotations {ours_name} and {names} differ; they mean the same: give one")
    return {**{name: text for name, text in annotations.items() if name not in given}, **ours}


def _value(row: Alias, text: str) -> str:
    try:
        return row.translate(text)
    except (ValueError, KeyError):
        raise InvalidArgument(
            f"annotation {row.name}: {text[:80]!r}: Virtlet knows no such value; see {PREFIX}{row.ours}"
        ) from None


def _combined(found: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations with those that belong together as one, as Virtlet read them."""
    one = dict(found)
    if _SOURCE_KEY in one and _SOURCE not in one:
        raise InvalidArgument(f"annotation {_SOURCE_KEY} is given without {_SOURCE}, whose key it is")
    if one.pop(_OVERWRITE, ""):
        for here, there in ((_USER_DATA, _SOURCE), (_KEYS, _KEY_SOURCE)):
            if here in one and not (there == _SOURCE and _SOURCE_KEY in one):
                one.pop(there, None)
    if _SOURCE_KEY in one:
        one.pop(_SCRIPT, None)
        one[_SOURCE] += f"/{one.pop(_SOURCE_KEY)}"
        one.pop(_USER_DATA, None)
    if _SCRIPT in one:
        one.pop(_USER_DATA, None)
        one.pop(_SOURCE, None)
    if one.get(_KEY_SOURCE, "").count("/") == 1:
        one[_KEY_SOURCE] += "/authorized_keys"
    return one
