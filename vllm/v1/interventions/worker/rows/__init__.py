# SPDX-License-Identifier: Apache-2.0
"""Captured rows, from the arena to the host.

arena.py    which arena row each captured token of a step gets, and the map that taps read
outbox.py   captured rows from the device to the host
pinning.py  the host memory where they land, made known to the GPU
"""
