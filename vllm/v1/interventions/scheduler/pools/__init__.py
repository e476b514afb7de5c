# SPDX-License-Identifier: Apache-2.0
"""Pools of what requests need in the workers' tables.

protocol.py  what a request needs before it starts: the pools' protocol
slots.py     slots of the steering table
terms.py     rows for operations
focus.py     rows for programs of focus
matrices.py  rows for `project` matrices
"""
