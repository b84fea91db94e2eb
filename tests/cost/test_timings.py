"""Times are measured once for each distinct call, and what cannot be measured is told."""

import json

import pytest

from lowtide.cost.device import PRESETS
from lowtide.cost.timings import measure_timings
from lowtide.ir.graph import Kind, Node, Storage, Value

ROOFLINE = PRESETS[0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    return tmp_path


def _value(name, *shape):
    return Value(name, Storage(name, 4 * shape[0] * shape[1], "cpu", Kind.ACTIVATION), "float32", shape, (shape[1], 1))


def _mm(size):
    return Node("aten.mm.default", (_value("x", size, size), _value("y", size, size)), (_value("z", size, size),))


def test_more_work_takes_longer_and_views_nothing():
    x = _value("x", 8, 8)
    view = Node("aten.t.default", (x,), (Value("v", x.storage, "float32", (8, 8), (1, 8)),))
    times = measure_timings([_mm(16), view, _mm(512)], ROOFLINE)
    assert not times.unknown
    assert times.us[1] == 0
    assert 0 < times.us[0] < times.us[2]


def test_a_call_is_measured_once_and_remembered(cache):
    first = measure_timings([_mm(16), _mm(16)], ROOFLINE)
    assert first.us[0] == first.us[1]
    (path,) = cache.glob("timings-*.json")
    document = json.loads(path.read_text())
    (call,) = document["entries"]
    document["entries"][call] = 123_000
    path.write_text(json.dumps(document))
    assert measure_timings([_mm(16)], ROOFLINE).us == (123.0,)


def test_a_file_that_does_not_read_is_measured_anew(cache):
    measure_timings([_mm(16)], ROOFLINE)
    (path,) = cache.glob("timings-*.json")
    path.write_text('{"format": 1, "entries": {"x": -1}}')
    with pytest.warns(UserWarning, match="does not read"):
        again = measure_timings([_mm(16)], ROOFLINE)
    assert again.us[0] > 0
    assert json.loads(path.read_text())["entries"]


def test_what_cannot_be_run_has_its_roofline_and_is_listed():
    times = measure_timings([_mm(512)], ROOFLINE, limit_bytes=1000)
    assert times.us == (ROOFLINE.node_us(_mm(512)),)
    (told,) = times.unknown
    assert "the limit is 1000" in told.reason
    wrong = Node("aten.mm.default", (_value("x", 2, 3), _value("y", 2, 3)), (_value("z", 2, 3),))
    assert "RuntimeError" in measure_timings([wrong], ROOFLINE).unknown[0].reason
