"""RADDTrainer on other masked language models and on adapters; the checkpoint generates by the same sampler."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import LENGTH, VOCAB, arguments, blocks, logged, tiny_model
from torch import nn
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from radd_hf import RADDForMaskedDiffusion, RADDTrainer, diffusion_generate, estimate_likelihood
from radd_hf.data import BlockDataset
from radd_hf.losses import LOSS_TYPES

MASK = VOCAB - 1


def backbone(kind: str) -> nn.Module:
    """A tiny BERT or ModernBERT from its config, which knows no mask token."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 16}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**sizes))
    tokens = {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return ModernBertForMaskedLM(ModernBertConfig(**sizes, **tokens))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_another_backbone_trains_and_its_checkpoint_generates(tmp_path: Path, kind: str, loss_type: str):
    """A text of two tokens alone: its cross-entropy falls below that of three, and a sample holds no third."""
    text = BlockDataset(torch.where(blocks(16).blocks % 2 == 0, 3, 7))
    args = arguments(
        tmp_path, loss_type=loss_type, max_steps=25, ema_decay=0.5, mask_token_id=MASK, learning_rate=3e-2
    )
    trainer = RADDTrainer(backbone(kind), args, train_dataset=text, eval_dataset=text)
    trainer.train()
    after = trainer.evaluate()["eval_nll_per_token"]
    assert logged(trainer, "nll_per_token")[0] == pytest.approx(math.log(VOCAB - 1), abs=0.2)
    assert after < math.log(3)
    trainer.save_model(str(tmp_path / "final"))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "final").eval()
    given = torch.full((4, LENGTH), MASK)
    given[:, 0] = torch.arange(4)
    sample = diffusion_generate(model, given, mask_token_id=MASK, seed=0, top_k=2)
    assert torch.equal(sample[:, 0], given[:, 0]) and set(sample[:, 1:].flatten().tolist()) == {3, 7}
    if loss_type == "ao":
        bound = estimate_likelihood(model, text.blocks, num_samples=64, mask_token_id=MASK, seed=1)
        assert math.log(bound.perplexity) == pytest.approx(after, abs=0.3)


def lora(model: nn.Module, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights="gaussian", **options))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "v_proj", "lm_head"]], ids=["trunk", "head"])
def test_adapters_attach_train_merge_and_save(tmp_path: Path, targets: list[str]):
    model = tiny_model()
    nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = lora(model, target_modules=targets)
    args = arguments(tmp_path, max_steps=20, learning_rate=3e-2, ema_decay=0.5)
    trainer = RADDTrainer(adapted, args, train_dataset=blocks(), eval_dataset=blocks(16))
    before = trainer.evaluate()["eval_nll_per_token"]
    trainer.train()
    after = trainer.evaluate()["eval_nll_per_token"]
    assert after < before - 0.05
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            original = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, frozen[original]), name
    trainer.save_model(str(tmp_path / "adapter"))  # the average of the adapters
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("lora" in name for name in saved)  # beside an adapted output layer peft keeps the layer itself
    merged = trainer.ema_model().merge_and_unload()
    assert isinstance(merged, RADDForMaskedDiffusion)
    merged.save_pretrained(tmp_path / "merged")
    loaded = RADDForMaskedDiffusion.from_pretrained(tmp_path / "merged")
    ids = blocks(4).blocks.masked_fill(torch.arange(LENGTH) % 2 == 0, MASK)
    with torch.no_grad(), trainer.ema.applied_to(trainer.model):
        expected = trainer.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_adapters_resume(tmp_path: Path):
    def run(steps: int, resume: bool | None = None) -> dict[str, torch.Tensor]:
        args = arguments(tmp_path, max_steps=steps, ema_decay=0.5, save_strategy="steps", save_steps=2)
        args.lr_scheduler_type = "constant"
        trainer = RADDTrainer(lora(tiny_model(), target_modules=["q_proj"]), args, train_dataset=blocks())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.ema.average

    straight = run(4)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    resumed = run(4, resume=True)
    assert straight.keys() == resumed.keys() and all("lora" in name for name in straight)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
