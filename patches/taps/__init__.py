# SPDX-License-Identifier: Apache-2.0
"""Wires the residual-stream taps into upstream's decoder layers.

`codemod.wire(tree)` edits every class of `table.ROWS` that is wired; `codemod.verify(tree)` says,
row by row, which still fit (for a rebase); `census.check(tree)` says which decoder-like classes of
the tree the table does not mention; `python -m patches.taps.report TREE` prints both.

How a class is wired and why one can believe it:

1. The table names a class, its idiom and the attribute names that the idiom needs (norms, mixers,
   MLPs). Nothing is guessed from the tree.
2. The idiom (`fused.py`, `unfused.py`, `normed.py`, `lanes.py`) finds its anchor statements in
   `forward` and inserts whole lines; a hoisted `return self.mlp(x), residual` is the only line
   that is ever replaced. `edit.py` checks afterwards that the upstream lines are all still there,
   in order.
3. `proof.py` executes the *edited* `forward` symbolically, once for every branch of every `if` and
   for the first block (no residual) as well as the later ones. It knows what the residual stream
   is at each moment, as a sum of symbols, and checks that each tap receives exactly that, between
   the mixer and the MLP as docs/hook-contract.md says, and that nothing computed from the stream
   before a tap is used after it. A statement it cannot interpret is an error, not a guess.
4. What forward() does not show is read from constructors: `norms.py` (a fused norm's class is one
   known to add), `reduced.py` (no branch leaves its all-reduce to others).

Classes and instances. A wired class gets a class attribute `taps = UnboundTaps(...)` in the body of
the class that defines `forward`. A subclass with a `forward` of its own (draft models do this, for
instance qwen3_eagle3) inherits the attribute without having a wired `forward`. Whoever binds taps
must find the class in the MRO that defines `forward` and require `"taps" in vars(cls)`:

    owner = next(c for c in type(layer).__mro__ if "forward" in vars(c))
    wired = "taps" in vars(owner)

`census.overridden(tree)` lists the classes for which this matters.

To wire a class: read its `forward` and the norms' classes; add a row to `table_fused.py` or
`table_summed.py` (most need only names), take it out of REFUSED, and run
`pytest tests/taps`. If `forward` tests attributes, list their values in
`tests/support/taps_settings.py:SETTINGS`. What the proof refuses is not to be forced with `Allow`:
each member says what it permits, and the class must mean just that. Then add the architecture to
the conformance table: only that makes it supported.

What a row assumes away (`Row.assume`) goes into the class attribute, as does the reason of a
refused class; `vllm/v1/interventions/worker/layers.py:refuse_layers` checks both at start-up.
"""
