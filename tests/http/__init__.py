# SPDX-License-Identifier: Apache-2.0
"""One server for the tests of this package."""
