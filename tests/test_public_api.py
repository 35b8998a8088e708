"""The names that DESIGN fixes, and what importing the package registers."""

import inspect

import transformers

import radd_hf

NAMES = """
RADDConfig RADDModel RADDForMaskedDiffusion RADDGenerationConfig RADDGenerationOutput NoiseSchedule LogLinearNoise
GeometricNoise CosineNoise get_noise_schedule diffusion_loss RADDTrainer RADDTrainingArguments InfillingPipeline
estimate_likelihood expected_nfe diffusion_generate SEDDConfig SEDDForMaskedDiffusion add_mask_token
""".split()


def test_exports_are_exactly_these():
    assert sorted(radd_hf.__all__) == sorted(NAMES)
    assert all(hasattr(radd_hf, name) for name in NAMES)


def test_everything_public_is_documented():
    for name in NAMES:
        assert inspect.getdoc(getattr(radd_hf, name)), name


def test_auto_classes_know_radd():
    config = radd_hf.RADDConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert type(transformers.AutoConfig.for_model("radd")) is radd_hf.RADDConfig
    for auto in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        assert type(auto.from_config(config)) is radd_hf.RADDForMaskedDiffusion
    assert "radd-infilling" in transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks()
