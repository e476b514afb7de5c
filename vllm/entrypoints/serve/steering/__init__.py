# SPDX-License-Identifier: Apache-2.0
"""Serves steering and capture over HTTP."""
