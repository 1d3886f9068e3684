"""Which kernels a call launches, forward and backward, and what they read and write: torch is
asked, no table has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TEMPORARY = (
    -1000
)  # the place of a tensor that is neither an operand nor a result, nor the gradient of one


class KernelLaunch(NamedTuple):
    """One kernel.

    Attributes:
        operator: the ATen operator's name, "mm" or "gelu_backward".
        kind: as the cost model knows it, one of ``cluster.WORK``.
        touched: for each tensor read or written its place and its bytes. An operand and its
            gradient have the operand's number, the first result and its gradient -1, the second -2,
            what is neither OTHER.
        writes: the place of what it writes first.
        flops: of products of matrices, convolutions and fused attention.
        call: the operator with its arguments, meta tensors among them, to run it again on a device.
    """

    operator: str
    kind: str
    touched: tuple[tuple[int, int], ...]
    writes: int
    flops: float = 0.0
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def sends(self) -> bool:
        """Whether it is a collective, or waits for one."""
        return "c10d" in self.operator

    @property
    def nbytes(self) -> int:
        """Read and written."""
        return sum(nbytes for _, nbytes in self.touched)


_KINDS = {
    "matmul": "mm addmm bmm baddbmm mv addmv dot _grouped_mm",
    "conv": "convolution convolution_backward _convolution slow_conv2d_forward mkldnn_convolution",
    "attention": """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward""",
    "normalisation": """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward _native_batch_norm_legit _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp
_fused_rms_norm _fused_rms_norm_backward var_mean cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward""",
    "reduction": "sum mean amax amin max min argmax argmin any all prod var std norm "
    "linalg_vector_norm cumsum",
    "random": "native_dropout bernoulli bernoulli_ rand rand_like randn uniform_ normal_",
    "indexing": """embedding embedding_dense_backward index index_put index_put_ _index_put_impl_ index_add index_select gather scatter
scatter_add scatter_ nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward one_hot topk sort histc""",
    "transcendental": """gelu gelu_backward silu silu_backward exp exp2 log log2 log1p expm1 tanh tanh_backward sigmoid sigmoid_backward erf
pow sin cos mish mish_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward""",
    "copy": "clone copy_ contiguous cat stack constant_pad_nd repeat slice_backward "
    "select_backward split_with_sizes_copy",
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_PICKS = {"embedding", "gather", "index", "index_select"}
# products of a flash attention's backward, which computes the scores again, to those of its forward
_ATTENTION_BACKWARD = 2.5
# keys: of those that are masked, the CPU's flash attention leaves out whole blocks
# (FlashAttentionKernel.cpp)
_CPU_BLOCK = 512
_NOTHING = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_fused_sdp_choice",
}


STREAMED_COLLECTIVES = (
    "broadcast",
    "shift",
)  # kernels send these piece by piece, while they compute


def collectives_of_launch(launch: KernelLaunch) -> list[tuple[str, float, tuple[int, ...]]]:
    """What a collective is for ``cost_model.collective_seconds``: its kind, the bytes of its tensor where that
    is whole, the mesh axes of its group. Empty for what waits for one."""
    if launch.call is None or launch.operator.endswith("wait_tensor"):
        return []
    args = launch.call[1]
    name, group = (
        launch.operator.removeprefix("_c10d_functional::"),
        tuple(int(axis) for axis in str(args[-1]).split(",")),
    )
    own = args[0].numel() * args[0].element_size()
    if name.startswith("all_gather_into_tensor"):
        return [("all_gather", float(own * args[1]), group)]
    if name == "all_to_all_single":
        moved = sum(args[2]) * own / max(args[0].shape[0], 1)
        alone = any(n == 0 for n in args[1])  # from neighbours, to neighbours
        return [("shift", float(moved), group) if alone else ("all_to_all", float(own), group)]
    return [
        (
            "reduce_scatter" if name == "reduce_scatter_tensor" else name.rstrip("_"),
            float(own),
            group,
        )
    ]


class KernelRecorder(TorchDispatchMode):
    """Notes the kernels that run inside. Tensors that it saw stay alive, so that their addresses
    stay their own.
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
        if not view and name not in _NOTHING and (read or made):
            self._seen.append((name, read, made, (func, args, dict(kwargs or {}))))
        return out

    def launches(self, places: dict[int, int]) -> tuple[KernelLaunch, ...]:
        """What ran, given the place of each storage."""
        found = []
        for name, read, made, call in self._seen:
            most = (
                _nbytes(made[0]) if name in _PICKS and made else math.inf
            )  # of a table they read what they pick
            touched = tuple(
                (places.get(storage_id(t), TEMPORARY), int(min(_nbytes(t), most)))
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


def storage_id(t: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others."""
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
    """What lies in memory: an expanded tensor is as small as it was."""
    return min(t.numel() * t.dtype.itemsize, t.untyped_storage().nbytes())


def _flops(name: str, function: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> float:
    """A multiply-add is two."""
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
