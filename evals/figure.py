"""Figures without a display: matplotlib's own objects, no global state."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that can be saved as PNG; sizes in inches."""
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    return figure
