"""The kernels that a call launches, with the tensors that they read and write.

torch dispatches the call on meta tensors and a recorder notes each ATen operator, so no table of
kernels has to be correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TEMPORARY = -1000  # the place of a tensor that is no operand, no result, and no gradient of these


class KernelLaunch(NamedTuple):
    """One kernel.

    Attributes:
        operator: the name of the ATen operator, for example "mm" or "gelu_backward".
        kind: one of ``cost_model.device.KERNEL_KINDS``.
        touched: the place and the bytes of each tensor that the kernel reads or writes. The place
            of operand k and of its gradient is k. The place of result j and of its gradient is
            -1 - j. The place of any other tensor is TEMPORARY.
        writes: the place of the first tensor that it writes.
        flops: FLOPs of matrix products, convolutions and fused attention; 0 for other kernels.
        call: the operator and its arguments, with meta tensors, to run the kernel on a device.
    """

    operator: str
    kind: str
    touched: tuple[tuple[int, int], ...]
    writes: int
    flops: float = 0.0
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def sends(self) -> bool:
        """Whether it is a collective, or waits for a collective."""
        return "c10d" in self.operator

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(nbytes for _, nbytes in self.touched)


_OPERATORS = {
    "matmul": "mm addmm bmm baddbmm mv addmv dot _grouped_mm",
    "conv": "convolution convolution_backward _convolution slow_conv2d_forward mkldnn_convolution",
    "attention": """
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward
    """,
    "normalisation": """
        native_layer_norm native_layer_norm_backward native_group_norm
        native_group_norm_backward native_batch_norm native_batch_norm_backward
        _native_batch_norm_legit _softmax _softmax_backward_data _log_softmax
        _log_softmax_backward_data logsumexp _fused_rms_norm _fused_rms_norm_backward
        var_mean cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward
    """,
    "reduction": """
        sum mean amax amin max min argmax argmin any all prod var std norm
        linalg_vector_norm cumsum
    """,
    "random": "native_dropout bernoulli bernoulli_ rand rand_like randn uniform_ normal_",
    "indexing": """
        embedding embedding_dense_backward index index_put index_put_ _index_put_impl_
        index_add index_select gather scatter scatter_add scatter_ nll_loss_forward
        nll_loss_backward nll_loss2d_forward nll_loss2d_backward one_hot topk sort histc
    """,
    "transcendental": """
        gelu gelu_backward silu silu_backward exp exp2 log log2 log1p expm1 tanh
        tanh_backward sigmoid sigmoid_backward erf pow sin cos mish mish_backward softplus
        softplus_backward log_sigmoid_forward log_sigmoid_backward
    """,
    "copy": """
        clone copy_ contiguous cat stack constant_pad_nd repeat slice_backward
        select_backward split_with_sizes_copy
    """,
}
_KIND = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_PICKS = {"embedding", "gather", "index", "index_select"}
# FLOPs of a flash attention's backward, which computes the scores again, relative to its forward
_ATTENTION_BACKWARD = 2.5
# The CPU's flash attention skips blocks of this many keys that are fully masked
# (FlashAttentionKernel.cpp).
_CPU_BLOCK = 512
# operators that launch no kernel
_NO_KERNEL = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_fused_sdp_choice",
}
# A compiler computes kernels of these kinds together, in one kernel. Reads by index, and a loss's
# choice of one class, are parts of such kernels, too.
_FUSED_KINDS = {"elementwise", "transcendental", "normalisation", "reduction", "random", "copy"}
FUSED_READS = {
    "embedding",
    "gather",
    "index",
    "index_select",
    "nll_loss_forward",
    "nll_loss_backward",
}
# fused kernels that the compiler runs in the forward alone, and saves the result of
_NOT_REPEATED = {"embedding", "index_select", "cat", "stack", "constant_pad_nd", "repeat", "cumsum"}
# the norms whose statistics need a pass of their own
_NORMS_OF_CHANNELS = ("batch_norm", "group_norm")
# collectives that kernels send piece by piece while they compute
STREAMED_COLLECTIVES = ("broadcast", "shift")


def fuse(launches: Iterable[KernelLaunch]) -> bool:
    """Whether a compiler that fuses pointwise operators and reductions, such as inductor, computes
    all these kernels in a kernel with its neighbours.
    """
    return all(
        (launch.kind in _FUSED_KINDS or launch.operator in FUSED_READS)
        and not launch.sends
        and not any(norm in launch.operator for norm in _NORMS_OF_CHANNELS)
        for launch in launches
    )


def may_repeat(launches: Iterable[KernelLaunch]) -> bool:
    """Whether such a compiler may compute these kernels again in the backward, in a kernel with
    others, instead of saving what they compute.
    """
    launches = list(launches)
    return fuse(launches) and not any(
        launch.operator in _NOT_REPEATED or launch.kind == "random" for launch in launches
    )


def collectives_of_launch(launch: KernelLaunch) -> list[tuple[str, float, tuple[int, ...]]]:
    """The collective of a launch, as arguments of ``cost_model.collective_seconds``.

    Returns:
        The kind, the bytes of the tensor that is whole along the axes, and the mesh axes of the
        group. Empty for a launch that only waits for a collective.
    """
    if launch.call is None or launch.operator.endswith("wait_tensor"):
        return []
    args = launch.call[1]
    name = launch.operator.removeprefix("_c10d_functional::")
    group = tuple(int(axis) for axis in str(args[-1]).split(","))
    own = args[0].numel() * args[0].element_size()
    if name.startswith("all_gather_into_tensor"):
        return [("all_gather", float(own * args[1]), group)]
    if name == "all_to_all_single":
        sent = sum(args[2]) * own / max(args[0].shape[0], 1)
        is_shift = any(n == 0 for n in args[1])  # some ranks receive nothing: neighbours exchange
        return [("shift", float(sent), group) if is_shift else ("all_to_all", float(own), group)]
    kind = "reduce_scatter" if name == "reduce_scatter_tensor" else name.rstrip("_")
    return [(kind, float(own), group)]


class KernelRecorder(TorchDispatchMode):
    """Records the kernels that run inside its context.

    It keeps the tensors alive, so that no two tensors have the same storage id.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[
            tuple[
                str,
                list[torch.Tensor],
                list[torch.Tensor],
                tuple[Any, tuple[Any, ...], dict[str, Any]],
            ]
        ] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        read = _tensors([*args, *(kwargs or {}).values()])
        made = _tensors([out])
        own = {storage_id(t) for t in read}
        view = not func._schema.is_mutable and made and all(storage_id(t) in own for t in made)
        if not view and name not in _NO_KERNEL and (read or made):
            self._seen.append((name, read, made, (func, args, dict(kwargs or {}))))
        return out

    def launches(self, places: dict[int, int]) -> tuple[KernelLaunch, ...]:
        """The recorded kernels; ``places`` maps a storage id to the place of its tensor."""
        found = []
        for name, read, made, call in self._seen:
            # An operator that picks rows of a table reads as many bytes as it writes.
            limit = _nbytes(made[0]) if name in _PICKS and made else math.inf
            touched = tuple(
                (places.get(storage_id(t), TEMPORARY), int(min(_nbytes(t), limit)))
                for t in (*read, *made)
            )
            written = places.get(storage_id(made[0]), TEMPORARY) if made else TEMPORARY
            found.append(
                KernelLaunch(
                    name,
                    _KIND.get(name, "elementwise"),
                    touched,
                    written,
                    _flops(name, call[0], call[1], made),
                    call,
                )
            )
        return tuple(found)


