# SPDX-License-Identifier: Apache-2.0
"""The kinds of bugs: each operator is a function that finds where in a place it can put one.

They are the mistakes that people make and reviewers overlook: something is not done, not undone, done too
early or in the wrong order, a case is forgotten, a bound is off by one.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Iterator

import attrs

from tests.mutants.source import Function, Place, Source, Span, is_logging

BOUNDARIES: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
SIGNS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
# Their last argument is not an option, or it is the text of an error.
PLAIN_CALLS = frozenset(dir(builtins)) | {"cast", "field", "evolve"}


@attrs.frozen
class Edit:
    """A bug: what is to be replaced, and by what."""

    span: Span
    replacement: str
    first: ast.AST  # the first and last node that are replaced: if neither runs, nothing has changed
    last: ast.AST


Edits = Iterator[Edit]
Operator = Callable[[Place, Source], Edits]


def _edit(source: Source, replacement: str, first: ast.AST, last: ast.AST | None = None) -> Edit:
    return Edit(source.span(first, last), replacement, first, last or first)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def _is_only_pass(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise)


# -- what is not done


def drop_call(place: Place, source: Source) -> Edits:
    """Leave out a call that is made for its effect, awaited or not."""
    node = place.node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield _edit(source, "pass", node)


def drop_assignment(place: Place, source: Source) -> Edits:
    """Leave out a change of an object's state, except where objects are made."""
    node = place.node
    if isinstance(node, ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Assign)
        and place.function.name != "__init__"
        and all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    ):
        yield _edit(source, "pass", node)


def drop_finally(place: Place, source: Source) -> Edits:
    """Leave out the clean-up."""
    node = place.node
    if isinstance(node, ast.Try) and node.finalbody:
        yield _edit(source, "pass", node.finalbody[0], node.finalbody[-1])


def drop_handler(place: Place, source: Source) -> Edits:
    """Ignore an error instead of handling it, or let it pass unhandled."""
    node = place.node
    if isinstance(node, ast.ExceptHandler):
        first, last = node.body[0], node.body[-1]
        if not _is_only_pass(node.body):
            yield _edit(source, "pass", first, last)
        if not (isinstance(first, ast.Raise) and first.exc is None):
            yield _edit(source, "raise", first, last)
        if len(node.body) > 1 and isinstance(last, ast.Raise) and last.exc is None:
            yield _edit(source, "pass", last)


def drop_with(place: Place, source: Source) -> Edits:
    """Do without a lock, a limit or whatever else a block is in."""
    node = place.node
    if isinstance(node, ast.With | ast.AsyncWith) and all(item.optional_vars is None for item in node.items):
        start = source.offset(node.lineno, node.col_offset)
        end = source.encoded.rindex(b":", start, source.span(node.body[0]).start)
        yield Edit(Span(start, end), "if True", node.items[0].context_expr, node.items[-1].context_expr)


def return_early(place: Place, source: Source) -> Edits:
    """Return in the middle of a function that returns nothing."""
    function = place.function
    if place.node is not function.body[0] or function.name == "__init__":
        return
    if any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(function)):
        return
    for statement in function.body[1:-1]:
        if not isinstance(statement, Function | ast.ClassDef):
            yield _edit(source, "return", statement, function.body[-1])


def swap(place: Place, source: Source) -> Edits:
    """Do two things in the wrong order: two effects, neither of which needs a name that the other sets."""
    bodies = list(_bodies(place.node))
    if place.node is place.function.body[0]:
        bodies.append(place.function.body)
    for body in bodies:
        for first, second in itertools.pairwise(body):
            if (
                _is_effect(first)
                and _is_effect(second)
                and (_has(first, ast.Await) or _has(second, ast.Await))
            ):
                between = source.encoded[source.span(first).end : source.span(second).start].decode()
                yield _edit(source, source.of(second) + between + source.of(first), first, second)


def _is_effect(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await) and not is_logging(node.value)
    return isinstance(node, ast.Assign) and all(isinstance(target, ast.Attribute) for target in node.targets)


# -- cases that are forgotten


def fix_condition(place: Place, source: Source) -> Edits:
    """Let a condition always or never hold."""
    node = place.node
    if not isinstance(node, ast.If | ast.IfExp | ast.While) or _has(node.test, ast.NamedExpr):
        return
    if not isinstance(node.test, ast.Constant):
        yield _edit(source, "False", node.test)
    if not isinstance(node, ast.While):
        yield _edit(source, "True", node.test)


