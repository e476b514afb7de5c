# SPDX-License-Identifier: Apache-2.0
"""Steering and capture over HTTP."""
