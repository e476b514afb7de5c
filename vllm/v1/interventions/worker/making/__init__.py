# SPDX-License-Identifier: Apache-2.0
"""Values that are made of captured rows on the device.

maker.py      makers, and the rows that they start from
makers.py     which one makes what
rows.py       rows of heads and branches
scores.py     rows times matrices
norms.py      lengths of rows
means.py      sums of rows
attention.py  what a step reads of attention, block by block, and for whom
lens.py       rows under a lens: its matrices, the norm before the head, and the head
"""
