# SPDX-License-Identifier: Apache-2.0
"""What is seen of one pod, as the page of a pod shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from infranetes_common.wire import control


@attrs.frozen
class Volume:
    """A volume that is the pod's. :ivar disk: its serial number in the VM; "": it is not attached yet."""

    id: str
    provider: str
    disk: str


@attrs.frozen
class Mount:
    """What a container has at a path. :ivar source: the node's path that it was asked for with."""

    container: str
    path: str
    source: str
    read_only: bool


@attrs.frozen
class PodView:
    """A pod. Neither environments nor annotations are in it, which may hold secrets.

    :ivar events: of all sandboxes of the pod, the newest first.
    :ivar console: the end of its console, or "" and why.
    :ivar policies: what holds for it, or None and why.
    """

    described: control.DescribePodResponse
    events: Sequence[control.Event]
    volumes: Sequence[Volume]
    mounts: Sequence[Mount]
    console: str = ""
    no_console: str = ""
    policies: control.PodPolicies | None = None
    no_policies: str = ""


class LooksAtPods(Protocol):
    """Looks at pods for their pages."""

    async def look(self, pod: str, *, console: bool) -> PodView:
        """Return what is seen of a pod.

        :param pod: as of `DescribePodRequest`. :param console: whether its console is looked at, too.
        :raise NotFound: nothing is known of it. :raise InvalidArgument: several are meant."""
