# SPDX-License-Identifier: Apache-2.0
"""A VM as the daemon knows it: its record, its files, and the hardware that it has while it runs."""
