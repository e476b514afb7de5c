# SPDX-License-Identifier: Apache-2.0
"""Parts that run beside the scheduler in the engine core: all decisions, each with one owner.

decisions.py     entry: the scheduler's calls, and the message to the workers
tables.py        rows of the workers' tables: what each request needs and holds, what is sent
pools.py         rows of one table, handed out
request.py       state of one request
identity.py      prefix-cache keys of a request's blocks
stale_blocks.py  blocks that may hold NaN, and must be cleared before others get them
turns.py         queues of refused requests, and their turns
row_budget.py    chooses the rows that leave the device in a step, and checks that they fit
relay.py         hands a step's rows to frontends and consumers
kept_rows.py     rows of cached blocks, for requests that find these blocks
consumers.py     consumers of this process, and the memory reserved for all of them
state.py         the global state between two changes: tiers, operations, rules and modules
module_sets.py   vector sets of modules, for requests that name them by digest
changes.py       changes of the global state, in two phases
"""
