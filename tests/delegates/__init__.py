# SPDX-License-Identifier: Apache-2.0
"""Runtimes that are newer than Debian's as the delegate. `make delegates` builds and tries them."""
