# SPDX-License-Identifier: Apache-2.0
"""Control: what is changed for all requests, beside any of them.

early_checks.py  refusals that need no loaded model
changes.py       checks and builds changes of global state
steering.py      `llm.steering`: the global state, read and changed at run time
"""