def backward_launches(
    operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], places: dict[int, int]
) -> tuple[KernelLaunch, ...]:
    """The kernels that the backward launches.

    A backward that does not run on meta tensors counts as one kernel, which reads the results'
    gradients and all operands, and writes the operands' gradients.
    """
    inputs = [t for t in operands if t.requires_grad]
    if not outputs or not inputs:
        return ()
    arriving = [torch.empty_like(t) for t in outputs]
    try:
        with KernelRecorder() as recorder:
            gradients = torch.autograd.grad(outputs, inputs, arriving, allow_unused=True)
    except Exception:  # meta kernels raise any exception
        nbytes = [
            (places[storage_id(t)], t.numel() * t.dtype.itemsize)
            for t in (*outputs, *operands, *inputs)
        ]
        return (
            KernelLaunch("backward", "elementwise", tuple(nbytes), places[storage_id(inputs[0])]),
        )
    # A gradient has the place of its operand; an arriving gradient has the place of its result.
    gradient_of = {
        storage_id(g): places[storage_id(t)]
        for g, t in zip(gradients, inputs, strict=True)
        if g is not None
    }
    places = places | gradient_of
    arriving_of = {
        storage_id(g): places[storage_id(t)] for g, t in zip(arriving, outputs, strict=True)
    }
    return recorder.launches(places | arriving_of)


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return t.untyped_storage()._cdata


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _nbytes(t: torch.Tensor) -> int:
    """Bytes in memory; an expanded tensor counts the bytes of its storage only."""
    return min(t.numel() * t.dtype.itemsize, t.untyped_storage().nbytes())


def _flops(name: str, function: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> float:
    """FLOPs of a kernel, where a multiply-add counts two."""
    kind = _KIND.get(name)
    if kind not in ("matmul", "conv", "attention") or not made:
        return 0.0
    given = dict(zip((a.name for a in function._schema.arguments), args, strict=False))
    if kind == "matmul":
        right = next(given[key] for key in ("mat2", "batch2", "vec", "tensor") if key in given)
        return 2.0 * math.prod(made[0].shape) * right.shape[-2 if right.ndim > 1 else -1]
    if kind == "conv":
        out = given["grad_output"] if "grad_output" in given else made[0]
        gradients = sum(given["output_mask"][:2]) if "output_mask" in given else 1
        return 2.0 * out.numel() * math.prod(given["weight"].shape[1:]) * gradients
    q, k, v = (given[key] for key in ("query", "key", "value"))
    products = 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    part = 0.5 if given.get("is_causal") else 1.0
    if part < 1 and "for_cpu" in name:
        blocks = math.ceil(k.shape[-2] / _CPU_BLOCK)
        part = (blocks + 1) / (2 * blocks)
    return products * part * (_ATTENTION_BACKWARD if name.endswith("backward") else 1.0)
