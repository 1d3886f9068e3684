"""The canonical graph computes what the model computes, and has only the forms that it promises."""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

import pytest
import torch
import zoo
from canonical_graphs import assert_same, leaves, targets
from torch import fx, nn

from autopar.capture.capture_graph import capture
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import arguments, describe_node, set_device
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.runtime.kernels.graph_kernels import cross_entropy, target_count

aten = torch.ops.aten


def without_cache(model: nn.Module) -> dict[str, Any]:
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


class Checked(fx.Interpreter):
    """An interpreter that checks each node's ``val``: it has the shape and dtype of the result."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            for got, val in zip(leaves(result), leaves(n.meta["val"]), strict=True):
                assert (got.shape, got.dtype) == (val.shape, val.dtype), describe_node(n)
        return result


@pytest.fixture(scope="module", params=[*zoo.MODELS, "mixtral"])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Any], CapturedModel]:
    model, sample = getattr(zoo, request.param)(dtype=torch.float64, batch=4)
    return model, sample, canonicalise(capture(model, sample))


def test_same_loss_outputs_gradients_and_buffers_as_the_model(
    case: tuple[nn.Module, dict[str, Any], CapturedModel],
) -> None:
    model, sample, captured = case
    reference = copy.deepcopy(model)
    expected = reference(**sample, **without_cache(model))
    expected["loss"].backward()
    result, updates = zoo.run(captured, **sample)
    result["loss"].backward()
    assert type(result) is type(expected)
    assert_same(result, expected)
    for (path, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12, msg=path)
    assert_same({**dict(model.named_buffers()), **updates}, dict(reference.named_buffers()))


def test_canonical_form(case: tuple[nn.Module, dict[str, Any], CapturedModel]) -> None:
    _, sample, captured = case
    graph = captured.graph
    graph.lint()
    assert [n.name for n in graph.nodes if n.op == "placeholder"] == [
        i.name for i in captured.inputs
    ]
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        assert node.users or node.target is aten.batch_norm.default
        if not isinstance(node.target, torch._ops.OpOverload):
            assert node.target in (cross_entropy, target_count)
            continue
        assert not node.target._schema.is_mutable
        assert node.target._schema.name.removeprefix("aten::") not in (
            "view",
            "contiguous",
            "clone",
            "alias",
            "detach",
            "split",
            "chunk",
            "unbind",
            "addmm",
            "mm",
            "cross_entropy_loss",
            "mse_loss",
        )
        counts = [
            v
            for k, v in arguments(node).items()
            if k in ("dim", "dim0", "dim1", "index", "start", "end") and isinstance(v, int)
        ]
        assert min(counts, default=0) >= 0
    Checked(fx.GraphModule(nn.Module(), graph)).run(
        *[v.detach().clone() for v in _values(captured, sample)]
    )


def _values(captured: CapturedModel, sample: dict[str, Any]) -> list[torch.Tensor]:
    return [
        sample[i.target] if i.kind == "input" else captured.state[i.target] for i in captured.inputs
    ]


def test_dropout_draws_as_the_model_does() -> None:
    model, sample = zoo.gpt2(dtype=torch.float64, dropout=0.5, batch=4)
    captured = canonicalise(capture(model, sample))
    torch.manual_seed(1)
    expected = model(**sample, use_cache=False)
    torch.manual_seed(1)
    assert_same(zoo.run(captured, **sample)[0], expected)
    assert aten.dropout.default not in targets(canonicalise(capture(model.eval(), sample)))


def test_t5_shifts_its_labels_right() -> None:
    model, sample = zoo.t5(batch=4)
    captured = canonicalise(capture(model, sample))
    shifted = [n for n in captured.graph.nodes if n.target is aten.masked_fill.Scalar]
    assert len(shifted) == 1
    interpreter = fx.Interpreter(
        fx.GraphModule(nn.Module(), captured.graph), garbage_collect_values=False
    )
    interpreter.run(*_values(captured, sample))
    assert torch.equal(interpreter.env[shifted[0]], model._shift_right(sample["labels"]))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_graph_is_the_same_on_the_meta_device(name: str) -> None:
    def calls(captured: CapturedModel) -> list[str]:
        set_device(captured.graph, torch.device("cpu"))
        return [n.format_node() for n in captured.graph.nodes]

    model, sample = getattr(zoo, name)(batch=4)
    with torch.device("meta"):
        empty, _ = getattr(zoo, name)(batch=4)
    assert calls(canonicalise(capture(model, sample))) == calls(
        canonicalise(capture(empty, sample))
    )
