# SPDX-License-Identifier: Apache-2.0
"""Delegates that are newer than Debian's. `make test-delegates` builds and tests them."""

from tests.harness.needs import NIGHT, VMS

NEEDS = (VMS, NIGHT)
