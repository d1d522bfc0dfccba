# SPDX-License-Identifier: Apache-2.0
"""The errors that a simulated OpenStack answers."""


class Refusal(Exception):
    """An error that is answered."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
