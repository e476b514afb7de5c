# SPDX-License-Identifier: Apache-2.0
"""Proofs at start-up: a site, attention or lens that is not exact is not offered.

taps.py       start-up check: every site moves its row
attention.py  start-up proof of attention weights
lens.py       start-up check: which norm is before the head
"""
