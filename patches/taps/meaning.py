# SPDX-License-Identifier: Apache-2.0
"""Gives norms, branches and taps their meaning in the proof, and checks what must hold at each."""

import ast
from dataclasses import replace

from patches.taps.errors import REMEDY_PROOF, TapsError
from patches.taps.norms import two_argument_norms
from patches.taps.rows import DEFERRED, MLP_IN, Allow, Idiom, NormCall, Row
from patches.taps.source import Source
from patches.taps.values import (
    STALE,
    Atom,
    Impossible,
    Nothing,
    Plain,
    Several,
    State,
    Tensor,
    Value,
    minus,
    same,
)

UNTAPPED = frozenset({Allow.POST_NORM, Allow.TAIL, Allow.UNTAPPED_SUM})
"""With these a sum that no tap has seen may be computed with."""
REPLACES_STREAM = frozenset({Allow.NORMED_SKIP, Allow.POST_NORM, Allow.TAIL})
"""With these a tap may get something in place of the stream plus a branch."""
BRANCHES = frozenset({"mixer", "mlp"})
BUFFERS = frozenset({"torch.empty_like", "torch.zeros_like"})
"""The functions that make a buffer, which a mixer fills."""
NO_READ = frozenset({"isinstance", "len", "get_tensor_model_parallel_world_size"})
"""The functions that do not read the values of a tensor."""


