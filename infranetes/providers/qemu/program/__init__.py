# SPDX-License-Identifier: Apache-2.0
"""QEMU as a program: its command line, its open files, its process, and the sockets that it is reached by."""
