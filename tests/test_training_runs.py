"""Training in processes of its own: kill -9 and resume, and two processes against one."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent


def torchrun(processes: int) -> list[str]:
    """The command that starts Python in so many processes, on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]


def launch(tmp_path: pathlib.Path, name: str, processes: int = 1, **job) -> list[dict]:
    """What each process of a run wrote; an exit code alone says nothing where gloo is torn down."""
    result = tmp_path / f"{name}.pt"
    job = {"folder": str(tmp_path / name), "result": str(result), **job}
    command = torchrun(processes) if processes > 1 else [sys.executable]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "training_run.py"), json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if job.get("kill"):
        assert done.returncode == -9, done.stderr
        return []
    paths = [result.with_name(f"{result.name}.{rank}") for rank in range(processes)]
    assert all(path.exists() for path in paths), done.stderr
    return [torch.load(path) for path in paths]


def equal(one, other) -> bool:
    """Bit for bit, through lists, tuples and dicts."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def curve(outcome: dict, key: str = "loss") -> list[float]:
    return [entry[key] for entry in outcome["log"] if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_kill_9_and_resume_is_the_straight_run_bit_for_bit(tmp_path: pathlib.Path, workers: int):
    """Six steps over an epoch's end, with dropout; killed after the fifth, resumed from the third."""
    job = {"max_steps": 6, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    job["dataloader_num_workers"] = workers
    (straight,) = launch(tmp_path, "straight", **job)
    launch(tmp_path, "broken", kill=5, **job)
    assert sorted(path.name for path in (tmp_path / "broken").glob("checkpoint-*")) == ["checkpoint-3"]
    (resumed,) = launch(tmp_path, "broken", resume=True, **job)
    for part in ("weights", "average", "optimizer", "rng"):
        assert equal(straight[part], resumed[part]), part
    tail = [entry for entry in straight["trace"] if entry[0] >= 3]  # data order and corruption noise
    assert len(tail) == 6 and equal(tail, list(resumed["trace"]))
    assert curve(straight)[3:] == curve(resumed)[-3:]


def test_two_processes_are_one_with_the_doubled_batch(tmp_path: pathlib.Path):
    """Loss curve, weights and average to 1e-4 with ragged rows; evaluation of 11 sequences (not of 8)."""
    job = {"max_steps": 6, "dropout": 0.0, "ragged": True, "eval_rows": 11, "per_device_eval_batch_size": 4}
    one, two = launch(tmp_path, "two", 2, ddp_backend="gloo", gradient_accumulation_steps=2, **job)
    (whole,) = launch(tmp_path, "one", per_device_train_batch_size=16, **job)
    assert curve(one) == pytest.approx(curve(whole), abs=1e-4) and len(curve(one)) == 6
    assert curve(one, "nll_per_token") == pytest.approx(curve(whole, "nll_per_token"), abs=1.1e-4)
    for part in ("weights", "average"):
        assert equal(one[part], two[part])  # every process holds the same average
        for name, value in whole[part].items():
            torch.testing.assert_close(one[part][name], value, rtol=0, atol=1e-4, msg=name)
    noisy = [[row for _, _, ids in run["trace"] for row in ids.tolist()] for run in (one, two)]
    assert len(noisy[0]) == len(noisy[1]) == 40 and noisy[0] != noisy[1]
    # neither dropped nor repeated: the tokens and the bound of every sequence, in order
    nll, tokens = whole["prediction"]
    assert tokens.tolist() == [2 + i * 5 % 7 for i in range(11)]
    assert torch.equal(one["prediction"][1], tokens)
    torch.testing.assert_close(one["prediction"][0], nll, rtol=1e-3, atol=1e-3)
    assert one["metrics"]["eval_num_tokens"] == int(tokens.sum())
    assert one["metrics"]["eval_loss"] == pytest.approx(whole["metrics"]["eval_loss"], abs=1e-4)


@pytest.mark.slow
def test_processes_share_no_dropout(tmp_path: pathlib.Path):
    one, two = launch(tmp_path, "two", 2, ddp_backend="gloo", max_steps=2)
    assert not torch.equal(one["rng"], two["rng"])


@pytest.mark.slow
def test_fsdp2_is_the_whole_model(tmp_path: pathlib.Path):
    """Losses, weights and the sharded average of two processes on the CPU; accelerate itself shards on GPUs alone."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [*torchrun(2), str(HERE / "fsdp_run.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert {path.name for path in tmp_path.glob("passed.*")} == {"passed.0", "passed.1"}, done.stderr
