# SPDX-License-Identifier: Apache-2.0
"""Requests in: all that a request asks for is checked here, and becomes a plan.

resolve.py       entry: makes a `Plan` of `SamplingParams`
plan_threads.py  threads in which a server makes plans, off its event loop
steering.py      the steering fields of a request
focus.py         the operation `focus` of a request
memo.py          vectors and captures that several requests share, parsed once
module_plans.py  plans of modules alone, made once for all prompts of a length
contents.py      the numbers of a tier's arrays or lists, all at once
segments.py      cuts a request's positions into runs in which the same vectors act
capture.py       the `capture` field of a request
streams.py       streams in which captured rows leave the device
attention.py     the part of a capture that asks for attention weights
lens.py          the part of a capture that asks for a lens
matrices.py      the matrices of `project`, and directions of modules
rules.py         the `rules` field of a request, and the operator's rules on its prompt
selectors.py     finds the positions that a selector means in a prompt
chat.py          finds the turns of a chat in its prompt
media.py         finds images, videos and sounds in a prompt
budget.py        counts the work that a request's fields cause, and refuses too much
text.py          the prompt as text, for selectors by text
written_text.py  the text before the tokenizer changes it, and its tokens
catalog.py       the global state that plans are made of: modules, operations, rules
sending.py       requests on their way to the engine core
"""
