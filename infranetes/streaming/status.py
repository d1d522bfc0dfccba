"""What the error channel says at the end of an exec or attach (source: Kubernetes' meta/v1 Status)."""

from __future__ import annotations

import json
from typing import Any


def exited(code: int, version: int) -> bytes:
    """The command ended with this exit code; ``b""``: say nothing."""
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
    """The session could not be had, or broke."""
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


def _encode(status: dict[str, Any]) -> bytes:
    return json.dumps(status, separators=(",", ":")).encode()
