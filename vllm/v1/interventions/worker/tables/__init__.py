# SPDX-License-Identifier: Apache-2.0
"""Tables on the device that taps and scores read; the scheduler says what lies where.

sums.py      sums of vectors
terms.py     operations other than addition
matrices.py  `project` matrices, and scores of rows
"""
