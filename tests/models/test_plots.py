"""The content of a plot, checked in matplotlib's own objects."""

import pytest

from sharp.models.plots import plot_scores


def test_a_dashed_line_has_the_color_of_the_line_before(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda figure, *given, **options: (figures.append(figure), save(figure, *given, **options)),
    )
    rows = [(line, x, score, 0.1) for line, score in (("ours", 1.0), ("theirs", 2.0)) for x in (16, 32)]
    assert plot_scores(rows, "length", "score", "a title", tmp_path / "plot.png", dashed=["theirs"]) is None
    [axes] = figures[0].axes
    ours, theirs = (next(line for line in axes.lines if line.get_ydata()[0] == score) for score in (1.0, 2.0))
    assert (ours.get_linestyle(), theirs.get_linestyle()) == ("-", "--")
    assert ours.get_color() == theirs.get_color()
    assert (tmp_path / "plot.png").stat().st_size > 1000
