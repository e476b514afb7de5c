# SPDX-License-Identifier: Apache-2.0
"""Places the taps where the stream has several lanes, which a block mixes for its one input and
writes back to by learned weights: no sum in between is a state of the stream.

h = self.taps.pre_attn(h)        # first statement: all lanes, before they are mixed
...
h = self.taps.post_block(h)      # before the return: all lanes, written back
return h
"""

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import Row
from patches.taps.shapes import body, code, fail, last_return


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """Return the edits for a class with lanes; raises TapsError where it returns no name."""
    edits, (last, ret) = Edits(), last_return(row, forward)
    if not isinstance(ret.value, cst.Name):
        raise fail(row, "`return <stream>`", code(ret))
    name = ret.value.value
    edits.before.append((body(forward)[0], f"{row.stream} = self.taps.pre_attn({row.stream})"))
    edits.before.append((last, f"{name} = self.taps.post_block({name})"))
    return edits
