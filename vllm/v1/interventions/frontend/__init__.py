# SPDX-License-Identifier: Apache-2.0
"""Modules that run in the frontend: they check requests and raise every user error.

early_checks.py       refusals that need no loaded model
resolve.py            entry: makes a `Plan` of `SamplingParams`
plan_threads.py       threads in which a server makes plans, off its event loop
steering_request.py   the steering fields of a request
focus_request.py      the operation `focus` of a request
vector_memo.py        vectors that several requests share, parsed and hashed once
segments.py           cuts a request's positions into runs in which the same vectors act
capture_request.py    the `capture` field of a request
capture_memo.py       `inline` captures that several requests share, parsed once
capture_streams.py    streams in which captured rows leave the device
attention_request.py  the part of a capture that asks for attention weights
lens_request.py       the part of a capture that asks for a lens
projections.py        the matrices of `project`, and directions of modules
rule_request.py       the `rules` field of a request, and the operator's rules on its prompt
selectors.py          finds the positions that a selector means in a prompt
chat_turns.py         finds the turns of a chat in its prompt
media.py              finds images, videos and sounds in a prompt
work.py               counts the work that a request's fields cause, and refuses too much
prompt_text.py        the prompt as text, for selectors by text
written_text.py       the text before the tokenizer changes it, and its tokens
module_catalog.py     the modules that names in `steering_modules` mean now
change_builder.py     checks and builds changes of global state
global_steering.py    `llm.steering`: global tiers and named modules at run time
capture_outputs.py    adds captures to outputs, and holds outputs until these are there
output_hold.py        keeps last outputs until the captures that end in them are complete
rule_watch.py         decides the rules of a completion as its rows and tokens come
row_inbox.py          rows as they come from the engine core, for each request to read
row_collector.py      gathers the rows of one completion for `inline`
row_pieces.py         places of rows in memory, and the code that joins them when read
kept_memory.py        memory that rows are copied to
capture_link.py       the frontend's calls to the captures of the engine core
sending.py            requests on their way to the engine core
progress.py           the progress bar of an offline run
"""
