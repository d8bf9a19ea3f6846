"""Attention on a device, with the device's kernel, for queries and keys at any positions of a sequence.

A causal mask depends on positions (`ir.causal`): it consists of a few rectangles and triangles, each computed by the
kernel without a mask tensor; masked blocks are not computed. Partial results of a query over several sets of keys,
(out, lse), are merged by `merged`: out = sum out_i exp(lse_i - lse), lse = log sum exp lse_i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshweave.ir.attention_kernels import Scoring, float_bias, kernel_for
from meshweave.ir.causal import Causal, CausalBlock, Runs


def merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two sets of keys, from that over each. A query that sees no key has lse -inf."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == float("-inf"), 0.0)
    left, right = (torch.exp(x - base).unsqueeze(-1) for x in (lse, more_lse))
    return (out * left + more * right).to(out.dtype), total


def merge_attention(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merged` in at least float32."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return merged(out.to(wide), lse.to(wide), more.to(wide), more_lse.to(wide))


def finish_attention(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A merged result in the kernels' convention: a query that sees no key has lse 0."""
    return out.to(dtype), lse.masked_fill(lse == float("-inf"), 0.0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: Causal | None,
    scale: float,
    is_part: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [b, h, s, d] over k, v [b, g, t, .]; `causal` has their positions under a causal mask. is_part:
    there are more keys elsewhere, so lse is in the form that `merged` needs. Otherwise, if the device has no kernel
    that returns lse and there is a single block, lse is zeros, which `backward` does not read.
    """
    if causal is not None and not causal.is_ascending:
        of_queries, of_keys = causal.queries, causal.keys
        own = (_ascending(q, of_queries), _ascending(k, of_keys), _ascending(v, of_keys), _ascending_bias(bias, causal))
        results = forward(*own, causal.ascending, scale, is_part)
        return _in_order_of(results[0], of_queries), _in_order_of(results[1], of_queries)
    k, v = _repeat_groups(q, k), _repeat_groups(q, v)
    parts = _parts(q, k, causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    if _is_single(parts, q) and not is_part:
        keys, values = k[:, :, parts[0].keys], v[:, :, parts[0].keys]
        scoring = _scoring(bias, parts[0], scale)
        if kernel_for(q, keys, values, scoring):
            return _block(q, keys, values, scoring)
        return _plain(q, keys, values, scoring), q.new_zeros(q.shape[:-1], dtype=wide)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for part in parts:
        scoring = _scoring(bias, part, scale)
        more, more_lse = _block(q[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys], scoring)
        more_lse = _without_blind(more_lse.to(wide), scoring)
        rows = merged(out[:, :, part.rows], lse[:, :, part.rows], more.to(wide), more_lse)
        out[:, :, part.rows], lse[:, :, part.rows] = rows
    return (out.to(q.dtype), lse) if is_part else finish_attention(out, lse, q.dtype)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: Causal | None,
    scale: float,
    is_part: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the weight of a pair is exp(score - lse)."""
    if causal is not None and not causal.is_ascending:
        of_queries, of_keys = causal.queries, causal.keys
        grad, q, out, lse = (_ascending(x, of_queries) for x in (grad, q, out, lse))
        own = (_ascending(k, of_keys), _ascending(v, of_keys), _ascending_bias(bias, causal), out, lse)
        grads = backward(grad, q, *own, causal.ascending, scale, is_part)
        return _in_order_of(grads[0], of_queries), _in_order_of(grads[1], of_keys), _in_order_of(grads[2], of_keys)
    parts = _parts(q, k, causal)
    if _is_single(parts, q) and not is_part:
        (part,) = parts
        keys, values, scoring = k[:, :, part.keys], v[:, :, part.keys], _scoring(bias, part, scale)
        if kernel_for(q, keys, values, scoring) is None:
            gq, gk, gv = _recomputed_backward(grad, q, keys, values, scoring)
            return gq, _padded(gk, k), _padded(gv, v)
    wide_k, wide_v = _repeat_groups(q, k), _repeat_groups(q, v)

    def of_part(part: CausalBlock) -> tuple[Tensor, Tensor, Tensor]:
        g, a, o, sums = (x[:, :, part.rows] for x in (grad, q, out, lse))
        keys, values = wide_k[:, :, part.keys], wide_v[:, :, part.keys]
        return _block_backward(g, a, keys, values, o, sums, _scoring(bias, part, scale))

    if _is_single(parts, q):
        gq, gk, gv = of_part(parts[0])
        return gq, _sum_groups(_padded(gk, k), k), _sum_groups(_padded(gv, v), v)
    total = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, wide_k, wide_v)]
    for part in parts:
        for whole, place, more in zip(total, (part.rows, part.keys, part.keys), of_part(part), strict=True):
            whole[:, :, place] += more
    return total[0].to(q.dtype), _sum_groups(total[1], k).to(k.dtype), _sum_groups(total[2], v).to(v.dtype)


def _ascending(x: Tensor, runs: Runs, dim: int = 2) -> Tensor:
    """x with the runs along `dim` sorted by position."""
    order = sorted(range(len(runs)), key=runs.__getitem__)
    pieces = x.split([size for _, size in runs], dim)
    return x if order == list(range(len(runs))) else torch.cat([pieces[i] for i in order], dim)


