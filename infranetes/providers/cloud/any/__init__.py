# SPDX-License-Identifier: Apache-2.0
"""Pods on whatever libcloud has a driver for: of the driver only `NodeDriver`'s own methods are used."""
