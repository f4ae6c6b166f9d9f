"""`benchmarks/passes.py`: every size predicts all samples, and the ratios are those of medians."""

import statistics

import pytest
import torch


def test_ratios_are_of_the_medians_of_the_seconds(script, monkeypatch):
    module = script("passes")
    monkeypatch.setattr(module, "SAMPLES", 48)
    monkeypatch.setattr(module, "SIZES", (48, 16))
    found = module.measure("mlp", repeats=3)
    medians = {size: statistics.median(own) for size, own in found["seconds"].items()}
    assert all(len(own) == 3 for own in found["seconds"].values())
    assert found["ratios"] == pytest.approx({48: 1.0, 16: medians[48] / medians[16]})


def test_the_first_prediction_is_not_timed(script, monkeypatch):
    module, events = script("passes"), []

    class Net(torch.nn.Module):
        def forward(self, x):
            events.append(len(x))

    monkeypatch.setattr(module.plugins.models, "get", lambda name: lambda shape, classes: Net())
    monkeypatch.setattr(module.time, "perf_counter", lambda: events.append("clock") or float(len(events)))
    monkeypatch.setattr(module, "SIZES", (1024, 512))
    module.measure("mlp", repeats=1)
    assert events == [1024, "clock", 1024, "clock", "clock", 512, 512, "clock"]


def test_inputs_are_images_or_tokens(script):
    module = script("passes")
    assert module.inputs("cnn").shape == (1024, 3, 32, 32)
    tokens = module.inputs("bert_tiny")
    assert tokens.shape == (1024, 2, 64) and tokens.dtype == torch.int64 and tokens[:, 1].eq(1).all()
