# SPDX-License-Identifier: Apache-2.0
"""Seccomp filters that crun has compiled, given to it again for the next container with the same profile.

libseccomp compiles the default profile in 35 million instructions, which in an emulated VM is more than all
the rest of a container's start. crun leaves each filter beside its record of the container, for `crun exec`,
and takes one from an annotation. The profile stays in the specification, so a crun that does not know the
annotation compiles it. Sources: containers/crun src/libcrun/container.c, seccomp.c; crun.1.md.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST = 16  # profiles that are remembered; pods have one or two
ANNOTATION = "run.oci.seccomp_bpf_data"
FILE = "seccomp.bpf"

_INSTRUCTION_BYTES = 8  # struct sock_filter of linux/filter.h
_MAX_BYTES = 4096 * _INSTRUCTION_BYTES  # BPF_MAXINSNS

Document = Mapping[str, Any]  # Any: JSON made by `spec`


class SeccompFilters:
    """The filters of this agent's containers, by their profiles.

    :param root: crun's directory, which has a directory for each container.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[str, str] = {}

    def added(self, spec: Document) -> Document:
        """Return a container's config.json with its profile's filter, if that is known."""
        found = self._found.get(_profile(spec))
        return spec if found is None else {**spec, "annotations": {ANNOTATION: found}}

    def keep(self, spec: Document, id: str) -> None:
        """Remember the filter that crun has made for a container.

        :param spec: the config.json by which crun has created it."""
        profile = _profile(spec)
        if not profile or ANNOTATION in spec.get("annotations", {}) or len(self._found) >= MOST:
            return
        with contextlib.suppress(OSError), open(self._root / id / FILE, "rb") as file:
            filter = file.read(_MAX_BYTES + 1)
            if filter and not len(filter) % _INSTRUCTION_BYTES and len(filter) <= _MAX_BYTES:
                self._found[profile] = base64.b64encode(filter).decode()


def _profile(spec: Document) -> str:
    """Return all that a filter depends on, in this VM; empty: the container is not confined."""
    profile = spec["linux"].get("seccomp")
    return json.dumps(profile, sort_keys=True) if profile else ""
