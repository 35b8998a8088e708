"""Odd input that once came out wrong or failed without a name."""

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast, TrainingArguments

from radd_hf import (
    GeometricNoise,
    RADDConfig,
    RADDForMaskedDiffusion,
    RADDGenerationConfig,
    RADDTrainer,
    RADDTrainingArguments,
    diffusion_loss,
    estimate_likelihood,
)
from radd_hf.data import MaskedDiffusionCollator, bpe_tokenizer, character_tokenizer
from radd_hf.evaluation import perplexity
from radd_hf.pipeline_radd import InfillingPipeline

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
        ({"order": "forward"}, "`order` must be left at its default unless algorithm='any_order', got 'tweedie'"),
        ({"algorithm": "any_order", "order": torch.tensor([0.2, 1.7, 2.1])}, "`order` must hold integers"),
        ({"typical_p": 0.0}, r"`typical_p` must be None or a number in \(0.0, 1.0\], got 0.0"),
        ({"repetition_penalty": 0}, r"`repetition_penalty` must be None or a number in \(0.0, inf\), got 0"),
        ({"repetition_penalty": float("inf")}, r"`repetition_penalty` must be .* in \(0.0, inf\), got inf"),
        ({"temperature": float("inf")}, r"`temperature` must be None or a number in \[0.0, 1e\+30\], got inf"),
        ({"temperature": 1e-40}, "`temperature` must be 0 .* or at least 1e-06, got 1e-40"),
        ({"generation_config": {"top_k": 3}}, "`generation_config` must be a GenerationConfig or None, got dict"),
        ({"generation_config": torch.ones(2, 3)}, "`generation_config` must be .*, got Tensor"),
        ({"attention_mask": torch.tensor([[0.0, 0.0, -1e9]] * 2)}, r"`attention_mask` must hold 0 and 1 alone"),
        ({"attention_mask": torch.full((2, 3), float("nan"))}, r"`attention_mask` must hold 0 and 1 alone, got \[nan"),
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
        (IDS[1:], {"loss_mask": torch.tensor([[1, 2, 0]])}, r"`loss_mask` must hold 0 and 1 alone, got \[0, 1, 2\]"),
        (IDS[1:], {"mask_token_id": 6.0}, r"`mask_token_id` must be an id in \[0, vocab_size=7\).*got 6.0"),
        (IDS[1:], {"time_eps": "1e-3"}, r"`time_eps` must be in \[0, 1\), got '1e-3'"),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 1}, "`vocab_size` must be at least 2, a token and the mask token, got 1"),
        ({"hidden_act": "glue"}, "`hidden_act` must be one of .*'gelu_pytorch_tanh'.*got 'glue'"),
        ({"training_loss": "dce"}, "`training_loss` must be one of .*'t_dce'.*got 'dce'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"`rope_parameters\['rope_type'\]` must be one of .*'spiral'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"`rope_parameters\['rope_theta'\]` must be a number greater"),
        ({"noise_sigma_max": float("inf")}, "`noise_sigma_max` must be a number greater than noise_sigma_min"),
        ({"layer_norm_eps": float("inf")}, "`layer_norm_eps` must be a number greater than 0, got inf"),
        ({"pad_token_id": 50258}, r"`pad_token_id` must be None or in \[0, vocab_size=50258\), got 50258"),
        ({"eos_token_id": [1, -1]}, r"`eos_token_id` must be None or in .*got \[1, -1\]"),
    ],
)
def test_config_names_the_field(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RADDConfig(**fields)


def test_geometric_noise_is_finite():
    with pytest.raises(ValueError, match="sigma_max"):
        GeometricNoise(1e-4, float("inf"))


def test_a_damaged_generation_config_is_not_ignored(model, tmp_path: Path):
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"algorithm": ')
    with pytest.raises(OSError, match="not a valid JSON file"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).generation_config.algorithm == "tweedie"


def test_damaged_weights_and_surplus_blocks_are_refused(tmp_path: Path):
    fields = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2}
    RADDForMaskedDiffusion(RADDConfig(num_hidden_layers=2, **fields)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"does not fit .*unexpected keys: \['model.layers.1.attn_norm.bias'"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert RADDForMaskedDiffusion.from_pretrained(tmp_path, strict=False).config.num_hidden_layers == 1
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="must be whole safetensors files"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches(model, shape: tuple[int, int]):
    ids = torch.zeros(shape, dtype=torch.long)
    assert model(ids).logits.shape == (*shape, VOCAB)
    with pytest.warns(UserWarning, match="No mask token in `input_ids`"):
        assert model.diffusion_generate(ids).shape == shape
    assert diffusion_loss(model, ids, "ao").tolist() == [0.0] * shape[0]
    if not shape[0]:
        with pytest.warns(UserWarning, match="No mask token in `input_ids`"):
            assert len(model.diffusion_generate(ids, max_new_tokens=2)) == 0


def test_integers_of_numpy_and_labels_of_32_bits(model):
    assert model(IDS, logits_to_keep=np.int64(2)).logits.shape == (2, 2, VOCAB)
    assert torch.equal(model(IDS, labels=IDS.int()).loss, model(IDS, labels=IDS).loss)


@pytest.mark.parametrize("t", [0.0, 1.5, float("nan"), torch.ones(3), torch.ones(2, 1)])
def test_concrete_score_needs_a_time(model, t):
    with pytest.raises(ValueError, match=r"`t` must be in \(0, 1\], one number or one a row \(2,\), got"):
        model.concrete_score(IDS, t)


def test_a_streamer_gets_no_padding(model):
    class Collector:
        def __init__(self):
            self.ids = []

        def put(self, ids):
            self.ids += ids.tolist()

        def end(self):
            self.ids.append("end")

    collector, ids = Collector(), torch.tensor([[1, MASK, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    out = model.diffusion_generate(ids, attention_mask=mask, streamer=collector, seed=0)
    assert collector.ids == [*out[0, :3].tolist(), "end"]


def test_perplexity_beyond_a_float_is_infinite():
    assert perplexity(800.0) == float("inf") and perplexity(0.0) == 1.0


def test_the_trainer_refuses_what_its_figures_need(model, tmp_path: Path):
    with pytest.raises(ValueError, match="`batch_eval_metrics` must be False and `eval_do_concat_batches` True"):
        RADDTrainingArguments(str(tmp_path), eval_do_concat_batches=False)
    with pytest.raises(ValueError, match=r"`ema_decay` must be in \[0, 1\), got '0.9'"):
        RADDTrainingArguments(str(tmp_path), ema_decay="0.9")
    with pytest.raises(ValueError, match="`args` must be RADDTrainingArguments or None, got TrainingArguments"):
        RADDTrainer(model, TrainingArguments(str(tmp_path), report_to=[]))
    with pytest.raises(ValueError, match="Examples must be dicts with `input_ids`, got Tensor"):
        MaskedDiffusionCollator()(list(torch.ones(2, 3)))
    trainer = RADDTrainer(model, RADDTrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(ValueError, match="`eval_dataset` must have at least one example"):
        trainer.evaluate([])
    with pytest.raises(ValueError, match=r"`eval_dataset\['b'\]` must have at least one example"):
        trainer.evaluate({"a": [{"input_ids": [1]}], "b": []})


def test_characters_without_a_token_are_named():
    texts = ["a plain text of known letters"]
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    characters = character_tokenizer(texts[0])
    assert characters.decode(characters("aé").input_ids) == "a<unk>"
    pipe = InfillingPipeline(RADDForMaskedDiffusion(RADDConfig(vocab_size=len(characters), **config)), characters)
    with pytest.warns(UserWarning, match=r"no token for \['é', '—'\]"):
        pipe("a é[MASK] —t", seed=0)
    partial = bpe_tokenizer(texts, 300)
    bare = partial.backend_tokenizer.to_str().replace('"Ã":', '"never":')  # without the first byte of é
    partial = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bare), mask_token="[MASK]")
    pipe = InfillingPipeline(RADDForMaskedDiffusion(RADDConfig(vocab_size=len(partial), **config)), partial)
    with pytest.warns(UserWarning, match=r"no token for \['é'\]: .* in 'Héllo \[MASK\] there'"):
        pipe("Héllo [MASK] there", seed=0)
    whole = bpe_tokenizer(texts, 300)
    pipe = InfillingPipeline(RADDForMaskedDiffusion(RADDConfig(vocab_size=len(whole), **config)), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe("any é [MASK] — 文🙂 text", seed=0)
        pipe(prefix="é", suffix="[MASK]", length=1, parse_mask=False, seed=0)


def test_padding_is_no_text_for_processors(model):
    """A repetition penalty must not see the tokens under padding."""
    torch.manual_seed(0)
    loud = RADDForMaskedDiffusion(model.config).eval()
    torch.nn.init.normal_(loud.lm_head.weight)
    short, padded = torch.full((200, 4), MASK), torch.tensor([[5, 5] + [MASK] * 4] * 200)
    options = {"seed": list(range(200)), "repetition_penalty": 3.0}
    mask = (padded != 5).long()
    assert torch.equal(
        loud.diffusion_generate(short, **options),
        loud.diffusion_generate(padded, attention_mask=mask, **options)[:, 2:],
    )


@pytest.mark.parametrize("algorithm", ["confidence", "entropy", "margin"])
def test_ties_go_to_the_left_whatever_the_padding(model, algorithm: str):
    torch.manual_seed(0)
    loud = RADDForMaskedDiffusion(model.config).eval()
    for parameter in loud.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    short, padded = torch.full((20, 8), MASK), torch.tensor([[5] * 3 + [MASK] * 8] * 20)
    options = {"seed": list(range(20)), "algorithm": algorithm, "return_dict_in_generate": True}
    alone = loud.diffusion_generate(short, **options)
    assert (alone.reveal_pass[:, 0] == 0).all()
    assert torch.equal(
        alone.sequences,
        loud.diffusion_generate(padded, attention_mask=(padded != 5).long(), **options).sequences[:, 3:],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": 3}, "`generator` must be a torch.Generator or None, got 3"),
        ({"times": "a"}, "`times` must be a list of numbers, got 'a'"),
        ({"trim_at_eos": True, "eos_token_id": "a"}, r"`eos_token_id` must be an id or a list of ids, got 'a'"),
        (
            {"trim_at_eos": True, "eos_token_id": 99},
            r"`eos_token_id` must hold ids in \[0, vocab_size=7\), got \[99\]",
        ),
    ],
)
def test_more_wrong_options(model, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        model.diffusion_generate(IDS, **options)


def test_huge_quotas_mean_everything(model):
    out = model.diffusion_generate(
        IDS, algorithm="margin", tokens_per_step=10**18, block_length=10**18, seed=0, return_dict_in_generate=True
    )
    assert out.nfe.tolist() == [1, 0]


def test_frequencies_stay_exact_in_half_precision(model):
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(half.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert half.lm_head.weight.dtype == torch.bfloat16


def test_shrinking_keeps_the_special_ids():
    config = RADDConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mask_token_id=0, eos_token_id=[2, 9]
    )
    with pytest.raises(ValueError, match=r"`new_num_tokens` must exceed the config's eos_token_id=\[2, 9\], got 6"):
        RADDForMaskedDiffusion(config).resize_token_embeddings(6)


def test_the_collator_refuses_fractions():
    with pytest.raises(ValueError, match="`input_ids` must hold whole numbers"):
        MaskedDiffusionCollator()([{"input_ids": [1.7, 2.0]}])
    with pytest.raises(ValueError, match="`loss_mask` must hold 0 and 1 alone, got"):
        MaskedDiffusionCollator()([{"input_ids": [1, 2], "loss_mask": [0.5, 1]}])


def test_line_breaks_before_a_mask_are_named():
    tokenizer = bpe_tokenizer(["some words in lines"], 300)
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    pipe = InfillingPipeline(RADDForMaskedDiffusion(RADDConfig(vocab_size=len(tokenizer), **fields)), tokenizer)
    with pytest.warns(UserWarning, match=r"no token for \['\\n\\n'\]"):
        pipe("words\n\n[MASK] in", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe("words\n\nin [MASK]\n", seed=0)
