# SPDX-License-Identifier: Apache-2.0
"""AWS signatures by AWS' own library, for requests that libcloud has signed."""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials


@attrs.frozen
class Signature:
    """:ivar sent: libcloud's. :ivar expected: botocore's. :ivar headers: those that are signed."""

    sent: str
    expected: str
    headers: list[str]


def of(request: dict[str, Any], service: str, region: str) -> Signature:
    """Return the signature of a POST to `/` with AKID, SECRET and TOKEN."""
    headers = {name.lower(): str(value) for name, value in request["headers"].items()}
    body = request["body"]
    signed = headers["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    chosen = {name: headers[name] for name in signed}
    reference = AWSRequest("POST", f"https://{headers['host']}/", headers=chosen, data=body)
    reference.context["timestamp"] = headers["x-amz-date"]
    auth = SigV4Auth(Credentials("AKID", "SECRET", "TOKEN"), service, region)
    canonical = "\n".join(
        [
            "POST",
            "/",
            "",
            "\n".join(f"{name}:{value.strip()}" for name, value in chosen.items()) + "\n",
            ";".join(signed),
            hashlib.sha256(body.encode() if isinstance(body, str) else body).hexdigest(),
        ]
    )
    expected = auth.signature(auth.string_to_sign(reference, canonical), reference)
    return Signature(headers["authorization"].rpartition("Signature=")[2], expected, signed)
