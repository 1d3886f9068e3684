"""A slice of torch's own table of operators, of each family some: one sample each, split in every way that its rule offers.

``benchmarks/operators.py`` runs all of it.
"""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.passes.canonicalise import canonicalise

# pointwise; reductions; products; convolutions, normalisations and pooling; views; indexing and writing; several results; losses; made
# from nothing; layouts and dtypes of another kind
SLICE = """where special.i1e nn.functional.prelu
var logsumexp
einsum addmm cdist
nn.functional.conv_transpose1d nn.functional.instance_norm nn.functional.avg_pool1d nn.functional.unfold nn.functional.glu
cat unfold repeat_interleave
gather index_add scatter_add index_put
topk linalg.qr
nn.functional.triplet_margin_loss nn.functional.nll_loss
logspace.tensor_overload to_sparse fft.rfft"""
BY_RULE = "where special.i1e nn.functional.prelu var logsumexp einsum addmm cdist"  # whatever the sample


@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_torchs_operators_is_what_eager_computes() -> None:
    import operators  # here, as torch's table takes seconds to make

    checked: set[str] = set()
    names = SLICE.split()
    found = {name: operators.check(cases[0], checked) for name, cases in operators.cases(names, 1) if name in names}
    assert found.keys() == set(names)
    assert {status for status, _ in found.values()} == {operators.SPLIT, operators.UNSPLIT}, found
    split = {name for name, (status, _) in found.items() if status == operators.SPLIT}
    assert set(BY_RULE.split()) <= split, found
    assert "to_sparse" not in split


def test_rescaling_embeddings_are_refused_with_what_to_write() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4, max_norm=1.0), torch.nn.Flatten(0), torch.nn.Linear(8, 1), torch.nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"module '0'.*max_norm=1\).*after optimizer.step\(\)"):
        canonicalise(capture(model, torch.zeros(2, dtype=torch.long), loss_fn=lambda output, batch: output.sum()))
