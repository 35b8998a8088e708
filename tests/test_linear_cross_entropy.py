"""The fused output layer and cross-entropy: value and gradients of the dense form, and what never exists."""

import inspect
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from radd_hf import RADDConfig, RADDForMaskedDiffusion
from radd_hf import linear_cross_entropy_radd as module
from radd_hf.linear_cross_entropy_radd import is_plain_linear, linear_cross_entropy
from radd_hf.losses import LOSS_TYPES, corrupt, diffusion_loss_terms, row_weights, weigh
from radd_hf.noise_schedule_radd import get_noise_schedule

N, D, V, M = 37, 8, 23, 5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple:
    """hidden, weight, bias and targets; logits of some size, so that softmax is far from uniform."""
    g = seeded(0)
    hidden, weight = (
        (2 * torch.randn(s, D, generator=g, dtype=torch.float64)).to(dtype).requires_grad_() for s in (N, V)
    )
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(V - 1, (N,), generator=g)
    return hidden, weight, b, targets + (targets >= M)


def dense(hidden, weight, bias, targets):
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.masked_fill(torch.arange(V) == M, float("-inf"))
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def gradients(token_nll: torch.Tensor, factor: torch.Tensor, leaves: tuple) -> list[torch.Tensor]:
    return torch.autograd.grad((token_nll * factor).sum(), [leaf for leaf in leaves if leaf is not None])


@pytest.fixture
def chunks_of_five(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 5 * V})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list:
    """One entry for each time the logits are computed."""
    calls, run = [], module._run
    monkeypatch.setattr(module, "_run", lambda *args: (calls.append(args), run(*args))[1])
    return calls


