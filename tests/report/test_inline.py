"""The small picture that notebooks show."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import torch
from torch import nn

import lowtide
from lowtide.report import svg
from lowtide.report.chart import COLOURS


def _texts(picture: str) -> list[str]:
    return [text for element in ET.fromstring(picture).iter() if (text := (element.text or "").strip())]


def _step(**options: object) -> lowtide.Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    return lowtide.optimize(model, (torch.randn(16, 64),), loss=lambda model, x: model(x).square().mean(), optimizer=optimizer, **options)


def test_it_names_both_peaks_and_what_is_held():
    step = _step()
    texts = _texts(svg(step.plan))
    assert any("peak" in text and "in eager PyTorch" in text for text in texts)
    assert {"parameters", "optimizer state", "gradients", "eager PyTorch"} <= set(texts)
    assert COLOURS["gradient"] in svg(step.plan)


def test_it_asks_for_nothing_and_runs_nothing():
    picture = svg(_step(memory="95%").plan)
    elements = {element.tag.rpartition("}")[2] for element in ET.fromstring(picture).iter()}
    assert elements <= {"svg", "title", "text", "path", "rect"}
    assert picture.count("http") == 1, "the name of SVG's own language"


def test_a_function_that_makes_nothing_has_a_picture_too():
    fn = lowtide.optimize(nn.Identity(), (torch.ones(2, 4),))
    assert "Memory over the step" in svg(fn.plan)
