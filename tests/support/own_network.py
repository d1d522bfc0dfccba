# SPDX-License-Identifier: Apache-2.0
"""A network of its own for a command that a test runs."""

from __future__ import annotations


def in_own_network(*command: str, also: tuple[str, ...] = ()) -> list[str]:
    """Return the command line that runs a command in a network of its own, which /sys shows there.

    :param also: more namespaces, as options of unshare(1).
    """
    script = 'mount -t sysfs sysfs /sys && exec "$@"'
    return ["unshare", "--net", "--mount", *also, "sh", "-c", script, "sh", *command]
