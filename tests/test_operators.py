"""A slice of torch's own table of operators, of each family some: one sample each, split in every
way that its rule offers. And modules whose operators are odd.

``benchmarks/operators.py`` runs all of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.capture_graph import capture
from autopar.errors import CaptureError
from autopar.passes.canonical.canonicalise import canonicalise

# pointwise; reductions; products; convolutions, normalisations and pooling; views; indexing and
# writing; several results; losses; made from nothing; layouts and dtypes of another kind
SLICE = """where special.i1e nn.functional.prelu
var logsumexp
einsum addmm cdist
nn.functional.conv_transpose1d nn.functional.instance_norm nn.functional.avg_pool1d
nn.functional.unfold nn.functional.glu
cat unfold repeat_interleave
gather index_add scatter_add index_put
topk linalg.qr
nn.functional.triplet_margin_loss nn.functional.nll_loss
logspace.tensor_overload to_sparse fft.rfft fft.ihfftn histogramdd"""
BY_RULE = (
    "where special.i1e nn.functional.prelu var logsumexp einsum addmm cdist"  # whatever the sample
)


@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_torchs_operators_is_what_eager_computes() -> None:
    from operator_cases import SPLIT, UNSPLIT, cases  # here: torch's table takes seconds to make
    from operator_checks import check

    checked: set[str] = set()
    names = SLICE.split()
    found = {
        name: check(of_operator[0], checked)
        for name, of_operator in cases(names, 1)
        if name in names
    }
    assert found.keys() == set(names)
    assert {status for status, _ in found.values()} == {
        SPLIT,
        UNSPLIT,
    }, found
    split = {name for name, (status, _) in found.items() if status == SPLIT}
    assert set(BY_RULE.split()) <= split, found
    assert "to_sparse" not in split


class Bags(torch.nn.Module):
    """Means of some rows of a weight, which has sparse gradients."""

    def __init__(self, bags: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = (
            torch.nn.EmbeddingBag(9, 4, sparse=True)
            if bags
            else torch.nn.Embedding(9, 4, sparse=True)
        )
        self.head = torch.nn.Linear(4, 1)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids)).square().mean()


def _with_sparse_gradients(bags: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of rows, given ids that do not lie one after the other, and that of one
    device.
    """
    ids = torch.arange(32).reshape(8, 4).remainder(9)[:, ::2]
    model, compiled = (
        Bags(bags),
        autopar.compile(Bags(bags), ids.contiguous(), dist.get_world_size(), progress=False),
    )
    model(ids).backward()
    compiled(ids).backward()
    found = dict(compiled.named_parameters())["rows.weight"].grad
    expected = model.rows.weight.grad
    assert isinstance(found, DTensor)
    assert expected is not None
    assert expected.is_sparse
    return found.full_tensor(), expected.to_dense()


@pytest.mark.parametrize("bags", [False, True])
def test_sparse_gradients_are_those_of_one_device_and_dense(bags: bool, ranks: Pools) -> None:
    for found, expected in ranks(2).run(_with_sparse_gradients, bags):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rescaling_embeddings_are_refused_with_what_to_write() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(6, 4, max_norm=1.0),
        torch.nn.Flatten(0),
        torch.nn.Linear(8, 1),
        torch.nn.Flatten(0),
    )
    with pytest.raises(CaptureError, match=r"module '0'.*max_norm=1\).*after optimizer.step\(\)"):
        canonicalise(
            capture(
                model, torch.zeros(2, dtype=torch.long), loss_fn=lambda output, batch: output.sum()
            )
        )
