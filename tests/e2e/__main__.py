# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.e2e`: prints what `python -m tests` leaves out today."""

from __future__ import annotations

from tests.e2e.slices import resting_today

if __name__ == "__main__":
    print(*(f"--without={name}" for name in resting_today()))