@pytest.mark.usefixtures("chunks_of_five")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hint", ["right", "scaled", "wrong", "none"])
def test_value_and_gradients_are_those_of_the_dense_form(hint: str, bias: bool, runs: list):
    leaves = problem(bias=bias)
    factor = torch.rand(N, generator=seeded(1)) * 100
    expected_grad = {"right": factor, "scaled": 0.01 * factor, "wrong": torch.ones(N), "none": None}[hint]
    nll = linear_cross_entropy(*leaves, M, expected_grad)
    reference = dense(*leaves)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, reference, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(nll, factor, leaves[:3]), gradients(reference, factor, leaves[:3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
    assert len(runs) == (1 if hint in ("right", "scaled") else 2)  # logits are computed again only without a true hint


@pytest.mark.usefixtures("chunks_of_five")
def test_float64_to_twelve_digits():
    leaves = problem(torch.float64)
    factor = torch.rand(N, generator=seeded(1), dtype=torch.float64)
    nll, reference = linear_cross_entropy(*leaves, M, factor), dense(*leaves)
    torch.testing.assert_close(nll, reference, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(nll, factor, leaves[:3]), gradients(reference, factor, leaves[:3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_probability_that_underflows_has_its_logarithm():
    weight = torch.zeros(V, D)
    weight[0, 0] = 1.0
    hidden = torch.zeros(1, D)
    hidden[0, 0] = 500.0
    assert linear_cross_entropy(hidden, weight, None, torch.tensor([1]), M).item() == pytest.approx(500.0)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_what_needs_no_gradient_gets_none(frozen: tuple[int, ...]):
    leaves = list(problem())
    for i in frozen:
        leaves[i] = leaves[i].detach()
    nll = linear_cross_entropy(*leaves, M, torch.ones(N))
    free = [leaf for i, leaf in enumerate(leaves[:3]) if i not in frozen]
    assert nll.requires_grad == bool(free)
    if free:
        factor = torch.ones(N)
        expected = gradients(dense(*leaves), factor, tuple(free))
        for one, other in zip(gradients(nll, factor, tuple(free)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nothing_scored_has_a_gradient_of_zero():
    hidden, weight, bias, targets = problem()
    nll = linear_cross_entropy(hidden[:0], weight, bias, targets[:0], M, torch.zeros(0))
    assert nll.shape == (0,)
    for gradient in torch.autograd.grad(nll.sum(), (weight, bias)):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_precision_weights(dtype: torch.dtype):
    """Products in the half type, softmax and sums in float32; against the dense form in float32."""
    leaves, factor = (
        problem(),
        1e5 * torch.rand(N, generator=seeded(2)) ** 8,
    )  # factors beyond float16's largest number
    expected = gradients(dense(*leaves), factor, leaves[:3])
    with torch.autocast("cpu", dtype):
        nll = linear_cross_entropy(*leaves, M, factor)
    assert nll.dtype == torch.float32
    halves = tuple(x.detach().to(dtype).requires_grad_() for x in leaves[:3])
    pure = linear_cross_entropy(*halves, leaves[3], M, factor)
    assert pure.dtype == torch.float32
    for value, of in ((nll, leaves[:3]), (pure, halves)):
        torch.testing.assert_close(value, dense(*leaves), rtol=0.05, atol=0.2)
        for one, other in zip(
            gradients(value, factor if of is not halves else factor / 1e3, of), expected, strict=True
        ):
            assert one.dtype == of[0].dtype
            other = other / (1e3 if of is halves else 1)
            assert (one - other).abs().max() < 0.03 * other.abs().max()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return result


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_tensor_of_logits_and_one_computation_of_them(loss_type: str, monkeypatch: pytest.MonkeyPatch, runs: list):
    """Every loss tells the output layer its weights, so nothing is computed twice; nothing is as large as N x V."""
    vocabulary, chunk = 997, 4
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk * vocabulary})
    config = RADDConfig(vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = RADDForMaskedDiffusion(config)
    x0 = torch.randint(0, vocabulary - 1, (8, 16), generator=seeded(3))
    with Largest() as largest:
        terms = diffusion_loss_terms(model, x0, loss_type, generator=seeded(4))
        (terms.loss.sum() / 77.0).backward()
    assert len(runs) == 1
    assert terms.num_masked.sum() > 4 * chunk
    assert largest.size == model.lm_head.weight.numel()  # > chunk * V


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_row_weights_are_the_derivative(loss_type: str):
    schedule = get_noise_schedule("log_linear")
    x0 = torch.zeros(64, 12, dtype=torch.long)
    corruption = corrupt(
        x0, loss_type, 3, torch.ones_like(x0, dtype=torch.bool), noise_schedule=schedule, generator=seeded(5)
    )
    nll = torch.rand(64, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(weigh(nll, corruption, loss_type, schedule).sum(), nll)
    torch.testing.assert_close(row_weights(corruption, loss_type, schedule), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_parameter_of_a_model_has_the_gradient_of_full_logits(loss_type: str, tied: bool, make_model):
    model = make_model(tie_word_embeddings=tied)
    x0 = torch.tensor([0, 2, 3])[torch.randint(0, 3, (12, 6), generator=seeded(6))]
    schedule = get_noise_schedule(model.config)
    terms = diffusion_loss_terms(model, x0, loss_type, generator=seeded(7))
    terms.loss.mean().backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    drawn = corrupt(
        x0, loss_type, 1, torch.ones_like(x0, dtype=torch.bool), noise_schedule=schedule, generator=seeded(7)
    )
    log_probs = model(drawn.noisy_ids).logits.log_softmax(-1).gather(-1, x0[..., None])[..., 0]
    loss = weigh(-torch.where(drawn.masked, log_probs, 0.0).sum(-1), drawn, loss_type, schedule)
    torch.testing.assert_close(terms.loss, loss, rtol=1e-5, atol=1e-5)
    loss.mean().backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_token_nll_needs_labels_and_a_mask(make_model):
    model, ids = make_model(), torch.tensor([[0, 1, 2]])
    for options in ({"labels": ids}, {"logits_to_keep": ids == 1}, {"labels": ids, "logits_to_keep": 1}):
        with pytest.raises(ValueError, match="`return_token_nll` needs `labels` and a boolean `logits_to_keep`"):
            model(ids, return_token_nll=True, **options)


def test_only_a_plain_layer_is_bypassed(make_model):
    """With a hook, an adapter or another forward the layer's own forward runs, to the same loss."""
    model, x0 = make_model(), torch.tensor([[0, 2, 3, 2]] * 4)
    expected = diffusion_loss_terms(model, x0, "ao", generator=seeded(8)).loss
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(1))
    assert not is_plain_linear(model.lm_head)
    torch.testing.assert_close(diffusion_loss_terms(model, x0, "ao", generator=seeded(8)).loss, expected)
    assert seen
    handle.remove()
    assert is_plain_linear(model.lm_head)
    model.lm_head.forward = model.lm_head.forward
    assert not is_plain_linear(model.lm_head)
    assert not is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


def training_gradient(make_model, prepare=lambda model: model) -> torch.Tensor:
    model = make_model(num_hidden_layers=2).train()
    x0 = torch.tensor([[0, 2, 3, 2]] * 8)
    diffusion_loss_terms(prepare(model), x0, "lambda_dce", generator=seeded(9)).loss.mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_a_checkpointed_model_has_the_same_gradient(make_model):
    def prepare(model):
        model.gradient_checkpointing_enable()
        return model

    torch.testing.assert_close(training_gradient(make_model, prepare), training_gradient(make_model))


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradient(make_model):
    compiled = training_gradient(make_model, lambda model: torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(compiled, training_gradient(make_model))


class StandIn(torch.autograd.Function):
    """Liger's interface, in the positions of its arguments, by the dense form."""

    @staticmethod
    def forward(ctx, _input, weight, target, bias, ce_weight, ignore_index, z, smoothing, reduction, softcap, rz, acc):
        assert (ce_weight, ignore_index, z, smoothing, reduction, softcap, rz) == (
            None,
            -100,
            0,
            0,
            "none",
            None,
            False,
        )
        assert acc == torch.float32 and bias[M] == float("-inf") and bias.isinf().sum() == 1
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (_input, weight, bias)]
            logits = nn.functional.linear(*leaves)
            loss = nn.functional.cross_entropy(logits, target, reduction="none")
        ctx.leaves, ctx.loss = leaves, loss
        return loss.detach(), None, None, None

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, weight, bias = torch.autograd.grad(ctx.loss, ctx.leaves, grad)
        return hidden, weight, None, bias, *([None] * 8)


@pytest.mark.parametrize("bias", [True, False])
def test_liger_is_called_with_the_mask_column_in_the_bias(bias: bool):
    leaves, factor = problem(bias=bias), torch.rand(N, generator=seeded(1))
    nll, reference = module.liger_cross_entropy(StandIn, *leaves, M), dense(*leaves)
    torch.testing.assert_close(nll, reference)
    for one, other in zip(gradients(nll, factor, leaves[:3]), gradients(reference, factor, leaves[:3]), strict=True):
        torch.testing.assert_close(one, other)


def test_liger_itself_agrees_in_tritons_interpreter():
    """Where liger-kernel is installed: its kernel on the CPU, in a process of its own since the switch is global."""
    pytest.importorskip("liger_kernel")
    code = inspect.cleandoc(
        """
        import torch
        from test_linear_cross_entropy import M, N, dense, gradients, module, problem, seeded
        leaves, factor = problem(), torch.rand(N, generator=seeded(1))
        nll, reference = module.liger_cross_entropy(module._liger_function(), *leaves, M), dense(*leaves)
        torch.testing.assert_close(nll, reference)
        for pair in zip(gradients(nll, factor, leaves[:3]), gradients(reference, factor, leaves[:3])):
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
        """
    )
    here = pathlib.Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
