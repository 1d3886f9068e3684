"""Decompositions and solutions of matrices. Each matrix of a batch is independent."""

from __future__ import annotations

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

_LINALG = """cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex ldl_factor ldl_factor_ex
lu lu_factor lu_factor_ex matrix_exp matrix_rank pinv qr slogdet svd svdvals"""
_WITHOUT_PREFIX = "cholesky det inverse logdet matrix_exp pinverse qr slogdet svd"


@register_rule(
    *(f"aten.linalg_{n}" for n in _LINALG.split()), *(f"aten.{n}" for n in _WITHOUT_PREFIX.split())
)
def function_of_matrix(call: OperatorCall) -> Rule | None:
    """The dims of the batch come first in the first result, and so in all results."""
    batch = len(call.shapes[0]) - 2
    if batch < 1 or len(call.inputs) != 1 or call.shapes[0][:batch] != call.shape[:batch]:
        return None
    names = " ".join(f"b{d}" for d in range(batch))
    own = [f"o{d}" for d in range(len(call.shape) - batch)]
    return call.rule(f"~{names} i j -> {names} {' '.join(own)}", whole=["i", "j", *own])


@register_rule("aten.linalg_solve", "aten.linalg_solve_triangular")
def solution(call: OperatorCall) -> Rule | None:
    """Both sides have as many dims, so that the right-hand side holds matrices, not vectors."""
    a, b = call.shapes
    if len(a) != len(b) or len(a) < 3:
        return None
    return call.rule(
        "~... i j, ~... j k -> ... j k"
        if call.arguments.get("left", True)
        else "~... i j, ~... k i -> ... k i",
        whole="ijk",
    )
