"""The canonical graph computes what the model computes, and has only the forms that it promises."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import fx, nn

from autopar.capture.capture_graph import capture
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import arguments, describe_node, operands, set_device, set_operand, shape
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.runtime.kernels.graph_kernels import cross_entropy, target_count

aten = torch.ops.aten


def targets(captured: CapturedModel) -> list[Any]:
    return [n.target for n in captured.graph.nodes if n.op == "call_function"]


def canonical(model: nn.Module, *sample: Any, **options: Any) -> CapturedModel:
    return canonicalise(capture(model, sample if len(sample) != 1 else sample[0], **options))


def without_cache(model: nn.Module) -> dict[str, Any]:
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


def leaves(value: Any) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def assert_same(actual: Any, expected: Any) -> None:
    pairs = list(zip(leaves(actual), leaves(expected), strict=True))
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


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


# --- in-place operators
# --------------------------------------------------------------------------------------------------


def _transposed_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.transpose(0, 1).permute(1, 2, 0)[0].mul_(2)
    return y


def _views_see_the_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    before, row = y[:, 1:3], y.view(-1)[5:7]
    row.add_(100)
    y[0].zero_()
    return before * y.flatten()[1] + row.sum()


def _pieces_share_memory(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 1  # autograd refuses such writes to tensors that need a gradient
    a, b = y.chunk(2, dim=-1)
    y.exp_()
    a.add_(b)
    y.unbind(0)[1].neg_()
    return a * x.sum() + b


def _contiguous_may_copy(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    same, copied = y.contiguous(), y.transpose(0, 1).contiguous()
    same.add_(1)
    copied.mul_(3)
    return y.sum() + copied.sum()


def _set_items(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1] * 2
    y[0, 1:3, ...] = 7
    y[x > 0] = -1.0
    y[:, torch.tensor([2, 0])] += x[:, :2]
    y.diagonal(dim1=0, dim2=1).fill_(torch.tensor(3))
    return y * x


def _change_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = y.select(0, 0)
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    y.mul_(2)
    return y + z.sum()


def _promotion(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32)
    y += x  # stays float32
    mask = x > 0
    mask &= x < 1
    mask |= x > 2
    return y * mask


def _dropout_returns_its_operand(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = F.dropout(y.mT, 0.5, training=False)
    z += 1
    z[0].mul_(2)
    return y


def _on_itself(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.add_(y).masked_fill_(y > 1, 0.5)
    return y.copy_(x[0]) + y.index_fill_(0, torch.tensor([1]), 9)


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.narrow(1, 1, 2).unflatten(0, (1, -1)).squeeze(0).mul_(0.5)
    y[-1].neg_()
    return y


WRITES = [
    _transposed_write,
    _views_see_the_write,
    _pieces_share_memory,
    _contiguous_may_copy,
    _set_items,
    _change_views,
    _promotion,
    _dropout_returns_its_operand,
    _on_itself,
    _narrowed,
]


class Function(nn.Module):
    """``sum(f(x · weight) · coefficients)``, so that every element of f counts in the loss."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.f, self.weight = (
            f,
            nn.Parameter(torch.linspace(-2, 3, 48, dtype=torch.float64).view(2, 4, 6)),
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.f(x * self.weight)
        return {
            "loss": (y * torch.arange(y.numel(), dtype=torch.float64).view(y.shape)).sum(),
            "y": y,
        }


def assert_function_kept(f: Callable[..., torch.Tensor]) -> CapturedModel:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    model = Function(f)
    reference = copy.deepcopy(model)
    captured = canonical(model, x)
    expected = reference(x)
    expected["loss"].backward()
    result, _ = zoo.run(captured, x)
    result["loss"].backward()
    assert_same((result, model.weight.grad), (expected, reference.weight.grad))
    assert not any(getattr(t, "_schema", None) and t._schema.is_mutable for t in targets(captured))
    return captured


@pytest.mark.parametrize("write", WRITES)
def test_writes_become_functional(write: Callable[..., torch.Tensor]) -> None:
    assert_function_kept(write)


def test_a_write_to_part_of_a_buffer_is_an_update() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, 4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            with torch.no_grad():
                self.total[1].mul_(0.5).add_(x.mean(0))
            return (x * self.total[1]).sum() * self.steps

    model, x = Counts(), torch.randn(5, 4)
    captured = canonical(model, x)
    result, updates = zoo.run(captured, x)
    assert captured.updates == ("total", "steps")
    assert torch.equal(result, model(x))
    assert_same(updates, {"total": model.total, "steps": model.steps})


def test_a_write_to_an_input_stays_inside() -> None:
    captured = canonical(Function(lambda x: x), torch.ones(2, 4, 6, dtype=torch.float64))
    assert captured.updates == ()

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x.sum()

    x = torch.zeros(3)
    captured = canonical(Writes(), x)
    assert zoo.run(captured, x)[0] == 3
    assert captured.updates == ()
    assert torch.equal(x, torch.zeros(3))
    assert any("'args[0]'" in note for note in captured.notes)


