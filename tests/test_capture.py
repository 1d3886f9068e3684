"""Capture: signature, state, loss, places and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("unused", torch.ones(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.inner(x) * self.scale
        return y if labels is None else {"loss": F.cross_entropy(y, labels), "logits": y}


def batch(**options: Any) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(4, 8, **options),
        "labels": torch.zeros(4, dtype=torch.long, **options),
    }


def kinds(captured: CapturedModel) -> dict[str, list[str]]:
    return {
        kind: [i.target for i in captured.inputs if i.kind == kind]
        for kind in ("parameter", "buffer", "constant", "input")
    }


def test_signature_names_every_placeholder() -> None:
    captured = capture(Net(), batch())
    parameters = [f"inner.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")]
    assert kinds(captured) == {
        "parameter": parameters,
        "buffer": ["scale"],
        "constant": [],
        "input": ["x", "labels"],
    }
    placeholders = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    assert placeholders == [i.name for i in captured.inputs]
    assert set(captured.state) == {*parameters, "scale", "unused"}


def test_inputs_keep_the_users_order_and_unused_ones_stay() -> None:
    given = batch()
    captured = capture(Net(), {"labels": given["labels"], "x": given["x"]})
    assert kinds(captured)["input"] == ["labels", "x"]

    class Ignores(Net):
        def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.inner(x).mean()

    captured = capture(Ignores(), (given["x"], torch.ones(2)))
    assert kinds(captured)["input"] == ["args[0]", "args[1]"]


def test_nested_inputs_and_constants() -> None:
    class Nested(nn.Module):
        def forward(
            self, pair: tuple[torch.Tensor, torch.Tensor], flag: bool, *, more: dict[str, Any]
        ) -> torch.Tensor:
            return (pair[0] * pair[1] + (more["b"] if flag else 0)).sum()

    x = torch.randn(3)
    captured = capture(Nested(), {"pair": (x, x), "flag": True, "more": {"b": x, "c": None}})
    assert kinds(captured)["input"] == ["pair[0]", "pair[1]", "more['b']"]
    assert captured.constant_inputs == {2: True, 4: None}
    got, _ = zoo.run(captured, pair=(x, x), flag=True, more={"b": x, "c": None})
    assert torch.equal(got, (x * x + x).sum())


def test_a_tensor_given_twice_is_two_inputs() -> None:
    model, sample = zoo.llama(layers=1)
    captured = capture(model, {"input_ids": sample["input_ids"], "labels": sample["input_ids"]})
    by_target = {i.target: i.name for i in captured.inputs}
    users = {n.name: len(n.users) for n in captured.graph.nodes}
    assert users[by_target["input_ids"]] > 0
    assert users[by_target["labels"]] > 0


def test_use_cache_is_switched_off_and_not_asked_of_the_user() -> None:
    model, sample = zoo.gpt2(layers=1)
    captured = capture(model, sample)
    assert captured.in_spec.num_leaves == len(sample)
    assert any("use_cache" in note for note in captured.notes)
    assert capture(model, {**sample, "use_cache": False}).constant_inputs == {2: False}


def test_tied_parameters_go_by_their_first_name() -> None:
    model, sample = zoo.gpt2(layers=1)
    captured = capture(model, sample)
    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "transformer.wte.weight" in kinds(captured)["parameter"]
    assert not {"lm_head.weight"} & {*kinds(captured)["parameter"], *captured.state}
    assert set(captured.state) == {
        name for name, _ in (*model.named_parameters(), *model.named_buffers())
    }


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(training: bool) -> None:
    model, sample = zoo.cnn()
    model.train(training)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tensors = {k: v.data_ptr() for k, v in model.state_dict().items()}
    capture(model, sample)
    assert model.training is training
    assert all(m.training is training for m in model.modules())
    assert all(
        torch.equal(v, before[k]) and v.data_ptr() == tensors[k]
        for k, v in model.state_dict().items()
    )
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("sample_device", ["cpu", "meta"])
def test_a_meta_model_takes_a_sample_from_any_device(sample_device: str) -> None:
    with torch.device("meta"):
        model = Net()
    captured = capture(model, batch(device=sample_device))
    assert all(t.device.type == "meta" for t in captured.state.values())
    assert all(
        n.meta["val"].device.type == "meta" for n in captured.graph.nodes if n.op != "output"
    )


def test_every_node_has_a_value_a_module_and_a_source() -> None:
    model, sample = zoo.llama(layers=1)
    calls = [n for n in capture(model, sample).graph.nodes if n.op == "call_function"]
    assert all(set(n.meta) == {"val", "module", "source"} for n in calls)
    attention = next(n for n in calls if "scaled_dot_product" in n.name)
    assert attention.meta["module"] == "model.layers.0.self_attn"
    assert (
        attention.meta["source"].startswith("integrations/sdpa_attention.py:")
        or "modeling_llama.py:" in attention.meta["source"]
    )
    assert (
        next(n for n in calls if n.name == "linear")
        .meta["source"]
        .startswith("llama/modeling_llama.py:")
    )


def test_loss_by_name_or_as_the_only_scalar() -> None:
    assert capture(Net(), batch()).loss == 0

    class Scalar(Net):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return y, y.pow(2).mean()

    assert capture(Scalar(), torch.randn(4, 8)).loss == 1


def test_without_a_loss_the_error_lists_the_outputs() -> None:
    with pytest.raises(CaptureError, match=r"no scalar output.*\(4, 8\).*labels.*loss_fn="):
        capture(Net(), torch.randn(4, 8))

    class Two(Net):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return {"a": x.mean(), "b": x.sum()}

    with pytest.raises(CaptureError, match="several scalar outputs"):
        capture(Two(), torch.randn(4, 8))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_loss_fn_gets_the_whole_batch(form: str) -> None:
    torch.manual_seed(0)
    model, given, target = Net(), torch.randn(4, 8), torch.randn(4, 8)
    if form == "tensor":
        captured = capture(model, given, loss_fn=lambda output, x: F.mse_loss(output, x))
        result, expected = zoo.run(captured, given)[0], F.mse_loss(model(given), given)
    elif form == "tuple":

        class Plain(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return super().forward(x)

        model = Plain()
        captured = capture(
            model, (given, target), loss_fn=lambda output, pair: F.mse_loss(output, pair[1])
        )
        result, expected = zoo.run(captured, given, target)[0], F.mse_loss(model(given), target)
    else:
        captured = capture(
            model,
            {"x": given, "target": target},
            loss_fn=lambda output, b: F.mse_loss(output, b["target"]),
        )
        result, expected = (
            zoo.run(captured, x=given, target=target)[0],
            F.mse_loss(model(given), target),
        )
    assert set(result) == {"loss", "output"}
    assert torch.equal(result["loss"], expected)
    assert kinds(captured)["parameter"][0] == "inner.0.weight"  # the wrapper does not show
    assert {n.meta["module"] for n in captured.graph.nodes if n.name.startswith("linear")} == {
        "inner.0",
        "inner.2",
    }


def test_loss_fn_on_a_transformers_model_keeps_the_cache_out() -> None:
    model, sample = zoo.gpt2(layers=1)
    ids, labels = sample["input_ids"], sample["labels"]
    captured = capture(
        model,
        {"input_ids": ids, "target": labels},
        lambda out, b: F.cross_entropy(out.logits.transpose(1, 2), b["target"]),
    )
    result, _ = zoo.run(captured, input_ids=ids, target=labels)
    assert torch.allclose(
        result["loss"], F.cross_entropy(model(ids).logits.transpose(1, 2), labels)
    )
    assert set(result["output"]) == {"logits"}


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_control_flow_on_data_names_the_module_the_line_and_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Branches()), nn.Linear(8, 1))
    with pytest.raises(
        CaptureError,
        match=r"module 1\.0 \(Branches\) at "
        r"tests/test_capture.py:\d+.*torch\.where.*experts_implementation",
    ):
        capture(model, torch.randn(4, 8))


def test_a_model_that_does_not_run_says_where() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 1))
    with pytest.raises(CaptureError, match=r"module 1 \(Linear\).*Check that the model runs"):
        capture(model, torch.randn(4, 8))
    with pytest.raises(CaptureError, match="arguments of the model's forward"):
        capture(model, {"y": torch.randn(4, 8)})
    with pytest.raises(CaptureError, match="sample_input is a int"):
        capture(model, 3)


def test_shapes_that_depend_on_data_are_refused() -> None:
    class Selects(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].mean()

    with pytest.raises(CaptureError, match=r"index.*test_capture.py:\d+.*depends on tensor values"):
        capture(Selects(), torch.randn(4, 8))