class Meaning:
    """The rules of the proof for one row. All methods raise TapsError where the wiring is wrong."""

    def __init__(self, row: Row, source: Source) -> None:
        self.row = row
        self.modules = {n: "norm" for n in (*row.norms, *row.branch_norms)}
        self.modules |= {n: "mixer" for n in row.mixers} | {n: "mlp" for n in row.mlps}
        self.modules |= {n: "function" for n in row.functions}
        self.adding = two_argument_norms(row, source)

    def wrong(self, node: ast.AST, expected: str, found: str) -> TapsError:
        """Make the error at a statement or expression of forward()."""
        line = getattr(node, "lineno", None)
        where = f" (line {line} of the wired file)" if line else ""
        return TapsError(self.row.file, self.row.cls, expected, found + where, REMEDY_PROOF)

    def readable(self, node: ast.AST, name: str, value: Value, state: State) -> None:
        """Check that a variable may be read: nothing in it dates from before the last tap."""
        for part in _tensors(value):
            for atom in part.terms:
                fresh = atom.src <= {state.version} if atom.computed else False
                if atom in state.stream or fresh:
                    continue
                last = state.events[-1] if state.events else "entry"
                why = (
                    "is the unused residual argument"
                    if atom.what == STALE
                    else (f"dates from before {last}")
                )
                raise self.wrong(node, "only values of the current stream", f"`{name}` {why}")

    def computed(
        self, node: ast.AST, values: list[Value], state: State, stage: str = "", call: str = ""
    ) -> Value:
        """Return the value of something computed: a new symbol if the stream went into it.

        Args:
            stage: "mixer" or "mlp" if this is such a branch.
            call: the declared callable that computes it.
        """
        tensors = [t for v in values for t in _tensors(v)]
        if not tensors:
            return Plain()
        if stage != "mlp" and any(atom.tapped for tensor in tensors for atom in tensor.terms):
            raise self.wrong(node, f"the MLP alone to read {MLP_IN}", ast.unparse(node))
        src, whole = set[int](), True
        stages, calls = {stage} & BRANCHES, {call} - {""}
        for tensor in tensors:
            extra = minus(tensor.terms, state.stream)
            if extra is not None and (not extra or self.row.allow & UNTAPPED):
                src.add(state.version)
                tensor = Tensor(extra)
            for atom in tensor.terms:
                part = not atom.computed or atom in state.stream
                src |= {state.version} if part else atom.src
                whole = whole and not part and atom.whole
                stages |= atom.stages
                calls |= atom.calls
        label = ast.unparse(node).replace("\n", " ")[:60]
        return Tensor((Atom(label, frozenset(src), whole, frozenset(stages), frozenset(calls)),))

    def call(
        self, node: ast.Call, args: list[Value], kwargs: dict[str, Value], state: State
    ) -> Value:
        """Return the value of a call: of a tap, or of something that the row declares."""
        func = ast.unparse(node.func)
        if func.startswith("self.taps."):
            return self.tap(node, func.removeprefix("self.taps."), args, state)
        name = func.removeprefix("self.")
        values = [*args, *kwargs.values()]
        kind = self.modules.get(name, "")
        if kind:
            state.used |= {name}
        if kind == "norm" and len(args) == 2:
            return self.norm_pair(node, name, args, state)
        due = self.order()[len(state.events) : len(state.events) + 1]
        early = not state.events or (due and due[0].endswith(".read"))
        if kind in BRANCHES and early:
            raise self.wrong(node, f"{due[0]} before the next branch", ast.unparse(node))
        if kind == "mlp" and self.row.mlp_in:
            self.reads_tapped(node, values)
        if kind == "norm" and len(values) == 1 and isinstance(values[0], Tensor):
            return self.normed(node, name, values[0], state)
        if kind:
            return self.computed(node, values, state, kind, name)
        if func in BUFFERS:
            value = self.computed(node, values, state)
            if isinstance(value, Tensor):
                old = value.terms[0]
                return Tensor((Atom(old.what, old.src, old.whole, buffer=True),))
            return value
        if func in NO_READ or not any(_tensors(v) for v in values):
            return Plain()
        raise self.wrong(
            node, f"a callable that the row declares ({sorted(self.modules)})", f"`{func}`"
        )

    def discarded(
        self, node: ast.Call, args: list[Value], kwargs: dict[str, Value], state: State
    ) -> None:
        """Execute a call for its effect: `read` of a tap, or a mixer that fills a buffer."""
        func = ast.unparse(node.func)
        if func.startswith("self.taps."):
            self.tap(node, func.removeprefix("self.taps."), args, state)
            return
        result = self.call(node, args, kwargs, state)
        if not isinstance(result, Tensor):
            return
        filled = [
            v
            for v in (*args, *kwargs.values())
            if isinstance(v, Tensor) and len(v.terms) == 1 and v.terms[0].buffer
        ]
        if len(filled) != 1:
            raise self.wrong(node, "one output buffer among the arguments", ast.unparse(node))
        for name, value in state.env.items():
            if isinstance(value, Tensor) and value.storage == filled[0].storage:
                state.env[name] = Tensor(result.terms, value.storage)

    def normed(self, node: ast.AST, name: str, value: Tensor, state: State) -> Value:
        """Return the value of `norm(s)`."""
        result = self.computed(node, [value], state, call=name)
        assert isinstance(result, Tensor)
        return Tensor((replace(result.terms[0], normed=(name, _ids(value))),))

    def norm_pair(self, node: ast.Call, name: str, args: list[Value], state: State) -> Value:
        """Return the value of `norm(h, r)`: it adds, or (Cohere) passes r through."""
        h, r = args
        if isinstance(r, Nothing) and Allow.NO_MIXER in self.row.allow:
            raise Impossible("the first block has a mixer")
        if not isinstance(h, Tensor) or not isinstance(r, Tensor):
            raise self.wrong(node, "two tensors of the stream", ast.unparse(node))
        if self.row.norm_call is NormCall.PASSES:
            return Several((self.computed(node, [h], state, call=name), r))
        if name not in self.adding:
            raise self.wrong(node, "a norm known to add its second argument", f"self.{name}")
        total = h.terms + r.terms
        untapped = Allow.UNTAPPED_SUM in self.row.allow and minus(total, state.stream)
        if not same(total, state.stream) and not untapped:
            raise self.wrong(node, "h + r to be the stream here", Tensor(total).text())
        summed = Tensor(total)
        normed = self.computed(node, [summed], state, call=name)
        return Several((normed, summed))

    def branch(self, node: ast.AST, terms: tuple[Atom, ...], state: State, *stages: str) -> None:
        """Check that `terms` is a branch: computed from the whole current stream only.

        Args:
            stages: the kinds of branch that it must have passed through.
        """
        seen: set[str] = set()
        norms = {*self.row.norms, *self.row.branch_norms}
        for atom in terms:
            if not atom.computed or atom.src != {state.version} or not atom.whole:
                raise self.wrong(
                    node, "a branch computed from the whole stream at the last tap", atom.what
                )
            if atom.tapped:
                raise self.wrong(node, "a branch, not what the MLP reads", atom.what)
            if atom.buffer:
                raise self.wrong(node, "a branch, not an unfilled buffer", atom.what)
            if not atom.calls & norms and Allow.POST_NORM not in self.row.allow:
                raise self.wrong(node, f"a branch with a norm of {sorted(norms)}", atom.what)
            seen |= atom.stages
        if not seen and stages == ("mlp",) and Allow.NO_MLP in self.row.allow:
            return
        if seen != set(stages):
            raise self.wrong(
                node, f"a branch through {' and '.join(stages)}", f"through {sorted(seen)}"
            )

    def added(self, node: ast.AST, terms: tuple[Atom, ...], state: State, *stages: str) -> None:
        """Check that `terms` is the stream plus a branch, or what the row allows in its place."""
        rest = minus(terms, state.stream)
        if rest is None and self.row.allow & REPLACES_STREAM:
            rest = terms
        if not rest:
            raise self.wrong(node, "stream + branch at this tap", Tensor(terms).text())
        self.branch(node, rest, state, *stages)

    def advance(self, state: State, stream: tuple[Atom, ...]) -> None:
        """Start a new stream: values computed from the old one are no longer readable."""
        state.stream = stream
        state.version += 1

    def last_stages(self) -> tuple[str, ...]:
        """Return the kinds of branch between the last tap and the end of the block."""
        if self.row.points == ("pre_attn", "post_block") and self.row.mlps:
            return ("mixer", "mlp")
        if self.row.idiom is Idiom.PARALLEL:
            return ("mixer",)
        return ("mixer",) if self.row.idiom is Idiom.FUSED_SINGLE else ("mlp",)

    def tap(self, node: ast.Call, name: str, args: list[Value], state: State) -> Value:
        """Execute a call of a tap, which must be the next one in order."""
        point = name.partition(".")[0]
        expected = self.order()[len(state.events) : len(state.events) + 1]
        if expected != (name,):
            raise self.wrong(node, f"taps in the order {self.order()}", f"{name}, early or twice")
        state.events += (name,)
        if name.endswith((".steer_pair", ".steer_and_capture_pair")):
            return self.pair(node, point, args, state)
        if name.endswith(".renorm"):
            return self.renorm(node, point, args, state)
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise self.wrong(node, "one tensor of the stream", ast.unparse(node))
        value = args[0]
        if point == MLP_IN:
            return self.mlp_in(node, value, state)
        if name.endswith(".read"):
            if not same(value.terms, state.stream):
                raise self.wrong(node, "the complete stream", value.text())
            return Plain()
        new = Atom(f"stream after {point}")
        if point == "pre_attn":
            self.is_stream(node, value, state)
        else:
            stages = ("mixer",) if point == "post_attn" else self.last_stages()
            self.added(node, value.terms, state, *stages)
        self.advance(state, (new,))
        return Tensor((new,))

    def pair(self, node: ast.Call, point: str, args: list[Value], state: State) -> Value:
        """Execute a tap of a pair: both halves are new, and no old one may be read again.

        The tap may hand on (zeros, f(h + r)), so only the sum of what it returns has a meaning.
        """
        h, r = args if len(args) == 2 else (Nothing(), Nothing())
        if not isinstance(h, Tensor) or not isinstance(r, Tensor | Nothing):
            raise self.wrong(node, "the two halves of the stream", ast.unparse(node))
        whole = Atom(f"stream after {point}")
        total = h.terms + (r.terms if isinstance(r, Tensor) else ())
        stages = ("mixer",) if point == "post_attn" else self.last_stages()
        if same(total, state.stream):
            if point != "pre_attn" and not self.may_lack(stages):
                raise self.wrong(node, "stream + branch at this tap", Tensor(total).text())
            if isinstance(r, Nothing):
                self.advance(state, (whole,))
                return Several((Tensor((whole,)), r))
        elif point == "pre_attn" or isinstance(r, Nothing):
            raise self.wrong(node, "the stream at this tap", Tensor(total).text())
        elif self.row.idiom is Idiom.PAIRED or Allow.UNTAPPED_SUM in self.row.allow:
            self.added(node, total, state, *stages)
        else:
            self.is_stream(node, r, state)
            self.branch(node, h.terms, state, *stages)
        halves = (Atom(f"hidden after {point}"), Atom(f"residual after {point}"))
        self.advance(state, halves)
        return Several((Tensor(halves[:1]), Tensor(halves[1:])))

    def mlp_in(self, node: ast.AST, value: Tensor, state: State) -> Tensor:
        """Execute the tap of what the MLP reads: a norm of the current stream."""
        self.branch(node, value.terms, state)
        if len(value.terms) != 1:
            raise self.wrong(node, "a norm of the stream", value.text())
        return Tensor((replace(value.terms[0], what=MLP_IN, normed=None, tapped=True),))

    def reads_tapped(self, node: ast.AST, values: list[Value]) -> None:
        """Check that a call of the MLP gets what the tap of its input returned."""
        tensors = [t for v in values for t in _tensors(v)]
        if not tensors or not all(len(t.terms) == 1 and t.terms[0].tapped for t in tensors):
            raise self.wrong(node, f"an MLP that reads {MLP_IN}", ast.unparse(node))

    def may_lack(self, stages: tuple[str, ...]) -> bool:
        """Tell whether the row allows a layer without these branches."""
        lacking = {"mixer": Allow.NO_MIXER, "mlp": Allow.NO_MLP}
        return self.row.idiom is Idiom.PAIRED and {lacking[s] for s in stages} <= self.row.allow

    def renorm(self, node: ast.Call, point: str, args: list[Value], state: State) -> Value:
        """Execute `renorm(n, s, self.norm)`: s must be the stream plus a branch, and n its norm."""
        normed, value = args[:2] if len(args) == 3 else (Nothing(), Nothing())
        if not isinstance(normed, Tensor) or not isinstance(value, Tensor):
            raise self.wrong(node, "(normed, stream, norm)", ast.unparse(node))
        norm = ast.unparse(node.args[2]).removeprefix("self.")
        if len(normed.terms) != 1 or normed.terms[0].normed != (norm, _ids(value)):
            raise self.wrong(node, f"self.{norm} of the second argument", normed.text())
        self.added(node, value.terms, state, "mixer")
        whole = Tensor((Atom(f"stream after {point}"),))
        self.advance(state, whole.terms)
        return Several((self.normed(node, norm, whole, state), whole))

    def is_stream(self, node: ast.AST, value: Tensor, state: State) -> None:
        """Check that a value is the complete stream."""
        if not same(value.terms, state.stream):
            raise self.wrong(node, "the complete stream at this tap", value.text())

    def order(self) -> tuple[str, ...]:
        """Return the taps of the idiom, in the order in which each path must call them."""
        calls: dict[str, tuple[str, ...]] = {
            point: (f"{point}.steer_and_capture_pair",) for point in self.row.points
        }
        if self.row.idiom not in DEFERRED:
            calls = {point: (point,) for point in self.row.points}
        elif self.row.idiom is not Idiom.PAIRED:
            for point in {"pre_attn", "post_attn"} & calls.keys():
                calls[point] = (f"{point}.steer_pair", f"{point}.read")
        if self.row.idiom is Idiom.NORMED:
            calls["post_attn"] = ("post_attn.renorm",)
        return tuple(call for p in self.row.taps for call in calls.get(p, (p,)))

    def returned(self, node: ast.AST, value: Value, state: State) -> None:
        """Check that the block returns the stream as the last tap left it."""
        if state.events != self.order():
            raise self.wrong(node, f"all taps {self.order()}", f"{state.events} on a path")
        deferred = self.row.idiom in DEFERRED
        parts = value.items if isinstance(value, Several) else (value,)
        if self.row.idiom is Idiom.PAIRED:  # what else it returns holds no part of the stream
            parts = tuple(p for p in parts if _tensors(p) or isinstance(p, Nothing))
            if len(parts) == 2 and Allow.NO_MIXER in self.row.allow:
                parts = tuple(p if isinstance(p, Tensor) else Tensor(()) for p in parts)
        if len(parts) != (2 if deferred else 1) or not all(isinstance(p, Tensor) for p in parts):
            raise self.wrong(node, "a pair" if deferred else "one tensor", str(len(parts)))
        terms = tuple(a for p in _tensors(value) for a in p.terms)
        if not same(terms, state.stream):
            raise self.wrong(node, "the stream after post_block", Tensor(terms).text())

    def all_used(self, used: set[str]) -> None:
        """Check that every name of the row is called on some path."""
        missing = sorted(self.modules.keys() - used)
        if missing:
            raise TapsError(
                self.row.file,
                self.row.cls,
                "everything the row declares called in forward()",
                f"never called: {missing}",
                REMEDY_PROOF,
            )


def _ids(value: Tensor) -> tuple[int, ...]:
    return tuple(sorted(map(id, value.terms)))


def _tensors(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors that a value holds."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Plain):
        return value.parts
    if isinstance(value, Several):
        return tuple(t for item in value.items for t in _tensors(item))
    return ()
