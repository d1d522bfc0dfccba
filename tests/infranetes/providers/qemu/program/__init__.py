# SPDX-License-Identifier: Apache-2.0
"""QEMU as a program."""
