# SPDX-License-Identifier: Apache-2.0
"""Steering and capture of requests, filed by the process in which the code runs.

frontend/           checks what a request asks for, and gives it its results
scheduler/          decides, in the engine core: who starts, which rows leave, what is sent
worker/             carries out on the device what was decided
startup.py          checks the taps of all workers, and joins the rows of several workers

The rest is shared by the three, which do not import each other:

plan.py             what travels with a request from the frontend to the workers
shape.py            what a loaded model offers, layer by layer
makings.py          what is made of captured rows on the device
messages.py         what scheduler and workers tell each other in a step
global_state.py     contents of the global state: tiers, operations, rules and modules; changes
calls.py            what frontends ask of the engine core beside requests
capture_groups.py   requests that capture the same on one worker
step_rows.py        the captured rows of one step, from the arena to their requests
vectors.py          steering vectors of a request: parsed and checked
focus.py            what a request attends to, and by which rule
operations.py       operations and gates of a request: parsed and checked
given_rules.py      rules of a request or of the operator: parsed and checked
terms.py            an operation at one site, as the workers' tables hold it
sites.py            how requests name points and layers
positions.py        sets of token positions
values.py           numbers, strings and lists as people have them
given.py            one reader of what users say: a value with the path of its field
errors.py           the error of a request that cannot be honoured exactly
likely.py           the name or key that a user probably meant, for errors
start_failure.py    why an engine core did not start, for its frontend
"""
