# SPDX-License-Identifier: Apache-2.0
"""The message on the error channel at the end of an exec or attach (source: Kubernetes' meta/v1 Status)."""

from __future__ import annotations

import json
from collections.abc import Mapping


def exited(code: int, version: int) -> bytes:
    """Return what to say of a command that ended with this exit code; ``b""``: nothing."""
    if version < 4:
        return (
            b"" if code == 0 else f"command terminated with non-zero exit code: exit status {code}".encode()
        )
    if code == 0:
        return _encode({"metadata": {}, "status": "Success"})
    return _encode(
        {
            "metadata": {},
            "status": "Failure",
            "message": f"command terminated with non-zero exit code: exit status {code}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    )


def failed(message: str, version: int) -> bytes:
    """Return what to say of a session that could not begin, or broke."""
    if version < 4:
        return message.encode()
    return _encode(
        {
            "metadata": {},
            "status": "Failure",
            "message": f"Internal error occurred: {message}",
            "reason": "InternalError",
            "details": {"causes": [{"message": message}]},
            "code": 500,
        }
    )


def _encode(status: Mapping[str, object]) -> bytes:
    return json.dumps(status, separators=(",", ":")).encode()
