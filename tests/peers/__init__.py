# SPDX-License-Identifier: Apache-2.0
"""Requests of other tools."""
