"""Odd input that once came out wrong or failed without a name."""

import pytest
import torch

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDGenerationConfig, diffusion_loss, estimate_likelihood

VOCAB, MASK = 7, 6


@pytest.fixture(scope="module")
def model() -> RADDForMaskedDiffusion:
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=12
    )
    return RADDForMaskedDiffusion(config).eval()


IDS = torch.tensor([[1, 2, MASK], [3, 4, 5]])


def test_padding_by_the_mask_token_never_comes_out(model):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    out = model.diffusion_generate(IDS, attention_mask=mask, max_new_tokens=2, pad_token_id=MASK, seed=0)
    assert out.shape == (2, 5) and not bool((out == MASK).any())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_token_id": VOCAB, "max_new_tokens": 1}, r"`pad_token_id` must be an id in \[0, vocab_size=7\), got 7"),
        ({"suppress_tokens": [99]}, r"`suppress_tokens` must hold ids in \[0, vocab_size=7\), got \[99\]"),
        ({"suppress_tokens": 3}, "`suppress_tokens` must be a list of token ids, got 3"),
        ({"attention_mask": [[1, 1, 1]] * 2}, "`attention_mask` must have the shape.*got list"),
        ({"algorithm": "any_order", "order": torch.tensor([0.2, 1.7, 2.1])}, "`order` must hold integers"),
        ({"typical_p": 0.0}, r"`typical_p` must be None or a number in \(0.0, 1.0\], got 0.0"),
        ({"repetition_penalty": 0}, r"`repetition_penalty` must be None or a number in \(0.0, inf\], got 0"),
    ],
)
def test_generation_names_the_argument(model, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        model.diffusion_generate(IDS, **options)


def test_nothing_to_sample_is_refused(model):
    with pytest.raises(ValueError, match="`max_new_tokens` must be greater than 0 without `input_ids`"):
        model.diffusion_generate(max_new_tokens=0)


def test_options_are_checked_when_they_are_made():
    with pytest.raises(ValueError, match=r"Unknown generation option\(s\) \['num_beams'\]; valid options: "):
        RADDGenerationConfig(num_beams=4)


def test_positions_of_each_row_are_not_an_index(model):
    with pytest.raises(ValueError, match="`logits_to_keep` must be an integer, a 1-D tensor"):
        model(IDS, logits_to_keep=torch.tensor([[0], [1]]))


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1, 2]], {}, "`input_ids` must be an integer tensor of shape"),
        (IDS[1:], {"attention_mask": [[1, 1, 1]]}, "`attention_mask` must have the shape of `input_ids`.*got list"),
        (IDS, {}, r"`input_ids` must be clean text where it may be masked, got mask tokens \(id 6\)"),
    ],
)
def test_loss_names_the_argument(model, ids, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        diffusion_loss(model, ids, "ao", **options)


@pytest.mark.parametrize("loss_type", ["dse", "t_dce", "lambda_dce", "ao"])
def test_a_batch_without_any_mask_costs_nothing(model, loss_type: str):
    ids = IDS[1:].int()
    loss = diffusion_loss(model, ids, loss_type, loss_mask=torch.zeros_like(ids, dtype=torch.bool))
    assert loss.tolist() == [0.0]
    loss.sum().backward()


@pytest.mark.parametrize("value", [2, 0.5, True])
def test_every_nonzero_attention_value_means_a_real_token(model, value):
    torch.manual_seed(1)
    loud = RADDForMaskedDiffusion(model.config).eval()
    for parameter in loud.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    wanted = loud(IDS).logits
    assert torch.equal(loud(IDS, attention_mask=torch.full(IDS.shape, value)).logits, wanted)


def test_likelihood_turns_dropout_off_and_restores_it():
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.5
    )
    model = RADDForMaskedDiffusion(config).train()
    torch.nn.init.normal_(model.lm_head.weight)
    state = torch.get_rng_state()
    first, second = (estimate_likelihood(model, IDS[1:], num_samples=8, seed=0).nll for _ in range(2))
    assert torch.equal(first, second) and model.training
    assert torch.equal(state, torch.get_rng_state())
