"""Functions that are captured in another form than torch's.

Attention becomes a single device-neutral op, a matmul over several batch dims keeps them separate, and batch
normalisation is plain arithmetic (its fused op changes its running statistics outside the graph and cannot be sharded
over the batch).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from meshweave.capture.record import storage_of
from meshweave.capture.selected_rows import Masks, has_rows, on_rows
from meshweave.capture.trace import user_line
from meshweave.errors import CaptureError
from meshweave.interop import pytree
from meshweave.interop.fake import FakeTensor
from meshweave.ir import ops
from meshweave.ir.graph import wide_dtype
from meshweave.ir.recurrent import KINDS, recurrent


def _autocast(*values: Any) -> tuple[Any, ...]:
    """Values cast as autocast would for a matmul: meshweave's ops are not on its list."""
    if not torch.is_autocast_enabled("cpu"):
        return values
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    if query.dim() == 4:
        query, key, value = _of_one_batch(query, key, value)
        if attn_mask is not None and attn_mask.dim() not in (2, 4):  # a mask for each head
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    is_single_op = query.dim() == 4 and dropout_p == 0.0 and (attn_mask is None or not attn_mask.requires_grad)
    if is_single_op:
        return ops.attention(query, key, value, attn_mask, is_causal, scale)[0]
    return _spelled_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _of_one_batch(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Queries, keys and values with the batch that they broadcast to; heads as well, except for groups of heads."""
    (batch,) = torch.broadcast_shapes(*(x.shape[:1] for x in (q, k, v)))
    heads = max(k.shape[1], v.shape[1])
    wanted = (q, max(q.shape[1], heads)), (k, heads), (v, heads)
    return [x if x.shape[:2] == (batch, n) else x.expand(batch, n, -1, -1) for x, n in wanted]


def _spelled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """Attention as matmuls and a softmax, for dropout on the scores, a learnt bias or another rank than 4."""
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = _matmul(q * scale, k.transpose(-2, -1))
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, torch.full((), float("-inf"), dtype=scores.dtype, device=q.device))
    elif mask is not None:
        scores = scores + mask
    if mask is None:
        return _matmul(_dropout(torch.softmax(scores, -1), dropout_p), v)
    sees_nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(sees_nothing, 0.0), -1).masked_fill(sees_nothing, 0.0)
    return _matmul(_dropout(weights, dropout_p), v)


def _matmul(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Matmul over two or more batch dims as a single op: torch would merge them, and only the outermost could be
    sharded."""
    if args or kwargs or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 4:
        return torch.matmul(a, b, *args, **kwargs)
    a, b = _autocast(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return ops.matmul(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))


def _normalized(
    input: Tensor,
    over: list[int],
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """`input` minus its mean over dims `over`, divided by its standard deviation over them; vectors are along dim 1. If
    each sample has its own statistics, the running statistics take their mean over samples."""
    wide = [-1 if d == 1 else 1 for d in range(input.dim())]
    x = input.to(wide_dtype(input.dtype))
    running_mean, running_var = running
    if training or running_mean is None or running_var is None:
        mean = x.mean(over, keepdim=True)
        centred = x - mean
        var = (centred * centred).mean(over, keepdim=True)
    else:
        mean, var = running_mean.view(wide), running_var.view(wide)
        centred = x - mean
    if training and running_mean is not None and running_var is not None:
        count = math.prod(input.shape[d] for d in over)
        with torch.no_grad():
            seen = [s if 0 in over else s.mean(0) for s in (mean, var)]
            running_mean.mul_(1 - momentum).add_(seen[0].flatten(), alpha=momentum)
            running_var.mul_(1 - momentum).add_(seen[1].flatten(), alpha=momentum * count / max(count - 1, 1))
    out = centred * torch.rsqrt(var + eps)
    weight, bias = affine
    out = out if weight is None else out * weight.view(wide)
    out = out if bias is None else out + bias.view(wide)
    return out.to(input.dtype)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    over = [d for d in range(input.dim()) if d != 1]
    return _normalized(input, over, (weight, bias), (running_mean, running_var), training, momentum, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    over = list(range(2, input.dim()))
    return _normalized(input, over, (weight, bias), (running_mean, running_var), use_input_stats, momentum, eps)


def _parameters_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of torch.nn.functional in the form of torch's own: weight and bias first, whether to use cuDNN last."""
    return lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True: norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As a single op that saves its mask for backward as bool; PyTorch on CPU uses a mask of floats."""
    if inplace or not training or not 0.0 < p < 1.0:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


# Indexing in the form for capture.


def _is_position(index: Any) -> bool:
    """Whether torch would read the number of an index, to select what is there: a single integer, known in a step."""
    is_integer = isinstance(index, FakeTensor) and index.dtype not in (torch.bool, torch.uint8)
    return is_integer and index.dim() == 0 and not index.is_floating_point()


def _refuse_positions(index: Any) -> None:
    """CaptureError for a part at a position that the step computes: torch's is a view, which no op gives."""
    if any(map(_is_position, index if isinstance(index, tuple) else (index,))):
        raise CaptureError(
            "the model selects a part of a tensor at a position that the step computes",
            where=user_line(),
            got="x[i] with i a tensor of a single integer",
            hint="x.index_select(0, i.view(1))[0], which copies it; x.index_copy_(0, i.view(1), values[None]) "
            "to write, and to add x.index_add_(0, i.view(1), more[None])",
        )


def _get_item(x: Tensor, index: Any) -> Tensor:
    _refuse_positions(index)
    return x[index]


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    _refuse_positions(index)
    x[index] = value


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """torch's writes through strides, which a value of the trace does not have; of more dims, or wrapped around, that
    stays an error."""
    if x.dim() != 2 or (wrap and x.shape[0] > x.shape[1]):
        return x.fill_diagonal_(fill_value, wrap)
    return x.masked_fill_(torch.eye(*x.shape, dtype=torch.bool, device=x.device), fill_value)


# A loss in the form for capture: it does not read data, and has static shapes.


def _lengths(lengths: Any, like: Tensor) -> Tensor:
    """Lengths of sequences as a tensor [n]."""
    tensor = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64, device=like.device)
    return tensor.reshape(-1).to(torch.int64)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Like torch's, by an op whose result shapes do not depend on lengths.

    log_probs [t, n, c] or [t, c], targets [n, s], or those of all sequences concatenated, at offsets that depend on
    lengths: CaptureError if these are computed, because the shape of the targets would depend on data."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    if targets.dim() != 2 and not isinstance(target_lengths, FakeTensor):
        each = _lengths(target_lengths, targets).tolist()
        targets = pad_sequence(targets.split(each), batch_first=True)
    if targets.dim() != 2:
        raise CaptureError(
            "the targets of ctc_loss are concatenated, at offsets that depend on data",
            where=user_line(),
            got=f"targets {list(targets.shape)} for log_probs {list(log_probs.shape)}",
            expected=f"[{log_probs.shape[1]}, longest]",
            hint="pass a row of targets for each sequence, padded to the longest: padding is not read",
        )
    wide = log_probs.to(wide_dtype(log_probs.dtype))
    counts = _lengths(target_lengths, targets)
    loss = ops.ctc_loss(wide, targets, _lengths(input_lengths, targets), counts, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    if reduction == "mean":
        return (loss / counts.clamp(min=1)).mean()
    if reduction not in ("none", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss.sum() if reduction == "sum" else loss if is_batched else loss.squeeze(0)


# Recurrent layers of torch.nn in the form for capture: an op for each layer and direction.


def _network(kind: str, *args: Any) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like. A packed sequence, whose sizes are constants, runs as torch's."""
    if not isinstance(args[3], bool):  # (data, batch_sizes, state, params, has_biases, ...)
        return KINDS[kind](*args)  # type: ignore[no-any-return]
    x, state, params, has_biases, num_layers, dropout, is_training, is_bidirectional, is_batch_first = args
    hidden, cell = state if kind == "lstm" else (state, state.new_empty((*state.shape[:2], 0)))
    x, hidden, cell, *params = _autocast(x, hidden, cell, *params)
    is_projected = kind == "lstm" and hidden.shape[2] != cell.shape[2]
    size = 2 + 2 * has_biases + is_projected
    x = x.transpose(0, 1) if is_batch_first else x
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        outs: list[Tensor] = []
        for is_reverse in (False, True)[: 1 + is_bidirectional]:
            at = len(last)
            weights = list(params[at * size : (at + 1) * size])
            out, *ends = recurrent(x, hidden[at], cell[at], weights, kind, is_reverse)
            outs.append(out)
            last.append((ends[0], ends[1]))
        x = torch.cat(outs, -1) if is_bidirectional else outs[0]
        if dropout and is_training and layer < num_layers - 1:
            x = F.dropout(x, dropout, True)
    return (x.transpose(0, 1) if is_batch_first else x, *_stacked(last)[: 1 + (kind == "lstm")])


def _stacked(last: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([hidden for hidden, _ in last]), torch.stack([cell for _, cell in last])


# Functions whose backward depends on whether their operand is contiguous, which it then is where the graph runs, too.
_OF_CONTIGUOUS = (
    *(torch.det, torch.linalg.det, Tensor.det, torch.slogdet, torch.linalg.slogdet, Tensor.slogdet),
    *(torch.logdet, Tensor.logdet),
)


def _on_contiguous(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x.contiguous())


_TABLE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _parameters_first(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _parameters_first(_instance_norm),
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    F.ctc_loss: _ctc_loss,
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    Tensor.fill_diagonal_: _fill_diagonal,
    **{function: partial(_network, kind) for kind, function in KINDS.items()},
    **{function: partial(_on_contiguous, function) for function in _OF_CONTIGUOUS},
}


_LEAVES = frozenset(
    {int, float, bool, str, complex, type(None), type(...), slice, torch.dtype, torch.device, torch.Size}
    | {torch.layout, torch.memory_format}
)


# Ways to read or change a tensor that no trace can see: the description, and what to do instead.
_ARRAYS = (Tensor.numpy, Tensor.__array__)
_DLPACK = (Tensor.__dlpack__, torch.utils.dlpack.to_dlpack)  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_PAST_THE_TRACE: Mapping[Any, tuple[str, str]] = {
    _SET_DATA: (
        "assigns other values by .data",
        "compute a new tensor: x = x + (x.round() - x).detach() has the values of x.round() and the gradient of x",
    ),
    Tensor.data_ptr: ("reads the address of a tensor", "tell tensors apart by a name or a number of your own"),
    **dict.fromkeys(_DLPACK, ("passes a tensor by DLPack", "compute with torch only")),
    **dict.fromkeys(
        _ARRAYS,
        (
            "turns a tensor into a NumPy array",
            "compute with torch, or pass NumPy's result in the batch (of step.forward_only(batch))",
        ),
    ),
}


_GRAD_SCALER = torch.amp.grad_scaler.__file__


def _check_unscaled() -> None:
    """CaptureError for a product that `GradScaler.scale` computes: nobody would unscale the gradients."""
    if sys._getframe(2).f_code.co_filename == _GRAD_SCALER:
        raise CaptureError(
            "the model or the loss scales the loss by a torch.amp.GradScaler, but the step does so by itself",
            where=user_line(),
            got="a call of scaler.scale(...)",
            expected="the loss as it is",
            hint="remove the scaler. The loss is scaled wherever gradients are computed through float16, or by "
            "precision=mw.Precision(loss_scale=mw.LossScale(init_scale=...)); step.metrics has loss_scale and "
            "skipped_steps",
        )


def _check_seen(func: Any, x: Any) -> None:
    """CaptureError for accesses that the trace would not see. Address and elements of a constant may be read."""
    if func in (Tensor.data_ptr, *_ARRAYS) and not isinstance(x, FakeTensor):
        return
    what, hint = _PAST_THE_TRACE[func]
    raise CaptureError(f"the model or the loss {what}", where=user_line(), hint=hint)


def refuse_communication(name: str) -> NoReturn:
    """CaptureError for a query or a collective of torch.distributed in a traced step."""
    raise CaptureError(
        "the model or the loss asks torch.distributed for its ranks, or communicates",
        where=user_line(),
        got=f"a call of {name}",
        expected="the computation on the global batch, as on a single device",
        hint="remove it: batch, sums and counts are those of all ranks already. What divides by the world size, or "
        "multiplies by it to undo DDP's mean (loss * world_size), goes too; a mean over all ranks is x.mean()",
    )


class CapturedFunctions(TorchFunctionMode):
    """While active, the functions of the table are replaced; all others pass through.

    Tensors are replaced, too: `substituted` are pairs of a user's parameter or buffer and its substitute in the trace.
    A function that gets the former, from a closure or a list, runs on the latter. A function that would read or change
    a tensor outside the trace is a CaptureError; a NumPy array of a constant is read-only. A value assigned to `.data`
    of a parameter in `frozen` is written into it.
    """

    def __init__(self, substituted: Iterable[tuple[Tensor, Tensor]] = (), frozen: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._frozen = {id(tensor): tensor for tensor in frozen}
        substituted = list(substituted)
        self._stand_ins = {id(tensor) for pair in substituted for tensor in pair}
        self._substituted = {id(own): (own, traced) for own, traced in substituted}
        self._masks = Masks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.mul:
            _check_unscaled()
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor):
            return f"<{args[0].dtype} of shape {tuple(args[0].shape)}>"  # the step is logged while it is captured
        # Parameters and buffers are checked when the step has run.
        if func in _PAST_THE_TRACE and not (func == _SET_DATA and id(args[0]) in self._stand_ins):
            _check_seen(func, args[0])
        if not self._are_as_traced((args, kwargs)):
            args, kwargs = pytree.tree_map_only(Tensor, self._traced, (args, kwargs))
        if func == _SET_DATA and self._is_value_for(*args):
            with torch.no_grad():
                return args[0].copy_(args[1])
        result = self._call(func, args, kwargs)
        if func in _ARRAYS:
            result.flags.writeable = False
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._masks.call(func, args, kwargs)
        if result is not NotImplemented:
            return result
        function = _TABLE.get(func, func)
        if not self._are_as_traced((args, kwargs)) and has_rows((args, kwargs)):
            return on_rows(func, function, args, kwargs)
        result = function(*args, **kwargs)
        self._masks.note(func, args, kwargs, result)
        return result

    def _is_value_for(self, x: Tensor, value: Tensor) -> bool:
        """Whether `x.data = value` is the same as to write the value into x: not where x would share memory then."""
        owners = {storage_of(traced) for _, traced in self._substituted.values()}
        is_like = (x.shape, x.dtype) == (value.shape, value.dtype)
        return id(x) in self._frozen and is_like and storage_of(value) not in owners

    def _are_as_traced(self, value: Any) -> bool:
        """Whether no value inside needs a substitute; also False for an unknown kind of container."""
        if isinstance(value, Tensor):
            return id(value) not in self._substituted
        if type(value) is tuple or type(value) is list:
            return all(map(self._are_as_traced, value))
        if type(value) is dict:
            return all(map(self._are_as_traced, value.values()))
        return type(value) in _LEAVES

    def _traced(self, x: Tensor) -> Tensor:
        return self._substituted.get(id(x), (x, x))[1]