def _hidden_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    with torch.no_grad():
        y.mul_(2)
    return y


def _write_through_detach(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.detach().mul_(2)
    return y


def _resized(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 1
    y.resize_(2, 24)
    return y


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_hidden_write, "writes, without gradient, to a tensor that has one"),
        (_write_through_detach, "writes, without gradient, to a tensor that has one"),
        (_resized, "no form that returns the result"),
    ],
)
def test_writes_without_a_functional_form_name_the_place(
    write: Callable[..., torch.Tensor], message: str
) -> None:
    with pytest.raises(
        CaptureError, match=rf"module '\(root\)' at tests/test_canonicalise.py:\d+.*{message}"
    ):
        canonical(Function(write), torch.ones(2, 4, 6, dtype=torch.float64))


def test_a_parameter_may_not_change_in_the_forward() -> None:
    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.clamp_(max=0.5)
            return (x * self.weight).sum()

    with pytest.raises(CaptureError, match=r"parameter 'weight'.*register_buffer"):
        canonical(Clips(), torch.ones(3))


# --- gradients that stop
# --------------------------------------------------------------------------------------------------


def _regions(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        a = x.sin() * 2
        with torch.enable_grad():
            b = x.exp() * a
        c = b + x
    return a + b + c * x


def _detaches(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).detach().view(x.shape) * x + torch.ones(6).detach()


def _autocast_off(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.tanh() * x


@pytest.mark.parametrize("f", [_regions, _detaches, _autocast_off])
def test_regions_keep_their_gradients(f: Callable[..., torch.Tensor]) -> None:
    captured = assert_function_kept(f)
    assert (aten.detach.default in targets(captured)) == (f is not _autocast_off)


def test_autocast_is_refused() -> None:
    def casts(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.mT

    with pytest.raises(CaptureError, match=r"autocast on .cpu, torch.bfloat16.*precision="):
        canonical(Function(casts), torch.ones(2, 4, 6, dtype=torch.float64))


# --- views and no-ops
# --------------------------------------------------------------------------------------------------

VIEWS: list[tuple[Callable[..., torch.Tensor], set[Any]]] = [
    (lambda x: x.movedim(0, -1), {aten.permute.default}),
    (lambda x: x.swapaxes(-1, 0), {aten.permute.default}),
    (lambda x: x.mT, {aten.permute.default}),
    (
        lambda x: x[:1].squeeze().flatten(),
        {aten.slice.Tensor, aten.squeeze.dims, aten.reshape.default},
    ),
    (lambda x: x.squeeze(0).squeeze(), set()),
    (lambda x: x.narrow(-1, -3, 2), {aten.slice.Tensor}),
    (lambda x: x.unflatten(-1, (2, -1)), {aten.reshape.default}),
    (lambda x: x[0].expand(3, -1, -1), {aten.select.int, aten.expand.default}),
    (lambda x: x[..., -1], {aten.select.int}),
    (lambda x: x.split([1, 5], dim=-1)[1], {aten.slice.Tensor}),
    (lambda x: torch.cat(x.chunk(4, -1)[::3], 2), {aten.slice.Tensor, aten.cat.default}),
    (lambda x: x.tensor_split((1, 3), -1)[1], {aten.slice.Tensor}),
    (lambda x: torch.stack(x.unbind(1)[1:], -2), {aten.select.int, aten.stack.default}),
    (lambda x: torch.broadcast_tensors(x, x[0])[1], {aten.select.int, aten.expand.default}),
    (lambda x: x.to(torch.float64).contiguous().clone().type_as(x).to("cpu"), set()),
    (lambda x: x.float().double().square(), {aten.to.dtype, aten.pow.Tensor_Scalar}),
    (lambda x: F.pad(x, (1, 0)), {aten.constant_pad_nd.default}),
    (lambda x: F.adaptive_avg_pool2d(x, 1), {aten.mean.dim}),
    (
        lambda x: x.mean() + x.sum() + x.sum(()),
        {aten.mean.dim, aten.sum.dim_IntList, aten.add.Tensor},
    ),
]


@pytest.mark.parametrize(("view", "wanted"), VIEWS, ids=range(len(VIEWS)))
def test_views_have_one_form(view: Callable[..., torch.Tensor], wanted: set[Any]) -> None:
    harness = {aten.mul.Tensor, aten.arange.default, aten.reshape.default, aten.sum.dim_IntList}
    assert set(targets(assert_function_kept(view))) - harness == wanted - harness


def test_arguments_are_in_normal_form() -> None:
    graph = assert_function_kept(
        lambda x: torch.softmax(
            torch.cat([x[:, -3:], x.transpose(-1, -2).mT[:, :9]], dim=-2), dim=-1
        )
    ).graph
    calls = {n.target: n.args[1:] for n in graph.nodes if n.op == "call_function"}
    assert calls[aten.slice.Tensor] == (1, 1, 4)
    assert calls[aten.transpose.int] == (2, 1)
    assert calls[aten.cat.default] == (1,)
    assert calls[aten.softmax.int] == (2,)
    cat = next(n for n in graph.nodes if n.target is aten.cat.default)
    assert [path for _, path in operands(cat)] == [(0, 0), (0, 1)]
    assert arguments(cat)["dim"] == 1
    other = operands(cat)[0][0]
    set_operand(cat, 1, other)
    assert [n for n, _ in operands(cat)] == [other, other]


# --- linears
# --------------------------------------------------------------------------------------------------


class Projections(nn.Module):
    """GPT-2's Conv1D, the same without bias, a linear on flattened tokens, and an addmm whose
    result stays flat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(self.bias, x.view(-1, 6), self.weight).view(x.shape)
        x = torch.mm(x.view(-1, 6), self.weight.t()).view(x.shape)
        x = F.linear(x.flatten(0, 1), self.weight, self.bias).unflatten(0, (2, -1))
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).pow(2).mean()


def test_linears_take_unflattened_tokens() -> None:
    model, x = Projections(), torch.randn(2, 4, 6)
    captured = canonical(model, x)
    linears = [n for n in captured.graph.nodes if n.target is aten.linear.default]
    assert [shape(n) for n in linears] == [(2, 4, 6)] * 3 + [(8, 6)]
    assert targets(captured).count(aten.t.default) == 2
    assert targets(captured).count(aten.reshape.default) == 1
    torch.testing.assert_close(zoo.run(captured, x)[0], model(x))


# --- losses
# --------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(logits, target)


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 1.5], dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"ignore_index": 2},
    {"label_smoothing": 0.2},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.3},
    {"weight": WEIGHT, "label_smoothing": 0.3, "reduction": "sum"},
]
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "rows": ((5, 6), (5,), F.cross_entropy),
    "flattened": (
        (3, 4, 6),
        (3, 4),
        lambda x, t, **o: F.cross_entropy(x.view(-1, 6), t.view(-1), **o),
    ),
    "image": ((2, 6, 3, 4), (2, 3, 4), F.cross_entropy),
    "transposed": ((2, 5, 6), (2, 5), lambda x, t, **o: F.cross_entropy(x.transpose(1, 2), t, **o)),
}


def assert_loss_kept(
    loss: Callable[..., torch.Tensor], logits: torch.Tensor, target: torch.Tensor
) -> CapturedModel:
    captured = canonical(Loss(loss), logits, target)
    logits.requires_grad_()
    expected = loss(logits, target)
    result, _ = zoo.run(captured, logits, target)
    assert_same(
        (result, *torch.autograd.grad(result, logits)),
        (expected, *torch.autograd.grad(expected, logits)),
    )
    return captured


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy_is_a_sum_and_a_count(form: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size, target_size, loss = FORMS[form]
    target = torch.randint(6, target_size)
    target.view(-1)[::4] = options.get("ignore_index", -100)
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    captured = assert_loss_kept(
        lambda x, t: loss(x, t, **options), torch.randn(size, dtype=torch.float64), target
    )
    node = next(n for n in captured.graph.nodes if n.target is cross_entropy)
    assert shape(node.args[0]) == (*target_size, 6)
    assert shape(node.args[1]) == target_size
    assert (target_count in targets(captured)) == (options.get("reduction") != "sum")
    assert aten.reshape.default not in targets(captured)
    assert form == "image" or aten.permute.default not in targets(captured)


def test_negative_log_likelihood_of_log_softmax_is_cross_entropy() -> None:
    logits, target = torch.randn(5, 6, dtype=torch.float64), torch.randint(6, (5,))
    captured = assert_loss_kept(lambda x, t: F.nll_loss(F.log_softmax(x, -1), t), logits, target)
    assert targets(captured) == [cross_entropy, target_count, aten.div.Tensor]


def test_bfloat16_losses_are_summed_in_float32() -> None:
    logits, target = torch.randn(4096, 6).bfloat16(), torch.randint(6, (4096,))
    captured = canonical(Loss(F.cross_entropy), logits, target)
    result = zoo.run(captured, logits, target)[0]
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, F.cross_entropy(logits, target))


def test_losses_of_other_forms_stay_with_a_note() -> None:
    logits, target = (
        torch.randn(6, dtype=torch.float64),
        torch.rand(6, dtype=torch.float64).softmax(-1),
    )  # one sample, without a batch dim
    captured = assert_loss_kept(F.cross_entropy, logits, target)
    assert targets(captured) == [aten.cross_entropy_loss.default]
    assert any("runs unsplit" in note for note in captured.notes)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.soft_margin_loss,
    ],
)
def test_elementwise_losses_reduce_by_themselves(
    loss: Callable[..., torch.Tensor], reduction: str
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)

    def total(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return loss(x, t, reduction=reduction).sum()

    captured = assert_loss_kept(total, logits, target)
    assert all(
        arguments(n).get("reduction", 0) == 0
        for n in captured.graph.nodes
        if n.op == "call_function"
    )
