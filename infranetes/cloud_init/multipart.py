# SPDX-License-Identifier: Apache-2.0
"""Several documents as one, by MIME, which cloud-init and cloudbase-init take apart."""

from __future__ import annotations

import base64
import email
import email.generator
import email.policy
import hashlib
from collections.abc import Sequence
from email.message import Message
from io import BytesIO

import attrs

from infranetes.cloud_init.user_data import MULTIPART

_POLICY = email.policy.compat32.clone(max_line_length=0)


@attrs.frozen
class Part:
    """A document among others.

    :ivar merge: how a #cloud-config joins those before it, as cloud-init's Merge-Type says; "": its default,
        by which keys replace those of the same name."""

    content: bytes = attrs.field(repr=False)
    kind: str
    name: str
    merge: str = ""


def joined(parts: Sequence[Part]) -> bytes:
    """Return the parts as one document. Their content arrives byte by byte."""
    digest = hashlib.sha256(b"\0".join(part.content for part in parts)).hexdigest()[:32]
    whole: Message[str, str] = Message(_POLICY)
    # cloudbase-init looks for the first of these words in the first lines.
    whole["Content-Type"] = f'{MULTIPART}; boundary="=={digest}=="'
    whole["MIME-Version"] = "1.0"
    whole.set_payload([_message(part) for part in parts])
    out = BytesIO()
    email.generator.BytesGenerator(out, mangle_from_=False, policy=_POLICY).flatten(whole)
    return out.getvalue()


def _message(part: Part) -> Message[str, str]:
    if part.kind == MULTIPART:
        return email.message_from_bytes(part.content.lstrip(), policy=_POLICY)
    message: Message[str, str] = Message(_POLICY)
    message["Content-Type"] = part.kind
    message["MIME-Version"] = "1.0"
    message["Content-Transfer-Encoding"] = "base64"
    message["Content-Disposition"] = f'attachment; filename="{part.name}"'
    if part.merge:
        message["Merge-Type"] = part.merge
    message.set_payload(base64.encodebytes(part.content).decode())
    return message
