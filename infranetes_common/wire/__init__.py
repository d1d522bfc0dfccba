# SPDX-License-Identifier: Apache-2.0
"""Messages, enums and services of the `.proto` files."""
