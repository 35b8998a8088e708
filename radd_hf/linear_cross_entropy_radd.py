# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The output layer and its cross-entropy in one, in chunks: no tensor of logits outlives its chunk.

Shapes: N scored positions, D width, V vocabulary (mask column included), C positions of a chunk.
"""

import importlib
import inspect

import torch
from torch import nn

# Logits of a chunk (two such buffers exist): 33 MB in float32 on a CPU, where larger chunks are no faster; on an
# accelerator each chunk also reads and writes the float32 gradient of the output layer once, so chunks are larger.
CHUNK_ELEMENTS = {"cpu": 2**23, "accelerator": 2**26}


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.LongTensor,
    excluded: int | None = None,
    expected_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    -log softmax(W h + b)[target] at each position, (N,), nats, without a tensor (N, V).

    Value and gradients are those of `nn.functional.cross_entropy` on the logits. The gradients of W and b are sums
    over positions, so they can be formed with the logits of a chunk at hand only if what will be sent back to each
    position is known by then: `expected_grad` says it up to one common factor. If what comes is something else, or
    nothing was said, the logits of each chunk are computed a second time.

    On CUDA, where liger-kernel is installed, its fused kernel does the same (and always computes them twice).

    Args:
        hidden (`torch.Tensor` of shape `(N, D)`): Final hidden states h.
        weight (`torch.Tensor` of shape `(V, D)`): W.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): b.
        targets (`torch.LongTensor` of shape `(N,)`): Ids of the clean tokens.
        excluded (`int`, *optional*): A column at -inf: the mask token.
        expected_grad (`torch.Tensor` of shape `(N,)`, *optional*): Not negative; a hint, never a weight.

    Returns:
        `torch.Tensor` of shape `(N,)`, float32 (float64 for float64 states).
    """
    fused = _liger_function() if hidden.is_cuda and len(hidden) else None
    if fused is not None:
        return liger_cross_entropy(fused, hidden, weight, bias, targets, excluded)
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    wanted = torch.is_grad_enabled()  # inside the function it is off
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, excluded, expected_grad, dtype, wanted)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is `nn.Linear` and nothing more, so that its weight and bias say all: no adapter, no hook."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)  # as accelerate's offloading sets it
        and not (module._forward_hooks or module._forward_pre_hooks)  # as DeepSpeed gathers a weight with
        and type(module.weight) in (nn.Parameter, torch.Tensor)  # a sharded or quantised one is a subclass
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """
    Forward keeps dL/dh for a unit gradient (N, D), exact for any gradient by rows, and the sums over positions that
    `expected_grad` foretells: dL/dW (V, D) and dL/db (V,), accumulated in float32.
    """

    @staticmethod
    @torch.compiler.disable
    def forward(ctx, hidden, weight, bias, targets, excluded, expected_grad, dtype, wanted):
        need_hidden, need_weight, need_bias = (wanted and needed for needed in ctx.needs_input_grad[:3])
        need_sums = need_weight or need_bias
        share = None
        if need_sums and expected_grad is not None and len(hidden):
            largest = expected_grad.max()
            share = (expected_grad / largest.clamp(min=torch.finfo(expected_grad.dtype).tiny)).to(_accurate(dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            nll, grad_hidden, sums = _run(
                hidden, weight, bias, targets, excluded, dtype, need_hidden, share, (need_weight, need_bias)
            )
        ctx.save_for_backward(
            hidden if need_sums else None, weight if need_sums else None, bias, targets, grad_hidden, share, *sums
        )
        ctx.excluded, ctx.dtype = excluded, dtype
        return nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, targets, grad_hidden, share, grad_weight, grad_bias = ctx.saved_tensors
        need_weight, need_bias = ctx.needs_input_grad[1:3]
        if need_weight or need_bias:
            factor = _common_factor(grad, share)
            if factor is None:
                _, _, (grad_weight, grad_bias) = _run(
                    hidden, weight, bias, targets, ctx.excluded, ctx.dtype, False, grad, (need_weight, need_bias)
                )
                factor = 1.0
            grad_weight = None if grad_weight is None else grad_weight.mul_(factor).to(weight.dtype)
            grad_bias = None if grad_bias is None else grad_bias.mul_(factor).to(bias.dtype)
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad[:, None]).to(grad_hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float64 for float64, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _common_factor(grad: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor | None:
    """f with grad = f share at every position to a few roundings, or None; shares are at most 1, the largest is 1."""
    if share is None:
        return None
    factor = grad[share.argmax()]
    error = (grad - factor * share).abs()
    return factor if bool((error <= 1e-6 * (factor * share).abs()).all()) else None


def _run(hidden, weight, bias, targets, excluded, dtype, need_hidden, share, need_sums):
    """
    nll (N,); dL/dh (N, D) for a unit gradient at each position, or None; dL/dW (V, D) and dL/db (V,) for the gradient
    `share` (N,), or None. Logits, softmax and sums are in float32, products in `dtype`.
    """
    accurate = _accurate(dtype)
    size, (vocabulary, width) = len(hidden), weight.shape
    length = CHUNK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "accelerator"] // vocabulary
    length = max(1, min(length, size))
    options = {"dtype": accurate, "device": hidden.device}
    nll = torch.empty(size, **options)
    grad_hidden = torch.empty_like(hidden, dtype=hidden.dtype) if need_hidden else None
    want_weight, want_bias = (needed and (share is not None or size == 0) for needed in need_sums)
    grad_weight = torch.zeros(vocabulary, width, **options) if want_weight else None
    grad_bias = torch.zeros(vocabulary, **options) if want_bias else None
    projection = weight.to(dtype)
    logits_buffer, softmax_buffer = (torch.empty(length, vocabulary, **options) for _ in range(2))
    for start in range(0, size, length):
        part = slice(start, start + length)
        states, target = hidden[part].to(dtype), targets[part, None]
        logits = logits_buffer[: len(states)]
        if dtype == accurate:
            torch.mm(states, projection.t(), out=logits)
        else:
            logits.copy_(states @ projection.t())
        if bias is not None:
            logits += bias
        if excluded is not None:
            logits[:, excluded] = float("-inf")
        error = torch.softmax(logits, -1, out=softmax_buffer[: len(states)])
        # by the largest probability, at least 1 / V: exact where the target's own underflows
        nll[part] = logits.amax(-1) - error.amax(-1).log() - logits.gather(1, target)[:, 0]
        if grad_hidden is None and not want_weight and not want_bias:
            continue
        error.scatter_add_(1, target, error.new_full(target.shape, -1.0))  # softmax - onehot, (C, V)
        small = error.to(dtype)
        if grad_hidden is not None:
            grad_hidden[part] = small @ projection
        if want_weight:
            # the share on h, not on the error: in float16 a small share of a small error would vanish
            scaled = (states * share[part, None]).to(dtype)
            if dtype == accurate:
                grad_weight.addmm_(small.t(), scaled)
            else:
                grad_weight += small.t() @ scaled
        if want_bias:
            grad_bias.addmv_(error.t(), share[part].to(accurate))
    return nll, grad_hidden, (grad_weight, grad_bias)


def _liger_function() -> type[torch.autograd.Function] | None:
    """Liger's fused linear cross-entropy, or None where it is not installed or wrong for a gradient by positions."""
    try:  # by name: a shipped file may import nothing else that is not always there
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError:
        return None
    # older versions multiply the summed gradient of W by the gradient of the first position
    supported = "token_grad_output" in inspect.signature(liger.fused_linear_cross_entropy_forward).parameters
    return liger.LigerFusedLinearCrossEntropyFunction if supported else None


def liger_cross_entropy(
    function: type[torch.autograd.Function],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.LongTensor,
    excluded: int | None,
) -> torch.Tensor:
    """`linear_cross_entropy` by Liger's `function`: it knows no excluded column, but a bias of -inf is the same."""
    if bias is None and excluded is not None:
        bias = torch.zeros(len(weight), dtype=hidden.dtype, device=hidden.device)
    if excluded is not None:
        column = torch.arange(len(weight), device=hidden.device) == excluded
        bias = bias.masked_fill(column, float("-inf"))
    # positions: class weights, ignored id, z-loss, smoothing, reduction, soft cap, z-loss asked for, type of the sums
    options = (None, -100, 0.0, 0.0, "none", None, False, torch.float32)
    return function.apply(hidden, weight, targets, bias, *options)[0]


__all__ = ["is_plain_linear", "linear_cross_entropy"]
