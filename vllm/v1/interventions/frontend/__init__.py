# SPDX-License-Identifier: Apache-2.0
"""Modules that run in the frontend: they check requests and raise every user error.

early_checks.py       what would fail once the model is loaded, refused before
resolve.py            entry: `SamplingParams` to a `Plan`
plan_threads.py       where that is done in a server: off its event loop
steering_request.py   the steering fields of one request
focus_request.py      its operations on what is attended to
vector_memo.py        vectors that come again are neither parsed nor hashed again
segments.py           cuts its positions into segments in which the same acts
capture_request.py    the `capture` field of one request
capture_streams.py    in which streams its rows leave the device
attention_request.py  what it says of attention weights
lens_request.py       what it says of a lens
projections.py        the matrices of `project`, and directions of modules
rule_request.py       the `rules` field of one request, and the operator's on its prompt
selectors.py          what `positions` mean on a prompt
chat_turns.py         where the turns of a chat stand in its prompt
media.py              where the images, videos and sounds of a prompt stand
work.py               how much work its fields are, and that it is not too much
prompt_text.py        the prompt as text, for selectors that give a text
written_text.py       where its tokenizer changes that: the tokens of what was written
module_catalog.py     what the names in `steering_modules` mean now
change_builder.py     makes and checks changes of what holds for all requests
global_steering.py    `llm.steering`: global tiers and named modules at run time
capture_outputs.py    captures on their way back: one object per completion, outputs held for them
output_hold.py        keeps last outputs until the captures that end in them are complete
rule_watch.py         decides the rules of a completion as its rows and tokens come
row_inbox.py          rows as they come from the engine core, for each request to read
row_collector.py      gathers the rows of one completion for `inline`
row_pieces.py         where rows came to lie, and what joins them when they are read
kept_memory.py        memory that rows are copied to
capture_link.py       how captures reach the engine core
sending.py            requests on their way to the engine core
progress.py           what an offline run shows beside the prompts
"""