def drop_operand(place: Place, source: Source) -> Edits:
    """Forget one part of an `and` or `or`."""
    node = place.node
    if isinstance(node, ast.BoolOp):
        sign = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            if not _has(left_out, ast.NamedExpr):
                rest = [f"({source.of(each)})" for each in node.values if each is not left_out]
                yield _edit(source, sign.join(rest), node)


def drop_filter(place: Place, source: Source) -> Edits:
    """Forget the filter of a comprehension."""
    node = place.node
    if isinstance(node, ast.comprehension):
        for condition in node.ifs:
            if not _has(condition, ast.NamedExpr):
                yield _edit(source, "True", condition)


def negate_result(place: Place, source: Source) -> Edits:
    """Return the opposite."""
    node = place.node
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Compare):
        yield _edit(source, f"not ({source.of(node.value)})", node.value)


def leave_loop(place: Place, source: Source) -> Edits:
    """End a loop instead of going on with the next one, or the other way round."""
    node = place.node
    if isinstance(node, ast.Continue | ast.Break):
        yield _edit(source, "break" if isinstance(node, ast.Continue) else "continue", node)


# -- values


def move_boundary(place: Place, source: Source) -> Edits:
    """Take `<` for `<=`."""
    node = place.node
    if isinstance(node, ast.Compare):
        operands = [f"({source.of(each)})" for each in (node.left, *node.comparators)]
        signs = [SIGNS[type(each)] for each in node.ops]
        for index, sign in enumerate(node.ops):
            if type(sign) in BOUNDARIES:
                changed = [*signs[:index], BOUNDARIES[type(sign)], *signs[index + 1 :]]
                pairs = zip(changed, operands[1:], strict=True)
                text = " ".join([operands[0], *itertools.chain.from_iterable(pairs)])
                yield _edit(source, text, node)


def off_by_one(place: Place, source: Source) -> Edits:
    """Let a bound or an addend be one more."""
    node, found = place.node, list[ast.expr | None]()
    if isinstance(node, ast.Compare):
        found = [node.left, *node.comparators]
    elif isinstance(node, ast.Slice):
        found = [node.lower, node.upper]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        found = [node.left, node.right]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"range", "min", "max"}
    ):
        found = [*node.args]
    for each in found:
        if isinstance(each, ast.Constant) and type(each.value) is int:
            yield _edit(source, str(each.value + 1), each)


def flip_constant(place: Place, source: Source) -> Edits:
    """Take True for False."""
    node = place.node
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _edit(source, str(not node.value), node)


def other_extreme(place: Place, source: Source) -> Edits:
    """Take the smallest for the largest."""
    node = place.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"min", "max"}:
        yield _edit(source, "max" if node.func.id == "min" else "min", node.func)


def drop_argument(place: Place, source: Source) -> Edits:
    """Leave out a named argument, or pass None as the last one of a call that is made for its effect."""
    node = place.node
    if not isinstance(node, ast.Call) or _has_generator(node) or _is_plain(node):
        return
    called = source.of(node.func)
    for left_out in node.keywords:
        if left_out.arg is not None:
            rest = [source.of(each) for each in (*node.args, *node.keywords) if each is not left_out]
            yield _edit(source, f"{called}({', '.join(rest)})", node)
    if isinstance(place.statement, ast.Expr) and len(node.args) > 1:
        last = node.args[-1]
        if not isinstance(last, ast.Constant | ast.Starred | ast.Tuple):
            yield _edit(source, "None", last)


def _has_generator(node: ast.Call) -> bool:
    return any(isinstance(each, ast.GeneratorExp) for each in node.args)


def _is_plain(node: ast.Call) -> bool:
    name = ast.unparse(node.func).split(".")[-1]
    return name in PLAIN_CALLS or name.endswith(("Error", "Exception"))


OPERATORS: tuple[Operator, ...] = (
    drop_call,
    drop_assignment,
    drop_finally,
    drop_handler,
    drop_with,
    return_early,
    swap,
    fix_condition,
    drop_operand,
    drop_filter,
    negate_result,
    leave_loop,
    move_boundary,
    off_by_one,
    flip_constant,
    other_extreme,
    drop_argument,
)
