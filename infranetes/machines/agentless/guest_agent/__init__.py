# SPDX-License-Identifier: Apache-2.0
"""A guest by QEMU's guest agent, qemu-ga, which many images bring: commands, files, power, clock, keys.

Its protocol (QEMU's docs/interop/qemu-ga-ref) has neither streams nor terminals, and answers one request at a
time.
"""
