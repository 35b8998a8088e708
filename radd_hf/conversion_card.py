# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The model card of a converted checkpoint: what is known of it, and where it came from. No figure is claimed."""

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A masked (absorbing-state) diffusion language model, converted from `{{ source }}` (the format of the public
{{ family }} code{{ averaged }}) with `python -m radd_hf.conversion`. The network is the same function under other
weight names; nothing was trained or measured here.

## Architecture

| | |
|---|---|
{%- for key, value in architecture %}
| {{ key }} | {{ value }} |
{%- endfor %}

## Training

**Loss.** {{ loss }}

**Noise schedule.** {{ schedule }}

**Data, recipe and metrics.** As its authors state them at the source.

## How to use

```python
import radd_hf
from transformers import {{ auto }}{{ ", AutoTokenizer" if has_tokenizer }}

model = {{ auto }}.from_pretrained("{{ path }}")
{%- if has_tokenizer %}
tokenizer = AutoTokenizer.from_pretrained("{{ path }}")
inputs = tokenizer("The library opens at [MASK] on Monday.", return_tensors="pt")
output = model.diffusion_generate(**inputs, num_steps=16, seed=0)
print(tokenizer.batch_decode(output))
{%- else %}
output = model.diffusion_generate(batch_size=1, max_length={{ sample_length }}, num_steps=16, seed=0)
print(output)  # token ids: the tokenizer of the original belongs beside these files
{%- endif %}
```

## Limits

- What the weights were trained on, and what they say, was not looked at in the conversion.
- Sequences longer than {{ block_length }} tokens were never seen in training.
- Tokens revealed in the same pass are drawn independently of one another, so few steps cost coherence.
- No fact in a sample can be relied on without a check.

## Licence

The weights are the work of the authors of the source, and its terms hold for this copy: read them before you pass it
on.

## Citation

{{ citation }}
"""

CITATIONS = {
    "RADD": """```bibtex
@inproceedings{ou2025your,
  title     = {Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data},
  author    = {Jingyang Ou and Shen Nie and Kaiwen Xue and Fengqi Zhu and Jiacheng Sun and Zhenguo Li and
               Chongxuan Li},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
}
```""",
    "MDLM": """```bibtex
@inproceedings{sahoo2024simple,
  title     = {Simple and Effective Masked Diffusion Language Models},
  author    = {Subham Sekhar Sahoo and Marianne Arriola and Yair Schiff and Aaron Gokaslan and Edgar Marroquin and
               Justin T Chiu and Alexander Rush and Volodymyr Kuleshov},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}
```""",
    "SEDD": """```bibtex
@inproceedings{lou2024discrete,
  title     = {Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution},
  author    = {Aaron Lou and Chenlin Meng and Stefano Ermon},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}
```""",
}

_LOSSES = {
    "dse": "Denoising score entropy (`dse`)",
    "t_dce": "t-denoising cross-entropy (`t_dce`)",
    "lambda_dce": "λ-denoising cross-entropy (`lambda_dce`)",
    "ao": "Any-order autoregressive loss (`ao`)",
}


def conversion_card(
    model: PreTrainedModel, *, name: str, source: str, family: str, from_ema: bool, has_tokenizer: bool
) -> ModelCard:
    """
    The README.md of a converted checkpoint.

    Args:
        model (`PreTrainedModel`): The converted model.
        name (`str`): Title, and the path in the snippet.
        source (`str`): Hub name or folder name of the original.
        family (`str`): "RADD", "MDLM" or "SEDD", the code base.
        from_ema (`bool`): Whether the weights are a training run's exponential average.
        has_tokenizer (`bool`): Whether a tokenizer lies beside the weights.
    """
    config = model.config
    data = ModelCardData(
        license="unknown",
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=[config.model_type, "masked-diffusion", "discrete-diffusion"],
    )
    kind = f"{config.noise_schedule.replace('_', '-')}"
    values = (
        f"ε = {config.noise_eps:g}"
        if config.noise_schedule != "geometric"
        else f"σ from {config.noise_sigma_min:g} to {config.noise_sigma_max:g}"
    )
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=name,
        path=name,
        source=source,
        family=family,
        averaged=", the exponential average of the weights" if from_ema else "",
        architecture=[
            ("parameters", f"{model.num_parameters():,}"),
            ("layers", config.num_hidden_layers),
            ("hidden size", f"{config.hidden_size:,}"),
            ("attention heads", config.num_attention_heads),
            ("block length", f"{config.max_position_embeddings:,} tokens"),
            ("vocabulary", f"{config.vocab_size:,}, the mask token (id {config.mask_token_id}) included"),
            ("time input", "none" if config.model_type == "radd" else "sigma_bar(t), by adaLN"),
        ],
        loss=_LOSSES.get(config.training_loss, "Not stated in the original's config") + ".",
        schedule=f"{kind[0].upper()}{kind[1:]}, {values}.",
        auto="AutoModelForMaskedLM",
        has_tokenizer=has_tokenizer,
        block_length=f"{config.max_position_embeddings:,}",
        sample_length=min(config.max_position_embeddings, 128),
        citation=CITATIONS[family],
    )
