# SPDX-License-Identifier: Apache-2.0
"""The table `[delegate]` of the configuration."""

from __future__ import annotations

import attrs

from infranetes_common import config_outside as outside


@attrs.frozen
class DelegateConfig:
    """The node's own runtime, which gets the pods of all handlers not named here. Empty: there is none."""

    # Of its CRI: a path, or unix://PATH.
    socket: str = attrs.field(default="", metadata=outside.names(outside.server))

    @property
    def socket_path(self) -> str:
        """The socket's path; "": there is no delegate."""
        return self.socket.removeprefix("unix://")
