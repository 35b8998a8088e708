"""The network: sizes, padding, kept logits, outputs, loading, precision."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import MaskedLMOutput

from radd_hf.configuration_radd import RADDConfig
from radd_hf.modeling_radd import RADDForMaskedDiffusion, RADDModel
from radd_hf.noise_schedule_radd import get_noise_schedule

M = 4  # mask id of the ten-token networks
Builder = Callable[..., RADDForMaskedDiffusion]
BACKENDS = pytest.mark.parametrize("backend", ["sdpa", "eager"])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def build(make_model: Builder) -> Builder:
    """`build(**config fields)`: V = 10, two blocks of width 16."""

    def make(**fields) -> RADDForMaskedDiffusion:
        sizes = {"vocab_size": 11, "mask_token_id": M, "num_hidden_layers": 2}
        return make_model(**{**sizes, **fields})

    return make


@pytest.fixture(scope="module")
def model(build: Builder) -> RADDForMaskedDiffusion:
    return build()


@pytest.fixture
def ids() -> torch.LongTensor:
    x = torch.randint(11, (3, 7), generator=seeded(0))
    return torch.where(torch.rand(3, 7, generator=seeded(1)) < 0.4, M, x)


def clean(logits: torch.Tensor) -> torch.Tensor:
    """Logits without the mask column, which is -inf."""
    return logits[..., [i for i in range(logits.shape[-1]) if i != M]]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (clean(a) - clean(b)).detach().abs().max().item()


# Sizes and fields


def closed_form(config: RADDConfig) -> int:
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    attention, mlp, norms = 4 * d * d, 2 * d * f + f + d, 4 * d
    embedding, head = v * d, v * d * (not config.tie_word_embeddings) + v
    return embedding + config.num_hidden_layers * (attention + mlp + norms) + 2 * d + head


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RADDConfig.small(), 162_265_682),
        (RADDConfig.medium(), 405_191_762),
        (RADDConfig.small(tie_word_embeddings=True, intermediate_size=100, vocab_size=300), None),
    ],
)
def test_parameter_counts(config: RADDConfig, expected: int | None):
    with torch.device("meta"):
        model = RADDForMaskedDiffusion(config)
    model.tie_weights()
    assert model.num_parameters() == closed_form(config) == (expected or closed_form(config))


def test_config_defaults():
    config = RADDConfig()
    assert (config.vocab_size, config.mask_token_id, config.intermediate_size) == (50258, 50257, 3072)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert RADDConfig(vocab_size=10, mask_token_id=3).mask_token_id == 3
    assert RADDConfig(vocab_size=10).mask_token_id == 9
    assert RADDConfig.medium(hidden_dropout=0.1).hidden_dropout == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 50258}, r"`mask_token_id` must be an integer in \[0, vocab_size=50258\), got 50258"),
        ({"mask_token_id": -1}, r"`mask_token_id` must be an integer in .* got -1"),
        ({"mask_token_id": 1.0}, r"`mask_token_id` must be an integer"),
        ({"hidden_size": 770}, r"`hidden_size` must be divisible by `num_attention_heads`, got hidden_size=770"),
        ({"hidden_size": 36, "num_attention_heads": 4}, r"`hidden_size / num_attention_heads` must be even .*= 9"),
        *(
            ({name: value}, rf"`{name}` must be a positive integer, got {value}")
            for name in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "intermediate_size",
                "max_position_embeddings",
            )
            for value in (0, -2)
        ),
        ({"hidden_dropout": 1.0}, r"`hidden_dropout` must be a number in \[0, 1\), got 1.0"),
        ({"hidden_dropout": -0.1}, r"`hidden_dropout` must be a number in \[0, 1\)"),
        ({"layer_norm_eps": 0}, r"`layer_norm_eps` must be a number greater than 0, got 0"),
        ({"initializer_range": -1}, r"`initializer_range` must be a number greater than 0, got -1"),
        ({"noise_schedule": "linear"}, r"`noise_schedule` must be one of \['log_linear', 'geometric', 'cosine'\]"),
        ({"noise_eps": 1}, r"`noise_eps` must be a number in \[0, 1\), got 1"),
        ({"noise_sigma_min": 0}, r"`noise_sigma_min` must be a number greater than 0"),
        ({"noise_sigma_max": 1e-5}, r"`noise_sigma_max` must be a number greater than noise_sigma_min=0.0001"),
    ],
)
def test_wrong_fields_raise(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RADDConfig(**fields)


def test_config_copies(tmp_path: Path):
    config = RADDConfig(vocab_size=20, mask_token_id=7, noise_schedule="cosine", training_loss="ao")
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), RADDConfig.from_dict(config.to_dict())):
        assert other.to_dict() == config.to_dict() and other.mask_token_id == 7
    config.save_pretrained(tmp_path)
    assert RADDConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_usual_names(model: RADDForMaskedDiffusion):
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers) == (16, 2)
    assert (config.num_attention_heads, config.vocab_size) == (2, 11)
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert model.base_model_prefix == "model" and model.base_model is model.model
    assert list(model._no_split_modules) == ["RADDLayer"]
    assert type(model.model.layers[0]).__name__ == "RADDLayer"


def test_embeddings_can_be_set(build: Builder):
    model = build()
    embedding, head = nn.Embedding(11, 16), nn.Linear(16, 11)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    assert model.model.embed_tokens is embedding and model.lm_head is head


# The function


def test_zero_head_is_uniform(ids: torch.LongTensor):
    config = RADDConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mask_token_id=M, hidden_dropout=0.0
    )
    model = RADDForMaskedDiffusion(config)
    probabilities = model(ids).logits.softmax(-1)
    assert torch.allclose(clean(probabilities), torch.full((3, 7, 10), 0.1))
    weights = model.model.layers[0].mlp.up_proj.weight
    assert 0.015 < weights.std() < 0.025


def test_mask_column(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    logits = model(ids).logits
    assert (logits[..., M] == float("-inf")).all() and clean(logits).isfinite().all()
    assert (logits.softmax(-1)[..., M] == 0).all()


@BACKENDS
def test_bidirectional_and_without_time(build: Builder, ids: torch.LongTensor, backend: str):
    model = build(attn_implementation=backend)
    base = model(ids).logits
    for i in (0, 3, 6):
        other = ids.clone()
        other[:, i] = (other[:, i] + 1) % 11
        change = (clean(model(other).logits) - clean(base)).abs().amax(-1)  # (B, L)
        assert (change > 1e-4).all(), f"position {i} must reach all others"
    assert difference(model(ids.flip(1)).logits.flip(1), base) > 1e-2, "positions must matter"


@BACKENDS
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_is_invisible(build: Builder, ids: torch.LongTensor, backend: str, side: str):
    model = build(attn_implementation=backend)
    assert model.config._attn_implementation == backend
    base = model(ids).logits
    places = {"left": range(3, 10), "right": range(7), "middle": (0, 1, 4, 5, 6, 8, 9)}[side]
    for filler in (0, M):
        padded, real = torch.full((4, 10), filler), torch.zeros(4, 10, dtype=torch.long)
        padded[:3, list(places)], real[:3, list(places)] = ids, 1
        padded[3], real[3] = 2, 1  # a row without padding beside them
        for attention_mask in (real, real.bool()):
            logits = model(padded, attention_mask=attention_mask).logits
            assert difference(logits[:3, list(places)], base) < 1e-5
            assert difference(logits[3:], model(padded[3:]).logits) < 1e-5
            keep = real.bool() & (padded != 0)
            kept = model(padded, attention_mask=attention_mask, logits_to_keep=keep).logits
            assert difference(kept, logits[keep]) < 1e-5


def test_backends_agree(build: Builder, ids: torch.LongTensor):
    real = torch.ones_like(ids)
    real[0, :3] = real[1, 5:] = 0
    for attention_mask in (None, real):
        keep = real.bool() if attention_mask is not None else torch.ones_like(ids, dtype=torch.bool)
        eager = build(attn_implementation="eager")(ids, attention_mask=attention_mask).logits[keep]
        sdpa = build(attn_implementation="sdpa")(ids, attention_mask=attention_mask).logits[keep]
        assert difference(sdpa, eager) < 1e-5


def test_flex_attention(build: Builder, ids: torch.LongTensor):
    """On a CPU it runs without gradients only; not compiled here, which would take most of a minute."""
    model, reference = build(attn_implementation="flex_attention"), build()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    keep = (ids == M) & real.bool()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(ids, attention_mask=real).logits
        kept = model(ids, attention_mask=real, logits_to_keep=keep).logits
        expected = reference(ids, attention_mask=real).logits
    assert difference(logits[real.bool()], expected[real.bool()]) < 1e-5
    assert difference(kept, expected[keep]) < 1e-5


def test_backend_can_be_changed(build: Builder, ids: torch.LongTensor):
    model = build()
    base = model(ids).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert difference(model(ids).logits, base) < 1e-5
    assert len(model(ids, output_attentions=True).attentions) == 2


def test_four_dimensional_masks_pass(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    """Two texts in a row that do not see each other."""
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = (segment[:, None] == segment)[None, None].expand(3, 1, 7, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    assert difference(logits[:, :3], model(ids[:, :3]).logits) < 1e-5
    assert difference(logits[:, 3:], model(ids[:, 3:]).logits) < 1e-5
    keep = ids == M
    kept = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep).logits
    assert difference(kept, logits[keep]) < 1e-5


def test_embeddings_instead_of_ids(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    embeds = model.get_input_embeddings()(ids)
    assert difference(model(inputs_embeds=embeds).logits, model(ids).logits) == 0
    keep = ids == M
    assert difference(model(inputs_embeds=embeds, logits_to_keep=keep).logits, model(ids).logits[keep]) < 1e-5
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds`"):
            model(**inputs)


def test_wrong_shapes_raise(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    with pytest.raises(ValueError, match=r"`attention_mask` must have the inputs' shape \(3, 7\), got \(3, 6\)"):
        model(ids, attention_mask=torch.ones(3, 6))
    with pytest.raises(ValueError, match=r"boolean `logits_to_keep` must have the inputs' shape \(3, 7\), got \(7,\)"):
        model(ids, logits_to_keep=torch.ones(7, dtype=torch.bool))


# Kept logits


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@BACKENDS
@pytest.mark.parametrize("hidden", [False, True])
def test_logits_to_keep_is_slicing(build: Builder, ids: torch.LongTensor, backend: str, hidden: bool):
    model = build(attn_implementation=backend)
    real = torch.ones_like(ids)
    real[1, :2] = 0
    keep = torch.rand(3, 7, generator=seeded(2)) < 0.4
    keep[2] = False
    index = torch.tensor([5, 0, 2])
    cases = [(0, slice(None)), (3, slice(-3, None)), (index, index)]
    full = model(ids, attention_mask=real).logits
    for kept, columns in cases:
        logits = model(ids, attention_mask=real, logits_to_keep=kept, output_hidden_states=hidden).logits
        assert difference(logits, full[:, columns]) < 1e-5
    weight = torch.randn(int(keep.sum()), 10, generator=seeded(3))
    collected = []
    for kept in (0, keep):
        model.zero_grad()
        output = model(ids, attention_mask=real, logits_to_keep=kept, output_hidden_states=hidden)
        logits = output.logits[keep] if isinstance(kept, int) else output.logits
        assert (output.hidden_states is not None) == hidden
        (clean(logits) * weight).sum().backward()
        collected.append((logits.detach(), gradients(model)))
    assert collected[1][0].shape == (int(keep.sum()), 11)
    assert difference(collected[1][0], collected[0][0]) < 1e-5
    assert collected[0][1].keys() == collected[1][1].keys() == dict(model.named_parameters()).keys()
    for name, expected in collected[0][1].items():
        torch.testing.assert_close(collected[1][1][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_last_block_runs_at_kept_positions_only(build: Builder, ids: torch.LongTensor):
    model = build()
    shapes: list[tuple[int, ...]] = []
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[:-1])))
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[:-1])))
    keep = torch.zeros_like(ids, dtype=torch.bool)
    keep[0, 2] = keep[1, 1] = keep[1, 6] = True
    model(ids, logits_to_keep=keep)
    assert shapes == [(3, 7), (3, 2), (3,)]
    shapes.clear()
    model(ids, logits_to_keep=keep, output_hidden_states=True)
    assert shapes == [(3, 7), (3, 7), (3,)]


@BACKENDS
def test_nothing_kept(build: Builder, ids: torch.LongTensor, backend: str):
    model = build(attn_implementation=backend)
    output = model(ids, logits_to_keep=torch.zeros_like(ids, dtype=torch.bool))
    assert output.logits.shape == (0, 11)
    output.logits.sum().backward()


def test_labels_follow_the_kept_positions(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    labels = torch.where(ids == M, 3, -100)
    expected = model(ids, labels=labels).loss
    assert torch.allclose(model(ids, labels=labels, logits_to_keep=ids == M).loss, expected)
    last = model(ids, labels=labels, logits_to_keep=2)
    assert torch.allclose(last.loss, model(ids, labels=_only(labels, slice(-2, None))).loss)


def _only(labels: torch.Tensor, columns: slice) -> torch.Tensor:
    kept = torch.full_like(labels, -100)
    kept[:, columns] = labels[:, columns]
    return kept


# Outputs


@BACKENDS
def test_hidden_states_and_attentions(build: Builder, ids: torch.LongTensor, backend: str):
    model = build(attn_implementation=backend)
    output = model(ids, output_hidden_states=True, output_attentions=backend == "eager")
    assert isinstance(output, MaskedLMOutput)
    assert [tuple(h.shape) for h in output.hidden_states] == [(3, 7, 16)] * 3
    assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids))
    assert difference(model.compute_logits(output.hidden_states[-1]), output.logits) == 0
    assert model(ids).hidden_states is None
    if backend == "eager":
        assert [tuple(a.shape) for a in output.attentions] == [(3, 2, 7, 7)] * 2
        assert torch.allclose(output.attentions[0].sum(-1), torch.ones(3, 2, 7))


def test_tuple_output(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    output = model(ids, return_dict=False)
    assert isinstance(output, tuple) and difference(output[0], model(ids).logits) == 0
    loss, logits = model(ids, labels=ids, return_dict=False)
    assert loss.dim() == 0 and logits.shape == (3, 7, 11)


def test_labels_are_plain_cross_entropy(model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    labels = torch.randint(10, ids.shape, generator=seeded(5))
    labels = labels + (labels >= M)
    labels[0, :4] = labels[2] = -100
    rows = model(ids).logits.log_softmax(-1)
    terms = [-rows[b, i, labels[b, i]] for b in range(3) for i in range(7) if labels[b, i] != -100]
    total = torch.stack(terms).sum()
    assert torch.allclose(model(ids, labels=labels).loss, total / len(terms), rtol=1e-5)
    assert torch.allclose(model(ids, labels=labels, num_items_in_batch=50).loss, total / 50, rtol=1e-5)
    assert torch.allclose(model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss, total / 50, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["log_linear", "geometric"])
def test_concrete_score(build: Builder, ids: torch.LongTensor, schedule: str):
    """Theorem 1: s(t) times the clean distribution, exp(-sigma_bar) / (1 - exp(-sigma_bar))."""
    model = build(noise_schedule=schedule)
    probabilities = model(ids).logits.softmax(-1)
    times = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
    for t in (0.3, times):
        survived = torch.exp(-get_noise_schedule(model.config).total(t))
        scale = (survived / (1 - survived)).float().reshape(-1, 1, 1)
        score = model.concrete_score(ids, t)
        assert score.shape == (3, 7, 11) and score.dtype == torch.float32
        free = ids == M
        score_at_masks, expected = clean(score)[free], clean(scale * probabilities)[free]
        torch.testing.assert_close(score_at_masks, expected, rtol=1e-5, atol=1e-8)
        assert (score.gather(-1, ids[..., None]) == 1).all()
    real = torch.ones_like(ids)
    real[:, :2] = 0
    padded = model.concrete_score(ids, 0.3, attention_mask=real)[:, 2:]
    torch.testing.assert_close(padded, model.concrete_score(ids[:, 2:], 0.3), rtol=1e-4, atol=1e-6)


# Gradient checkpointing, compilation


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes that autograd keeps for the backward pass, in a list of one."""
    total, seen = [0], set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            total[0] += x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_gradient_checkpointing(build: Builder, reentrant: bool, keep: bool):
    ids = torch.randint(11, (8, 16), generator=seeded(0))
    labels = torch.where(torch.rand(8, 16, generator=seeded(1)) < 0.3, 2, -100)
    kept = labels != -100 if keep else 0
    results = []
    for checkpointing in (False, True):
        model = build(num_hidden_layers=4, hidden_dropout=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
            if reentrant:
                model.enable_input_require_grads()
        torch.manual_seed(0)
        with saved_bytes() as total:
            loss = model(ids, labels=labels, logits_to_keep=kept).loss
        loss.backward()
        results.append((total[0], gradients(model)))
    assert results[1][0] < 0.6 * results[0][0]
    assert results[0][1].keys() == results[1][1].keys() == dict(model.named_parameters()).keys()
    for name, expected in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], expected, rtol=0, atol=1e-6, msg=name)


