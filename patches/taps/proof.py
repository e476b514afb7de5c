# SPDX-License-Identifier: Apache-2.0
"""Executes an edited forward() symbolically: statements, expressions, branches.

What the taps and norms mean, and what must hold there, is in `meaning.py`. Every `if` is followed
both ways unless its test is known (`residual is None`, a value fixed earlier on the path, one the
row assumes). Anything that is not listed here ends the proof with an error.
"""

import ast

from patches.taps.errors import REMEDY_PROOF, TapsError
from patches.taps.inlining import expand
from patches.taps.meaning import Meaning
from patches.taps.rows import DEFERRED, Row, Second
from patches.taps.source import Source, method
from patches.taps.unfused import one_time
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
)

MAX_PATHS = 2048
"""The most paths through forward() that are followed."""
ALIASES = frozenset({"clone", "contiguous"})
"""The methods of a tensor that return the same values."""
METADATA = frozenset({"device", "dtype", "ndim", "shape"})
"""The attributes of a tensor that do not depend on its values."""


def prove(row: Row, source: Source) -> None:
    """Prove the wiring of the row's class in the edited module.

    Raises:
        TapsError: it is wrong, or forward() is not understood.
    """
    forward = method(source.cls(row.cls), "forward")
    if forward is None:
        raise TapsError(row.file, row.cls, "its own forward()", "none", REMEDY_PROOF)
    forward = one_time(row, expand(row, source, forward))
    run = _Run(row, source)
    used: set[str] = set()
    for start in _starts(row, forward):
        for end in run.finish(forward, start):
            used |= end.used
    run.meaning.all_used(used)


def _starts(row: Row, forward: ast.FunctionDef) -> list[State]:
    """Return the states in which forward() may start: the first block, and (fused) later ones."""
    args = forward.args
    env: dict[str, Value] = {
        a.arg: Plain() for a in [*args.posonlyargs, *args.args, *args.kwonlyargs]
    }
    if args.kwarg:
        env[args.kwarg.arg] = Plain()
    wanted = {row.stream} | ({row.residual} if row.idiom in DEFERRED else set())
    if not wanted <= env.keys():
        raise TapsError(
            row.file, row.cls, f"parameters {sorted(wanted)}", str(list(env)), REMEDY_PROOF
        )
    whole = Tensor((Atom("x"),))
    env[row.stream] = whole
    if row.idiom not in DEFERRED:
        if row.residual in env:
            env[row.residual] = Tensor((Atom(STALE),))
        return [State(env, whole.terms)]
    h, r = Tensor((Atom("h"),)), Tensor((Atom("r"),))
    return [
        State(env | {row.residual: Nothing()}, whole.terms),
        State(env | {row.stream: h, row.residual: r}, h.terms + r.terms),
    ]


