# SPDX-License-Identifier: Apache-2.0
"""Classes of other tools over ours, each one file to copy (docs/coming-from.md)."""