def test_compiles_as_one_graph(build: Builder, ids: torch.LongTensor):
    model = build()
    real = torch.ones_like(ids)
    real[0, :2] = 0
    expected = model(ids, attention_mask=real).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert difference(compiled(ids, attention_mask=real).logits, expected) < 1e-5
    assert compiled(ids).logits.shape == (3, 7, 11)


# Saving and loading


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(build: Builder, ids: torch.LongTensor, tmp_path: Path, tied: bool):
    model = build(tie_word_embeddings=tied)
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert stored == set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    loaded, info = RADDForMaskedDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[name], name
    assert not loaded.training and loaded.config.mask_token_id == M
    assert torch.equal(clean(loaded(ids).logits), clean(model(ids).logits))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_generation_options_travel_with_the_model(build: Builder, tmp_path: Path):
    model = build()
    model.generation_config.update(algorithm="euler", num_steps=6, top_p=0.7)
    model.save_pretrained(tmp_path)
    loaded = RADDForMaskedDiffusion.from_pretrained(tmp_path).generation_config
    assert (type(loaded).__name__, loaded.algorithm, loaded.num_steps) == ("RADDGenerationConfig", "euler", 6)
    assert loaded.top_p == 0.7 and loaded.top_k is None


def test_trunk_loads_from_the_whole(model: RADDForMaskedDiffusion, ids: torch.LongTensor, tmp_path: Path):
    model.save_pretrained(tmp_path)
    trunk = RADDModel.from_pretrained(tmp_path)
    assert torch.equal(trunk(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_device_map(model: RADDForMaskedDiffusion, ids: torch.LongTensor, tmp_path: Path):
    model.save_pretrained(tmp_path)
    loaded = RADDForMaskedDiffusion.from_pretrained(tmp_path, device_map="auto")
    device = loaded.device
    assert torch.allclose(clean(loaded(ids.to(device)).logits).cpu(), clean(model(ids).logits), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model: RADDForMaskedDiffusion, ids: torch.LongTensor, tmp_path: Path, dtype: torch.dtype):
    model.save_pretrained(tmp_path)
    half = RADDForMaskedDiffusion.from_pretrained(tmp_path, dtype=dtype)
    assert half.lm_head.weight.dtype == dtype
    rotary = half.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, model.model.rotary_emb.inv_freq)
    logits = half(ids).logits
    assert logits.dtype == dtype
    assert difference(logits.float(), model(ids).logits) < 0.3
    score = half.concrete_score(ids, 0.5)[ids == M]
    scale = float(get_noise_schedule(model.config).score_scale(0.5))
    others = clean(score).sum(-1) / scale
    assert score.dtype == torch.float32 and torch.allclose(others, torch.ones_like(others), atol=1e-6)
    labels = torch.where(ids == M, 2, -100)
    loss = half(ids, labels=labels).loss
    expected = -logits.double().log_softmax(-1)[..., 2][ids == M].mean()
    assert loss.dtype == torch.float32 and abs(loss.double() - expected) < 1e-6 * expected
    out = half.diffusion_generate(ids, num_steps=3, seed=0)
    assert not (out == M).any() and torch.equal(out[ids != M], ids[ids != M])


@pytest.fixture
def damaged(model: RADDForMaskedDiffusion, tmp_path: Path) -> Path:
    """A checkpoint with two keys missing, two of another shape and one too many."""
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.bias"], weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.ones(5)
    weights["model.embed_tokens.weight"] = torch.ones(12, 16)
    weights["stranger"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_bad_checkpoints_are_refused(damaged: Path):
    with pytest.raises(ValueError, match="does not fit RADDForMaskedDiffusion") as caught:
        RADDForMaskedDiffusion.from_pretrained(damaged)
    message = str(caught.value)
    assert "missing keys: ['lm_head.bias', 'model.layers.1.mlp.up_proj.weight']" in message
    assert "model.norm.weight: (5,) instead of (16,)" in message
    assert "model.embed_tokens.weight: (12, 16) instead of (11, 16)" in message
    assert "unexpected keys: ['stranger']" in message and "strict=False" in message


def test_bad_checkpoints_load_on_request(damaged: Path, model: RADDForMaskedDiffusion, ids: torch.LongTensor):
    loaded, info = RADDForMaskedDiffusion.from_pretrained(
        damaged, strict=False, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"lm_head.bias", "model.layers.1.mlp.up_proj.weight"}
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert clean(loaded(ids).logits).isfinite().all()


def test_unexpected_keys_alone_are_no_error(model: RADDForMaskedDiffusion, tmp_path: Path):
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "stranger": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    RADDForMaskedDiffusion.from_pretrained(tmp_path)


# Resizing


@pytest.mark.parametrize("tied", [False, True])
def test_resizing_keeps_the_mask(build: Builder, ids: torch.LongTensor, tmp_path: Path, tied: bool):
    model = build(tie_word_embeddings=tied)
    model.tie_weights()
    base = model(ids).logits
    model.resize_token_embeddings(15)
    assert model.config.vocab_size == 15 and model.config.mask_token_id == M
    assert model.lm_head.weight.shape == (15, 16) and model.lm_head.bias.shape == (15,)
    logits = model(ids).logits
    assert logits.shape[-1] == 15 and (logits[..., M] == float("-inf")).all()
    assert difference(logits[..., :11], base) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = RADDForMaskedDiffusion.from_pretrained(tmp_path)
    assert difference(loaded(ids).logits, logits) == 0
    model.resize_token_embeddings(M + 1)
    assert model(ids.clamp(max=M)).logits.shape[-1] == M + 1


def test_shrinking_below_the_mask_raises(build: Builder):
    model = build()
    with pytest.raises(ValueError, match=r"`new_num_tokens` must exceed mask_token_id=4, got 4"):
        model.resize_token_embeddings(M)
    assert model.config.vocab_size == 11 and model.lm_head.out_features == 11
    assert model.resize_token_embeddings() is model.model.embed_tokens


# Training


def test_a_plain_trainer_trains_it(build: Builder, tmp_path: Path):
    """Labels from any masked-LM collator; the trainer passes num_items_in_batch."""
    model = build(hidden_dropout=0.02)
    rows = [{"input_ids": [2, M, 3, M, 5], "labels": [-100, 7, -100, 8, -100]}] * 32
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=40,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0]
    with torch.no_grad():
        first = build().train(False)(**{k: torch.tensor([v]) for k, v in rows[0].items()}).loss
    assert losses[0] == pytest.approx(float(first), rel=0.15), "accumulation must not change the loss's scale"
