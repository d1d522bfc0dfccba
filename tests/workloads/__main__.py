# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.workloads`: prints the names of today's tests."""

from __future__ import annotations

from tests.workloads.slices import today

if __name__ == "__main__":
    print(*today())
