"""To the Hub and back, against a server in this process that answers as the Hub does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import fake_hub
from huggingface_hub import ModelCard
from safetensors.torch import load

RADD = Path(__file__).parent / "fixtures" / "radd_original"
SEDD = Path(__file__).parent / "fixtures" / "sedd_original_scaled"

# Runs with HF_ENDPOINT set: argv are the two original checkpoints and a work folder.
SCRIPT = """
import json, sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import radd_hf
from radd_hf.conversion import main
from radd_hf.data import character_tokenizer

radd, sedd, work = sys.argv[1:]
main([radd, work + "/radd", "--push", "someone/radd-tiny"])
main([sedd, work + "/sedd", "--push", "someone/sedd-tiny"])
report = {}
model = AutoModelForMaskedLM.from_pretrained("someone/radd-tiny")
local = AutoModelForMaskedLM.from_pretrained(work + "/radd")
ids = torch.tensor([[1, 96, 3, 96]])
report["equal"] = torch.equal(model(ids).logits, local(ids).logits)
report["tokens"] = model.diffusion_generate(ids, seed=0).tolist() == local.diffusion_generate(ids, seed=0).tolist()
report["sedd"] = type(AutoModelForMaskedLM.from_pretrained("someone/sedd-tiny")).__name__

model.generation_config = radd_hf.RADDGenerationConfig(num_steps=7)
model.push_to_hub("someone/pushed", commit_message="weights")
tokenizer = character_tokenizer("abc")
tokenizer.push_to_hub("someone/pushed", commit_message="tokenizer")
again = radd_hf.RADDForMaskedDiffusion.from_pretrained("someone/pushed")
report["options"] = again.generation_config.num_steps
report["weights"] = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
pushed = AutoTokenizer.from_pretrained("someone/pushed")
report["tokenizer"] = pushed("a[MASK]c")["input_ids"] == tokenizer("a[MASK]c")["input_ids"]
try:
    radd_hf.RADDForMaskedDiffusion.from_pretrained("someone/absent")
except OSError as error:
    report["absent"] = "someone/absent" in str(error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """What the script reports, and the repositories it leaves on the server."""
    work = tmp_path_factory.mktemp("work")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    with fake_hub() as server:
        environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(work / "home"), "HF_TOKEN": "hf_none"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(RADD), str(SEDD), str(work)],
            cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-4000:]
        return json.loads(run.stdout.splitlines()[-1]), dict(server.repositories)


def test_round_trip(hub: tuple[dict, dict]):
    report, _ = hub
    assert report == {
        "equal": True, "tokens": True, "sedd": "SEDDForMaskedDiffusion", "options": 7, "weights": True,
        "tokenizer": True, "absent": True,
    }  # fmt: skip


def test_what_lies_on_the_hub(hub: tuple[dict, dict]):
    _, repositories = hub
    assert set(repositories) == {"someone/radd-tiny", "someone/sedd-tiny", "someone/pushed"}
    for name, files in repositories.items():
        assert {"config.json", "generation_config.json", "model.safetensors", "modeling_radd.py"} <= set(files), name
        assert not any(path.endswith((".bin", ".pth", ".pt")) for path in files)
        assert len(load(files["model.safetensors"])) > 20
    assert "tokenizer.json" in repositories["someone/pushed"]
    assert "modeling_sedd.py" in repositories["someone/sedd-tiny"]
    card = ModelCard(repositories["someone/radd-tiny"]["README.md"].decode())
    assert card.data.library_name == "transformers" and 'from_pretrained("someone/radd-tiny")' in card.text
