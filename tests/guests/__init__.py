# SPDX-License-Identifier: Apache-2.0
"""Guests for tests: disks and CDs of systems that know nothing of Infranetes, of Debian's packages.

``python -m tests.guests`` makes them, as `make test-guests` does; `catalogue` says which there are, and
where. A test that boots one says so by `tests.harness.needs.needs_guests`, and takes `catalogue.path`.
`machine.Machine` boots one in a plain QEMU.
"""
