# SPDX-License-Identifier: Apache-2.0
"""Names, tags and ids at OpenStack (source: Compute API, "Server tags" and "Create Server")."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

# An id is a UUID; that of a project or an older resource may lack the hyphens.
ID = r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}"
NAME = r"[^\s/?#&%,]{1,255}"  # a resource's name or id

_NEW_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MAX_TAG = 60
_PLAIN_TAG = re.compile(r"[A-Za-z0-9._:=@+-]*")


def is_id(text: str) -> bool:
    """Return whether this could be the id of a server, a volume or a snapshot."""
    return _NEW_ID.fullmatch(text) is not None


def is_any_id(text: str) -> bool:
    """Return whether this is an id rather than a name."""
    return re.fullmatch(ID, text) is not None


def name_of(token: str, number: int) -> str:
    """Return a server's name. Nova allows several servers of one name: a launch looks for the name first."""
    return f"infranetes-{token}-{number}"


def hashed_name_of(cluster: str, name: str) -> str:
    """Return the name by which a volume or snapshot of a cluster is looked for at Cinder, which takes off
    spaces at the ends of a name and compares names as the database does, such as without their case."""
    digest = hashlib.sha256(f"{len(cluster)} {cluster} {name}".encode()).hexdigest()
    return f"infranetes-{digest[:40]}"


def tag(key: str, value: str) -> str:
    """Return a tag by which servers can be listed. Different values have different tags.

    A tag has no comma, no slash, and no more than 60 characters; what does not fit is `#` and its hash."""
    text = f"{key}={value}"
    if len(text) <= _MAX_TAG and _PLAIN_TAG.fullmatch(text):
        return text
    return f"{key}=#{hashlib.sha256(value.encode()).hexdigest()[:32]}"


def tags(tagged: Mapping[str, str]) -> str:
    """Return the filter for servers that have all of these tags."""
    return ",".join(tag(key, value) for key, value in tagged.items())


def exactly(name: str) -> str:
    """Return a filter for resources of this name: Nova takes names for regular expressions."""
    return f"^{name}$"
