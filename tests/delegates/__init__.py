# SPDX-License-Identifier: Apache-2.0
"""Delegates that are newer than Debian's. `make delegates` builds and tests them."""
