# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.workloads`: names the tests of today."""

from __future__ import annotations

from tests.workloads.slices import today

if __name__ == "__main__":
    print(*today())
