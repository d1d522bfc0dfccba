# SPDX-License-Identifier: Apache-2.0
"""A page of a cloud's price list, as libcloud's connections read it."""

from __future__ import annotations

from libcloud.common.base import JsonResponse
from libcloud.common.types import MalformedResponseError


class PricePage(JsonResponse):  # type: ignore[misc]
    """A page, which is refused if it is too long. Each cloud says what its errors look like."""

    most_bytes = 8 << 20

    def parse_body(self) -> object:
        if len(self.body or "") > self.most_bytes:
            raise MalformedResponseError("the answer is too long", body="", driver=None)
        body: object = super().parse_body()
        return body
