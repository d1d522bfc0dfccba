# SPDX-License-Identifier: Apache-2.0
"""`[csi]` of the node's configuration."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes_common import config_outside as outside

NAME = "infranetes.io"  # the driver's name
_MAX_PATH = 60  # bytes of sun_path (see unix(7)) that the sockets' own names leave


def _is_directory(_: object, field: attrs.Attribute[str], value: str) -> None:
    if value and not Path(value).is_absolute():
        raise ValueError(f"{field.name}: {value!r} is not an absolute path")
    if len(value.encode()) > _MAX_PATH:
        raise ValueError(f"{field.name}: {value!r} is over {_MAX_PATH} bytes, too long for sockets in it")


@attrs.frozen
class CsiConfig:
    """Whether the node's pods can have volumes of their VMs' own."""

    # kubelet's directory, such as /var/lib/kubelet, which holds its drivers' sockets. Empty: no driver.
    kubelet_dir: str = attrs.field(
        default="", validator=_is_directory, metadata=outside.names(outside.present_directory)
    )

    @property
    def socket(self) -> str:
        """The path of the driver's socket."""
        return str(Path(self.kubelet_dir) / "plugins" / NAME / "csi.sock")

    @property
    def registration_socket(self) -> str:
        """The path of the socket by which kubelet finds the driver."""
        return str(Path(self.kubelet_dir) / "plugins_registry" / f"{NAME}-reg.sock")
