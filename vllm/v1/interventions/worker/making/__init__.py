# SPDX-License-Identifier: Apache-2.0
"""Values that are made of captured rows on the device.

attention.py  what a step reads of attention, block by block, and for whom
lens.py       rows under a lens: its matrices, the norm before the head, and the head
"""
