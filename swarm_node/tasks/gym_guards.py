"""What a reasoning-gym scorer may be given: completions come from peers, and some scorers execute their text.

Four scorers call `eval` on the answer, three of those allowed hand it to sympy's parser, which does the same, and others can be made to
work for hours by one exponent, count or formula, be fooled by a NaN, or fail on text that they do not expect. Each of them has a guard: an
answer in none of the forms that the dataset asks for is wrong unscored.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

MAX_ANSWER = 4096
"""Characters of an answer at most; the largest grids need half of it."""

MAX_EXPRESSION = 400
"""Characters of an answer that is parsed as an expression or formula."""

MAX_DEGREE = 64
"""Degree of a polynomial at most, counted before terms cancel."""

MAX_CONSTANT = 10**12
"""Size of a number inside an expression."""


def may_score(dataset: str, answer: str, expected: object) -> bool:
    """Whether `answer` may go to the scorer of `dataset`. What the dataset itself expects always may."""
    if len(answer) > MAX_ANSWER:
        return False
    guard = _GUARDS.get(dataset)
    return guard is None or answer.strip() == str(expected).strip() or guard(answer)


def is_literal(answer: str) -> bool:
    """Text in which `eval` finds numbers, texts, lists and tuples alone, or a syntax error."""
    try:
        tree = ast.parse(answer.lstrip(" \t"), mode="eval")
    except SyntaxError:
        return True
    except (ValueError, MemoryError, RecursionError):
        return False
    allowed = ast.Expression | ast.Constant | ast.List | ast.Tuple | ast.Load | ast.UnaryOp | ast.USub
    return all(isinstance(node, allowed) for node in ast.walk(tree))


def is_arithmetic(answer: str) -> bool:
    """Sums, differences, products and quotients of numbers: no power, no name, no call."""
    tree = _expression(answer)
    return tree is not None and all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)) and _degree(tree.body) is not None


def is_polynomial(answer: str) -> bool:
    """Polynomials in at most two one-letter names (the variable and the constant of integration), of bounded degree."""
    tree = _expression(answer)
    if tree is None or not all(isinstance(node, _ARITHMETIC | ast.Name | ast.Pow) for node in ast.walk(tree)):
        return False
    degree = _degree(tree.body)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return degree is not None and degree <= MAX_DEGREE and len(names) <= 2 and all(len(name) == 1 for name in names)


def is_formula(answer: str) -> bool:
    """Formulas whose variables are single letters: the scorer tries every assignment of whatever it takes for a variable."""
    text = re.sub(r"\s", "", answer)
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return (
        depth == 0
        and len(text) <= MAX_EXPRESSION
        and re.fullmatch(r"[A-Z()¬∧∨→↔]+", text) is not None
        and re.search(r"[A-Z)][A-Z(¬]|\(\)", text) is None
    )


def is_json_list(answer: str) -> bool:
    """A list, in whatever depth."""
    return isinstance(_json(answer), list)


def is_json_moves(answer: str) -> bool:
    """A list of objects whose keys hold coordinates and whose values are texts."""
    moves = _json(answer)
    return isinstance(moves, list) and all(
        isinstance(move, dict) and all(isinstance(text, str) and len(re.findall(r"\d+", place)) >= 2 for place, text in move.items())
        for move in moves
    )


_ARITHMETIC = (
    ast.Expression | ast.Constant | ast.BinOp | ast.UnaryOp | ast.Load | ast.Add | ast.Sub | ast.Mult | ast.Div | ast.USub | ast.UAdd
)


def _expression(answer: str) -> ast.Expression | None:
    # An exponent in a number, which Python rounds and sympy expands, is no part of any answer.
    if len(answer) > MAX_EXPRESSION or re.search(r"[0-9.][A-Za-z_]", answer):
        return None
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _degree(node: ast.expr) -> int | None:
    """Degree of a polynomial, numbers counting as degree 1 under a power, so that it bounds their size as well; None if it is none."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return 1 if abs(value) <= MAX_CONSTANT else None
        case ast.Name():
            return 1
        case ast.UnaryOp(operand=operand):
            return _degree(operand)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as exponent)) if exponent <= MAX_DEGREE:
            degree = _degree(base)
            return None if degree is None else degree * exponent
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operator, right=right):
            degrees = _degree(left), _degree(right)
            if None in degrees or (isinstance(operator, ast.Div) and any(isinstance(part, ast.Name) for part in ast.walk(right))):
                return None
            return sum(filter(None, degrees)) if isinstance(operator, ast.Mult | ast.Div) else max(filter(None, degrees), default=0)
    return None


def _json(answer: str) -> object:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


_GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": is_arithmetic,
    "puzzle24": is_arithmetic,
    "simple_integration": is_polynomial,
    "propositional_logic": is_formula,
    "boxnet": is_json_moves,
    "game_of_life": is_json_list,
    # Fraction("1e999999999") has a billion digits.
    "coin_flip": lambda answer: len(answer) <= 100 and "e" not in answer.lower(),
    # min(1.0, exp(-nan)) is 1.0.
    "complex_arithmetic": lambda answer: "nan" not in answer.lower(),
    "prime_factorization": lambda answer: re.fullmatch(r"\s*[0-9]{1,40}\s*(×\s*[0-9]{1,40}\s*)*", answer) is not None,
    # "R999999999" is a billion moves.
    "rubiks_cube": lambda answer: re.search(r"\d{3}", answer) is None,
}