class _Run:
    """The execution of one row's forward()."""

    def __init__(self, row: Row, source: Source) -> None:
        self.row = row
        self.source = source
        self.meaning = Meaning(row, source)
        self.done: list[State] = []
        self.locals: set[str] = set()
        self.given = {name: self.definition(name, text) for name, text in row.given}

    def finish(self, forward: ast.FunctionDef, start: State) -> list[State]:
        """Follow all paths of one call, and return their states at their returns."""
        self.done = []
        names = (n for n in ast.walk(forward) if isinstance(n, ast.Name))
        self.locals = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        for state in self.block(forward.body, [start]):
            raise self.meaning.wrong(forward, "a return on every path", str(state.decided))
        return self.done

    def block(self, stmts: list[ast.stmt], states: list[State]) -> list[State]:
        """Return the states after statements; paths that return are in `done`."""
        for stmt in stmts:
            states = [after for state in states for after in self.step(stmt, state)]
            if len(states) + len(self.done) > MAX_PATHS:
                raise self.meaning.wrong(stmt, f"at most {MAX_PATHS} paths", "more")
        return states

    def definition(self, name: str, text: str) -> ast.expr:
        """Return a definition that the row relies on, once `__init__` is seen to have it alone."""
        init = method(self.source.cls(self.row.cls), "__init__")
        found = [
            _text(n.value).replace("config.", "self.config.")
            for n in ast.walk(init or ast.Pass())
            if isinstance(n, ast.Assign) and _text(n.targets[0]) == name
        ]
        if found != [text]:
            raise self.meaning.wrong(ast.Pass(), f"{name} = {text} in __init__", f"{found}")
        return ast.parse(text, mode="eval").body

    def step(self, stmt: ast.stmt, state: State) -> list[State]:
        """Return the states after a statement: none where it returns or raises."""
        try:
            return self.stmt(stmt, state)
        except Impossible:
            return []

    def stmt(self, stmt: ast.stmt, state: State) -> list[State]:
        """Execute a statement, as `step`, which also sees where forward() itself would raise."""
        match stmt:
            case ast.Assign(targets=[target], value=value):
                self.inert(target, value)
                self.bind(target, self.value(value, state), state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value, state), state)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                sum_ = ast.copy_location(ast.BinOp(ast.Name(name, ast.Load()), op, value), stmt)
                self.in_place(name, self.value(sum_, state), stmt, state)
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name)) as part, value=value):
                parts = [self.value(node, state) for node in (part, value)]
                self.in_place(name, self.meaning.computed(stmt, parts, state), stmt, state)
            case ast.If(test=test, body=body, orelse=orelse):
                return self.branch(test, body, orelse, state)
            case ast.Return(value=value):
                self.meaning.returned(stmt, self.returned(value, stmt, state), state)
                self.done.append(state)
                return []
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call() as call) if not self.holders(call.func, state):
                self.meaning.discarded(call, *self.arguments(call, state), state)
            case ast.Delete(targets=targets):
                for target in targets:
                    state.env.pop(ast.unparse(target), None)
            case ast.Assert(test=test):
                self.value(test, state)
            case ast.Raise():
                return []
            case ast.Pass():
                pass
            case _:
                raise self.meaning.wrong(stmt, "a statement the proof understands", _text(stmt))
        return [state]

    def inert(self, target: ast.expr, value: ast.expr) -> None:
        """Check that a tap's result goes where its argument came from: unbound, it does nothing."""
        if not isinstance(value, ast.Call) or not _text(value.func).startswith("self.taps."):
            return
        args = value.args[:-1] if _text(value.func).endswith(".renorm") else value.args
        wanted = ", ".join(map(_text, args))
        if _text(target).strip("()") != wanted:
            raise self.meaning.wrong(target, f"{wanted} = {_text(value)}", _text(target))

    def returned(self, value: ast.expr | None, stmt: ast.stmt, state: State) -> Value:
        """Evaluate a returned value; a stale second element is checked by form and not read."""
        if value is None:
            return Nothing()
        if isinstance(value, ast.Tuple) and self.row.second is not Second.ABSENT:
            second = _text(value.elts[-1])
            wanted = "None" if self.row.second is Second.NONE else self.row.residual
            if len(value.elts) != 2 or second != wanted:
                raise self.meaning.wrong(stmt, f"{wanted} as second element", second)
            return self.value(value.elts[0], state)
        return self.value(value, state)

    def branch(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], state: State
    ) -> list[State]:
        """Follow an `if`: one way where its test is known, else both."""
        known = self.truth(test, state)
        if isinstance(known, bool):
            return self.block(body if known else orelse, [state])
        other = state.fork()
        state.decided[known] = True
        other.decided[known] = False
        return self.branch(test, body, orelse, state) + self.branch(test, body, orelse, other)

    def truth(self, test: ast.expr, state: State) -> bool | str:
        """Return the value of a test on this path, or the text of the part that decides it."""
        match test:
            case ast.Constant(value=bool() as value):
                return value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand, state)
                return inner if isinstance(inner, str) else not inner
            case ast.BoolOp(op=op, values=values):
                stop = isinstance(op, ast.Or)
                for part in values:
                    inner = self.truth(part, state)
                    if isinstance(inner, str) or inner is stop:
                        return inner
                return not stop
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op]):
                local = state.env.get(name)
                if isinstance(local, Nothing | Tensor):
                    return isinstance(local, Nothing) is isinstance(op, ast.Is)
            case ast.Name(id=name):
                local = state.env.get(name)
                if isinstance(local, Plain) and local.known is not None:
                    return local.known
        text = _text(test)
        if text in self.given:
            return self.truth(self.given[text], state)
        negated = text.replace(" is not ", " is ") if " is not " in text else ""
        if negated in state.decided:
            return not state.decided[negated]
        return state.decided.get(text, False if text in self.row.assume else text)

    def bind(self, target: ast.expr, value: Value, state: State) -> None:
        """Assign a value to a name, or to several."""
        match target:
            case ast.Name(id=name):
                state.env[name] = value
                state.forget(name)
            case ast.Tuple(elts=elts):
                if isinstance(value, Tensor):  # a module that returns (output, something)
                    value = Several((value,) * len(elts))
                if not isinstance(value, Several) or len(value.items) != len(elts):
                    raise self.meaning.wrong(target, f"{len(elts)} values", type(value).__name__)
                for part, item in zip(elts, value.items, strict=True):
                    self.bind(part, item, state)
            case ast.Subscript(value=ast.Name(id=name)) if isinstance(state.env.get(name), Plain):
                state.env[name] = Plain((*_parts(state.env[name]), *_parts(value)))
            case _:
                raise self.meaning.wrong(target, "assignment to a name", _text(target))

    def in_place(self, name: str, new: Value, stmt: ast.stmt, state: State) -> None:
        """Execute `name op= value`, also of a part: all that shares the storage becomes `new`."""
        old = state.env.get(name)
        if not isinstance(old, Tensor):
            state.env[name] = new
            return
        if not isinstance(new, Tensor):
            raise self.meaning.wrong(stmt, "a tensor", _text(stmt))
        for other, value in state.env.items():
            if isinstance(value, Tensor) and value.storage == old.storage:
                state.env[other] = Tensor(new.terms, old.storage)

    def value(self, node: ast.expr, state: State) -> Value:
        """Evaluate an expression."""
        match node:
            case ast.Name(id=name):
                value = state.env.get(name, Plain())
                if name in self.locals and name not in state.env:
                    raise Impossible(name)
                self.meaning.readable(node, name, value, state)
                return value
            case ast.Constant(value=None):
                return Nothing()
            case ast.Constant():
                return Plain()
            case ast.Attribute(value=base, attr=attr):
                if not self.holders(base, state) or attr in METADATA:
                    return Plain()
                raise self.meaning.wrong(node, f"an attribute among {sorted(METADATA)}", attr)
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return Several(tuple(self.value(e, state) for e in elts))
            case ast.Dict(values=values):
                return Plain(tuple(p for v in values for p in _parts(self.value(v, state))))
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(
                    node, op, self.value(left, state), self.value(right, state), state
                )
            case ast.UnaryOp(op=ast.Not()) | ast.BoolOp() | ast.Compare():
                self.scan(node, state)
                known = self.truth(node, state)
                return Plain(known=known if isinstance(known, bool) else None)
            case ast.UnaryOp(operand=operand):
                return self.meaning.computed(node, [self.value(operand, state)], state)
            case ast.Subscript(value=base, slice=index):
                names = [self.value(n, state) for n in ast.walk(index) if isinstance(n, ast.Name)]
                return self.meaning.computed(node, [self.value(base, state), *names], state)
            case ast.JoinedStr():
                return Plain()
            case ast.Call():
                return self.called(node, state)
            case _:
                raise self.meaning.wrong(node, "an expression the proof understands", _text(node))

    def called(self, node: ast.Call, state: State) -> Value:
        """Evaluate a call of a method of a tensor, or of something that the row declares."""
        positional, keyword = self.arguments(node, state)
        if not self.holders(node.func, state):
            return self.meaning.call(node, positional, keyword, state)
        if not isinstance(node.func, ast.Attribute) or node.func.attr.endswith("_"):
            raise self.meaning.wrong(node, "no in-place method on a tensor", _text(node))
        base = self.value(node.func.value, state)
        if node.func.attr in ALIASES and isinstance(base, Tensor):
            return Tensor(base.terms)
        return self.meaning.computed(node, [base, *positional, *keyword.values()], state)

    def holders(self, node: ast.expr, state: State) -> bool:
        """Tell whether the expression before a dot has a variable that holds tensors, or calls."""
        return any(
            isinstance(n, ast.Call) or (isinstance(n, ast.Name) and _parts(state.env.get(n.id)))
            for n in ast.walk(node)
        )

    def binary(
        self, node: ast.expr, op: ast.operator, left: Value, right: Value, state: State
    ) -> Value:
        """Evaluate a binary operation: a sum of tensors stays one, others make a new symbol."""
        if isinstance(op, ast.Add) and isinstance(left, Tensor) and isinstance(right, Tensor):
            return Tensor(left.terms + right.terms)
        return self.meaning.computed(node, [left, right], state)

    def scan(self, node: ast.expr, state: State) -> None:
        """Check the tensors whose contents a test reads (metadata and `is None` are not)."""
        match node:
            case ast.BoolOp(values=values):
                for part in values:
                    self.scan(part, state)
            case ast.UnaryOp(operand=operand):
                self.scan(operand, state)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                if not all(isinstance(o, ast.Is | ast.IsNot) for o in ops):
                    for part in (left, *comparators):
                        self.value(part, state)
            case _:
                self.value(node, state)

    def arguments(self, call: ast.Call, state: State) -> tuple[list[Value], dict[str, Value]]:
        """Evaluate positional and keyword arguments; `**name` passes the tensors of that dict."""
        positional = [
            self.value(a.value if isinstance(a, ast.Starred) else a, state) for a in call.args
        ]
        keyword = {
            k.arg or f"**{_text(k.value)}": self.value(k.value, state) for k in call.keywords
        }
        return positional, keyword


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _parts(value: Value | None) -> tuple[Tensor, ...]:
    """Return the tensors that a value holds."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Plain):
        return value.parts
    if isinstance(value, Several):
        return tuple(p for item in value.items for p in _parts(item))
    return ()
