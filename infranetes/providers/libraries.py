# SPDX-License-Identifier: Apache-2.0
"""The libraries that only some clouds need, and how they are installed when one of them is missing."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class Libraries:
    """What a cloud's provider needs besides what every node has.

    :ivar modules: the top-level modules. :ivar debian: Debian's packages of them.
    :ivar extra: the extra of our distribution at PyPI that brings them.
    """

    modules: frozenset[str]
    debian: tuple[str, ...]
    extra: str

    @property
    def remedy(self) -> str:
        """How to install them, for people."""
        return f"apt-get install {' '.join(self.debian)}, or pip install 'infranetes[{self.extra}]'"


def _with_libcloud(extra: str, modules: tuple[str, ...] = (), debian: tuple[str, ...] = ()) -> Libraries:
    return Libraries(
        frozenset(("libcloud", "requests", *modules)),
        ("python3-libcloud", "python3-requests", *debian),
        extra,
    )


CLOUDS: Mapping[str, Libraries] = {
    # botocore is missed only where keys are not configured; what needs it says so.
    "aws": _with_libcloud("aws", ("botocore",), ("python3-botocore",)),
    "azure": _with_libcloud("azure"),
    "gcp": _with_libcloud("gcp"),
    "libcloud": _with_libcloud("libcloud"),
    "openstack": _with_libcloud("openstack"),
    "vsphere": _with_libcloud("vsphere", ("pyVim", "pyVmomi"), ("python3-pyvmomi",)),
}


def missing(cloud: str, error: ModuleNotFoundError) -> str | None:
    """Return the message for a failed import: which library is missing, and how to install it.

    None: what is missing is none of the cloud's libraries."""
    libraries = CLOUDS.get(cloud)
    module = (error.name or "").partition(".")[0]
    if libraries is None or module not in libraries.modules:
        return None
    return f"{module} is not installed: {libraries.remedy}"