def _in_order_of(x: Tensor, runs: Runs) -> Tensor:
    """The inverse of `_ascending`."""
    order = sorted(range(len(runs)), key=runs.__getitem__)
    pieces = x.split([runs[i][1] for i in order], 2)
    return x if order == list(range(len(runs))) else torch.cat([pieces[order.index(i)] for i in range(len(runs))], 2)


def _ascending_bias(bias: Tensor | None, causal: Causal) -> Tensor | None:
    """`_ascending` of a bias that broadcasts to [b, h, s, t]."""
    for dim, table in ((-1, causal.keys), (-2, causal.queries)):
        if bias is not None and bias.dim() >= -dim and bias.shape[dim] > 1:
            bias = _ascending(bias, table, dim)
    return bias


def _without_blind(lse: Tensor, scoring: Scoring) -> Tensor:
    """lse with -inf for queries to which a bias leaves no key: kernels return 0 for them (torch 2.13)."""
    bias = scoring.bias
    if bias is None:
        return lse
    seen = bias if bias.dtype == torch.bool else bias != float("-inf")
    if scoring.is_causal:
        seen = seen & torch.ones(lse.shape[-1], lse.shape[-1], dtype=torch.bool, device=lse.device).tril()
    return lse.masked_fill(~seen.any(-1), float("-inf"))


def _parts(q: Tensor, k: Tensor, causal: Causal | None) -> tuple[CausalBlock, ...]:
    if causal is not None and q.numel():
        return causal.blocks
    return (CausalBlock(slice(0, q.shape[2]), slice(0, k.shape[2]), False),)


def _is_single(parts: tuple[CausalBlock, ...], q: Tensor) -> bool:
    return len(parts) == 1 and parts[0].rows == slice(0, q.shape[2])


def _scoring(bias: Tensor | None, block: CausalBlock, scale: float) -> Scoring:
    """The Scoring of a block, with the block's part of the bias, which broadcasts to [b, h, s, t]."""
    for dim, cut in ((-1, block.keys), (-2, block.rows)):
        if bias is not None and bias.dim() >= -dim and bias.shape[dim] > 1:
            bias = bias.narrow(dim, cut.start, cut.stop - cut.start)
    return Scoring(bias, block.is_causal, scale)


def _padded(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of all keys; the last keys get zeros."""
    missing = like.shape[2] - grad.shape[2]
    return torch.nn.functional.pad(grad, (0, 0, 0, missing)) if missing else grad


# The kernels: queries and keys begin at the same position, keys and values have as many heads as queries.


def _block(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.shape[2] == 0:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return out, q.new_full(q.shape[:-1], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    if kernel := kernel_for(q, k, v, scoring):
        return kernel.forward(q, k, v, scoring)
    scores = _scores(q, k, scoring)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse)
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if kernel := kernel_for(q, k, v, scoring):
        return kernel.backward(grad, q, k, v, out, lse, scoring)
    return _spelled_backward(grad, q, k, v, out, lse, scoring)


def _repeat_groups(q: Tensor, x: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape == like.shape:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _plain(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    bias, is_causal, scale = scoring.bias, scoring.is_causal, scoring.scale
    if q.numel() == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if bias is not None and is_causal:  # torch takes only one of the two arguments
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = float_bias(bias, q.dtype)
        bias, is_causal = None if mask is None else mask.masked_fill(~seen, float("-inf")), False
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.0, is_causal, scale=scale).contiguous()


def _recomputed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward by running the device's forward kernel again; by formula inside a dispatched op (no autograd there)."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        wide = [leaves[0], _repeat_groups(q, leaves[1]), _repeat_groups(q, leaves[2])]
        out = _plain(wide[0], wide[1], wide[2], scoring)
    if out.requires_grad:
        gq, gk, gv = torch.autograd.grad(out, leaves, grad)
        return gq, gk, gv
    wide_k, wide_v = _repeat_groups(q, k), _repeat_groups(q, v)
    lse = torch.logsumexp(_scores(q, wide_k, scoring), -1)
    gq, gk, gv = _spelled_backward(grad, q, wide_k, wide_v, out, lse, scoring)
    return gq, _sum_groups(gk, k), _sum_groups(gv, v)


def _scores(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """q k^T scale + bias in at least float32, -inf where masked; the whole matrix at once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * scoring.scale
    mask = float_bias(scoring.bias, scores.dtype)
    scores = scores if mask is None else scores + mask
    if scoring.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); zeros for a query that sees no key, whose lse is -inf."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def _spelled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of softmax(q k^T scale + bias) v, in at least float32."""
    scores = _scores(q, k, scoring)
    weights = _weights(scores, lse)
    g, a, b, c, o = (x.to(scores.dtype) for x in (grad, q, k, v, out))
    d_scores = weights * (g @ c.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * scoring.scale
    d_k, d_v = d_scores.transpose(-2, -1) @ a, weights.transpose(-2, -1) @ g
    return (d_scores @ b).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
