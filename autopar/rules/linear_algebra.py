"""Decompositions and solutions of matrices, each of a batch by itself."""

from __future__ import annotations

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

_OF_ONE = """cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu lu_factor lu_factor_ex matrix_exp
matrix_rank pinv qr slogdet svd svdvals"""
_OLD = "cholesky det inverse logdet matrix_exp pinverse qr slogdet svd"


@register_rule(*(f"aten.linalg_{n}" for n in _OF_ONE.split()), *(f"aten.{n}" for n in _OLD.split()))
def of_one_matrix(call: OperatorCall) -> Rule | None:
    """The first result has the batch before its own dims, and so have the others."""
    batch = len(call.shapes[0]) - 2
    if batch < 1 or len(call.inputs) != 1 or call.shapes[0][:batch] != call.shape[:batch]:
        return None
    names = " ".join(f"b{d}" for d in range(batch))
    own = [f"o{d}" for d in range(len(call.shape) - batch)]
    return call.rule(f"~{names} i j -> {names} {' '.join(own)}", whole=["i", "j", *own])


@register_rule("aten.linalg_solve", "aten.linalg_solve_triangular")
def solution(call: OperatorCall) -> Rule | None:
    """With as many dims on both sides, so that the right side holds matrices."""
    a, b = call.shapes
    if len(a) != len(b) or len(a) < 3:
        return None
    return call.rule(
        "~... i j, ~... j k -> ... j k"
        if call.arguments.get("left", True)
        else "~... i j, ~... k i -> ... k i",
        whole="ijk",
    )
