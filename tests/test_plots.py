"""Every figure can be drawn, and the same numbers give the same file."""

import pytest

from benchmarks.plots import difference_bars, speedup_over_branches, ttft_plot
from choreograph.errors import ConfigError
from choreograph.viz import speedup_over_tokens

BARS = {"leak both": (-3.0, -9.0, 3.0), "leak plan": (2.0, -4.0, 8.0)}


def test_every_figure_is_drawn_and_stays_the_same(tmp_path):
    def draw(folder):
        speedup_over_branches({"1 voter": [(4, (1.1, 1.0, 1.2)), (16, (1.4, 1.3, 1.5))]}, folder / "a.svg", title="t")
        for count, name in ((1, "b.svg"), (5, "c.svg")):
            series = {f"workflow {i}\nr = 0.5": [(100.0, 1.1), (200.0, 1.3)] for i in range(count)}
            speedup_over_tokens(series, folder / name)
        difference_bars(
            {"none": BARS, "always defect": dict(list(BARS.items())[:1])}, folder / "d.svg", ylabel="points"
        )
        ttft_plot({"modules": [(512, 9.0), (1024, 11.0)], "whole": [(512, 90.0)]}, folder / "e.svg", num_new_tokens=32)
        return {path.name: path.read_text() for path in sorted(folder.glob("*.svg"))}

    one, other = draw(tmp_path / "one"), draw(tmp_path / "other")
    assert list(one) == ["a.svg", "b.svg", "c.svg", "d.svg", "e.svg"] and one == other
    assert all(text.startswith("<?xml") and "</svg>" in text for text in one.values())


def test_a_figure_is_no_folder_and_below_no_file(tmp_path):
    (tmp_path / "file").touch()
    for path, said in ((tmp_path, "is a directory"), (tmp_path / "file" / "a.svg", "directory cannot be created")):
        with pytest.raises(ConfigError, match=said):
            ttft_plot({"whole": [(512, 90.0)]}, path, num_new_tokens=32)
