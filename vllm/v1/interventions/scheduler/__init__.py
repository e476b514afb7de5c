# SPDX-License-Identifier: Apache-2.0
"""Parts that run beside the scheduler in the engine core: all decisions, each with one owner.

decisions.py          entry: the scheduler's calls, and the message to the workers
request_state.py      state of one request
block_identity.py     prefix-cache keys of a request's blocks
stale_blocks.py       blocks that may hold NaN, and must be cleared before others get them
admission.py          what a request needs before it starts: the pools' protocol
turns.py              queues of refused requests, and their turns
slots.py              pool: slots of the steering table
term_pool.py          pool: rows for operations
focus_pool.py         pool: rows for programs of focus
projection_pool.py    pool: rows for `project` matrices
row_budget.py         chooses the rows that leave the device in a step, and checks that they fit
row_relay.py          hands a step's rows to frontends and consumers
capture_sessions.py   consumers of this process, and the memory reserved for all of them
tiers.py              the global tiers and named modules
changes.py            changes of tiers, modules and rules, in two phases
"""
