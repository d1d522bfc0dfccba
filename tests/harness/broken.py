# SPDX-License-Identifier: Apache-2.0
"""A module of tests whose part is missing."""

import a_part_that_is_missing  # type: ignore[import-not-found]  # noqa: F401
